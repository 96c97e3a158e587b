"""Candidates besides those of the plan: rescues of the failed ones, and the ablation.

`fallback.py` and `ablation.py` decide what to try. Here it is prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeline import backends
from pipeline.compiler.candidates.ablation import Ablated, base_of, reversals
from pipeline.compiler.candidates.fallback import (
    Attempt,
    Skipped,
    Tried,
    by_other_methods,
    ends,
    in_bf16,
    in_fp32,
    keeping,
    keeps_nodes,
    nearest,
    story,
    to_rescue,
    with_nodes_kept,
    with_opt_moved,
)
from pipeline.compiler.candidates.prepare import prepare
from pipeline.compiler.candidates.stages import RANK, convert_model
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import OnnxModel
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import (
    BackendUnavailable,
    ChildDied,
    CrucibleError,
    InternalError,
    ModelError,
    UnsupportedError,
)
from pipeline.execution.stage_runner import StageCall
from pipeline.results.candidates import Candidate, NodeRanking, Origin, Rescue
from pipeline.stages.sensitivity import rank_nodes
from pipeline.stages.validate import ReferenceOutputs


@dataclass(frozen=True, slots=True)
class Prepared:
    """The candidates with their states, and the rescues of those that failed."""

    candidates: tuple[Candidate, ...]
    rescues: tuple[Rescue, ...] = ()
    ablated: Ablated | None = None


def rescue(
    context: CompileContext,
    model: OnnxModel,
    candidates: Sequence[Candidate],
    expected: ReferenceOutputs,
) -> Prepared:
    """Rescue the candidates that failed their accuracy, and return all candidates.

    pipeline.compiler.candidates.fallback defines the steps of a rescue.
    """
    known = {candidate.label: candidate for candidate in candidates}
    stories = []
    for failed in to_rescue(candidates) if context.plan.fallback else ():
        history: list[Tried | Skipped] = []
        for attempt in attempts(context, model, failed, frozenset(known), history):
            if isinstance(attempt, Skipped):
                history.append(attempt)
                continue
            label = attempt.recipe.label
            if label not in known:  # else the plan or an earlier rescue has made it
                tuned = context.plan.model_copy(
                    update={"profiles": attempt.profiles or context.plan.profiles}
                )
                known[label] = prepare(
                    replace(context, plan=tuned), model, attempt.recipe, expected, Origin.FALLBACK
                ).candidate
            history.append(tried := Tried(attempt, known[label]))
            if ends(tried):
                break
        stories.append(story(failed, history))
    first = {candidate.label for candidate in candidates}
    added = (candidate for label, candidate in known.items() if label not in first)
    return Prepared((*candidates, *added), tuple(stories))


def attempts(
    context: CompileContext,
    model: OnnxModel,
    failed: Candidate,
    known: frozenset[str],
    history: Sequence[Tried | Skipped],
) -> Iterator[Attempt | Skipped]:
    """Yield the steps in order. Nodes are ranked only after the first steps have failed.

    `known`: labels of the candidates that exist already. `history`: results of the steps so far;
    the caller appends to it between two steps.
    """
    precision = failed.recipe.precision
    in_16_bits = precision is not Precision.INT8
    if in_16_bits or in_fp32(failed).recipe.label in known:
        yield in_fp32(failed)
    if in_16_bits:
        yield from with_opt_moved(failed, context.plan.profiles)
    yield from by_other_methods(failed)
    if keeps_nodes(failed.recipe):
        best = nearest(failed, history)
        yield from with_nodes_kept(best, rank(context, model, best), context.plan.keep_fp32_builds)
    if precision is Precision.FP16:
        yield in_bf16(failed)


def rank(context: CompileContext, model: OnnxModel, failed: Candidate) -> NodeRanking:
    """Rank the nodes by the harm of low precision on the selection set and its worst samples.

    The ranking holds a failure text if nodes cannot be ranked, or cannot be kept in fp32.
    """
    worst = (
        tuple(sorted({output.worst_sample for output in failed.selection.outputs}))
        if failed.selection
        else ()
    )
    samples = context.data.selection
    backend = backends.backend(failed.recipe.backend)
    try:  # first check whether the backend can keep a node in fp32
        backend.check_recipe(keeping(failed.recipe, ["*"]), context.target(failed.recipe.backend))
        # the rest in fp32, so that the ranking sees one loss at a time
        low = convert_model(
            context,
            model,
            failed.recipe.model_copy(update={"realised_in": "graph", "rest": Precision.FP32}),
        )
        work = partial(rank_nodes, model, low, samples, worst)
        return context.runner.stage(StageCall(RANK, NodeRanking, work, subject=failed.label))
    except (UnsupportedError, BackendUnavailable, ModelError, ChildDied) as error:
        return NodeRanking(failure=error.message)
    except InternalError as error:  # later steps may still help
        return NodeRanking(failure=f"a bug in Crucible, please report it: {error.message}")


def ablate(
    context: CompileContext,
    model: OnnxModel,
    prepared: Prepared,
    expected: ReferenceOutputs,
) -> Prepared:
    """Add a candidate for each switch of the best int8 candidate, with that switch reversed.

    Nothing is built for a switch that does not change the graph.
    """
    base = base_of(prepared.candidates) if context.plan.ablate else None
    if base is None:
        return prepared
    known = {candidate.label: candidate for candidate in prepared.candidates}
    tested = []
    for reversal in reversals(base.recipe):
        label = reversal.recipe.label
        changes = label in known or not same_graph(context, model, base.recipe, reversal.recipe)
        if changes and label not in known:
            known[label] = prepare(
                context, model, reversal.recipe, expected, Origin.ABLATION
            ).candidate
        tested.append(replace(reversal, changes=changes))
    return replace(prepared, candidates=tuple(known.values()), ablated=Ablated(base, tuple(tested)))


def same_graph(context: CompileContext, model: OnnxModel, one: Recipe, other: Recipe) -> bool:
    """Return whether two recipes convert the model to the same graph.

    False if a conversion fails: `prepare` reports the error.
    """
    try:
        return (
            convert_model(context, model, one).digest == convert_model(context, model, other).digest
        )
    except CrucibleError:
        return False
