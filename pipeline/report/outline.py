"""What a report is made of: sections with their tables, and the numbered entries that every table
and figure names alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeline.results.report import BenchmarkReport, Candidate, LatencyRow, Report

Part = Literal["winner", "baseline", "candidate"]


class Bar(NamedTuple):
    """Lengths from 0 to 1, drawn one after the other."""

    ran: float
    reused: float


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as plain text, not escaped. A header that starts with `>` is a column of numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasised: int | None = None  # the row of the winner
    bars: tuple[Bar, ...] = ()  # one per row, for HTML
    folded: str = ""  # for those who look for it: HTML shows the table closed, under this name


@dataclass(frozen=True, slots=True)
class Section:
    """One heading with what stands under it."""

    key: str
    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    code: str = ""
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the comparison: a candidate or a baseline, numbered as in every table and
    plot.
    """

    number: int
    label: str
    part: Part
    candidate: Candidate | None
    benchmark: BenchmarkReport | None

    @property
    def state(self) -> str:
        return (
            self.part if self.candidate is None or self.part == "winner" else self.candidate.state
        )

    def row(self, sizes: dict[str, int]) -> LatencyRow | None:
        """The latency at one shape, if it was measured."""
        rows = self.benchmark.rows if self.benchmark else ()
        return next((row for row in rows if row.sizes == sizes), None)


def entries(report: Report) -> tuple[Entry, ...]:
    """Candidates and baselines, the fastest at the first shape first, those without figures
    last.
    """
    winner = report.winner if report.verdict != "rejected" else None
    found: list[tuple[str, Part, Candidate | None, BenchmarkReport | None]] = [
        (item.title, "winner" if item.label == winner else "candidate", item, item.benchmark)
        for item in report.candidates
    ]
    measured = [report.baseline, *report.baselines] if report.baseline else [*report.baselines]
    found += [
        (item.label, "winner" if item.label == winner else "baseline", None, item)
        for item in measured
        if item
    ]
    found.sort(
        key=lambda item: (
            item[3].rows[0].end_to_end.median_s if item[3] and item[3].rows else math.inf
        )
    )
    return tuple(Entry(number, *item) for number, item in enumerate(found, start=1))


def shapes(report: Report) -> tuple[dict[str, int], ...]:
    """Every benchmarked shape, in the order of the benchmark."""
    rows = [row for entry in entries(report) if entry.benchmark for row in entry.benchmark.rows]
    return tuple(
        row.sizes
        for index, row in enumerate(rows)
        if row.sizes not in [other.sizes for other in rows[:index]]
    )
