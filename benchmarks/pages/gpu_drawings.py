"""The figures of results/gpu_models.json: times of every engine of every row, and the launch
queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.pages.figures import Drawing
from benchmarks.pages.gpu_model_rows import CURVE, ENGINES, times_by_picture
from pipeline.report.figures.drawing import INK, MUTED

COLOURS = dict(zip(ENGINES, ("#2f6fb5", "#9db8d6", "#b8860b"), strict=True))
COLUMNS = 2
PALE = 0.45
BAR, PANEL = 0.19, 0.75  # inches: of one bar, and of a panel without its bars

Bars = dict[str, dict[str, list[float]]]
"""Milliseconds end to end and of the GPU alone by row and engine, the fastest first."""


def models_drawings(document: Mapping[str, Any]) -> tuple[Drawing, ...]:
    """A drawing per model with a panel per row."""
    return tuple(
        Drawing(picture, bars, _draw_models, (9.2, sum(_heights(bars))))
        for picture, bars in times_by_picture(document).items()
    )


def _heights(bars: Bars) -> list[float]:
    """Inches of each row of panels."""
    deep = [len(times) for times in bars.values()]
    return [
        PANEL + BAR * max(deep[first : first + COLUMNS]) for first in range(0, len(deep), COLUMNS)
    ]


def _draw_models(figure: Figure, bars: Bars) -> None:
    heights = _heights(bars)
    grid = figure.subplots(
        len(heights), COLUMNS, squeeze=False, gridspec_kw={"height_ratios": heights}
    ).ravel()
    for axes, (name, times) in zip(grid, bars.items(), strict=False):
        whole, gpu = ([each[place] for each in times.values()] for place in (0, 1))
        colours = [COLOURS.get(engine.split()[0], COLOURS["ours"]) for engine in times]
        axes.barh(range(len(times)), whole, color=colours, height=0.72, alpha=PALE)
        axes.barh(range(len(times)), gpu, color=colours, height=0.36)
        axes.set_yticks(range(len(times)), list(times), fontsize=8)
        axes.invert_yaxis()
        axes.set(
            title=name,
            xlabel="ms end to end (pale), on the GPU (dark)",
            xlim=(0, max(whole) * 1.16),
        )
        axes.grid(visible=False, axis="y")
        for place, value in enumerate(whole):
            axes.text(value, place, f" {value:.3f}", va="center", fontsize=8, color=INK)
    for axes in grid[len(bars) :]:
        axes.set_visible(False)


def curve_drawing(document: Mapping[str, Any]) -> Drawing:
    """Time per call against the number of calls, synchronised and not."""
    row = document["rows"][CURVE]
    return Drawing("launch_queue.svg", [row["entries"]["curve"], row["events_ms"]], _draw_curve)


def _draw_curve(figure: Figure, values: tuple[Sequence[Mapping[str, float]], float]) -> None:
    curve, truth = values
    calls = [at["calls"] for at in curve]
    axes = figure.subplots()
    axes.axhline(truth, color=MUTED, linestyle="--", linewidth=1)
    axes.text(calls[0], truth, "CUDA events", color=MUTED, va="bottom")
    axes.plot(
        calls,
        [at["synchronised_ms"] for at in curve],
        color=COLOURS["ours"],
        marker="o",
        markersize=4,
        label="until the work is done",
    )
    axes.plot(
        calls,
        [at["unsynchronised_ms"] for at in curve],
        color="#b42318",
        marker="s",
        markersize=4,
        label="until the last call returns",
    )
    axes.set(xscale="log", xlabel="calls", ylabel="ms per call", ylim=(0, None))
    axes.set_xticks(calls, [str(count) for count in calls])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")


def attention_drawing(document: Mapping[str, Any]) -> Drawing:
    """Time and memory of attention against the number of tokens, in both forms."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in document["rows"]:
        if row["ms"] is not None:
            points = found.setdefault(row["attention"], [])
            points.append((row["tokens"], row["ms"], row["memory_mb"]))
    return Drawing("attention_lengths.svg", found, _draw_attention, (8.6, 3.2))


def _draw_attention(
    figure: Figure, found: Mapping[str, Sequence[tuple[int, float, float]]]
) -> None:
    panels = figure.subplots(1, 2)
    for (way, points), colour in zip(found.items(), (MUTED, COLOURS["ours"]), strict=True):
        tokens, *figures = zip(*points, strict=True)
        for axes, values in zip(panels, figures, strict=True):
            axes.plot(tokens, values, color=colour, marker="o", markersize=4, label=way)
    for axes, label in zip(panels, ("ms", "MB besides the inputs"), strict=True):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axes.minorticks_off()
    panels[0].legend(frameon=False)
