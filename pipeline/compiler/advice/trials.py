"""Build and measure the changes that the rules propose, beside the engine, in one race."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.benchmark.batch_sweep import batch_symbol
from pipeline.benchmark.elimination import MAX_PAIRS, Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.advice.figures import batch_attempt, clock_attempt, sizes_of_sweep
from pipeline.compiler.advice.rules import Change, Subject, changes_for, share_of
from pipeline.compiler.advice.width import why_wide
from pipeline.compiler.candidates.prepare import CANNOT_BUILD
from pipeline.compiler.candidates.stages import (
    build_engine,
    check_engine,
    convert_model,
    reference_outputs,
)
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.progress import Progress
from pipeline.errors import InternalError
from pipeline.execution.stage_runner import Stage
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse
from pipeline.measurement.clock import Samples
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.rewrites import Rewrite, rewrite_function
from pipeline.plan.files import override_plan
from pipeline.results.advice import MIN_GAIN, Advice, Attempt, Outcome, judged, sort_key
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.results.graph_node import GraphNode
from pipeline.results.layer_table import LayerTable
from pipeline.results.layer_work import LayerWork, work_of_layers
from pipeline.stages.benchmark import ENOUGH_RUNS, benchmark

ADVISE = Stage("advise", 1, writes_files=False, needs_quiet_device=True)
FIND = Stage("find rewrites", 1, writes_files=False)

Prepare = Callable[[CompileContext], OnnxModel]
"""Returns the simplified graph of a context's plan."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The engine to advise on, and what its compile has found out about it."""

    engine: Engine
    table: LayerTable | None
    graph: tuple[GraphNode, ...]
    graph_sizes: dict[str, int] | None
    peaks: Peaks | None
    sizes: dict[str, int]
    labels: frozenset[str]
    gpu_use: GpuUse | None = None


@dataclass(frozen=True, slots=True)
class _Built:
    """A change whose engine is ready for the race."""

    attempt: Attempt
    engine: Engine


def advise(
    context: CompileContext,
    delivered: Delivered,
    prepare: Prepare,
    reference: Engine,
    only: Iterable[str] = (),
) -> Advice:
    """Try every change that a rule proposes, and return what each gains."""
    model = prepare(context)
    subject = _subject(context, delivered, model)
    attempts, built = list[Attempt](), list[_Built]()
    for change in changes_for(subject, only):
        outcome = _built(subject, change, prepare, reference)
        if isinstance(outcome, _Built):
            built.append(outcome)
        else:
            attempts.append(outcome)
    wanted = frozenset(only)
    if not wanted or "batch" in wanted:
        attempts += _batch(context, delivered, model)
    if (not wanted or "clocks" in wanted) and (clocks := clock_attempt(delivered.gpu_use)):
        attempts.append(clocks)
    latency_s = None
    if built:
        latency_s, measured = _measured(context, delivered, model, built)
        attempts += measured
    return Advice(
        label=delivered.engine.recipe.label,
        sizes=delivered.sizes,
        latency_s=latency_s,
        attempts=tuple(sorted(attempts, key=sort_key)),
    )


def _subject(context: CompileContext, delivered: Delivered, model: OnnxModel) -> Subject:
    works: tuple[LayerWork, ...] = ()
    if delivered.table is not None:
        works = work_of_layers(
            delivered.graph,
            delivered.graph_sizes,
            delivered.table,
            delivered.engine.recipe,
            delivered.peaks,
        )
    rewritable: dict[Rewrite, tuple[str, ...]] = context.runner.anew(
        FIND, delivered.engine.recipe.label, rewritable_nodes, model.path
    )
    return Subject(
        context,
        model,
        delivered.engine,
        delivered.table,
        works,
        delivered.sizes,
        rewritable,
        delivered.labels,
    )


def rewritable_nodes(path: Path, progress: Progress) -> dict[Rewrite, tuple[str, ...]]:
    """Return the nodes that each rewrite would change, in a child process."""
    found = {}
    for rewrite in Rewrite:
        progress(None, f"looking for {rewrite}")
        _, found[rewrite] = rewrite_function(rewrite)(read_proto(path))
    return found


