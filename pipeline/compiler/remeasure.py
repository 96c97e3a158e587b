"""Check or measure a delivered engine again, for `crucible validate`, `crucible bench` and the
service's benchmark; and measure ONNX files as they are. Trace what was measured.

Results never come from the store.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from pipeline.benchmark.batch_sweep import Sweep, batch_symbol, sweep_of, sweep_sizes
from pipeline.benchmark.cpu_peaks import measure_once, with_limits
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.benchmark.trace import trace_engine
from pipeline.compiler.baselines import (
    build_baselines,
    build_reference,
    built_to_keep,
    deliverable_candidate,
)
from pipeline.compiler.candidates.stages import (
    VALIDATE,
    build_engine,
    prove_engine,
    reference_outputs,
)
from pipeline.compiler.context import CompileContext, batch_rows, open_context
from pipeline.compiler.decision import Baseline, decide, why_undelivered
from pipeline.compiler.graph import export_model, raw_model
from pipeline.compiler.measure import BENCHMARK, call_of_fastest, report_baselines
from pipeline.compiler.speed import ratio_missing, ratio_of
from pipeline.compiler.write_up import delivered_engine
from pipeline.core.artifacts import Engine, Note, NoteCode, OnnxModel
from pipeline.core.shapes import TensorSpec
from pipeline.data.input_checks import spec_text
from pipeline.errors import ChildStopped, CrucibleError, ModelError
from pipeline.execution.stage_runner import Runner, Stage
from pipeline.host.environment import environment, usable_cores
from pipeline.plan.baselines import deliverable_recipe, recipe_as_given
from pipeline.plan.schema import BenchmarkConfig, Plan
from pipeline.report.bundle import check_if_sealed
from pipeline.results.accuracy import ValidationReport
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.results.candidates import Ablation, Candidate, Origin
from pipeline.results.layer_table import LayerTable
from pipeline.results.report import Report, Step
from pipeline.results.timeline import EngineTrace, TraceFailure
from pipeline.stages.benchmark import benchmark, check_sizes, with_threads, workloads_from_plan
from pipeline.stages.validate import validate

TRACE = Stage("trace", 1, writes_files=False, needs_quiet_device=True)

REMEASURED = Note(
    stage="benchmark",
    text=(
        "the latencies are those of a new run of the baselines and the engine; no other candidate"
        " was measured beside them"
    ),
    level="info",
    code=NoteCode.REMEASURED,
)


def reopen_context(report: Report, plan: Plan, runner: Runner) -> CompileContext:
    """Open the context of a delivered engine, for its plan with overrides.

    ModelError if the source has changed since the engine was built.
    """
    context = open_context(plan, runner)
    if context.source.digest != report.source_digest:
        raise ModelError(
            "the model's source or weights have changed since this engine was compiled",
            "compile the plan again",
        )
    return context


def validate_again(report: Report, plan: Plan, engine: Engine, runner: Runner) -> ValidationReport:
    """Check a delivered engine on the validation set, or on the selection set if there is none.

    The result is never reused, because the engine's files may have changed.
    """
    context = reopen_context(report, plan, runner)
    reference = build_reference(context, export_model(context))
    samples = context.data.validation or context.data.selection
    arguments = (
        engine,
        reference_outputs(context, reference, samples),
        samples,
        context.plan.accuracy,
        context.plan.postprocess,
        batch_rows(context),
    )
    check_if_sealed(engine)  # again: the reference may have taken minutes
    validation: ValidationReport = context.runner.anew(
        VALIDATE, engine.recipe.label, validate, *arguments
    )
    return validation


@dataclass(frozen=True, slots=True)
class RaceRecord:
    """The engines of one run in their order, and what they were measured with."""

    engines: tuple[Engine, ...]
    model: OnnxModel
    options: BenchmarkConfig
    run: Benchmarks


@dataclass(frozen=True, slots=True)
class Remeasured:
    """New latencies of a delivered engine and its baselines. The engine's result is the last."""

    engine: Engine
    benchmarks: Benchmarks
    # if the engine is no faster: the baseline in its deliverable form, or the reason of its failure
    kept: Candidate | None
    call: str = ""  # how the user calls the fastest baseline, if that is a PyTorch module
    race: RaceRecord | None = None  # for a trace of the same engines


