"""The report's figures as inline SVG, drawn by matplotlib without a display. Text stays text: it can be read aloud, searched and copied."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from pipeline.measure import Interval
from pipeline.report import MetricResult, Report
from pipeline.sections import Entry, entries, median_s, quantile_s, shape_text, shapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#5f6b7a", "#dfe4ea"
COLOURS = {"winner": "#0b7a4b", "baseline": "#6b7280", "candidate": "#2f6fb5", "failed accuracy": "#b42318"}
MARKERS = {"winner": "*", "baseline": "s", "candidate": "o", "failed accuracy": "X"}  # told apart without colour too
DOTS = 300  # raw values drawn per engine; the box is of all of them
OPERATORS_SHOWN = 14
TABLES_SHOWN = 4


class Plot(NamedTuple):
    """One figure: `svg` is markup without a document around it, `caption` says in words what it shows."""

    section: str  # the key of the section it belongs to
    svg: str
    caption: str


def plots(report: Report) -> tuple[Plot, ...]:
    """All figures that this report has figures for."""
    lines = entries(report)
    found = [_pareto(report, lines)]
    found += [_latency(lines, sizes) for sizes in shapes(report)]
    found += [_stages(report), _operators(report)]
    return tuple(plot for plot in found if plot is not None)


def _pareto(report: Report, lines: tuple[Entry, ...]) -> Plot | None:
    """Accuracy against latency, the front marked."""
    first = next(iter(shapes(report)), None)
    points = [point for entry in lines if first is not None and (point := _point(report, entry, first)) is not None]
    if len(points) < 2:
        return None
    metrics = _metrics(report)
    name = metrics[0].name if metrics else "smallest cosine"
    figure, axes = _figure(4.3)
    if metrics:
        limit = metrics[0].reference - metrics[0].max_drop
        axes.axhline(limit, color=COLOURS["failed accuracy"], linestyle="--", linewidth=1)
        axes.annotate(
            f"limit: reference minus {metrics[0].max_drop:g}",
            (0.995, limit),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(0, -4),
            ha="right",
            va="top",
            color=COLOURS["failed accuracy"],
        )
    front = _front(points)
    axes.plot([p.x for p in front], [p.y for p in front], drawstyle="steps-post", color=MUTED, linewidth=1.2, alpha=0.7, zorder=1)
    for kind in COLOURS:
        for point in (p for p in points if p.kind == kind):
            size = 190 if kind == "winner" else 60
            if point.error is not None:
                axes.plot([point.x, point.x], point.error, color=COLOURS[kind], alpha=0.45, linewidth=1.5, zorder=2)
            axes.scatter([point.x], [point.y], s=size, color=COLOURS[kind], marker=MARKERS[kind], zorder=3, edgecolors="white", linewidths=0.8)
            axes.annotate(str(point.number), (point.x, point.y), textcoords="offset points", xytext=(7, 5), fontsize=10, fontweight="bold")
    _kinds_legend(axes, [kind for kind in COLOURS if any(p.kind == kind for p in points)])
    _milliseconds(axes, [p.x for p in points])
    axes.set_xlabel(f"median latency at {shape_text(first or {})}, ms (lower is better)")
    axes.set_ylabel(f"{name} (higher is better)")
    on_front = ", ".join(str(p.number) for p in front)
    caption = (
        f"Accuracy against latency. Numbers are those of the table; bars are 95 % intervals of the drop. "
        f"The line is the Pareto front ({on_front}): nothing is both faster and more accurate."
    )
    return Plot("candidates", _svg(figure, "pareto"), caption)


class _Point(NamedTuple):
    x: float  # ms
    y: float
    number: int
    kind: str
    error: tuple[float, float] | None


def _metrics(report: Report) -> list[MetricResult]:
    return [item.selection.metric for item in report.candidates if item.selection and item.selection.metric]


def _point(report: Report, entry: Entry, sizes: dict[str, int]) -> _Point | None:
    row = entry.row(sizes)
    if row is None:
        return None
    x, kind = median_s(row.end_to_end) * 1e3, _kind(entry)
    metrics = _metrics(report)
    if entry.candidate is None:  # the reference itself; further baselines were not validated
        is_reference = report.baseline is not None and entry.label == report.baseline.label
        return _Point(x, metrics[0].reference if metrics else 1.0, entry.number, kind, None) if is_reference else None
    selection = entry.candidate.selection
    if selection is None or not (selection.metric or selection.outputs):
        return None
    if selection.metric is None:
        return _Point(x, min(error.cosine for error in selection.outputs), entry.number, kind, None)
    drop: Interval = selection.metric.interval
    reference = selection.metric.reference
    return _Point(x, selection.metric.candidate, entry.number, kind, (reference - drop.high, reference - drop.low))


def _front(points: list[_Point]) -> list[_Point]:
    """The points that no other point beats on both axes, from fast to slow."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.x, -p.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return front


def _kind(entry: Entry) -> str:
    return entry.state if entry.state in COLOURS else entry.part


