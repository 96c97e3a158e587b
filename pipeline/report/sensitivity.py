"""Which layers hurt: of every rescue that ranked its nodes, the worst ones as a table and as a
figure.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.report.drawing import INK, MUTED, Plot, key_of, new_figure, short, svg
from pipeline.report.outline import Section, Table
from pipeline.results.report import NodeHarm, NodeRanking, Report, Rescue

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = "layer-errors"
NODES_SHOWN = 10  # in the table; report.json holds all
NODES_DRAWN = 24
OWN, ACCUMULATED, KEPT = "#b42318", "#b3bdc9", "#0b7a4b"
LARGEST_DRAWN = 10.0  # an error of 1 leaves nothing of a tensor; what overflows has no end
SMALLEST_DRAWN = 1e-5


def section(report: Report) -> Section:
    """The worst nodes of each rescue."""
    ranked = list(_ranked(report))
    text = (
        (
            "Errors are relative to the norm of what fp32 gives at the same place (signal to noise"
            " in dB beside them), in the worst batch. Own: this node alone is low, on exact inputs."
            " Accumulated: at its output, with every node as low as in the engine."
        ),
    )
    tables = tuple(
        table(rescue.label, ranking, _kept(report, rescue)) for rescue, ranking in ranked
    )
    return Section(KEY, "Which layers hurt", text if ranked else (), tables=tables)


def table(label: str, ranking: NodeRanking, kept: tuple[str, ...] = ()) -> Table:
    """The worst nodes; `kept` are patterns of those that the engine which passed has in fp32."""
    header = (
        f"of {len(ranking.nodes)} nodes of {label}",
        "operator",
        ">own error",
        ">accumulated",
        ">largest value",
        "kept",
    )
    rows = tuple(
        (
            harm.node,
            harm.operator,
            error_text(harm.error),
            error_text(harm.accumulated),
            f"{harm.largest:.3g}{' (overflows)' if harm.overflows else ''}",
            "fp32" if _is_kept(harm, kept) else "",
        )
        for harm in ranking.nodes[:NODES_SHOWN]
    )
    return Table(header, rows)


def error_text(error: float) -> str:
    """`0.016 (36 dB)`; from an error of 10 on, nothing is left to compare."""
    if error >= LARGEST_DRAWN:
        return "all is lost"
    return f"{error:.2g} ({round(-20 * math.log10(error))} dB)" if error else "0"


def _ranked(report: Report) -> Iterator[tuple[Rescue, NodeRanking]]:
    for rescue in report.rescues:
        if rescue.ranking is not None:
            yield rescue, rescue.ranking


def _kept(report: Report, rescue: Rescue) -> tuple[str, ...]:
    """What the engine that passed keeps in fp32; empty if none did."""
    last = next((each for each in report.candidates if each.label == rescue.steps[-1].label), None)
    return last.recipe.keep_fp32 if last and last.state == "measured" else ()


def _is_kept(harm: NodeHarm, kept: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(harm.node, pattern) for pattern in kept)


# -- the figure
# ------------------------------------------------------------------------------


class _Bars(NamedTuple):
    name: str
    own: float
    accumulated: float
    kept: bool


class _Layers(NamedTuple):
    bars: tuple[_Bars, ...]


def plots(report: Report) -> tuple[Plot, ...]:
    """One figure per ranking. Draws nothing yet."""
    return tuple(
        _plot(number, rescue, ranking, _kept(report, rescue))
        for number, (rescue, ranking) in enumerate(_ranked(report), start=1)
    )


def _plot(number: int, rescue: Rescue, ranking: NodeRanking, kept: tuple[str, ...]) -> Plot:
    shown = ranking.nodes[:NODES_DRAWN]
    data = _Layers(
        tuple(
            _Bars(short(harm.node), harm.error, harm.accumulated, _is_kept(harm, kept))
            for harm in shown
        )
    )
    caption = (
        f"The worst {len(shown)} of {len(ranking.nodes)} nodes of {rescue.label}, worst first, on"
        f" {ranking.samples} samples: the error that each makes by itself, and the error that has"
        " gathered at its output. At 1 nothing of the signal is left."
    )
    name = f"{KEY}-{number}"
    return Plot(
        KEY, name, caption, key_of(Path(__file__), data), partial(svg, name, partial(_draw, data))
    )


def _draw(data: _Layers) -> Figure:
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = new_figure(1.1 + 0.3 * len(data.bars))
    for place, bar in enumerate(data.bars):
        for value, shift, colour in (
            (bar.own, -0.19, KEPT if bar.kept else OWN),
            (bar.accumulated, 0.19, ACCUMULATED),
        ):
            axes.barh(
                place + shift,
                min(max(value, SMALLEST_DRAWN), LARGEST_DRAWN),
                height=0.36,
                color=colour,
            )
    axes.axvline(1.0, color=MUTED, linestyle="--", linewidth=1)
    labels = {OWN: "own error", KEPT: "own error, kept in fp32 at last", ACCUMULATED: "accumulated"}
    drawn = {KEPT if bar.kept else OWN for bar in data.bars} | {ACCUMULATED}
    for colour in (colour for colour in labels if colour in drawn):
        axes.barh(0, 0, color=colour, label=labels[colour])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlim(SMALLEST_DRAWN, LARGEST_DRAWN)
    axes.set_yticks(range(len(data.bars)), [bar.name for bar in data.bars], color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("error relative to the norm (lower is better)")
    figure.legend(frameon=False, loc="outside upper right", ncols=3)
    return figure
