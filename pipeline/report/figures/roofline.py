"""The roofline of an engine: what each layer reaches, beside the peaks of its device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.core.recipe import Precision
from pipeline.formatting import number_text
from pipeline.host.gpu import Peaks
from pipeline.report.figures.drawing import (
    INK,
    MUTED,
    PRECISION_COLOURS,
    Plot,
    new_figure,
    short,
)
from pipeline.report.layer_sections import EngineLayers, layers_of_engines
from pipeline.results.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_AREA = 900.0  # of the slowest layer's dot, in square points
MARGIN = 2.0  # beyond the outermost dots


class _Dot(NamedTuple):
    """One layer."""

    intensity: float  # FLOPs per byte
    gflops_per_s: float
    seconds: float
    precision: str
    name: str  # for people


class _Roofline(NamedTuple):
    dots: tuple[_Dot, ...]  # the slowest first
    roofs: tuple[tuple[str, float], ...]  # precision and its peak, GFLOP/s
    gb_per_s: float
    caches: tuple[tuple[str, float], ...]  # name and GB/s, the smallest cache first


def rooflines(report: Report) -> tuple[Plot, ...]:
    """Return the figure of the delivered engine, if its layers' work and its peaks are known."""
    winners = [each for each in layers_of_engines(report) if each.entry.state == "winner"]
    found = (_roofline(number, engine) for number, engine in enumerate(winners, start=1))
    return tuple(plot for plot in found if plot is not None)


def _roofline(number: int, engine: EngineLayers) -> Plot | None:
    peaks = engine.peaks
    if peaks is None or not peaks.bytes_per_s:
        return None
    dots = tuple(
        _Dot(
            work.flops / work.moved_bytes,
            work.flops / layer.seconds / 1e9,
            layer.seconds,
            str(layer.precision),
            short(layer.name),
        )
        for layer, work in zip(engine.layers, engine.works, strict=True)
        if layer.seconds and work.flops and work.moved_bytes
    )
    if not dots:
        return None
    caches = tuple((level.name, level.bytes_per_s / 1e9) for level in peaks.caches)
    data = _Roofline(dots, _roofs(dots, peaks), peaks.bytes_per_s / 1e9, caches)
    timed = sum(layer.seconds or 0.0 for layer in engine.layers)
    share = sum(dot.seconds for dot in dots) / timed
    caption = (
        f"The roofline of {engine.label}: one dot for each layer that computes, as large as its"
        f" time; together they take {share:.0%} of the time of all layers, and {dots[0].name} the"
        " most. On a line a layer is as fast as the device allows: on the slope by its memory, on"
        " the flat part by its arithmetic. Above it, its data stayed in caches, whose slopes are"
        " dotted where they are known. Peaks:"
        f" {peaks.source}."
    )
    return Plot("layers", f"roofline-{number}", caption, partial(_draw, data))


def _roofs(dots: tuple[_Dot, ...], peaks: Peaks) -> tuple[tuple[str, float], ...]:
    """Return the peaks of the precisions in which layers ran."""
    ran = {dot.precision for dot in dots}
    known = peaks.flops_per_s.items()
    return tuple((str(precision), peak / 1e9) for precision, peak in known if str(precision) in ran)


def _draw(data: _Roofline) -> Figure:
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = new_figure(4.6)
    intensities = [dot.intensity for dot in data.dots]
    ridges = [peak / data.gb_per_s for _, peak in data.roofs]
    x = np.geomspace(min(intensities) / MARGIN, max((*intensities, *ridges)) * MARGIN, 400)
    for name, peak in data.roofs:
        axes.plot(x, np.minimum(peak, x * data.gb_per_s), color=PRECISION_COLOURS[Precision(name)])
        label = f"{name}: {number_text(peak)} GFLOP/s"
        axes.annotate(
            label, (x[-1], peak), xytext=(0, 4), textcoords="offset points", ha="right", color=INK
        )
    if not data.roofs:
        axes.plot(x, x * data.gb_per_s, color=MUTED)
    for name, gb_per_s in data.caches:
        highest = max((peak for _, peak in data.roofs), default=np.inf)
        axes.plot(x, np.minimum(highest, x * gb_per_s), ":", color=MUTED, linewidth=1)
        label, start = f"{name}: {number_text(gb_per_s)} GB/s", (x[0], x[0] * gb_per_s)
        axes.annotate(label, start, xytext=(4, 12), textcoords="offset points", color=MUTED)
    _draw_dots(axes, data.dots)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(f"FLOPs per byte (the slope is the memory: {number_text(data.gb_per_s)} GB/s)")
    axes.set_ylabel("GFLOP/s (higher is better)")
    figure.legend(frameon=False, loc="outside upper right", ncols=4)
    return figure


def _draw_dots(axes: Axes, dots: tuple[_Dot, ...]) -> None:
    slowest_s = dots[0].seconds
    for name, colour in PRECISION_COLOURS.items():
        own = [dot for dot in dots if dot.precision == name]
        if own:
            axes.scatter(
                [dot.intensity for dot in own],
                [dot.gflops_per_s for dot in own],
                s=[max(8.0, MAX_AREA * dot.seconds / slowest_s) for dot in own],
                color=colour,
                alpha=0.45,
                edgecolor="white",
            )
            axes.scatter([], [], color=colour, label=str(name))  # of one size in the legend
