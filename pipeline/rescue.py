"""The recipe of experience for an fp16 engine that fails its accuracy: what is tried, when it ends, what it tells. Pure.

    1  fp32 without TF32: if that fails too, fp16 is not the cause, and it ends
    2  the profiles' opt shape moved to min, then to max: the builder chooses other kernels
    3  the worst nodes kept in fp32, more of them each time
    4  bf16: the range of fp32 in 16 bits
    at last the advice: train or fine-tune in 16 bits

It ends with the first engine that passes. Every step that builds is a recipe like any other, and a candidate in the report.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.core import Point, Precision, Profile, Recipe
from pipeline.decide import TRAIN_IN_16_BITS
from pipeline.report import Candidate, Rescue, RescueStep
from pipeline.stages.rank import NodeRanking

Step = Literal["fp32", "opt", "keep", "bf16"]

NAMED = 3  # nodes that a sentence names one by one


@dataclass(frozen=True, slots=True)
class Attempt:
    """One engine to try."""

    step: Step
    words: str
    recipe: Recipe
    profiles: tuple[Profile, ...] | None = None  # None: the plan's


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that has nothing to try."""

    words: str
    why: str


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt and what came out."""

    attempt: Attempt
    candidate: Candidate


# --- what is tried ---


def to_rescue(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The fp16 candidates that failed their accuracy: one of each kind of engine, and none where another fp16 engine of the kind passed."""
    in_fp16 = sorted((each for each in candidates if each.recipe.precision is Precision.FP16), key=lambda each: each.recipe.realised_in == "flags")
    passed = {_kind(each.recipe) for each in in_fp16 if each.state == "measured"}
    failed: dict[Recipe, Candidate] = {}
    for each in in_fp16:
        if each.state == "failed accuracy" and _kind(each.recipe) not in passed:
            failed.setdefault(_kind(each.recipe), each)
    return tuple(failed.values())


def _kind(recipe: Recipe) -> Recipe:
    """The recipe without what a rescue changes: precision written into the graph, no node kept yet."""
    return recipe.model_copy(update={"realised_in": "graph", "keep_fp32": (), "variant": ""})


def in_fp32(failed: Candidate) -> Attempt:
    """Is fp16 the cause?"""
    return Attempt("fp32", "fp32 without TF32", _kind(failed.recipe).model_copy(update={"precision": Precision.FP32}))


def with_opt_moved(failed: Candidate, profiles: tuple[Profile, ...]) -> tuple[Attempt | Skipped, ...]:
    """The same recipe, tuned for other shapes."""
    points: tuple[Point, ...] = ("min", "max")
    moves = [(point, moved) for point in points if (moved := tuple(_moved(profile, point) for profile in profiles)) != profiles]
    if not moves:
        return (Skipped("opt shape moved", "nothing to move: all shapes are fixed"),)
    return tuple(
        Attempt("opt", f"opt shape moved to {point}", failed.recipe.model_copy(update={"variant": f"opt-{point}"}), moved) for point, moved in moves
    )


def _moved(profile: Profile, point: Point) -> Profile:
    """The profile with its opt at min or max; an empty dimension is tuned for 1."""
    dims = {name: each.model_copy(update={"opt": max(1, getattr(each, point))}) for name, each in profile.dims.items()}
    values = {name: each.model_copy(update={"opt": getattr(each, point)}) for name, each in profile.values.items()}
    return profile.model_copy(update={"dims": dims, "values": values})


