"""The report's figures, as SVG by matplotlib, without a display.

Text stays text: it can be read aloud, searched and copied. Each figure is first computed as a
value, then drawn.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.core import Precision
from pipeline.formatting import shape_text, state_label
from pipeline.measurement.clock import thinned
from pipeline.report.entries import Entry, entries, shapes
from pipeline.report.latency_sections import load_of
from pipeline.report.layer_errors import (
    LAYER_ERRORS,
    MAX_ERROR,
    is_kept,
    kept_patterns,
    ranked_rescues,
)
from pipeline.report.run_sections import operator_names
from pipeline.results.precision_audit import time_by_precision
from pipeline.results.report import LoadPoint, MetricResult, NodeRanking, Report, Rescue

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#5f6b7a", "#dfe4ea"
WIDTH_INCHES = 8.6
COLOURS = {
    "winner": "#0b7a4b",
    "baseline": "#6b7280",
    "candidate": "#2f6fb5",
    "failed accuracy": "#b42318",
}
# Kinds are told apart without colour, too.
MARKERS = {"winner": "*", "baseline": "s", "candidate": "o", "failed accuracy": "X"}
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
MIN_LABELLED_SHARE = 0.12  # share of the time; smaller parts of a bar have no room for their number
MAX_DOTS = 200  # raw values drawn per engine; the box is of all of them
MAX_OPERATORS = 14
SESSION_STYLES = {1: "-", 2: "--", 4: ":"}
OWN, ACCUMULATED, KEPT = "#b42318", "#b3bdc9", "#0b7a4b"
MAX_NODES_DRAWN = 24
MAX_ERROR_DRAWN = MAX_ERROR
MIN_ERROR_DRAWN = 1e-5


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of a report, not drawn yet: drawing is the slowest part of a report."""

    section: str  # its key
    name: str  # unique in a report, fit for a file name
    caption: str
    figure: partial[Figure]  # the drawing function and the values that it shows

    @property
    def key(self) -> str:
        """The digest of this module's text and of the values. Equal figures have equal keys."""
        values = repr((self.name, self.figure.args)).encode()
        return hashlib.sha256(Path(__file__).read_bytes() + values).hexdigest()

    def draw(self) -> str:
        """Draw the `<svg>` element."""
        return svg(self.name, self.figure)


def plots(report: Report) -> tuple[Plot, ...]:
    """Return every figure that this report has values for."""
    lines = entries(report)
    candidates = [
        _pareto(report, lines),
        _throughput(lines, report.best_point),
        *(_latency(lines, sizes) for sizes in shapes(report)),
        _precisions(lines),
        _operators(report),
    ]
    layer_errors = [
        _layer_errors(number, rescue, ranking, kept_patterns(report, rescue))
        for number, (rescue, ranking) in enumerate(ranked_rescues(report), start=1)
    ]
    return (*(plot for plot in candidates if plot is not None), *layer_errors)


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


