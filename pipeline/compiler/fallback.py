"""What is tried for an engine of low precision that fails its accuracy, when it ends, what it
tells. Pure.

    1  fp32 without TF32: if that fails too, low precision is not the cause, and it ends. For int8
       only where there is an fp32 engine anyway
    2  fp16, bf16: the profiles' opt shape moved to min, then to max: a builder that tunes for it
       chooses other kernels
    3  int8 with `method: auto`: ranges by entropy, min-max and percentile
    4  the worst nodes kept in fp32, as few as may help, then twice as many each time; in int8 of
       the nearest miss
    5  fp16: bf16, the range of fp32 in 16 bits
    at last the advice

It ends with the first engine that passes. Every step that builds is a recipe like any other, and a
candidate in the report. fp16 is always rescued; bf16 and int8 where the plan says `keep_fp32:
auto`, int8 also where it says `method: auto`.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.compiler.decision import AFTER_INT8, TRAIN_IN_16_BITS, loss, mend_data
from pipeline.core import CalibrationMethod, Point, Precision, Profile, Recipe
from pipeline.plan.recipes import realised_in
from pipeline.results.report import Candidate, NodeHarm, NodeRanking, Rescue, RescueStep
from pipeline.stages.sensitivity import NORMALISATIONS

Step = Literal["fp32", "opt", "method", "keep", "bf16"]

NAMED = 3  # nodes that a sentence names one by one
KEEP = "worst nodes kept in fp32"
# backends whose engine is the same whatever the opt shape is
ANY_SHAPE = frozenset(
    {"onnxruntime", "openvino", "torch"},
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One engine to try."""

    step: Step
    words: str
    recipe: Recipe
    profiles: tuple[Profile, ...] | None = None  # None: the plan's
    ranking: NodeRanking | None = None  # by which its nodes were chosen


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
    """Of each kind of engine the candidate to rescue, if all failed their accuracy: in 16 bits the
    first, in int8 the nearest miss.

    None where the data is at fault: no engine mends that.
    """
    by_kind: dict[Recipe, list[Candidate]] = {}
    for each in sorted(candidates, key=lambda each: each.recipe.realised_in == "flags"):
        by_kind.setdefault(_kind(each.recipe), []).append(each)
    found = []
    for alike in by_kind.values():
        failed = [
            each
            for each in alike
            if each.state == "failed accuracy"
            and _may_be_rescued(each.recipe)
            and not mend_data([each.reason])
        ]
        if failed and not any(each.state == "measured" for each in alike):
            found.append(
                min(failed, key=loss) if failed[0].recipe.precision is Precision.INT8 else failed[0]
            )
    return tuple(found)


def _may_be_rescued(recipe: Recipe) -> bool:
    return recipe.precision is Precision.FP16 or recipe.keep_worst or recipe.try_methods


def _kind(recipe: Recipe, precision: Precision | None = None) -> Recipe:
    """The recipe without what a rescue changes and what chooses 8-bit values: a backend in a
    precision, for the same GPUs.
    """
    asked = precision or recipe.precision
    how = ("form", "mode", "provider", "weight_only")
    where = ("compute_capability", "hardware_compatible", "version_compatible")
    same = {name: getattr(recipe, name) for name in (*how, *where)}
    return Recipe(
        backend=recipe.backend,
        precision=asked,
        realised_in=realised_in(recipe.backend, asked),
        **same,
    )


def in_fp32(failed: Candidate) -> Attempt:
    """Is low precision the cause?"""
    return Attempt("fp32", "fp32 without TF32", _kind(failed.recipe, Precision.FP32))


def with_opt_moved(
    failed: Candidate, profiles: tuple[Profile, ...]
) -> tuple[Attempt | Skipped, ...]:
    """The same recipe, tuned for other shapes."""
    if failed.recipe.backend in ANY_SHAPE:
        return (
            Skipped("opt shape moved", f"{failed.recipe.backend} makes one engine for all shapes"),
        )
    points: tuple[Point, ...] = ("min", "max")
    moves = [
        (point, moved)
        for point in points
        if (moved := tuple(_moved(profile, point) for profile in profiles)) != profiles
    ]
    if not moves:
        return (Skipped("opt shape moved", "nothing to move: all shapes are fixed"),)
    return tuple(
        Attempt(
            "opt",
            f"opt shape moved to {point}",
            failed.recipe.model_copy(update={"variant": f"opt-{point}"}),
            moved,
        )
        for point, moved in moves
    )


