"""The results of a compile for several targets, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pipeline.core.frozen import Frozen
from pipeline.measurement.statistics import Interval
from pipeline.results.report import Report, Verdict

Outcome = Verdict | Literal["cancelled", "unavailable", "failed"]
OUTCOMES: tuple[Outcome, ...] = (
    "accepted",
    "keep",
    "unproven",
    "rejected",
    "cancelled",
    "unavailable",
    "failed",
)
"""From the best to the worst. `unavailable`: no host has the device."""


class TargetResult(Frozen):
    """What a compile gave on one target."""

    name: str
    target: str  # what it requires of a device
    outcome: Outcome
    reason: str = ""  # why there is no verdict
    device: str = ""  # the CPU, or the GPU
    threads: int = 0  # per engine; 0: all
    winner: str | None = None
    latency_s: float | None = None  # of the winner, end to end, median at the first shape
    ratio: Interval | None = None  # baseline / winner
    report: str | None = None  # the HTML report: a path relative to the summary, or an address


class TargetsSummary(Frozen):
    """All targets of one plan."""

    name: str
    created: str
    targets: tuple[TargetResult, ...]


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst of some outcomes; there is at least one."""
    return max(outcomes, key=OUTCOMES.index)


def exit_code(outcome: Outcome) -> int:
    """Return the exit code of a command with this worst outcome."""
    return {"rejected": 2, "cancelled": 1, "unavailable": 1, "failed": 1}.get(outcome, 0)


def result_of_report(name: str, target: str, report: Report, where: str) -> TargetResult:
    """Return the result of a target that has a report, which is at `where`."""
    measured = [
        report.baseline,
        *report.baselines,
        *(candidate.benchmark for candidate in report.candidates),
    ]
    rows = {each.label: each.rows[0] for each in measured if each and each.rows}
    row = rows.get(report.winner or "")
    gpus, cpu = report.environment.gpus, report.environment.cpu
    return TargetResult(
        name=name,
        target=target,
        outcome=report.verdict,
        device=gpus[0] if gpus else cpu,
        threads=report.plan.benchmark.threads,
        winner=report.winner,
        latency_s=row.end_to_end.median_s if row else None,
        ratio=report.ratio,
        report=where,
    )
