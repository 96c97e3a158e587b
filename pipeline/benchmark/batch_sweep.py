"""A sweep over the batch: throughput against latency, and the best batch under a latency limit.
Choosing is pure; drawing is apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core import Frozen, Profile, TensorSpec
from pipeline.errors import PlanError
from pipeline.report.figures import COLOURS, WIDTH_INCHES, svg
from pipeline.results.report import Bound, LatencyRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TAILS = (99, 95, 90, 50)
JSON_NAME, SVG_NAME = "sweep.json", "sweep.svg"


class SweepPoint(Frozen):
    """One batch."""

    batch: int
    median_s: float
    tail_s: float  # the sweep's percentile
    samples_per_s: float
    bound: Bound | None = None


class Sweep(Frozen):
    """All batches of one engine, in ascending order."""

    label: str
    symbol: str
    others: dict[str, int]  # sizes of the other symbols
    percentile: int  # of the end-to-end latency: the highest that every batch has values enough for
    limit_s: float | None  # on that percentile
    points: tuple[SweepPoint, ...]
    best: int | None  # the batch of highest throughput within the limit; None: no batch is


def batch_symbol(inputs: Sequence[TensorSpec]) -> str:
    """The symbolic first dimension of the first input that has one; PlanError if none has."""
    found = next(
        (spec.shape[0] for spec in inputs if spec.shape and isinstance(spec.shape[0], str)), None
    )
    if found is None:
        shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in inputs)
        raise PlanError(
            f"expected an input whose first dimension is symbolic, got {shapes}",
            "compile the model with a batch dimension first",
        )
    return found


def sweep_sizes(
    symbol: str, profiles: Sequence[Profile], batches: Sequence[int]
) -> tuple[dict[str, int], ...]:
    """The sizes to measure: each batch once, ascending, with the usual sizes of the other symbols.
    The benchmark checks them against the profiles.
    """
    usual = profiles[0].sizes("opt") if profiles else {}
    return tuple({**usual, symbol: batch} for batch in sorted(set(batches)))


def sweep_of(label: str, symbol: str, rows: Sequence[LatencyRow], limit_s: float | None) -> Sweep:
    """The sweep that these rows make, best batch and all."""
    percentile = next(
        tail
        for tail in TAILS
        if all(row.end_to_end.percentile_or_absent(tail) is not None for row in rows)
    )
    points = tuple(
        SweepPoint(
            batch=row.sizes[symbol],
            median_s=row.end_to_end.median_s,
            tail_s=row.end_to_end.percentile_s(percentile),
            samples_per_s=row.sizes[symbol] / row.end_to_end.median_s,
            bound=row.bound,
        )
        for row in rows
    )
    allowed = [point for point in points if limit_s is None or point.tail_s <= limit_s]
    best = max(allowed, key=lambda point: point.samples_per_s, default=None)
    others = {name: size for name, size in rows[0].sizes.items() if name != symbol}
    return Sweep(
        label=label,
        symbol=symbol,
        others=others,
        percentile=percentile,
        limit_s=limit_s,
        points=points,
        best=best.batch if best else None,
    )


def conclusion(sweep: Sweep) -> str:
    """The choice in one sentence."""
    tail, limit = (
        tail_name(sweep),
        "" if sweep.limit_s is None else f" within {sweep.limit_s * 1e3:g} ms",
    )
    point = next((point for point in sweep.points if point.batch == sweep.best), None)
    if point is None:
        least = min(sweep.points, key=lambda each: each.tail_s)
        return (
            f"no batch has its {tail}{limit}: the fastest, {least.batch}, takes"
            f" {least.tail_s * 1e3:.3g} ms"
        )
    asked = f" with {tail}{limit}" if limit else ""
    return (
        f"best batch{asked}: {point.batch}, {point.samples_per_s:,.0f} samples/s, {tail}"
        f" {point.tail_s * 1e3:.3g} ms"
    )


def tail_name(sweep: Sweep) -> str:
    """`p99`, or `median`."""
    return "median" if sweep.percentile == 50 else f"p{sweep.percentile}"


def write_sweep(sweep: Sweep, folder: Path) -> tuple[Path, Path]:
    """The sweep as JSON and as a plot, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SVG_NAME).write_text(svg("sweep", partial(_draw, sweep)), encoding="utf-8")
    (folder / JSON_NAME).write_text(sweep.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return folder / JSON_NAME, folder / SVG_NAME


def _draw(sweep: Sweep) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, 4.2), layout="constrained")
    axes = figure.subplots()
    points = [(point.tail_s * 1e3, point.samples_per_s, point.batch) for point in sweep.points]
    axes.plot(
        [x for x, _, _ in points],
        [y for _, y, _ in points],
        "o-",
        color=COLOURS["candidate"],
        linewidth=1.2,
    )
    for x, y, batch in points:
        axes.annotate(
            str(batch), (x, y), textcoords="offset points", xytext=(6, -12), fontweight="bold"
        )
    if sweep.limit_s is not None:
        axes.axvline(
            sweep.limit_s * 1e3,
            color=COLOURS["failed accuracy"],
            linestyle="--",
            linewidth=1,
            label=f"limit, {sweep.limit_s * 1e3:g} ms",
        )
    best = [(x, y) for x, y, batch in points if batch == sweep.best]
    axes.plot(
        [x for x, _ in best],
        [y for _, y in best],
        "*",
        color=COLOURS["winner"],
        markersize=17,
        label="best",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(
        f"{tail_name(sweep)} latency end to end, ms; numbers are the size of {sweep.symbol}"
    )
    axes.set_ylabel("samples per second")
    axes.set_title(f"{sweep.label}: throughput against latency", loc="left")
    if best or sweep.limit_s is not None:
        axes.legend(frameon=False, loc="lower right")
    return figure
