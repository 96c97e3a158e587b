"""The candidates and baselines of a report, numbered once for all tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.formatting import interval, time_text
from pipeline.measurement.clock import Samples
from pipeline.report.performance_summary import ratio_text
from pipeline.results.benchmarks import BenchmarkReport, LatencyRow
from pipeline.results.candidates import Candidate
from pipeline.results.report import Report

Part = Literal["winner", "baseline", "candidate"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate or a baseline, with its number in every table and figure."""

    number: int
    label: str
    part: Part
    candidate: Candidate | None
    benchmark: BenchmarkReport | None

    @property
    def state(self) -> str:
        if self.candidate is None or self.part == "winner":
            return self.part
        return self.candidate.state

    def row(self, sizes: dict[str, int]) -> LatencyRow | None:
        """Return the latency at one shape; None if it was not measured."""
        rows = self.benchmark.rows if self.benchmark else ()
        return next((row for row in rows if row.sizes == sizes), None)


def entries(report: Report) -> tuple[Entry, ...]:
    """Return candidates and baselines, from fast to slow at the first shape.

    Those without a measured latency are last.
    """
    winner = report.winner if report.verdict != "rejected" else None
    lines = [
        Entry(
            0,
            candidate.title,
            "winner" if candidate.label == winner else "candidate",
            candidate,
            candidate.benchmark,
        )
        for candidate in report.candidates
    ]
    baselines = [report.baseline, *report.baselines] if report.baseline else report.baselines
    for baseline in baselines:
        part: Part = "winner" if baseline.label == winner else "baseline"
        lines.append(Entry(0, baseline.label, part, None, baseline))
    lines.sort(key=_first_median_s)
    return tuple(replace(line, number=number) for number, line in enumerate(lines, start=1))


def _first_median_s(entry: Entry) -> float:
    rows = entry.benchmark.rows if entry.benchmark else ()
    return rows[0].end_to_end.median_s if rows else math.inf


def shapes(report: Report) -> tuple[dict[str, int], ...]:
    """Return every benchmarked shape, in the order of the benchmark."""
    distinct: list[dict[str, int]] = []
    for entry in entries(report):
        for row in entry.benchmark.rows if entry.benchmark else ():
            if row.sizes not in distinct:
                distinct.append(row.sizes)
    return tuple(distinct)


def winner_row(lines: Iterable[Entry]) -> int | None:
    return next((index for index, entry in enumerate(lines) if entry.part == "winner"), None)


def ratio_cell(entry: Entry, row: LatencyRow | None) -> str:
    if row and row.ratio:
        return interval(row.ratio, 2)
    return ratio_text(row, entry.benchmark.stopped if entry.benchmark else "") or "-"


def percentile_cell(samples: Samples, percent: float) -> str:
    seconds = samples.percentile_or_absent(percent)
    return "-" if seconds is None else time_text(seconds)


def percentile_cells(samples: Samples) -> tuple[str, str, str]:
    return (
        percentile_cell(samples, 50),
        percentile_cell(samples, 90),
        percentile_cell(samples, 99),
    )