def _latency(lines: tuple[Entry, ...], sizes: dict[str, int]) -> Plot | None:
    """Distribution of the raw latencies: every engine a row, fastest on top."""
    shown = [(entry, row.end_to_end.values_s) for entry in lines if (row := entry.row(sizes)) and row.end_to_end.values_s]
    if not shown:
        return None
    figure, axes = _figure(0.9 + 0.42 * len(shown))
    for place, (entry, values) in enumerate(shown):
        colour = COLOURS[_kind(entry)]
        ms = [value * 1e3 for value in values]
        dots = ms[:: max(1, len(ms) // DOTS)]
        heights = [place + 0.26 * (((index * 0.618034) % 1) - 0.5) * 2 for index in range(len(dots))]  # spread evenly, the same every time
        axes.scatter(dots, heights, s=5, color=colour, alpha=0.22, linewidths=0, rasterized=False)
        low, first, middle, third, high = (quantile_s(ms, q) for q in (0.05, 0.25, 0.5, 0.75, 0.95))
        axes.plot([low, high], [place, place], color=colour, linewidth=1.2)
        axes.barh(place, third - first, left=first, height=0.44, color=colour, alpha=0.55)
        axes.plot([middle, middle], [place - 0.3, place + 0.3], color=INK, linewidth=1.8)
    axes.set_yticks(range(len(shown)), [f"{_short(entry.label)}  {entry.number}" for entry, _ in shown])
    axes.invert_yaxis()
    _milliseconds(axes, [value * 1e3 for _, values in shown for value in values])
    axes.set_xlabel("latency end to end, ms (lower is better)")
    caption = (
        f"Latency at {shape_text(sizes)}. Each dot is one raw value; the box holds the middle half, its line is the median, "
        "the whisker reaches from the 5th to the 95th percentile."
    )
    return Plot("latency", _svg(figure, "latency-" + "-".join(f"{k}{v}" for k, v in sizes.items())), caption)


def _stages(report: Report) -> Plot | None:
    """Seconds per stage, all candidates together; what came from the store is hatched."""
    if not report.steps:
        return None
    names = list(dict.fromkeys(step.stage for step in report.steps))
    ran = [sum(s.seconds for s in report.steps if s.stage == name and not s.reused) for name in names]
    kept = [sum(s.seconds for s in report.steps if s.stage == name and s.reused) for name in names]
    figure, axes = _figure(0.9 + 0.34 * len(names))
    places = range(len(names))
    axes.barh(places, ran, color=COLOURS["candidate"], label="ran now")
    axes.barh(places, kept, left=ran, color="white", edgecolor=MUTED, hatch="////", linewidth=0.8, label="from the store (time it took then)")
    longest = max((a + b for a, b in zip(ran, kept, strict=True)), default=0.0)
    for place, total in enumerate(a + b for a, b in zip(ran, kept, strict=True)):
        axes.annotate(f"{total:.2g} s" if total < 10 else f"{total:.0f} s", (total, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [_short(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.12 or 1)
    axes.set_xlabel("seconds")
    axes.legend(frameon=False, loc="lower right")
    return Plot(
        "stages",
        _svg(figure, "stages"),
        "Time per stage, all candidates together. Hatched: reused from the store, with the time it took when it ran.",
    )


def _operators(report: Report) -> Plot | None:
    """Operator counts at each point of the line."""
    tables = report.operators[:TABLES_SHOWN]
    if not tables:
        return None
    totals = {name: max(table.operators.get(name, 0) for table in tables) for table in tables for name in table.operators}
    names = sorted(totals, key=lambda name: (-totals[name], name))[:OPERATORS_SHOWN]
    figure, axes = _figure(1.0 + 0.115 * len(names) * (len(tables) + 1))
    shades = ("#aeb8c4", "#5b93c9", "#1d4e89", "#0b7a4b")
    height = 0.8 / len(tables)
    for index, table in enumerate(tables):
        places = [place + (index - (len(tables) - 1) / 2) * height for place in range(len(names))]
        axes.barh(places, [table.operators.get(name, 0) for name in names], height=height * 0.92, color=shades[index], label=_short(table.stage))
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("nodes in the graph")
    axes.legend(frameon=False, loc="lower right")
    hidden = len(totals) - len(names)
    rest = f" {hidden} rarer operators are in the table only." if hidden > 0 else ""
    return Plot("operators", _svg(figure, "operators"), "Operators before and after each transform." + rest)


# -- drawing ----------------------------------------------------------------------------------------------------------


def _style() -> AbstractContextManager[None]:
    import matplotlib

    settings: dict[str, object] = {
        "svg.fonttype": "none",
        "text.parse_math": False,  # labels are untrusted: `$` is a dollar
        "font.family": ["sans-serif"],
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
        "hatch.linewidth": 0.6,
        "hatch.color": MUTED,
    }
    context: AbstractContextManager[None] = matplotlib.rc_context(settings)
    return context


def _figure(height: float) -> tuple[Figure, Axes]:
    """A figure 8.6 inches wide, without pyplot: no display, no global state."""
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(8.6, max(height, 1.8)), layout="constrained")
        axes = figure.subplots()
    return figure, axes


def _milliseconds(axes: Axes, values: list[float]) -> None:
    """A logarithmic axis where the values span more than a factor of five, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if max(values) < 5 * min(values) or min(values) <= 0:
        axes.set_xlim(left=0)
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _kinds_legend(axes: Axes, kinds: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", marker=MARKERS[kind], color=COLOURS[kind], markersize=9 if kind == "winner" else 7, label=kind) for kind in kinds
    ]
    axes.legend(handles=handles, frameon=False, loc="best")


def _short(text: str, limit: int = 44) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _svg(figure: Figure, name: str) -> str:
    """The `<svg>` element; its ids carry the figure's name, for ids are shared by a whole page."""
    buffer = io.StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}, transparent=True)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    prefix = re.sub(r"[^a-z0-9]+", "-", name.lower())
    replace: Callable[[str, str], str] = lambda pattern, s: re.sub(pattern, rf"\g<1>{prefix}-", s)  # noqa: E731
    return replace(r'(xlink:href="#)', replace(r"(url\(#)", replace(r'(\bid=")', svg)))