def _moved(profile: Profile, point: Point) -> Profile:
    """The profile with its opt at min or max; an empty dimension is tuned for 1."""
    dims = {
        name: each.model_copy(update={"opt": max(1, getattr(each, point))})
        for name, each in profile.dims.items()
    }
    values = {
        name: each.model_copy(update={"opt": getattr(each, point)})
        for name, each in profile.values.items()
    }
    return profile.model_copy(update={"dims": dims, "values": values})


def by_other_methods(failed: Candidate) -> tuple[Attempt, ...]:
    """The same engine with ranges chosen in the other ways, where the plan leaves that open."""
    if not failed.recipe.try_methods:
        return ()
    others = (method for method in CalibrationMethod if method is not failed.recipe.method)
    return tuple(
        Attempt(
            "method", f"ranges by {method}", failed.recipe.model_copy(update={"method": method})
        )
        for method in others
    )


def nearest(failed: Candidate, history: Sequence[Tried | Skipped]) -> Candidate:
    """Of the candidate and those with other ranges, the one that lost least."""
    others = (
        each.candidate
        for each in history
        if isinstance(each, Tried) and each.attempt.step == "method"
    )
    return min([failed, *(each for each in others if each.state == "failed accuracy")], key=loss)


def keeps_nodes(recipe: Recipe) -> bool:
    """Whether nodes of an engine that fails may be kept in fp32: in int8 only where the plan says
    so.
    """
    return recipe.keep_worst or recipe.precision is not Precision.INT8


def with_nodes_kept(
    failed: Candidate, ranking: NodeRanking, builds: int
) -> tuple[Attempt | Skipped, ...]:
    """The worst nodes in fp32, as few as may help, then more, in at most `builds` engines."""
    if not ranking.nodes:
        why = ranking.failure or (
            "none overflows, loses precision by itself or is delicate, on"
            f" {ranking.samples} samples"
        )
        return (Skipped(KEEP, why),)
    attempts = []
    for count in cuts(len(ranking.nodes), sum(harm.overflows for harm in ranking.nodes), builds):
        recipe = keeping(failed.recipe, [harm.node for harm in ranking.nodes[:count]])
        attempts.append(
            Attempt("keep", f"{_nodes(ranking, count)} kept in fp32", recipe, ranking=ranking)
        )
    return tuple(attempts)


def keeping(recipe: Recipe, nodes: Sequence[str]) -> Recipe:
    """The recipe with these nodes in fp32 too."""
    # names are patterns in a recipe
    kept = (
        *recipe.keep_fp32,
        *(glob.escape(name) for name in nodes),
    )
    return recipe.model_copy(
        update={
            "realised_in": "graph",
            "keep_fp32": kept,
            "keep_worst": False,
            "try_methods": False,
            "variant": "rescued",
        }
    )


def cuts(nodes: int, overflowing: int, builds: int) -> tuple[int, ...]:
    """How many of the worst nodes to keep, one count per build: twice as many each time, and all of
    them in the last of several.

    What overflows stays together: a half of it would overflow still.
    """
    counts = [max(overflowing, 1)]
    while counts[-1] < nodes:
        counts.append(min(2 * counts[-1], nodes))
    return tuple(
        counts
        if len(counts) <= builds
        else [*counts[: builds - 1], nodes]
        if builds > 1
        else counts[:1]
    )


def _nodes(ranking: NodeRanking, count: int) -> str:
    told = ", ".join(
        f"'{harm.node}' ({_harm_text(harm)})" for harm in ranking.nodes[: min(count, NAMED)]
    )
    return (
        f"{count} {'node' if count == 1 else 'nodes'} of {len(ranking.nodes)},"
        f" {told}{', ...' if count > NAMED else ''},"
    )


def _harm_text(harm: NodeHarm) -> str:
    if not harm.overflows:
        return f"error {harm.error:.2g}"
    return (
        f"{'sums up squares of ' if harm.operator in NORMALISATIONS else ''}values up to"
        f" {harm.largest:.3g}"
    )


def in_bf16(failed: Candidate) -> Attempt:
    """Less precision, but nothing overflows."""
    return Attempt("bf16", "bf16", _kind(failed.recipe, Precision.BF16))


# --- when it ends, and what it tells ---


