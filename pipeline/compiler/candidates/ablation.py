"""The ablation: the best int8 candidate again, with one placement switch reversed each time. Pure.

A reversed recipe is an ordinary candidate: it is built, checked and measured in the same run, and
it may win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.compiler.decision import loss
from pipeline.compiler.speed import speed_ratio
from pipeline.core.recipe import Precision, Recipe
from pipeline.results.candidates import Ablation, AblationRow, Candidate

SWITCHES = ("first_layer", "last_layer", "residual_add", "matmul_activations", "per_channel")
"""Switches that trade accuracy for speed. `conv` and `matmul_weight` are left out: without them
hardly anything runs in int8.
"""


@dataclass(frozen=True, slots=True)
class Reversal:
    """A recipe with one switch reversed."""

    switch: str
    recipe: Recipe
    changes: bool = True  # False: the switch does not change the graph, so nothing was built


@dataclass(frozen=True, slots=True)
class Ablated:
    """The candidate with the reversals of its switches."""

    base: Candidate
    reversals: tuple[Reversal, ...]

    @property
    def labels(self) -> frozenset[str]:
        """Labels of the candidates to compare in speed."""
        labels = [reversal.recipe.label for reversal in self.reversals]
        return frozenset([self.base.label, *labels])


def base_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the most accurate int8 candidate with Crucible's own placement.

    It is chosen among those that passed; if none passed, among those that were checked. Speed does
    not count: the reversed recipes are built before any measurement, so that one run measures all.
    """
    placed = [
        candidate
        for candidate in candidates
        if candidate.selection and candidate.state != "mislabelled" and _is_placed(candidate.recipe)
    ]
    passed = [candidate for candidate in placed if candidate.state == "measured"]
    return min(passed or placed, key=loss, default=None)


def _is_placed(recipe: Recipe) -> bool:
    return (
        recipe.precision is Precision.INT8
        and recipe.quantizer == "crucible"
        and recipe.realised_in == "graph"
    )


def reversals(recipe: Recipe) -> tuple[Reversal, ...]:
    """Return one recipe per switch, with that switch reversed."""
    placements = {
        name: recipe.placement.model_copy(update={name: not getattr(recipe.placement, name)})
        for name in SWITCHES
    }
    return tuple(
        Reversal(name, recipe.model_copy(update={"placement": placement}))
        for name, placement in placements.items()
    )


def ablation_from(ablated: Ablated, candidates: Sequence[Candidate]) -> Ablation:
    """Return the effect of each switch, from the measured candidates."""
    by_label = {candidate.label: candidate for candidate in candidates}
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
    variant = by_label[reversal.recipe.label]
    return row.model_copy(
        update={
            "label": variant.label,
            "state": variant.state,
            "reason": variant.reason,
            "drop": _drop(variant),
            "drop_change": _change(_drop(base), _drop(variant)),
            "cosine": _cosine(variant),
            "cosine_change": _change(_cosine(base), _cosine(variant)),
            "ratio": speed_ratio(base, variant),
        }
    )


def _drop(candidate: Candidate) -> float | None:
    if candidate.selection is None or candidate.selection.metric is None:
        return None
    return candidate.selection.metric.drop


def _cosine(candidate: Candidate) -> float | None:
    return None if candidate.selection is None else candidate.selection.cosine


def _change(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
