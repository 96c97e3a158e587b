"""Engines by their speed: accuracy against latency, the spread of latencies, throughput."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.formatting import shape_text, state_label
from pipeline.measurement.clock import thinned
from pipeline.report.entries import Entry, shapes
from pipeline.report.figures.drawing import COLOURS, INK, MUTED, Plot, axis_label, new_figure
from pipeline.report.latency_sections import load_of
from pipeline.results.accuracy import MetricResult
from pipeline.results.benchmarks import LoadPoint
from pipeline.results.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Kinds are told apart without colour, too.
MARKERS = {"winner": "*", "baseline": "s", "candidate": "o", "failed accuracy": "X"}
MAX_DOTS = 200  # raw values drawn per engine; the box is of all of them
SESSION_STYLES = {1: "-", 2: "--", 4: ":"}


# -- accuracy against latency ------------------------------------------------


class Point(NamedTuple):
    """An engine by its speed and its accuracy."""

    x: float  # ms
    y: float
    number: int
    kind: str
    bar: tuple[float, float] | None


class _Pareto(NamedTuple):
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    limit: tuple[float, str] | None  # where it lies, and its text
    xlabel: str
    ylabel: str
    is_loss: bool = False  # lower values are better, and higher up


def pareto(report: Report, lines: tuple[Entry, ...]) -> Plot | None:
    if not shapes(report):
        return None
    first = shapes(report)[0]
    selections = [candidate.selection for candidate in report.candidates if candidate.selection]
    metric = next((selection.metric for selection in selections if selection.metric), None)
    candidates = [_point(report, entry, first, metric) for entry in lines]
    points = tuple(point for point in candidates if point is not None)
    if len(points) < 2:
        return None
    xlabel = f"median latency at {shape_text(first)}, ms (lower is better)"
    if metric and metric.lower_is_better:
        ylabel = f"{metric.name} (lower is better)"
        return plot_of_losses("candidates", points, _limit_of(metric), xlabel, ylabel)
    front = _front(points)
    data = _Pareto(
        points=points,
        front=front,
        limit=_limit_of(metric) if metric else None,
        xlabel=xlabel,
        ylabel=f"{metric.name if metric else 'smallest cosine'} (higher is better)",
    )
    bars = "; bars are the 95 % intervals of the drop" if metric else ""
    numbers = ", ".join(str(point.number) for point in front)
    caption = (
        f"Accuracy against latency. Numbers are those of the table{bars}. The line is the Pareto"
        f" front ({numbers}): nothing else is as fast and as accurate."
    )
    return Plot("candidates", "pareto", caption, partial(_draw_pareto, data))


def _limit_of(metric: MetricResult) -> tuple[float, str]:
    if metric.lower_is_better:
        text = f"reference plus {metric.max_drop:g}: the limit"
        return metric.reference + metric.max_drop, text
    text = f"reference minus {metric.max_drop:g}: the limit"
    return metric.reference - metric.max_drop, text


def plot_of_losses(
    section: str, points: tuple[Point, ...], limit: tuple[float, str], xlabel: str, ylabel: str
) -> Plot:
    """Return the figure of engines by their speed and a loss, of which less is better.

    `limit`: where it lies, and its text.
    """
    gains = _front(tuple(point._replace(y=-point.y) for point in points))
    front = tuple(point._replace(y=-point.y) for point in gains)
    data = _Pareto(points, front, limit, xlabel, ylabel, is_loss=True)
    numbers = ", ".join(str(point.number) for point in front)
    caption = (
        "Accuracy against speed. Numbers are those of the table; bars are the 95 % intervals. The"
        f" line is the Pareto front ({numbers}): nothing else is as fast and as accurate."
    )
    return Plot(section, "pareto", caption, partial(_draw_pareto, data))


def _point(
    report: Report, entry: Entry, sizes: dict[str, int], metric: MetricResult | None
) -> Point | None:
    row = entry.row(sizes)
    if row is None:
        return None
    x, kind = row.end_to_end.median_s * 1e3, _kind(entry)
    if entry.candidate is None:
        # The first baseline is the reference itself; further ones are not validated.
        if report.baseline is None or entry.label != report.baseline.label:
            return None
        return Point(x, metric.reference if metric else 1.0, entry.number, kind, None)
    selection = entry.candidate.selection
    if selection is None:
        return None
    if selection.metric is not None:
        drop, reference = selection.metric.interval, selection.metric.reference
        bar = (reference - drop.high, reference - drop.low)
        if selection.metric.lower_is_better:
            bar = (reference + drop.low, reference + drop.high)
        return Point(x, selection.metric.candidate, entry.number, kind, bar)
    if metric is not None or selection.cosine is None:
        return None
    return Point(x, selection.cosine, entry.number, kind, None)


def _front(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Return the points that no other point beats on both axes, from fast to slow."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, -point.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return tuple(front)


def _draw_pareto(data: _Pareto) -> Figure:
    figure, axes = new_figure(4.4)
    red = COLOURS["failed accuracy"]
    if data.limit is not None:
        axes.axhline(data.limit[0], color=red, linestyle="--", linewidth=1)
        axes.text(
            0.995,
            data.limit[0],
            data.limit[1],
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            color=red,
        )
    axes.plot(
        [point.x for point in data.front],
        [point.y for point in data.front],
        drawstyle="steps-post",
        color=MUTED,
        linewidth=1.2,
        alpha=0.7,
        zorder=1,
    )
    for point in data.points:
        colour = COLOURS[point.kind]
        if point.bar is not None:
            axes.plot(
                [point.x, point.x], point.bar, color=colour, alpha=0.45, linewidth=1.5, zorder=2
            )
        size = 190 if point.kind == "winner" else 60
        axes.scatter(
            [point.x],
            [point.y],
            s=size,
            color=colour,
            marker=MARKERS[point.kind],
            zorder=3,
            edgecolors="white",
            linewidths=0.8,
        )
    _number(axes, data.points)
    for kind in COLOURS:
        if any(point.kind == kind for point in data.points):
            axes.scatter(
                [], [], marker=MARKERS[kind], color=COLOURS[kind], s=60, label=state_label(kind)
            )
    figure.legend(frameon=False, loc="outside upper right", ncols=len(COLOURS))
    _milliseconds(axes, [point.x for point in data.points])
    axes.set_xlabel(data.xlabel)
    axes.set_ylabel(data.ylabel)
    if data.is_loss:
        axes.invert_yaxis()
    return figure


def _number(axes: Axes, points: tuple[Point, ...]) -> None:
    """Write each point's number beside it, in a crowd at the four corners in turn."""
    corners = ((7, 5), (7, -13), (-14, 5), (-14, -13))
    axes.margins(y=0.12)
    ys = [point.y for point in points]
    height = max(ys) - min(ys) or 1.0
    crowd: list[Point] = []
    for point in sorted(points):
        if crowd and not _is_close(point, crowd[-1], height):
            crowd = []
        crowd.append(point)
        offset = corners[(len(crowd) - 1) % len(corners)]
        axes.annotate(
            str(point.number),
            (point.x, point.y),
            textcoords="offset points",
            xytext=offset,
            fontsize=10,
            fontweight="bold",
        )


