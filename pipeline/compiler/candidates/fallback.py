"""The rescue of a low-precision engine that fails its accuracy: its steps, end and text. Pure.

    1  fp32 without TF32: if it fails too, low precision is not the cause, and the rescue ends. For
       int8 only if there is an fp32 engine anyway
    2  fp16, bf16: the profiles' opt shape moved to min, then to max: a builder that tunes for it
       chooses other kernels
    3  int8 with `method: auto`: ranges by entropy, min-max and percentile
    4  the worst nodes kept in fp32: first as few as may help, then twice as many each time; in int8
       for the nearest miss
    5  fp16: bf16, which has the range of fp32 in 16 bits
    at the end the advice

The rescue ends with the first engine that passes. Every step that builds is an ordinary recipe and
a candidate in the report. fp16 is always rescued, bf16 and int8 if the plan says `keep_fp32: auto`,
int8 also if it says `method: auto`.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.compiler.decision import loss
from pipeline.compiler.next_steps import AFTER_INT8, TRAIN_IN_16_BITS
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Point, Profile
from pipeline.plan.precisions import realised_in
from pipeline.results.candidates import Candidate, NodeHarm, NodeRanking, Rescue, RescueStep
from pipeline.stages.sensitivity import NORMALISATIONS

Step = Literal["fp32", "opt", "method", "keep", "bf16"]

MAX_NAMED_NODES = 3  # in one sentence; more nodes are counted
KEEP = "worst nodes kept in fp32"
# backends with engines that do not depend on the opt shape
ANY_SHAPE = frozenset({"onnxruntime", "openvino", "torch"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One engine to build."""

    step: Step
    words: str
    recipe: Recipe
    profiles: tuple[Profile, ...] | None = None  # None: the plan's
    ranking: NodeRanking | None = None  # the ranking that chose its nodes


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step without an engine to build."""

    words: str
    why: str


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt and its result."""

    attempt: Attempt
    candidate: Candidate


# --- the steps ---


