"""The charts of the first page: speed beside PyTorch's best, and requests per second of servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.pages.figures import Drawing
from benchmarks.pages.gpu_drawings import COLOURS, PALE
from benchmarks.pages.torch_comparison import Comparison, comparisons
from pipeline.report.figures.drawing import INK, MUTED

HEIGHT = 0.36
LOADS = ("wire", "CNN")


def speedup_drawing(document: Mapping[str, Any]) -> Drawing:
    """How many times as fast as PyTorch's best ours is, by model: end to end and on the GPU."""
    values = {each.row.title: _speedups(each) for each in comparisons(document)}
    return Drawing("gpu_speedup.svg", values, _draw_speedups, (8.6, 4.6))


def _speedups(comparison: Comparison) -> list[float]:
    torch, ours = comparison.torch, comparison.usual[0]
    return [torch.wall_ms / ours.wall_ms, torch.gpu_ms / ours.gpu_ms]


def _draw_speedups(figure: Figure, values: Mapping[str, Sequence[float]]) -> None:
    axes = figure.subplots()
    for place, (whole, gpu) in enumerate(values.values()):
        axes.barh(place - HEIGHT / 2, whole, color=COLOURS["ours"], height=HEIGHT)
        axes.barh(place + HEIGHT / 2, gpu, color=COLOURS["ours"], height=HEIGHT, alpha=PALE)
        axes.text(whole, place - HEIGHT / 2, f" {whole:.2f}", va="center", fontsize=8, color=INK)
    axes.axvline(1, color=MUTED, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(values)), list(values), fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="times as fast as PyTorch's best: end to end (dark), on the GPU alone (pale)")


def serving_drawing(document: Mapping[str, Any]) -> Drawing:
    """Requests per second of every server: one panel per load."""
    values = {
        load: {row["server"]: row["per_s"] for row in document["rows"] if row["load"] == load}
        for load in LOADS
    }
    return Drawing("serving.svg", values, _draw_servers, (8.6, 3.0))


def _draw_servers(figure: Figure, values: Mapping[str, Mapping[str, float]]) -> None:
    for axes, (load, rates) in zip(figure.subplots(1, len(values)), values.items(), strict=True):
        fastest_first = sorted(rates.items(), key=lambda item: -item[1])
        names, rates_in_order = zip(*fastest_first, strict=True)
        colours = [COLOURS["ours" if name == "Crucible" else "bare"] for name in names]
        axes.barh(range(len(names)), rates_in_order, color=colours, height=0.7)
        for place, rate in enumerate(rates_in_order):
            axes.text(rate, place, f" {rate:,.0f}", va="center", fontsize=8, color=INK)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(
            title=load, xlabel="requests/s at 16 connections", xlim=(0, 1.16 * max(rates.values()))
        )