def benchmark_again(report: Report, plan: Plan, engine: Engine, runner: Runner) -> Remeasured:
    """Measure a delivered engine and its baselines in one interleaved run. Never reused."""
    context = reopen_context(report, plan, runner)
    raw = raw_model(context)
    baselines = _fit_baselines(report, build_baselines(context, raw))
    if decides_by_load(report) and report.baseline:  # all ratios refer to this one
        label = report.baseline.label
        baselines = [each for each in baselines if each.recipe.label == label] or baselines
    # with the verdict `keep` the engine is one of the baselines
    competitors = [baseline for baseline in baselines if baseline.digest != engine.digest]
    race = _measured(report, plan, [*competitors, engine], raw, context.runner)
    run, kept = race.run, None
    if _is_slower_or_equal(run.results[-1]) and not decides_by_load(report):
        for baseline in baselines:
            if baseline.recipe.label == run.baseline:
                kept = _kept_baseline(context, raw, baseline, engine)
                break
    return Remeasured(engine, run, kept, call_of_fastest(run, baselines), race)


def decides_by_load(report: Report) -> bool:
    """Return True if the verdict rests on throughput, which is not measured again."""
    return report.plan.objective != "latency"


def _kept_baseline(
    context: CompileContext, raw: OnnxModel, baseline: Engine, delivered: Engine
) -> Candidate:
    """Return a baseline in its deliverable form, which may be the delivered engine itself."""
    recipe = delivered.recipe
    if deliverable_recipe(baseline.recipe) == recipe:
        return Candidate(
            label=recipe.label,
            recipe=recipe,
            origin=Origin.BASELINE,
            state="built",
            engine=delivered,
        )
    expected = reference_outputs(
        context, build_reference(context, export_model(context)), context.data.selection
    )
    return deliverable_candidate(context, raw, baseline, expected)


def _fit_baselines(report: Report, baselines: Sequence[Engine]) -> Sequence[Engine]:
    """Return the baselines that kept the accuracy when the plan was compiled.

    Returns all baselines if the report names none of them.
    """
    known = {benchmark.label for benchmark in (report.baseline, *report.baselines) if benchmark}
    return [baseline for baseline in baselines if baseline.recipe.label in known] or baselines


def _is_slower_or_equal(last: BenchmarkReport | BenchmarkFailure) -> bool:
    """Return True if the engine was compared with the baselines and is not measurably faster."""
    ratio = last.rows[0].ratio if isinstance(last, BenchmarkReport) else None
    return ratio is not None and ratio.low <= 1.0


def sweep_again(
    report: Report,
    plan: Plan,
    engine: Engine,
    runner: Runner,
    batches: Sequence[int],
    limit_s: float | None,
) -> Sweep:
    """Measure a delivered engine alone, at every batch size.

    PlanError for a batch outside its profiles, or for a model without a batch axis.
    """
    symbol = batch_symbol(engine.inputs)
    sizes = sweep_sizes(symbol, engine.profiles, batches)
    check_sizes(sizes, engine.inputs, engine.profiles)
    context = reopen_context(report, plan, runner)
    sweep_plan = plan.model_copy(
        update={"benchmark": plan.benchmark.model_copy(update={"sizes": sizes})}
    )
    raw = raw_model(context)
    (result,) = _measured(report, sweep_plan, [engine], raw, context.runner).run.results
    assert isinstance(result, BenchmarkReport)
    return sweep_of(result.label, symbol, result.rows, limit_s)