def to_rescue(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Choose the candidates to rescue: one of each kind of engine, if all of that kind failed.

    In 16 bits it is the first one, in int8 the nearest miss. A candidate that failed because of
    the data is left out: no other engine can fix that.
    """
    by_kind: dict[Recipe, list[Candidate]] = {}
    for candidate in sorted(candidates, key=_is_by_flags):
        by_kind.setdefault(_kind(candidate.recipe), []).append(candidate)
    chosen = []
    for same_kind in by_kind.values():
        failed = [candidate for candidate in same_kind if _needs_rescue(candidate)]
        if not failed or any(candidate.state == "measured" for candidate in same_kind):
            continue
        is_int8 = failed[0].recipe.precision is Precision.INT8
        chosen.append(min(failed, key=loss) if is_int8 else failed[0])
    return tuple(chosen)


def _is_by_flags(candidate: Candidate) -> bool:
    return candidate.recipe.realised_in == "flags"


def _needs_rescue(candidate: Candidate) -> bool:
    return (
        candidate.state == "failed accuracy"
        and _may_be_rescued(candidate.recipe)
        and not (candidate.selection and candidate.selection.data_faults)
    )


def _may_be_rescued(recipe: Recipe) -> bool:
    return recipe.precision is Precision.FP16 or recipe.keep_worst or recipe.try_methods


def _kind(recipe: Recipe, precision: Precision | None = None) -> Recipe:
    """Return the recipe reduced to backend, precision, form and GPUs.

    Left out are the fields that a rescue changes, and the choices of int8. `precision` replaces
    the precision of the recipe.
    """
    precision = precision or recipe.precision
    return Recipe(
        backend=recipe.backend,
        precision=precision,
        realised_in=realised_in(recipe.backend, precision),
        form=recipe.form,
        mode=recipe.mode,
        provider=recipe.provider,
        weight_only=recipe.weight_only,
        compute_capability=recipe.compute_capability,
        hardware_compatible=recipe.hardware_compatible,
        version_compatible=recipe.version_compatible,
    )


def in_fp32(failed: Candidate) -> Attempt:
    """Return the attempt in fp32, which shows whether low precision is the cause."""
    return Attempt("fp32", "fp32 without TF32", _kind(failed.recipe, Precision.FP32))


def with_opt_moved(
    failed: Candidate, profiles: tuple[Profile, ...]
) -> tuple[Attempt | Skipped, ...]:
    """Return attempts with the same recipe, tuned for other shapes."""
    if failed.recipe.backend in ANY_SHAPE:
        return (
            Skipped("opt shape moved", f"{failed.recipe.backend} makes one engine for all shapes"),
        )
    points: tuple[Point, ...] = ("min", "max")
    attempts = []
    for point in points:
        moved = tuple(_moved(profile, point) for profile in profiles)
        if moved != profiles:
            recipe = failed.recipe.model_copy(update={"variant": f"opt-{point}"})
            attempts.append(Attempt("opt", f"opt shape moved to {point}", recipe, moved))
    if not attempts:
        return (Skipped("opt shape moved", "nothing to move: all shapes are fixed"),)
    return tuple(attempts)


def _moved(profile: Profile, point: Point) -> Profile:
    """Return the profile with its opt at min or max. A size of 0 is tuned for 1."""
    dims = {
        name: dim.model_copy(update={"opt": max(1, getattr(dim, point))})
        for name, dim in profile.dims.items()
    }
    values = {
        name: value_range.model_copy(update={"opt": getattr(value_range, point)})
        for name, value_range in profile.values.items()
    }
    return profile.model_copy(update={"dims": dims, "values": values})


def by_other_methods(failed: Candidate) -> tuple[Attempt, ...]:
    """Return attempts with the other calibration methods, if the plan says `method: auto`."""
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
    """Return the most accurate of the failed candidate and those with other ranges."""
    candidates = [failed]
    for step in history:
        if isinstance(step, Skipped) or step.attempt.step != "method":
            continue
        if step.candidate.state == "failed accuracy":
            candidates.append(step.candidate)
    return min(candidates, key=loss)


def keeps_nodes(recipe: Recipe) -> bool:
    """Return whether a rescue may keep nodes in fp32. In int8 only if the plan says so."""
    return recipe.keep_worst or recipe.precision is not Precision.INT8


def with_nodes_kept(
    failed: Candidate, ranking: NodeRanking, builds: int
) -> tuple[Attempt | Skipped, ...]:
    """Return attempts that keep the worst nodes in fp32, in at most `builds` engines.

    The first one keeps as few nodes as may help, the next ones more.
    """
    if not ranking.nodes:
        why = ranking.failure or (
            f"no node overflows, loses precision by itself or is delicate on {ranking.samples}"
            " samples"
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
    """Return the recipe with these nodes in fp32 too."""
    patterns = (glob.escape(name) for name in nodes)  # a recipe takes fnmatch patterns
    kept = (*recipe.keep_fp32, *patterns)
    return recipe.model_copy(
        update={
            "realised_in": "graph",
            "keep_fp32": kept,
            "variant": "rescued",
        }
    )


def cuts(nodes: int, overflowing: int, builds: int) -> tuple[int, ...]:
    """Return how many of the worst nodes to keep in each build.

    The count doubles each time. The last of several builds keeps all nodes. The first one keeps all
    overflowing nodes, because the rest would still overflow.
    """
    counts = [max(overflowing, 1)]
    while counts[-1] < nodes:
        counts.append(min(2 * counts[-1], nodes))
    if len(counts) <= builds:
        return tuple(counts)
    if builds <= 1:
        return (counts[0],)
    return (*counts[: builds - 1], nodes)


def _nodes(ranking: NodeRanking, count: int) -> str:
    named = ranking.nodes[: min(count, MAX_NAMED_NODES)]
    names = [f"'{harm.node}' ({_harm_text(harm)})" for harm in named]
    if count > MAX_NAMED_NODES:
        names.append("...")
    noun = "node" if count == 1 else "nodes"
    return f"{count} {noun} of {len(ranking.nodes)}, {', '.join(names)},"


def _harm_text(harm: NodeHarm) -> str:
    if not harm.overflows:
        return f"error {harm.error:.2g}"
    values = f"values up to {harm.largest:.3g}"
    return f"sums up squares of {values}" if harm.operator in NORMALISATIONS else values


def in_bf16(failed: Candidate) -> Attempt:
    """Return the attempt in bf16, which has less precision but does not overflow."""
    return Attempt("bf16", "bf16", _kind(failed.recipe, Precision.BF16))


# --- the end, and the text ---


def ends(tried: Tried) -> bool:
    """Return whether the rescue ends: an engine passes, or fp32 fails its accuracy too."""
    if tried.attempt.step == "fp32":
        return tried.candidate.state == "failed accuracy"
    return tried.candidate.state == "measured"


def story(failed: Candidate, history: Sequence[Tried | Skipped]) -> Rescue:
    """Describe all steps of a rescue and its conclusion."""
    tried = [step for step in history if isinstance(step, Tried)]
    rankings = [step.attempt.ranking for step in tried if step.attempt.ranking]
    return Rescue(
        label=failed.label,
        steps=tuple(_rescue_step(step, failed.recipe.precision) for step in history),
        ranking=rankings[0] if rankings else None,
        conclusion=_conclusion(failed, tried),
    )


def _rescue_step(step: Tried | Skipped, cause: Precision) -> RescueStep:
    if isinstance(step, Skipped):
        return RescueStep(step=step.words, label="", outcome=step.why)
    return RescueStep(
        step=step.attempt.words, label=step.candidate.label, outcome=_outcome(step, cause)
    )


def _outcome(tried: Tried, cause: Precision) -> str:
    candidate = tried.candidate
    if candidate.state == "measured":
        metric = candidate.selection.metric if candidate.selection else None
        text = f"passed, {metric.name} drop {metric.drop:.4f}" if metric else "passed"
        return f"{text}: {cause} is the cause" if tried.attempt.step == "fp32" else text
    reason, _, more = candidate.reason.partition("; ")
    first_line = reason.splitlines()[0] if reason else "no reason given"
    return f"{candidate.state}: {first_line}{'; ...' if more else ''}"


def _conclusion(failed: Candidate, history: Sequence[Tried]) -> str:
    precision = failed.recipe.precision
    last = history[-1] if history else None
    if last is None or not ends(last):
        return _nothing_passed(failed, history)
    if last.attempt.step == "fp32":
        return (
            f"fp32 fails too, so {precision} is not the cause: check the export and the"
            " simplification first"
        )
    if last.attempt.step == "opt":
        return (
            "the kernels chosen for the plan's opt shape lose the accuracy: with the"
            f" {last.attempt.words} it is kept; set that opt in `profiles`"
        )
    if last.attempt.step == "method":
        method = last.attempt.recipe.method
        return (
            f"{failed.recipe.method} chooses ranges that lose the accuracy, and {method} keeps it;"
            f" as the plan names it: `method: {method}`"
        )
    if last.attempt.step == "keep":
        counts = [
            len(step.attempt.recipe.keep_fp32) for step in history if step.attempt.step == "keep"
        ]
        return _nodes_kept(failed, counts, last.attempt.recipe)
    return (
        "bf16 keeps the accuracy: the values need its range, or more nodes in fp32 than fp16 is"
        " worth"
    )


def _nodes_kept(failed: Candidate, counts: Sequence[int], recipe: Recipe) -> str:
    """Say which nodes were enough, and whether fewer may be enough."""
    kept = recipe.keep_fp32
    listed = "the list of this recipe in report.json"
    if len(kept) <= MAX_NAMED_NODES:
        listed = str(list(kept))
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


def _nothing_passed(failed: Candidate, history: Sequence[Tried]) -> str:
    """Say that no step helped, and give the advice."""
    methods = [str(step.attempt.recipe.method) for step in history if step.attempt.step == "method"]
    ranges = (
        f" with ranges by {', '.join([str(failed.recipe.method), *methods])}" if methods else ""
    )
    kept = [step.attempt for step in history if step.attempt.step == "keep"]
    nodes = len(kept[-1].ranking.nodes) if kept and kept[-1].ranking else 0
    most = min(len(kept[-1].recipe.keep_fp32), nodes) if kept else 0
    more = " (more of them by a larger `keep_fp32_builds`)" if most < nodes else ""
    even = f", even with the worst {most} of {nodes} nodes in fp32{more}" if kept else ""
    if failed.recipe.precision is not Precision.INT8:
        return f"no engine in 16 bits keeps its accuracy{even}: {TRAIN_IN_16_BITS}"
    return f"int8 does not keep its accuracy{ranges}{even}: {'; '.join(AFTER_INT8)}"