def _is_close(point: Point, other: Point, height: float) -> bool:
    """Return True if the numbers of two points would overlap."""
    return point.x < 1.08 * other.x and abs(point.y - other.y) < 0.06 * height


# -- latency -----------------------------------------------------------------


class _Spread(NamedTuple):
    label: str
    kind: str
    quantiles: tuple[float, ...]  # ms: 5, 25, 50, 75, 95 %
    dots: tuple[float, ...]  # ms


def latency(lines: tuple[Entry, ...], sizes: dict[str, int]) -> Plot | None:
    spreads: list[_Spread] = []
    for entry in lines:
        row = entry.row(sizes)
        if row is None or not row.end_to_end.values_s:
            continue
        ms = np.asarray(row.end_to_end.values_s) * 1e3
        quantiles = tuple(np.percentile(ms, [5, 25, 50, 75, 95]).tolist())
        dots = thinned(ms.round(5).tolist(), MAX_DOTS)
        spreads.append(_Spread(axis_label(entry), _kind(entry), quantiles, dots))
    if not spreads:
        return None
    caption = (
        f"Latency at {shape_text(sizes)}. Each dot is one raw value (at most {MAX_DOTS} are drawn)."
        " The box holds the middle half of all values, its line is the median, and the whisker"
        " reaches from the 5th to the 95th percentile."
    )
    parts = [re.sub("[^A-Za-z0-9]+", "", symbol) + str(size) for symbol, size in sizes.items()]
    name = "-".join(["latency", *parts])
    return Plot("latency", name, caption, partial(_draw_latency, spreads))


def _draw_latency(spreads: Sequence[_Spread]) -> Figure:
    figure, axes = new_figure(0.8 + 0.4 * len(spreads))
    for row, spread in enumerate(spreads):
        colour = COLOURS[spread.kind]
        low, first, middle, third, high = spread.quantiles
        # The golden section spreads the dots evenly, the same every time.
        shifts = (np.arange(len(spread.dots)) * 0.618034) % 1 - 0.5
        axes.plot(
            spread.dots,
            row + 0.6 * shifts,
            ".",
            color=colour,
            alpha=0.25,
            markersize=2.5,
            markeredgewidth=0,
        )
        axes.plot([low, high], [row, row], color=colour, linewidth=1.2)
        axes.barh(row, third - first, left=first, height=0.46, color=colour, alpha=0.6)
        axes.plot([middle, middle], [row - 0.3, row + 0.3], color=INK, linewidth=1.8)
    axes.set_yticks(range(len(spreads)), [spread.label for spread in spreads])
    axes.invert_yaxis()
    values = chain.from_iterable((*spread.dots, *spread.quantiles) for spread in spreads)
    _milliseconds(axes, list(values))
    axes.set_xlabel("latency end to end, ms (lower is better)")
    return figure


