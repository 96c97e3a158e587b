"""Layers and nodes: precisions that ran, operators, errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.core.recipe import Precision
from pipeline.report.entries import Entry
from pipeline.report.figures.drawing import (
    INK,
    MUTED,
    PRECISION_COLOURS,
    Plot,
    axis_label,
    new_figure,
    short,
)
from pipeline.report.layer_errors import LAYER_ERRORS, MAX_ERROR, is_kept
from pipeline.report.run_sections import operator_names
from pipeline.results.candidates import NodeRanking, Rescue
from pipeline.results.precision_audit import time_by_precision
from pipeline.results.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES = ("#b3bdc9", "#2f6fb5", "#0b7a4b")
PRECISION_NAMES = {"integer": "sizes and indices", "none": "moves data", "unknown": "not known"}
MIN_LABELLED_SHARE = 0.12  # share of the time; smaller parts of a bar have no room for their number
MAX_OPERATORS = 14
OWN, ACCUMULATED, KEPT = "#b42318", "#b3bdc9", "#0b7a4b"
MAX_NODES_DRAWN = 24
MAX_ERROR_DRAWN = MAX_ERROR
MIN_ERROR_DRAWN = 1e-5


# -- precision ---------------------------------------------------------------


class _PrecisionBar(NamedTuple):
    label: str
    shares: tuple[tuple[str, float], ...]  # in the order of PRECISION_COLOURS


def precisions(lines: tuple[Entry, ...]) -> Plot | None:
    bars: list[_PrecisionBar] = []
    for entry in lines:
        if entry.candidate is not None and entry.candidate.layers is not None:
            shares = time_by_precision(entry.candidate.layers)
            parts = tuple(
                (str(name), shares[name]) for name in PRECISION_COLOURS if shares.get(name)
            )
            bars.append(_PrecisionBar(axis_label(entry), parts))
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


def operators(report: Report) -> Plot | None:
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


def layer_errors(
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