def _pareto(report: Report, lines: tuple[Entry, ...]) -> Plot | None:
    if not shapes(report):
        return None
    first = shapes(report)[0]
    selections = [candidate.selection for candidate in report.candidates if candidate.selection]
    metric = next((selection.metric for selection in selections if selection.metric), None)
    candidates = [_point(report, entry, first, metric) for entry in lines]
    points = tuple(point for point in candidates if point is not None)
    if len(points) < 2:
        return None
    front = _front(points)
    data = _Pareto(
        points=points,
        front=front,
        limit=_limit_of(metric) if metric else None,
        xlabel=f"median latency at {shape_text(first)}, ms (lower is better)",
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


def _latency(lines: tuple[Entry, ...], sizes: dict[str, int]) -> Plot | None:
    spreads: list[_Spread] = []
    for entry in lines:
        row = entry.row(sizes)
        if row is None or not row.end_to_end.values_s:
            continue
        ms = np.asarray(row.end_to_end.values_s) * 1e3
        quantiles = tuple(np.percentile(ms, [5, 25, 50, 75, 95]).tolist())
        dots = thinned(ms.round(5).tolist(), MAX_DOTS)
        spreads.append(_Spread(_axis_label(entry), _kind(entry), quantiles, dots))
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


def _throughput(lines: tuple[Entry, ...], chosen: LoadPoint | None) -> Plot | None:
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


# -- precision ---------------------------------------------------------------


class _PrecisionBar(NamedTuple):
    label: str
    shares: tuple[tuple[str, float], ...]  # in the order of PRECISION_COLOURS


def _precisions(lines: tuple[Entry, ...]) -> Plot | None:
    bars: list[_PrecisionBar] = []
    for entry in lines:
        if entry.candidate is not None and entry.candidate.layers is not None:
            shares = time_by_precision(entry.candidate.layers)
            parts = tuple(
                (str(name), shares[name]) for name in PRECISION_COLOURS if shares.get(name)
            )
            bars.append(_PrecisionBar(_axis_label(entry), parts))
    if not bars:
        return None
    caption = (
        "The precisions that really ran, by their share of the time of all layers. Each layer is"
        " timed by itself."
    )
    return Plot("layers", "precision", caption, partial(_draw_precisions, bars))


def _draw_precisions(bars: Sequence[_PrecisionBar]) -> Figure:
    figure, axes = new_figure(1.1 + 0.4 * len(bars))
    for row, bar in enumerate(bars):
        left = 0.0
        for name, share in bar.shares:
            axes.barh(
                row,
                share,
                left=left,
                height=0.62,
                color=PRECISION_COLOURS[name],
                edgecolor="white",
                linewidth=0.8,
            )
            if share >= MIN_LABELLED_SHARE:
                _label_share(axes, left + share / 2, row, name, share)
            left += share
    names = {name for bar in bars for name, _ in bar.shares}
    for name, colour in PRECISION_COLOURS.items():
        if name in names:
            axes.barh(0, 0, color=colour, label=PRECISION_NAMES.get(name, str(name)))
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.invert_yaxis()
    axes.set_xlabel("share of the time of all layers")
    figure.legend(frameon=False, loc="outside upper right", ncols=len(names))
    return figure


def _label_share(axes: Axes, x: float, y: float, name: str, share: float) -> None:
    ink = INK if name in ("none", "integer") else "white"
    precision = name if name in list(Precision) else ""
    text = f"{precision} {100 * share:.0f} %"
    axes.text(x, y, text, ha="center", va="center", color=ink)


# -- operators ---------------------------------------------------------------


class _Operators(NamedTuple):
    names: tuple[str, ...]
    stages: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [stage][name]


def _operators(report: Report) -> Plot | None:
    tables = report.operators[: len(SHADES)]
    operators = operator_names(tables)
    if not operators:
        return None
    names = operators[:MAX_OPERATORS]
    counts = tuple(tuple(table.operators.get(name, 0) for name in names) for table in tables)
    hidden = len(operators) - len(names)
    rest = f" {hidden} rarer operators are in the table only." if hidden else ""
    data = _Operators(
        tuple(short(name) for name in names), tuple(table.stage for table in tables), counts
    )
    caption = f"Operators in the graph after {' and after '.join(data.stages)}.{rest}"
    return Plot("operators", "operators", caption, partial(_draw_operators, data))


def _draw_operators(data: _Operators) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(1.1 + 0.12 * len(data.names) * (len(data.stages) + 1))
    height = 0.8 / len(data.stages)
    for index, (stage, counts) in enumerate(zip(data.stages, data.counts, strict=True)):
        rows = np.arange(len(counts)) + (index - (len(data.stages) - 1) / 2) * height
        bars = axes.barh(
            rows, counts, height=height * 0.92, color=SHADES[index], label=short(stage)
        )
        axes.bar_label(bars, padding=3, fontsize=8, color=MUTED)
    axes.set_yticks(range(len(data.names)), data.names)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("nodes in the graph")
    figure.legend(frameon=False, loc="outside upper right", ncols=len(data.stages))
    return figure


# -- the errors of layers ----------------------------------------------------


class _LayerError(NamedTuple):
    name: str
    own: float
    accumulated: float
    kept_fp32: bool


def _layer_errors(
    number: int, rescue: Rescue, ranking: NodeRanking, fp32_patterns: tuple[str, ...]
) -> Plot:
    worst = ranking.nodes[:MAX_NODES_DRAWN]
    bars = tuple(
        _LayerError(short(harm.node), harm.error, harm.accumulated, is_kept(harm, fp32_patterns))
        for harm in worst
    )
    caption = (
        f"The worst {len(worst)} of {len(ranking.nodes)} nodes of {rescue.label}, worst first, on"
        f" {ranking.samples} samples: the error that each node adds by itself, and the accumulated"
        " error at its output. At 1 nothing of the signal is left."
    )
    draw = partial(_draw_layer_errors, bars)
    return Plot(LAYER_ERRORS, f"{LAYER_ERRORS}-{number}", caption, draw)


def _draw_layer_errors(bars: tuple[_LayerError, ...]) -> Figure:
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = new_figure(1.1 + 0.3 * len(bars))
    for row, bar in enumerate(bars):
        for value, shift, colour in (
            (bar.own, -0.19, KEPT if bar.kept_fp32 else OWN),
            (bar.accumulated, 0.19, ACCUMULATED),
        ):
            axes.barh(
                row + shift,
                min(max(value, MIN_ERROR_DRAWN), MAX_ERROR_DRAWN),
                height=0.36,
                color=colour,
            )
    axes.axvline(1.0, color=MUTED, linestyle="--", linewidth=1)
    labels = {
        OWN: "own error",
        KEPT: "own error, kept in fp32 in the end",
        ACCUMULATED: "accumulated",
    }
    colours = {KEPT if bar.kept_fp32 else OWN for bar in bars} | {ACCUMULATED}
    for colour, label in labels.items():
        if colour in colours:
            axes.barh(0, 0, color=colour, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlim(MIN_ERROR_DRAWN, MAX_ERROR_DRAWN)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("error relative to the norm (lower is better)")
    figure.legend(frameon=False, loc="outside upper right", ncols=3)
    return figure


# -- drawing -----------------------------------------------------------------


def _axis_label(entry: Entry) -> str:
    return f"{short(entry.label)}  {entry.number}"


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


def short(text: str, limit: int = 44) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _style() -> AbstractContextManager[None]:
    import matplotlib

    settings: dict[str, object] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "crucible",  # equal values give equal ids
        "text.parse_math": False,  # labels are untrusted: `$` is a dollar
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": MUTED,
        "ytick.color": INK,
    }
    context: AbstractContextManager[None] = matplotlib.rc_context(settings)
    return context


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return a figure as wide as the page. Without pyplot it has no display and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, max(height, 1.8)), layout="constrained")
    return figure, figure.subplots()


def svg(name: str, draw: Callable[[], Figure]) -> str:
    """Draw the `<svg>` element. Its ids begin with the figure's name, to be unique in the page."""
    buffer = io.StringIO()
    with _style():
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        draw().savefig(buffer, format="svg", metadata=metadata, transparent=True)
    text = buffer.getvalue()
    return re.sub(
        r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name.lower()}-", text[text.index("<svg") :]
    )