def benchmark_files(plans: Sequence[Plan], backend: str, runner: Runner) -> RaceRecord:
    """Measure ONNX files as they are on one backend, in one interleaved run. Never reused.

    Each plan names a file; the others are compared with the first one. ModelError if their inputs
    differ, or if one of them cannot be measured.
    """
    contexts = [open_context(plan, runner) for plan in plans]
    models = [raw_model(context) for context in contexts]
    for plan, model in zip(plans[1:], models[1:], strict=True):
        check_same_inputs(plan.name, model.inputs, plans[0].name, models[0].inputs)
    engines, layers = list[Engine](), dict[str, LayerTable | None]()
    for context, model in zip(contexts, models, strict=True):
        recipe = recipe_as_given(backend, context.given, context.target(backend))
        label = f"{context.plan.name} {recipe.label}"
        engine = build_engine(context, model, recipe, label)
        layers[label] = next(iter(prove_engine(context, engine, model)), None)
        recipe = recipe.model_copy(update={"variant": context.plan.name})
        engines.append(engine.model_copy(update={"recipe": recipe}))
    return _raced(engines, models[0], plans[0].benchmark, layers, runner)


def check_same_inputs(
    name: str, inputs: tuple[TensorSpec, ...], other: str, wanted: tuple[TensorSpec, ...]
) -> None:
    """ModelError unless both files take the same inputs."""
    if inputs != wanted:
        texts = [", ".join(map(spec_text, specs)) for specs in (wanted, inputs)]
        raise ModelError(
            f"expected '{name}' to take the inputs of '{other}' ({texts[0]}), got {texts[1]}",
            "measure each of them alone",
        )


def _measured(
    report: Report, plan: Plan, engines: Sequence[Engine], model: OnnxModel, runner: Runner
) -> RaceRecord:
    """Measure the engines in one run. ModelError if one of them cannot be measured."""
    for candidate in report.candidates:
        if candidate.label == engines[-1].recipe.label and candidate.selection:
            runner.report(BENCHMARK, candidate.selection.figures_of(candidate.recipe))
    layers = {candidate.label: candidate.layers for candidate in report.candidates}
    return _raced(engines, model, plan.benchmark, layers, runner)


def _raced(
    engines: Sequence[Engine],
    model: OnnxModel,
    options: BenchmarkConfig,
    layers: Mapping[str, LayerTable | None],
    runner: Runner,
) -> RaceRecord:
    """Measure engines in one run; all but the last are baselines. ModelError if one fails."""
    entries = [RaceEntry(engine, Role.BASELINE) for engine in engines[:-1]]
    last = Role.CANDIDATE if entries else Role.BASELINE
    entries.append(RaceEntry(engines[-1], last))
    check_if_sealed(engines[-1])  # again: earlier steps may have taken minutes
    report_baselines(runner, (entry.engine for entry in entries if entry.role is Role.BASELINE))
    run: Benchmarks = runner.anew(
        BENCHMARK, engines[-1].recipe.label, benchmark, entries, model, options, None
    )
    for result in run.results:
        if isinstance(result, BenchmarkFailure):
            raise ModelError(
                f"{result.label} cannot be measured: {result.reason}", "see `crucible doctor`"
            )
    measure_once(runner, engines, options.threads, options.budget_s)
    run = with_limits(run, engines, layers, options.threads)
    return RaceRecord(tuple(engines), model, options, run)


def trace_engines(race: RaceRecord, runner: Runner) -> list[EngineTrace | TraceFailure]:
    """Trace the engines of a run at its first shape, one after the other, each in a child.

    The run is over by then, so that its figures are without tracing.
    """
    threads = race.options.threads or usable_cores()
    workload, *_ = workloads_from_plan(race.engines, race.model, race.options)
    traces: list[EngineTrace | TraceFailure] = []
    for engine in race.engines:
        label = engine.recipe.label
        try:
            traces.append(
                runner.anew(TRACE, label, trace_engine, with_threads(engine, threads), workload)
            )
        except ChildStopped:
            raise
        except CrucibleError as error:  # the figures, and other traces, are good all the same
            traces.append(TraceFailure(label, error.message))
    return traces