# -- throughput --------------------------------------------------------------


class _LoadLine(NamedTuple):
    """The points of one engine with one number of sessions, by ascending batch."""

    number: int
    kind: str
    sessions: int
    points: tuple[tuple[float, float], ...]  # ms, samples/s
    best: tuple[float, float] | None  # ms, samples/s, if the engine's best point is on this line


class _Load(NamedTuple):
    lines: tuple[_LoadLine, ...]
    chosen: tuple[float, float] | None  # ms, samples/s
    limit_ms: float | None
    tail: str


def throughput(lines: tuple[Entry, ...], chosen: LoadPoint | None) -> Plot | None:
    """Return throughput against p99, or against the median if there is no limit and p99s lack."""
    curves = [(entry, curve) for entry in lines if (curve := load_of(entry)) is not None]
    every = [point for _, curve in curves for point in curve.points]
    limit_s = curves[0][1].limit_s if curves else None
    has_p99 = limit_s is not None or all(point.p99_s is not None for point in every)

    def place(point: LoadPoint) -> tuple[float, float] | None:
        seconds = point.p99_s if has_p99 else point.p50_s
        return None if seconds is None else (seconds * 1e3, point.samples_per_s)

    drawn = []
    for entry, curve in curves:
        for sessions, points in curve.by_sessions():
            places = tuple(at for point in points if (at := place(point)) is not None)
            best = place(curve.best) if curve.best in points and curve.best else None
            if places:
                drawn.append(_LoadLine(entry.number, _kind(entry), sessions, places, best))
    if not drawn:
        return None
    tail = "p99" if has_p99 else "median"
    hidden = " Points whose median is over the limit are in the table only." if limit_s else ""
    if not has_p99:
        hidden = " Some points have too few requests for a p99."
    caption = (
        f"Throughput against the {tail} of a request. A line is one engine with one number of"
        " sessions, from small batches to large ones. Numbers are those of the table, markers are"
        f" best points, and the star is the delivered one.{hidden}"
    )
    data = _Load(
        tuple(drawn),
        place(chosen) if chosen else None,
        None if limit_s is None else limit_s * 1e3,
        tail,
    )
    return Plot("throughput", "throughput", caption, partial(_draw_throughput, data))


def _draw_throughput(data: _Load) -> Figure:
    figure, axes = new_figure(4.4)
    for line in data.lines:
        colour = COLOURS[line.kind]
        xs, ys = zip(*line.points, strict=True)
        axes.plot(
            xs,
            ys,
            marker=".",
            linestyle=SESSION_STYLES[line.sessions],
            color=colour,
            linewidth=1.2,
        )
        axes.annotate(
            str(line.number),
            (xs[-1], ys[-1]),
            textcoords="offset points",
            xytext=(6, 3),
            fontweight="bold",
        )
        if line.best is not None:
            axes.scatter(*line.best, s=60, marker=MARKERS[line.kind], color=colour, zorder=3)
    if data.chosen is not None:
        winner = COLOURS["winner"]
        axes.scatter(*data.chosen, s=190, marker="*", color=winner, zorder=4, label="delivered")
    if data.limit_ms is not None:
        red, text = COLOURS["failed accuracy"], f"limit, {data.limit_ms:g} ms"
        axes.axvline(data.limit_ms, color=red, linestyle="--", linewidth=1, label=text)
    for sessions in sorted({line.sessions for line in data.lines}):
        label = f"{sessions} session{'s' if sessions > 1 else ''}"
        axes.plot([], [], color=MUTED, linestyle=SESSION_STYLES[sessions], label=label)
    figure.legend(frameon=False, loc="outside upper right", ncols=5)
    _milliseconds(axes, [x for line in data.lines for x, _ in line.points])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{data.tail} of a request, ms (lower is better)")
    axes.set_ylabel("samples per second (higher is better)")
    return figure


def _kind(entry: Entry) -> str:
    return entry.state if entry.state in COLOURS else entry.part


def _milliseconds(axes: Axes, values: list[float]) -> None:
    """Set the x axis: logarithmic, with plain numbers, if the values span a factor of five."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if max(values) < 5 * min(values) or min(values) <= 0:
        axes.set_xlim(left=0)
        return
    axes.set_xscale("log")
    is_narrow = max(values) < 20 * min(values)
    ticks = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if is_narrow else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=ticks))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
