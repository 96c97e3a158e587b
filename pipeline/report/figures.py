"""The report's figures: each is first a value (what it shows), then a drawing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.core import Precision
from pipeline.formatting import shape_text
from pipeline.measurement.measure import thinned
from pipeline.report.drawing import INK, MUTED, Plot, key_of, new_figure, short, svg
from pipeline.report.outline import Entry, entries, shapes
from pipeline.results.precision_audit import time_by_precision
from pipeline.results.report import MetricResult, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "winner": "#0b7a4b",
    "baseline": "#6b7280",
    "candidate": "#2f6fb5",
    "failed accuracy": "#b42318",
}
MARKERS = {
    "winner": "*",
    "baseline": "s",
    "candidate": "o",
    "failed accuracy": "X",
}  # told apart without colour too
SHADES = ("#b3bdc9", "#2f6fb5", "#0b7a4b")
PRECISION_COLOURS = {
    Precision.FP32: "#1f2933",
    Precision.TF32: "#6b7280",
    Precision.BF16: "#6a51a3",
    Precision.FP16: "#2f6fb5",
    Precision.INT8: "#0b7a4b",
    Precision.FP8: "#b8860b",
    "integer": "#8fbc94",
    "none": "#dfe4ea",
    "unknown": "#b42318",
}
PRECISION_NAMES = {"integer": "sizes and indices", "none": "moves data", "unknown": "not known"}
LEAST_NAMED = 0.12  # share of the time; smaller parts of a bar have no room for their number
DOTS = 200  # raw values drawn per engine; the box is of all of them
OPERATORS_SHOWN = 14


def plots(report: Report) -> tuple[Plot, ...]:
    """Every figure that this report has values for. Draws nothing yet."""
    lines = entries(report)
    found = [
        _pareto(report, lines),
        *(_latency(lines, sizes) for sizes in shapes(report)),
        _precisions(lines),
        _operators(report),
    ]
    return tuple(plot for plot in found if plot is not None)


def _plot(
    section: str, name: str, caption: str, data: NamedTuple, draw: Callable[..., Figure]
) -> Plot:
    return Plot(
        section,
        name,
        caption,
        key_of(Path(__file__), data),
        partial(svg, name, partial(draw, data)),
    )


# -- accuracy against latency
# ------------------------------------------------------------------------------


class _Point(NamedTuple):
    x: float  # ms
    y: float
    number: int
    kind: str
    bar: tuple[float, float] | None


class _Pareto(NamedTuple):
    points: tuple[_Point, ...]
    front: tuple[_Point, ...]
    limit: tuple[float, float] | None  # where it lies, and max_drop
    xlabel: str
    ylabel: str


def _pareto(report: Report, lines: tuple[Entry, ...]) -> Plot | None:
    if not shapes(report):
        return None
    first = shapes(report)[0]
    metrics = [
        item.selection.metric
        for item in report.candidates
        if item.selection and item.selection.metric
    ]
    metric = metrics[0] if metrics else None
    points = tuple(
        point for entry in lines if (point := _point(report, entry, first, metric)) is not None
    )
    if len(points) < 2:
        return None
    front = _front(points)
    data = _Pareto(
        points=points,
        front=front,
        limit=(metric.reference - metric.max_drop, metric.max_drop) if metric else None,
        xlabel=f"median latency at {shape_text(first)}, ms (lower is better)",
        ylabel=f"{metric.name if metric else 'smallest cosine'} (higher is better)",
    )
    caption = (
        "Accuracy against latency. Numbers are those of the"
        f" table{'; bars are the 95 % intervals of the drop' if metric else ''}. The line is the"
        f" Pareto front ({', '.join(str(p.number) for p in front)}): nothing else is as fast and as"
        " accurate."
    )
    return _plot("candidates", "pareto", caption, data, _draw_pareto)


def _point(
    report: Report, entry: Entry, sizes: dict[str, int], metric: MetricResult | None
) -> _Point | None:
    row = entry.row(sizes)
    if row is None:
        return None
    x, kind = row.end_to_end.median_s * 1e3, _kind(entry)
    if (
        entry.candidate is None
    ):  # the first baseline is the reference itself; further ones are not validated
        is_reference = report.baseline is not None and entry.label == report.baseline.label
        return (
            _Point(x, metric.reference if metric else 1.0, entry.number, kind, None)
            if is_reference
            else None
        )
    selection = entry.candidate.selection
    if selection is None:
        return None
    if selection.metric is not None:
        drop, reference = selection.metric.interval, selection.metric.reference
        return _Point(
            x,
            selection.metric.candidate,
            entry.number,
            kind,
            (reference - drop.high, reference - drop.low),
        )
    cosines = [error.cosine for error in selection.outputs]
    return _Point(x, min(cosines), entry.number, kind, None) if cosines and metric is None else None


def _front(points: tuple[_Point, ...]) -> tuple[_Point, ...]:
    """The points that no other point beats on both axes, from fast to slow."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.x, -p.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return tuple(front)