# -- a report with the new figures -------------------------------------------


def report_again(
    report: Report, plan: Plan, engine: Engine, runner: Runner, command: str
) -> Report:
    """Measure an engine and its baselines again, and return its report with the new latencies."""
    return renewed_report(
        report, benchmark_again(report, plan, engine, runner), runner.steps, command
    )


def renewed_report(
    report: Report, remeasured: Remeasured, steps: Sequence[Step], command: str
) -> Report:
    """Return the report with the new latencies, dated now.

    `command`: the command that produces the report. `steps`: the stages that ran for it.
    """
    renewed = with_figures(report, remeasured, steps)
    here = {
        "command": command,
        "environment": environment(),
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }
    return renewed.model_copy(update=here)


def with_figures(report: Report, remeasured: Remeasured, steps: Sequence[Step]) -> Report:
    """Return the report with the new latencies in place of the old ones.

    Accuracy stays as the compile measured it. Verdict, ratios and winner follow from the new
    latencies, and the ratios of the ablation are dropped. By another objective than latency,
    throughput, verdict and winner stay too. `steps`: the stages that ran for it.
    """
    run, engine = remeasured.benchmarks, remeasured.engine
    curves = report.curves
    reports = [
        result.model_copy(update={"load": curves.get(result.label)})
        for result in run.results
        if isinstance(result, BenchmarkReport)
    ]
    last = reports[-1]
    new_digests = {step.digest for step in steps}
    earlier = (
        step.model_copy(update={"reused": True})
        for step in report.steps
        if step.stage != "benchmark" and step.digest not in new_digests
    )
    unmeasured = tuple(
        candidate.model_copy(update={"benchmark": None}) for candidate in report.candidates
    )
    renewed: dict[str, object] = {
        "candidates": unmeasured,
        "ablation": _without_ratios(report.ablation) if report.ablation else None,
        "steps": tuple(chain(earlier, steps)),
        "notes": (
            *(note for note in report.notes if note.code is not NoteCode.REMEASURED),
            REMEASURED,
        ),
        "peaks": run.peaks,
        "gpu_use": run.gpu_use,
        "benchmarked": run.created,
    }
    winner = next(
        (candidate for candidate in report.candidates if candidate.label == last.label), None
    )
    if winner is None:  # the engine is the baseline that was kept
        renewed |= {"baseline": last, "baselines": tuple(reports[:-1]), "delivered": engine}
        return report.model_copy(update=renewed)
    winner = winner.model_copy(update={"engine": engine, "benchmark": last})
    baselines = sorted(reports[:-1], key=lambda benchmark: benchmark.label != run.baseline)
    if decides_by_load(report):
        candidates = tuple(
            winner if candidate.label == winner.label else candidate for candidate in unmeasured
        )
        latencies = {"baseline": baselines[0], "baselines": (), "candidates": candidates}
        return report.model_copy(update=renewed | latencies)
    kept = remeasured.kept
    baseline = Baseline(run.baseline, remeasured.call, why_undelivered(kept))
    decision = decide([winner], winner, report.validation, baseline)
    verdict: dict[str, object] = {
        "candidates": (
            *(winner if candidate.label == winner.label else candidate for candidate in unmeasured),
            *built_to_keep(kept, unmeasured),
        ),
        "baseline": baselines[0],
        "baselines": tuple(baselines[1:]),
        "winner": run.baseline if decision.verdict == "keep" else winner.label,
        "ratio": ratio_of(winner),
        "ratio_missing": ratio_missing(winner),
        "delivered": delivered_engine(decision, kept.engine if kept else None),
        "verdict": decision.verdict,
        "reasons": decision.reasons,
        "next_steps": decision.next_steps,
    }
    return report.model_copy(update=renewed | verdict)


def _without_ratios(ablation: Ablation) -> Ablation:
    return ablation.model_copy(
        update={"rows": tuple(row.model_copy(update={"ratio": None}) for row in ablation.rows)}
    )
