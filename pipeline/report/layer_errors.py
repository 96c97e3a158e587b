"""The section about nodes that lose most in low precision."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator

from pipeline.report.tables import Section, Table, left, right
from pipeline.results.candidates import NodeHarm, NodeRanking, Rescue
from pipeline.results.report import Report

MAX_NODES = 10  # in the table of layer errors; report.json holds all
MAX_ERROR = 10.0  # an error of 1 leaves nothing of a tensor; after an overflow it has no limit
LAYER_ERRORS = "layer-errors"  # the key of that section
LAYER_ERRORS_TITLE = "Which layers hurt"


def layer_error_section(report: Report) -> Section:
    """Return the worst nodes of each rescue that ranked its nodes."""
    text = (
        "Errors are relative to the norm of the fp32 result of the same node, in the worst batch."
        " The signal-to-noise ratio in dB is beside them. Own: only this node is low, on exact"
        " inputs. Accumulated: the error at its output, with every node as low as in the engine."
    )
    tables = tuple(
        layer_error_table(rescue.label, ranking, kept_patterns(report, rescue))
        for rescue, ranking in ranked_rescues(report)
    )
    return Section(LAYER_ERRORS, LAYER_ERRORS_TITLE, (text,) if tables else (), tables=tables)


def layer_error_table(
    label: str, ranking: NodeRanking, fp32_patterns: tuple[str, ...] = ()
) -> Table:
    """Return the worst nodes. `fp32_patterns` match the fp32 nodes of the engine that passed."""
    columns = (
        *left(f"of {len(ranking.nodes)} nodes of {label}", "operator"),
        *right("own error", "accumulated", "largest value"),
        *left("kept"),
    )
    rows = tuple(
        (
            harm.node,
            harm.operator,
            error_text(harm.error),
            error_text(harm.accumulated),
            f"{harm.largest:.3g} (overflows)" if harm.overflows else f"{harm.largest:.3g}",
            "fp32" if is_kept(harm, fp32_patterns) else "",
        )
        for harm in ranking.nodes[:MAX_NODES]
    )
    return Table(columns, rows)


def error_text(error: float) -> str:
    """Return `0.016 (36 dB)`. From an error of 10 on there is nothing left to compare."""
    if error >= MAX_ERROR:
        return "all is lost"
    return f"{error:.2g} ({round(-20 * math.log10(error))} dB)" if error else "0"


def ranked_rescues(report: Report) -> Iterator[tuple[Rescue, NodeRanking]]:
    """Yield the rescues that ranked their nodes."""
    for rescue in report.rescues:
        if rescue.ranking is not None:
            yield rescue, rescue.ranking


def kept_patterns(report: Report, rescue: Rescue) -> tuple[str, ...]:
    """Return patterns of the fp32 nodes of the engine that passed; none if no engine passed."""
    label = rescue.steps[-1].label
    for candidate in report.candidates:
        if candidate.label == label:
            return candidate.recipe.keep_fp32 if candidate.state == "measured" else ()
    return ()


def is_kept(harm: NodeHarm, patterns: tuple[str, ...]) -> bool:
    """Return True if a pattern matches the node's name."""
    return any(fnmatch.fnmatchcase(harm.node, pattern) for pattern in patterns)