def ends(tried: Tried) -> bool:
    """The first engine that passes is enough; and where fp32 fails, low precision is not to
    blame.
    """
    if tried.attempt.step == "fp32":
        return tried.candidate.state == "failed accuracy"
    return tried.candidate.state == "measured"


def story(failed: Candidate, history: Sequence[Tried | Skipped]) -> Rescue:
    """All steps in words, and what follows from them."""
    steps = tuple(
        (
            RescueStep(
                step=each.attempt.words,
                label=each.candidate.label,
                outcome=_outcome(each, failed.recipe.precision),
            )
            if isinstance(each, Tried)
            else RescueStep(step=each.words, label="", outcome=each.why)
        )
        for each in history
    )
    attempted = [each for each in history if isinstance(each, Tried)]
    ranking = next((each.attempt.ranking for each in attempted if each.attempt.ranking), None)
    return Rescue(
        label=failed.label, steps=steps, ranking=ranking, conclusion=_conclusion(failed, attempted)
    )


def _outcome(tried: Tried, cause: Precision) -> str:
    candidate = tried.candidate
    if candidate.state == "measured":
        metric = candidate.selection.metric if candidate.selection else None
        drop = f", {metric.name} drop {metric.drop:.4f}" if metric else ""
        return f"passed{drop}" + (f": {cause} is the cause" if tried.attempt.step == "fp32" else "")
    reason, _, more = candidate.reason.partition("; ")
    return (
        f"{candidate.state}:"
        f" {reason.splitlines()[0] if reason else 'no reason given'}{'; ...' if more else ''}"
    )


def _conclusion(failed: Candidate, history: Sequence[Tried]) -> str:
    precision = failed.recipe.precision
    last = history[-1] if history else None
    if last is None or not ends(last):
        return _in_vain(failed, history)
    if last.attempt.step == "fp32":
        return (
            f"fp32 fails too, so {precision} is not the cause: look at the export and at"
            " simplification first"
        )
    if last.attempt.step == "opt":
        return (
            "the kernels chosen for the plan's opt shape lose the accuracy: with the"
            f" {last.attempt.words} it is kept; write that into `profiles`"
        )
    if last.attempt.step == "method":
        method = last.attempt.recipe.method
        return (
            f"{failed.recipe.method} chooses ranges that lose the accuracy, and {method} keeps it;"
            f" as the plan names it: `method: {method}`"
        )
    if last.attempt.step == "keep":
        return _kept(
            failed,
            [len(each.attempt.recipe.keep_fp32) for each in history if each.attempt.step == "keep"],
            last.attempt.recipe,
        )
    return (
        "bf16 keeps the accuracy: the values need its range, or more nodes in fp32 than fp16 is"
        " worth"
    )


def _kept(failed: Candidate, counts: Sequence[int], recipe: Recipe) -> str:
    """Which nodes were enough, and whether fewer might be."""
    kept = recipe.keep_fp32
    listed = f"{list(kept)}" if len(kept) <= NAMED else "the list of this recipe in report.json"
    before = (len(failed.recipe.keep_fp32), *counts)[-2]
    fewer = (
        f" ({before} were not enough, and nothing between was tried)"
        if len(kept) - before > 1
        else ""
    )
    words = "1 node in fp32 keeps" if len(kept) == 1 else f"{len(kept)} nodes in fp32{fewer} keep"
    return (
        f"{words} the accuracy, the others stay {failed.recipe.precision}; as the plan names nodes:"
        f" `keep_fp32`: {listed}"
    )


def _in_vain(failed: Candidate, history: Sequence[Tried]) -> str:
    """Nothing passed."""
    methods = [str(each.attempt.recipe.method) for each in history if each.attempt.step == "method"]
    ranges = (
        f" with ranges by {', '.join([str(failed.recipe.method), *methods])}" if methods else ""
    )
    kept = [each.attempt for each in history if each.attempt.step == "keep"]
    nodes = len(kept[-1].ranking.nodes) if kept and kept[-1].ranking else 0
    most = min(len(kept[-1].recipe.keep_fp32), nodes) if kept else 0
    more = " (more of them by a larger `keep_builds`)" if most < nodes else ""
    even = f", even with the worst {most} of {nodes} nodes in fp32{more}" if kept else ""
    if failed.recipe.precision is not Precision.INT8:
        return f"no engine in 16 bits keeps its accuracy{even}: {TRAIN_IN_16_BITS}"
    return f"int8 does not keep its accuracy{ranges}{even}: {'; '.join(AFTER_INT8)}"