def _built(
    subject: Subject, change: Change, prepare: Prepare, reference: Engine
) -> _Built | Attempt:
    """Build the engine of a change and check its answers; an attempt says why there is none."""
    context, engine = subject.context, subject.engine
    attempt = Attempt(
        rule=change.rule,
        reason=change.reason,
        how=change.how,
        nodes=change.nodes,
        share=share_of(subject.table, change.nodes) if change.nodes else None,
        outcome=Outcome.NOT_NEEDED,
    )
    if attempt.share is not None and attempt.share < MIN_GAIN:
        detail = f"its layers take {attempt.share:.1%} of the time: it was not built"
        return attempt.model_copy(update={"outcome": Outcome.TOO_SMALL, "detail": detail})
    changed = replace(context, plan=override_plan(context.plan, change.overrides))
    recipe = change.recipe or engine.recipe
    try:
        converted = convert_model(changed, prepare(changed), recipe)
        alternative = build_engine(changed, converted, recipe, f"{recipe.label}, {change.rule}")
        if alternative.digest == engine.digest:
            detail = "the engine stays the same"
            return attempt.model_copy(update={"detail": detail})
        expected = reference_outputs(changed, reference, context.data.selection)
        report = check_engine(changed, alternative, expected, context.data.selection)
    except CANNOT_BUILD as error:
        return attempt.model_copy(update={"outcome": Outcome.FAILED, "detail": error.message})
    except InternalError as error:  # the other attempts are still good
        detail = f"a bug in Crucible, please report it: {error.message}"
        return attempt.model_copy(update={"outcome": Outcome.FAILED, "detail": detail})
    if not report.passed:
        detail = "; ".join(report.failures)
        return attempt.model_copy(update={"outcome": Outcome.UNFIT, "detail": detail})
    named = recipe.model_copy(update={"variant": change.rule})
    return _Built(attempt, alternative.model_copy(update={"recipe": named}))


def _measured(
    context: CompileContext, delivered: Delivered, model: OnnxModel, built: Sequence[_Built]
) -> tuple[float | None, list[Attempt]]:
    """Measure the engine and all alternatives in one race, and judge each."""
    engine = delivered.engine
    entries = [RaceEntry(engine, Role.BASELINE)]
    entries += [RaceEntry(each.engine, Role.CHANGE) for each in built]
    options = context.plan.benchmark.model_copy(
        update={"sizes": (delivered.sizes,) if delivered.sizes else ()}
    )
    run: Benchmarks = context.runner.anew(
        ADVISE, engine.recipe.label, benchmark, entries, model, options, ENOUGH_RUNS
    )
    first, *others = run.results
    if isinstance(first, BenchmarkFailure):
        failed = {"outcome": Outcome.UNMEASURED, "detail": first.reason}
        return None, [each.attempt.model_copy(update=failed) for each in built]
    now = first.rows[0].end_to_end
    attempts = [
        _judged(each.attempt, now, result, options.budget_s)
        for each, result in zip(built, others, strict=True)
    ]
    return now.median_s, attempts


def _judged(
    attempt: Attempt, now: Samples, result: BenchmarkReport | BenchmarkFailure, budget_s: float
) -> Attempt:
    """Judge a change by its result in the race; `now`: the times of the engine without it."""
    if isinstance(result, BenchmarkFailure):
        failed = {"outcome": Outcome.UNMEASURED, "detail": result.reason}
        return attempt.model_copy(update=failed)
    row = result.rows[0]
    if row.ratio is None:
        failed = {"outcome": Outcome.UNMEASURED, "detail": row.ratio_missing}
        return attempt.model_copy(update=failed)
    return judged(attempt, row.ratio, why_wide(now, row.end_to_end, MAX_PAIRS, budget_s))


def _batch(context: CompileContext, delivered: Delivered, model: OnnxModel) -> list[Attempt]:
    """Measure the engine alone at other batches, where it takes any."""
    engine = delivered.engine
    sizes = sizes_of_sweep(engine, delivered.sizes)
    if not sizes:
        return []
    options = context.plan.benchmark.model_copy(update={"sizes": sizes})
    entries = [RaceEntry(engine, Role.BASELINE)]
    run: Benchmarks = context.runner.anew(
        ADVISE, f"{engine.recipe.label}, batches", benchmark, entries, model, options, ENOUGH_RUNS
    )
    (result,) = run.results
    if isinstance(result, BenchmarkFailure):
        return []
    symbol = batch_symbol(engine.inputs)
    return [batch_attempt(result.rows, delivered.sizes, symbol, options.budget_s)]
