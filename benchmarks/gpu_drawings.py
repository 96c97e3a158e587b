"""The figures of results/gpu_models.json: GPU time of every engine of every row, and the launch queue. Without that file there are none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from figures import Drawing
from gpu_model_tables import CURVE
from matplotlib.figure import Figure

from pipeline.drawing import INK, MUTED

COLOURS = {"ours": "#2f6fb5", "bare": "#9db8d6", "torch": "#b8860b"}  # by the first word of an engine's name
COLUMNS = 2
BAR, PANEL = 0.19, 0.75  # inches: of one bar, and of a panel without its bars

Bars = dict[str, dict[str, float]]
"""Milliseconds of the GPU by row and engine, the fastest first."""


def models_drawing(found: Mapping[str, Any]) -> tuple[Drawing, ...]:
    """A panel per row; a bare loop on our own engine is left out, being the same bar again."""
    bars: Bars = {}
    for name, row in found.get("rows", {}).items():
        entries = row.get("entries", {}) if name != CURVE and "inputs" in row else {}
        times = {
            engine: entry["device_median_ms"] for engine, entry in entries.items() if "device_median_ms" in entry and engine.split()[0] in COLOURS
        }
        if times:
            bars[name] = dict(sorted(times.items(), key=lambda item: item[1]))
    if not bars:
        return ()
    deepest = [max(len(times) for times in part) for part in _rows_of_panels(list(bars.values()))]
    return (Drawing("gpu_models.svg", bars, _draw_models, (9.2, sum(PANEL + BAR * count for count in deepest))),)


def _rows_of_panels(panels: Sequence[Any]) -> list[Sequence[Any]]:
    return [panels[first : first + COLUMNS] for first in range(0, len(panels), COLUMNS)]


def _draw_models(figure: Figure, bars: Bars) -> None:
    depth = math.ceil(len(bars) / COLUMNS)
    heights = [PANEL + BAR * max(len(times) for times in part) for part in _rows_of_panels(list(bars.values()))]
    grid = figure.subplots(depth, COLUMNS, squeeze=False, gridspec_kw={"height_ratios": heights}).ravel()
    for axes, (name, times) in zip(grid, bars.items(), strict=False):
        values = list(times.values())
        axes.barh(range(len(times)), values, color=[COLOURS[engine.split()[0]] for engine in times], height=0.72)
        axes.set_yticks(range(len(times)), list(times), fontsize=8)
        axes.invert_yaxis()
        axes.set(title=name, xlabel="GPU ms", xlim=(0, max(values) * 1.16))
        axes.grid(visible=False, axis="y")
        for place, value in enumerate(values):
            axes.text(value, place, f" {value:.3f}", va="center", fontsize=8, color=INK)
    for axes in grid[len(bars) :]:
        axes.set_visible(False)


def curve_drawing(found: Mapping[str, Any]) -> tuple[Drawing, ...]:
    """Time per call against the number of calls, synchronised and not."""
    row = found.get("rows", {}).get(CURVE, {})
    return (Drawing("launch_queue.svg", [row["entries"]["curve"], row["events_ms"]], _draw_curve),) if "entries" in row else ()


def _draw_curve(figure: Figure, values: tuple[Sequence[Mapping[str, float]], float]) -> None:
    curve, truth = values
    calls = [at["calls"] for at in curve]
    axes = figure.subplots()
    axes.axhline(truth, color=MUTED, linestyle="--", linewidth=1)
    axes.text(calls[0], truth, "CUDA events", color=MUTED, va="bottom")
    axes.plot(calls, [at["synchronised_ms"] for at in curve], color=COLOURS["ours"], marker="o", markersize=4, label="until the work is done")
    axes.plot(calls, [at["unsynchronised_ms"] for at in curve], color="#b42318", marker="s", markersize=4, label="until the last call returns")
    axes.set(xscale="log", xlabel="calls", ylabel="ms per call", ylim=(0, None))
    axes.set_xticks(calls, [str(count) for count in calls])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