def with_nodes_kept(failed: Candidate, ranking: NodeRanking) -> tuple[Attempt | Skipped, ...]:
    """The worst nodes in fp32, as few as may help, then more."""
    if not ranking.nodes:
        why = ranking.failure or f"none overflows, loses precision by itself or is delicate, on {ranking.samples} samples"
        return (Skipped("worst nodes kept in fp32", why),)
    attempts = []
    for count in cuts(len(ranking.nodes), sum(harm.overflows for harm in ranking.nodes)):
        names = tuple(harm.node for harm in ranking.nodes[:count])
        kept = (*failed.recipe.keep_fp32, *(glob.escape(name) for name in names))  # names are patterns in a recipe
        recipe = failed.recipe.model_copy(update={"realised_in": "graph", "keep_fp32": kept, "variant": "rescued"})
        attempts.append(Attempt("keep", f"{_nodes(ranking, count)} kept in fp32", recipe))
    return tuple(attempts)


def cuts(nodes: int, overflowing: int) -> tuple[int, ...]:
    """How many of the worst nodes to keep, in up to three attempts. What overflows stays together: a half of it would overflow still."""
    if overflowing:
        return tuple(dict.fromkeys((overflowing, overflowing + (nodes - overflowing + 1) // 2, nodes)))
    return tuple(dict.fromkeys((-(-nodes // 4), -(-nodes // 2), nodes)))


def _nodes(ranking: NodeRanking, count: int) -> str:
    worst = ranking.nodes[:count]
    told = [f"'{harm.node}' ({f'values up to {harm.largest:.3g}' if harm.overflows else f'error {harm.error:.2g}'})" for harm in worst[:NAMED]]
    return f"{count} {'node' if count == 1 else 'nodes'} of {len(ranking.nodes)}, {', '.join(told)}{', ...' if count > NAMED else ''},"


def in_bf16(failed: Candidate) -> Attempt:
    """Less precision, but nothing overflows."""
    return Attempt("bf16", "bf16", _kind(failed.recipe).model_copy(update={"precision": Precision.BF16}))


# --- when it ends, and what it tells ---


def ends(tried: Tried) -> bool:
    """The first engine that passes is enough; and where fp32 fails, fp16 is not to blame."""
    if tried.attempt.step == "fp32":
        return tried.candidate.state == "failed accuracy"
    return tried.candidate.state == "measured"


def story(failed: Candidate, history: Sequence[Tried | Skipped]) -> Rescue:
    """All steps in words, and what follows from them."""
    steps = tuple(
        RescueStep(step=each.attempt.words, label=each.candidate.label, outcome=_outcome(each))
        if isinstance(each, Tried)
        else RescueStep(step=each.words, label="", outcome=each.why)
        for each in history
    )
    return Rescue(label=failed.label, steps=steps, conclusion=_conclusion([each for each in history if isinstance(each, Tried)]))


def _outcome(tried: Tried) -> str:
    candidate = tried.candidate
    if candidate.state == "measured":
        metric = candidate.selection.metric if candidate.selection else None
        drop = f", {metric.name} drop {metric.drop:.4f}" if metric else ""
        return f"passed{drop}" + (": fp16 is the cause" if tried.attempt.step == "fp32" else "")
    reason, _, more = candidate.reason.partition("; ")
    return f"{candidate.state}: {reason.splitlines()[0] if reason else 'no reason given'}{'; ...' if more else ''}"


def _conclusion(history: Sequence[Tried]) -> str:
    last = history[-1]
    if last.attempt.step == "fp32":
        return "fp32 fails too, so fp16 is not the cause: look at the export and at simplification first"
    if not ends(last):
        return f"no engine in 16 bits keeps its accuracy: {TRAIN_IN_16_BITS}"
    if last.attempt.step == "opt":
        return f"the kernels chosen for the plan's opt shape lose the accuracy: with the {last.attempt.words} it is kept; write that into `profiles`"
    if last.attempt.step == "keep":
        kept = last.attempt.recipe.keep_fp32
        listed = f"{list(kept)}" if len(kept) <= NAMED else "the list of this recipe in report.json"
        return f"{len(kept)} nodes in fp32 keep the accuracy, the others stay fp16; to name them in the plan: `keep_fp32`: {listed}"
    return "bf16 keeps the accuracy: the values need its range, or more nodes in fp32 than fp16 is worth"
