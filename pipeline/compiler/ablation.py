"""What each switch of the placement does: the best int8 candidate again, with one switch reversed
each time. Pure.

A reversed recipe is a candidate like any other: it is built, checked and measured in the same run,
and it may win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.compiler.decision import loss, speed_ratio
from pipeline.core import Precision, Recipe
from pipeline.results.report import Ablation, AblationRow, Candidate

ABLATED = "ablated"
SWITCHES = ("first_layer", "last_layer", "residual_add", "matmul_activations", "per_channel")
"""Those that are a question of accuracy against speed; without `conv` and `matmul_weight` there is
hardly any int8.
"""


@dataclass(frozen=True, slots=True)
class Reversal:
    """A recipe with one switch the other way."""

    switch: str
    recipe: Recipe
    changes: bool = True  # False: the graph is the same either way, so nothing was built


@dataclass(frozen=True, slots=True)
class Ablated:
    """The candidate whose switches were reversed, and how."""

    base: Candidate
    reversals: tuple[Reversal, ...]

    @property
    def labels(self) -> frozenset[str]:
        """The candidates whose speed is compared."""
        return frozenset((self.base.label, *(each.recipe.label for each in self.reversals)))


def base_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The int8 candidate of our own placement that lost least of those that passed; where none
    passed, of those that gave answers in int8.

    Speed does not count: the switches are tried before anything is measured, so that all is
    measured in one run.
    """
    placed = [
        each
        for each in candidates
        if each.selection and each.state != "mislabelled" and _is_placed(each.recipe)
    ]
    passed = [each for each in placed if each.state == "measured"]
    return min(passed or placed, key=loss, default=None)


def _is_placed(recipe: Recipe) -> bool:
    return (
        recipe.precision is Precision.INT8
        and recipe.quantizer == "crucible"
        and recipe.realised_in == "graph"
    )


def reversals(recipe: Recipe) -> tuple[Reversal, ...]:
    """One recipe per switch."""
    turned = {
        name: recipe.placement.model_copy(update={name: not getattr(recipe.placement, name)})
        for name in SWITCHES
    }
    # of a rescued one: no attempt of that rescue, so it is measured whatever it loses
    variant = ABLATED if recipe.variant else ""
    return tuple(
        Reversal(name, recipe.model_copy(update={"placement": placement, "variant": variant}))
        for name, placement in turned.items()
    )


def ablation_from(ablated: Ablated, candidates: Sequence[Candidate]) -> Ablation:
    """Each switch with what reversing it did, from the candidates as they were measured."""
    by_label = {each.label: each for each in candidates}
    base = by_label[ablated.base.label]
    return Ablation(
        label=base.label,
        rows=tuple(_row(base, reversal, by_label) for reversal in ablated.reversals),
    )


def _row(base: Candidate, reversal: Reversal, by_label: dict[str, Candidate]) -> AblationRow:
    before = bool(getattr(base.recipe.placement, reversal.switch))
    row = AblationRow(switch=reversal.switch, before=before, after=not before)
    if not reversal.changes:
        return row
    made = by_label[reversal.recipe.label]
    drops, cosines = (
        [_drop(each) for each in (base, made)],
        [_cosine(each) for each in (base, made)],
    )
    return row.model_copy(
        update={
            "label": made.label,
            "state": made.state,
            "reason": made.reason,
            "drop": drops[1],
            "drop_change": _change(*drops),
            "cosine": cosines[1],
            "cosine_change": _change(*cosines),
            "ratio": speed_ratio(base, made),
        }
    )


def _drop(candidate: Candidate) -> float | None:
    return (
        candidate.selection.metric.drop
        if candidate.selection and candidate.selection.metric
        else None
    )


def _cosine(candidate: Candidate) -> float | None:
    return (
        min((output.cosine for output in candidate.selection.outputs), default=None)
        if candidate.selection
        else None
    )


def _change(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
