"""A batch sweep: throughput and latency of each batch size, and the best under a latency limit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import PlanError
from pipeline.report.figures.drawing import COLOURS, WIDTH_INCHES, svg
from pipeline.results.benchmarks import Bound, LatencyRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TAILS = (99, 95, 90, 50)
JSON_NAME, SVG_NAME = "sweep.json", "sweep.svg"


class SweepPoint(Frozen):
    """The measurement of one batch size."""

    batch: int
    median_s: float
    tail_s: float  # the sweep's percentile
    samples_per_s: float
    bound: Bound | None = None


class Sweep(Frozen):
    """The measurements of one engine, by ascending batch size."""

    label: str
    symbol: str
    others: dict[str, int]  # sizes of the other symbols
    percentile: int  # of the end-to-end latency: the highest with enough values at every batch
    limit_s: float | None  # on that percentile
    points: tuple[SweepPoint, ...]
    best: int | None  # batch of highest throughput within the limit; None if no batch is within it


def batch_symbol(inputs: Sequence[TensorSpec]) -> str:
    """Return the symbolic first dimension of the first input that has one, else raise PlanError."""
    for spec in inputs:
        if spec.shape and isinstance(spec.shape[0], str):
            return spec.shape[0]
    shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in inputs)
    raise PlanError(
        f"expected an input with a symbolic first dimension, got {shapes}",
        "compile the model with a batch dimension first",
    )


def sweep_sizes(
    symbol: str, profiles: Sequence[Profile], batches: Sequence[int]
) -> tuple[dict[str, int], ...]:
    """Return the sizes to measure: each batch once, ascending, with opt sizes of other symbols.

    The benchmark checks them against the profiles.
    """
    opt_sizes = profiles[0].sizes("opt") if profiles else {}
    return tuple({**opt_sizes, symbol: batch} for batch in sorted(set(batches)))


def sweep_of(label: str, symbol: str, rows: Sequence[LatencyRow], limit_s: float | None) -> Sweep:
    """Make a sweep of these rows, with its best batch."""
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
    """Describe the best batch in one sentence."""
    tail = tail_name(sweep)
    limit = "" if sweep.limit_s is None else f" within {sweep.limit_s * 1e3:g} ms"
    point = next((point for point in sweep.points if point.batch == sweep.best), None)
    if point is None:
        fastest = min(sweep.points, key=lambda point: point.tail_s)
        return (
            f"no batch has its {tail}{limit}: the fastest, {fastest.batch}, takes"
            f" {fastest.tail_s * 1e3:.3g} ms"
        )
    condition = f" with {tail}{limit}" if limit else ""
    return (
        f"best batch{condition}: {point.batch}, {point.samples_per_s:,.0f} samples/s, {tail}"
        f" {point.tail_s * 1e3:.3g} ms"
    )


def tail_name(sweep: Sweep) -> str:
    """Return the name of the sweep's percentile, such as `p99`, or `median`."""
    return "median" if sweep.percentile == 50 else f"p{sweep.percentile}"


def write_sweep(sweep: Sweep, folder: Path) -> tuple[Path, Path]:
    """Write a sweep to `folder`, as JSON and as a plot. Return both paths."""
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