def _draw_pareto(data: _Pareto) -> Figure:
    figure, axes = new_figure(4.4)
    red = COLOURS["failed accuracy"]
    if data.limit is not None:
        axes.axhline(data.limit[0], color=red, linestyle="--", linewidth=1)
        text = f"reference minus {data.limit[1]:g}: the limit"
        axes.text(
            0.995,
            data.limit[0],
            text,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            color=red,
        )
    axes.plot(
        [p.x for p in data.front],
        [p.y for p in data.front],
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
            axes.scatter([], [], marker=MARKERS[kind], color=COLOURS[kind], s=60, label=kind)
    figure.legend(frameon=False, loc="outside upper right", ncols=len(COLOURS))
    _milliseconds(axes, [point.x for point in data.points])
    axes.set_xlabel(data.xlabel)
    axes.set_ylabel(data.ylabel)
    return figure


def _number(axes: Axes, points: tuple[_Point, ...]) -> None:
    """Each point's number beside it; where points crowd, the numbers take turns at the four
    corners.
    """
    corners = ((7, 5), (7, -13), (-14, 5), (-14, -13))
    axes.margins(y=0.12)
    ys = [point.y for point in points]
    crowd: list[_Point] = []
    for point in sorted(points):
        near = (
            crowd
            and point.x < 1.08 * crowd[-1].x
            and abs(point.y - crowd[-1].y) < 0.06 * (max(ys) - min(ys) or 1)
        )
        crowd = [*crowd, point] if near else [point]
        offset = corners[(len(crowd) - 1) % len(corners)]
        axes.annotate(
            str(point.number),
            (point.x, point.y),
            textcoords="offset points",
            xytext=offset,
            fontsize=10,
            fontweight="bold",
        )


# -- latency
# ------------------------------------------------------------------------------


class _Spread(NamedTuple):
    label: str
    kind: str
    quantiles: tuple[float, ...]  # ms: 5, 25, 50, 75, 95 %
    dots: tuple[float, ...]  # ms


class _Latency(NamedTuple):
    spreads: tuple[_Spread, ...]


def _latency(lines: tuple[Entry, ...], sizes: dict[str, int]) -> Plot | None:
    spreads = []
    for entry in lines:
        row = entry.row(sizes)
        if row is None or not row.end_to_end.values_s:
            continue
        ms = np.asarray(row.end_to_end.values_s) * 1e3
        quantiles = tuple(np.percentile(ms, [5, 25, 50, 75, 95]).tolist())
        spreads.append(
            _Spread(
                f"{short(entry.label)}  {entry.number}",
                _kind(entry),
                quantiles,
                thinned(ms.round(5).tolist(), DOTS),
            )
        )
    if not spreads:
        return None
    caption = (
        f"Latency at {shape_text(sizes)}. Each dot is one raw value (at most {DOTS} are drawn); the"
        " box holds the middle half of all, its line is the median, the whisker reaches from the"
        " 5th to the 95th percentile."
    )
    name = "latency" + "".join(
        f"-{re.sub('[^A-Za-z0-9]+', '', symbol)}{size}" for symbol, size in sizes.items()
    )
    return _plot("latency", name, caption, _Latency(tuple(spreads)), _draw_latency)


def _draw_latency(data: _Latency) -> Figure:
    figure, axes = new_figure(0.8 + 0.4 * len(data.spreads))
    for place, spread in enumerate(data.spreads):
        colour = COLOURS[spread.kind]
        low, first, middle, third, high = spread.quantiles
        shifts = (
            np.arange(len(spread.dots)) * 0.618034
        ) % 1 - 0.5  # golden section: spread evenly, the same every time
        axes.plot(
            spread.dots,
            place + 0.6 * shifts,
            ".",
            color=colour,
            alpha=0.25,
            markersize=2.5,
            markeredgewidth=0,
        )
        axes.plot([low, high], [place, place], color=colour, linewidth=1.2)
        axes.barh(place, third - first, left=first, height=0.46, color=colour, alpha=0.6)
        axes.plot([middle, middle], [place - 0.3, place + 0.3], color=INK, linewidth=1.8)
    axes.set_yticks(range(len(data.spreads)), [spread.label for spread in data.spreads])
    axes.invert_yaxis()
    _milliseconds(
        axes, [value for spread in data.spreads for value in (*spread.dots, *spread.quantiles)]
    )
    axes.set_xlabel("latency end to end, ms (lower is better)")
    return figure


# -- precision
# ------------------------------------------------------------------------------


class _Bar(NamedTuple):
    label: str
    shares: tuple[tuple[str, float], ...]  # in the order of PRECISION_COLOURS


class _Precisions(NamedTuple):
    bars: tuple[_Bar, ...]


def _precisions(lines: tuple[Entry, ...]) -> Plot | None:
    bars = []
    for entry in lines:
        if entry.candidate is not None and entry.candidate.layers is not None:
            shares = time_by_precision(entry.candidate.layers)
            parts = tuple(
                (str(name), shares[name]) for name in PRECISION_COLOURS if shares.get(name)
            )
            bars.append(_Bar(f"{short(entry.label)}  {entry.number}", parts))
    if not bars:
        return None
    caption = (
        "What really ran: the share of the time of all layers per precision, each layer timed by"
        " itself."
    )
    return _plot("layers", "precision", caption, _Precisions(tuple(bars)), _draw_precisions)


def _draw_precisions(data: _Precisions) -> Figure:
    figure, axes = new_figure(1.1 + 0.4 * len(data.bars))
    for place, bar in enumerate(data.bars):
        left = 0.0
        for name, share in bar.shares:
            axes.barh(
                place,
                share,
                left=left,
                height=0.62,
                color=PRECISION_COLOURS[name],
                edgecolor="white",
                linewidth=0.8,
            )
            if share >= LEAST_NAMED:
                ink = INK if name in ("none", "integer") else "white"
                axes.text(
                    left + share / 2,
                    place,
                    f"{name if name in list(Precision) else ''} {100 * share:.0f} %",
                    ha="center",
                    va="center",
                    color=ink,
                )
            left += share
    drawn = {name for bar in data.bars for name, _ in bar.shares}
    for name in (name for name in PRECISION_COLOURS if name in drawn):
        axes.barh(0, 0, color=PRECISION_COLOURS[name], label=PRECISION_NAMES.get(name, str(name)))
    axes.set_yticks(range(len(data.bars)), [bar.label for bar in data.bars])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.invert_yaxis()
    axes.set_xlabel("share of the time of all layers")
    figure.legend(frameon=False, loc="outside upper right", ncols=len(drawn))
    return figure


# -- operators
# ------------------------------------------------------------------------------


class _Operators(NamedTuple):
    names: tuple[str, ...]
    stages: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [stage][name]


def _operators(report: Report) -> Plot | None:
    tables = report.operators[: len(SHADES)]
    totals = {
        name: max(table.operators.get(name, 0) for table in tables)
        for table in tables
        for name in table.operators
    }
    if not totals:
        return None
    names = tuple(sorted(totals, key=lambda name: (-totals[name], name))[:OPERATORS_SHOWN])
    counts = tuple(tuple(table.operators.get(name, 0) for name in names) for table in tables)
    hidden = len(totals) - len(names)
    rest = f" {hidden} rarer operators are in the table only." if hidden else ""
    data = _Operators(
        tuple(short(name) for name in names), tuple(table.stage for table in tables), counts
    )
    return _plot(
        "operators",
        "operators",
        f"Operators in the graph after {' and after '.join(data.stages)}.{rest}",
        data,
        _draw_operators,
    )


def _draw_operators(data: _Operators) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(1.1 + 0.12 * len(data.names) * (len(data.stages) + 1))
    height = 0.8 / len(data.stages)
    for index, (stage, counts) in enumerate(zip(data.stages, data.counts, strict=True)):
        places = np.arange(len(counts)) + (index - (len(data.stages) - 1) / 2) * height
        bars = axes.barh(
            places, counts, height=height * 0.92, color=SHADES[index], label=short(stage)
        )
        axes.bar_label(bars, padding=3, fontsize=8, color=MUTED)
    axes.set_yticks(range(len(data.names)), data.names)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("nodes in the graph")
    figure.legend(frameon=False, loc="outside upper right", ncols=len(data.stages))
    return figure


# -- drawing
# ------------------------------------------------------------------------------


def _kind(entry: Entry) -> str:
    return entry.state if entry.state in COLOURS else entry.part


def _milliseconds(axes: Axes, values: list[float]) -> None:
    """The x axis: logarithmic, with plain numbers, where the values span more than a factor of
    five.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if max(values) < 5 * min(values) or min(values) <= 0:
        axes.set_xlim(left=0)
        return
    axes.set_xscale("log")
    few, many = (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axes.xaxis.set_major_locator(
        LogLocator(base=10, subs=many if max(values) < 20 * min(values) else few)
    )
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
