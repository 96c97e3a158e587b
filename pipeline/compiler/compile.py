"""Compile a plan: a plan in, a report out.

`compile_plan` lists the steps. The functions below it are these steps, in order.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from pipeline.backends.onnxruntime.backend import gpu_providers
from pipeline.backends.pytorch import backend as pytorch_
from pipeline.backends.pytorch.findings import examine_module
from pipeline.benchmark.cpu_peaks import measure_once, with_limits
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.benchmark.packing import SAMPLES, prove_packing
from pipeline.compiler.advice.delivered import advise_on
from pipeline.compiler.candidates.ablation import ablation_from
from pipeline.compiler.candidates.further import Prepared, ablate, rescue
from pipeline.compiler.candidates.host_recipes import check_candidates, recipes_of
from pipeline.compiler.candidates.prepare import CANNOT_BUILD
from pipeline.compiler.candidates.side_by_side import candidates_of, prepare_all
from pipeline.compiler.candidates.stages import build_engine, check_engine, reference_outputs
from pipeline.compiler.context import FEEDS_FOR_CHECKS, CompileContext, open_context
from pipeline.compiler.decision import (
    Baseline,
    Decision,
    choose,
    decide,
    only_baseline_is_within,
    why_undelivered,
)
from pipeline.compiler.objective import (
    THROUGHPUT,
    after_load,
    measure_load,
    shorter,
    with_curves,
)
from pipeline.compiler.profile_width import WIDTH, measure_width
from pipeline.compiler.speed import is_slower_or_equal, ratio_missing, ratio_of
from pipeline.core import (
    CandidateFigures,
    Engine,
    ModelSource,
    Note,
    OnnxModel,
    OrtProvider,
    Precision,
    Recipe,
    Target,
)
from pipeline.errors import BackendUnavailable, ChildStopped, CrucibleError, ModelError
from pipeline.execution.child_process import TimeLimit
from pipeline.execution.stage_runner import Runner, Stage, StageCall
from pipeline.execution.store import canonical
from pipeline.onnx_graph.files import file_size, operator_histogram, read_proto
from pipeline.plan.recipes import (
    AS_GIVEN,
    AS_WRITTEN,
    baseline_recipes,
    call_of,
    cpu_recipe_as_given,
    deliverable_recipe,
    gpu_recipes_as_given,
)
from pipeline.plan.schema import ROLES, GeneratedData, Plan
from pipeline.plan.source import code_digest
from pipeline.postprocess import check_steps
from pipeline.preprocess import preprocessed
from pipeline.quantization.existing_qdq import given_precision
from pipeline.report.bundle import deliver_engine, withdraw_engine
from pipeline.report.files import write_report
from pipeline.results.model_graph import ModelGraph, model_graph
from pipeline.results.module_findings import ModuleFindings
from pipeline.results.report import (
    Ablation,
    BenchmarkFailure,
    BenchmarkReport,
    Benchmarks,
    Candidate,
    LoadCurve,
    LoadPoint,
    OperatorTable,
    Origin,
    PackingProof,
    ProfileWidth,
    Report,
    ReportFiles,
    Rescue,
    ValidationReport,
)
from pipeline.serving_inputs import check_serving
from pipeline.stages.benchmark import ENOUGH_RUNS, benchmark, figures_of
from pipeline.stages.export import export
from pipeline.stages.postprocess import postprocess
from pipeline.stages.preprocess import preprocess
from pipeline.stages.simplify import simplify
from pipeline.stages.validate import ReferenceOutputs, check_outputs
from pipeline.text_inputs import TOKENIZER_FILE

EXPORT = Stage("export", 3, ("torch", "onnx", "onnxscript", "onnxruntime"))
PREPROCESS = Stage("preprocess", 1, ("onnx", "onnx-ir", "onnxruntime"))
POSTPROCESS = Stage("postprocess", 1, ("onnx", "onnx-ir", "onnxruntime"))
SIMPLIFY = Stage(
    "simplify",
    8,
    ("onnx", "onnx-ir", "onnxsim", "onnx-graphsurgeon", "onnxruntime"),
    is_cacheable=lambda model: not model.provisional,
)
BASELINE = Stage("baseline", 4, pytorch_.DISTRIBUTIONS)
MODULE = Stage("module", 1, pytorch_.DISTRIBUTIONS, writes_files=False)
COMPILE = Stage("torch.compile", 2, pytorch_.DISTRIBUTIONS)
BENCHMARK = Stage(
    "benchmark",
    8,
    writes_files=False,
    needs_quiet_device=True,
    is_cacheable=lambda found: not found.provisional,
)
PACKING = Stage("packing", 1, writes_files=False)
STAGES = (
    EXPORT,
    PREPROCESS,
    SIMPLIFY,
    POSTPROCESS,
    BASELINE,
    MODULE,
    COMPILE,
    THROUGHPUT,
    BENCHMARK,
    WIDTH,
    PACKING,
)

MAX_GRAPH_S = 120  # to count the FLOPs and bytes of all nodes; 20,000 nodes took 2.4 s

EAGER = Recipe(backend="pytorch", precision=Precision.FP32, variant="eager")


def compile_plan(plan: Plan, runner: Runner, command: str) -> Report:
    """Compile a plan and report the fastest engine that keeps its accuracy, or why there is none.

    Raises a CrucibleError for an impossible request. A wrong or slow engine is no error: it is
    part of the report.
    """
    context = open_context(plan, runner)
    check_candidates(context)

    exported = export_model(context)
    check_steps(plan.postprocess, exported.inputs, exported.outputs, context.plan.profiles)
    check_outputs(plan.accuracy, exported.outputs, plan.postprocess)
    whole = preprocess_model(context, exported)
    raw = postprocess_model(context, whole)
    check_serving(plan.serving, raw.inputs, raw.outputs)
    # with whole outputs: a tiny difference may swap indices
    model = prepared_model(whole, context)
    context = replace(context, given=given_precision(read_proto(model.path, weights=False).graph))
    recipes, notes = recipes_of(context, size=file_size(model.path))
    reference = build_reference(context, exported)
    expected = reference_outputs(context, reference, context.data.selection)
    checked = check_baselines(context, build_baselines(context, raw), reference, expected)
    baselines = fit_baselines(checked) or [build_exact(context, context.raw_source, raw)]
    findings = examine_code(context, exported)
    candidates = candidates_of(prepare_all(context, model, recipes, expected))
    ablated = ablate(context, model, rescue(context, model, candidates, expected), expected)
    measured = measure(context, model, baselines, ablated)
    measured = replace(
        measured, profile_width=measure_width(context, model, choose(measured.candidates))
    )
    validation = validate_winner(context, reference, choose(measured.candidates))
    kept = kept_baseline(context, raw, measured, baselines, expected)
    notes = (
        *notes,
        *unfit_notes(checked),
        *baseline_notes(
            baselines,
            measured.candidates,
            context.given,
        ),
    )
    report = write_up(context, (raw, model), measured, kept, validation, notes, command)
    report = report.model_copy(update={"module": findings})
    return with_advice(context, report, whole, reference)


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements: candidates with their latencies, the baselines, and what was tried."""

    candidates: tuple[Candidate, ...]
    rescues: tuple[Rescue, ...]
    ablation: Ablation | None
    baselines: tuple[BenchmarkReport, ...]
    run: Benchmarks
    call: str = ""  # how the user calls the fastest baseline, where that is a PyTorch module
    profile_width: ProfileWidth | None = None

    @property
    def curve(self) -> LoadCurve | None:
        """The curve of the fastest baseline; None if latency decides."""
        return self.baselines[0].load if self.baselines else None


def export_model(context: CompileContext) -> OnnxModel:
    """Export the source to ONNX and check the result against the source."""
    # the source's digest covers the content of these files, so their paths are no part of the key
    paths = {"path": None, "weights": None, "python_path": Path()}
    raw = context.samples.first(FEEDS_FOR_CHECKS)
    samples = tuple(preprocessed(feeds, context.plan.preprocess) for feeds in raw)
    call = StageCall(
        EXPORT,
        OnnxModel,
        partial(export, context.source, context.plan.profiles, context.plan.export, samples),
        depends_on=(context.plan.model.model_copy(update=paths),),
    )
    return context.runner.stage(call)


def preprocess_model(context: CompileContext, exported: OnnxModel) -> OnnxModel:
    """Write the plan's preprocessing into the graph, or return it unchanged if there is none."""
    steps = context.plan.preprocess
    if not steps:
        return exported
    samples = context.samples.first(FEEDS_FOR_CHECKS)
    work = partial(preprocess, exported, context.plan.profiles, steps, samples)
    model = context.runner.stage(StageCall(PREPROCESS, OnnxModel, work))
    return model.model_copy(update={"notes": (*exported.notes, *model.notes)})


def postprocess_model(context: CompileContext, model: OnnxModel) -> OnnxModel:
    """Write the plan's reduction of outputs into the graph, or return it unchanged without one."""
    steps = context.plan.postprocess
    if not steps:
        return model
    samples = context.samples.first(FEEDS_FOR_CHECKS)
    work = partial(postprocess, model, context.plan.profiles, steps, samples)
    return context.runner.stage(StageCall(POSTPROCESS, OnnxModel, work))


def raw_model(context: CompileContext) -> OnnxModel:
    """Return the exported graph with the interface of the engines: what baselines compute."""
    return postprocess_model(context, preprocess_model(context, export_model(context)))


def simplify_model(context: CompileContext, exported: OnnxModel) -> OnnxModel:
    """Simplify the exported graph, or return it unchanged if the plan turns that off."""
    options = context.plan.simplify
    if not any((options.enabled, options.surgery, options.rewrite_attention, options.rewrites)):
        return exported
    surgery: tuple[object, ...] = ()
    if options.surgery:
        surgery = (code_digest(options.surgery, options.python_path, "simplify.surgery"),)
    samples = context.samples.first(FEEDS_FOR_CHECKS)
    work = partial(simplify, exported, context.plan.profiles, options, samples)
    return context.runner.stage(StageCall(SIMPLIFY, OnnxModel, work, depends_on=surgery))


def prepared_model(whole: OnnxModel, context: CompileContext) -> OnnxModel:
    """Return the graph that candidates are converted from; `whole`: with preprocessing."""
    return postprocess_model(context, simplify_model(context, whole))


def export_plan(plan: Plan, runner: Runner, simplified: bool = True) -> OnnxModel:
    """Return the graph that all candidates of a plan are converted from.

    `simplified`: False for the graph as the exporter wrote it.
    """
    context = open_context(plan, runner)
    model = preprocess_model(context, export_model(context))
    model = simplify_model(context, model) if simplified else model
    return postprocess_model(context, model)


def build_reference(context: CompileContext, exported: OnnxModel) -> Engine:
    """Build the accuracy reference: PyTorch eager in fp32, or ONNX Runtime on the CPU.

    The Q/DQ of an ONNX file are computed as written. It takes what the model itself takes.
    """
    return build_exact(context, context.source, exported)


def build_exact(context: CompileContext, source: ModelSource, exported: OnnxModel) -> Engine:
    """Build the engine that computes a source, or its unchanged graph, in fp32."""
    if source.kind != "onnx":
        return build_baseline(context, source, exported, EAGER)
    variant = AS_WRITTEN if context.given else AS_GIVEN
    return build_engine(
        context,
        exported,
        Recipe(backend="onnxruntime", precision=Precision.FP32, variant=variant),
    )


def build_baselines(context: CompileContext, exported: OnnxModel) -> list[Engine]:
    """Build the baselines: PyTorch as the plan lists it, or the unchanged ONNX file.

    An ONNX file runs on the GPU if possible, else on the CPU. The result is never empty. A
    baseline that cannot be built is left out, and a note of the first baseline gives the reason.
    """
    if context.source.kind == "onnx":
        recipes = gpu_recipes_as_given(context.given, *_gpu_tools(context))
        engines, notes = _buildable(recipes, partial(_build_given, context, exported))
        engines = engines or [_build_given(context, exported, cpu_recipe_as_given(context.given))]
    else:
        eager = build_baseline(context, context.raw_source, exported, EAGER)
        castable = context.source.kind != "pt2" and not context.given
        recipes = baseline_recipes(context.plan.benchmark.baselines, eager.target, castable)
        build = partial(_build_variant, context, exported, eager)
        variants, notes = _buildable(recipes[1:], build)
        engines = [eager, *variants]
    first = engines[0].model_copy(update={"notes": (*engines[0].notes, *notes)})
    return [first, *engines[1:]]


def build_baseline(
    context: CompileContext, source: ModelSource, exported: OnnxModel, recipe: Recipe
) -> Engine:
    """Build one baseline of the user's module.

    torch.compile is a stage of its own, so that the report shows how long it took.
    """
    call = StageCall(
        COMPILE if recipe.variant == "compile" else BASELINE,
        Engine,
        partial(
            pytorch_.build_baseline,
            source,
            exported,
            recipe,
            context.build_options("pytorch"),
        ),
        depends_on=(canonical(source),),  # with paths: its files are loaded from there
        subject=recipe.label,
        target=context.target("pytorch"),
    )
    return context.runner.stage(call)


def examine_code(context: CompileContext, exported: OnnxModel) -> ModuleFindings | None:
    """Return what a run of the user's module shows about its code; None if it is no Python code.

    A failure is part of the findings: nothing else depends on them.
    """
    if context.source.kind != "entrypoint":
        return None
    target = context.target("pytorch")
    baselines = baseline_recipes(context.plan.benchmark.baselines, target, not context.given)
    compiles = any(recipe.variant == "compile" for recipe in baselines)
    call = StageCall(
        MODULE,
        ModuleFindings,
        partial(examine_module, context.source, exported.inputs, context.plan.profiles, compiles),
        depends_on=(canonical(context.source),),  # with paths, which the findings name
        target=target,
    )
    try:
        return context.runner.stage(call)
    except ChildStopped:
        raise
    except CrucibleError as error:
        return ModuleFindings(failure=error.message)


def _build_variant(
    context: CompileContext, exported: OnnxModel, eager: Engine, recipe: Recipe
) -> Engine:
    """Build a baseline other than eager fp32. All but torch.compile use the files of eager fp32."""
    if recipe.variant == "compile":
        return build_baseline(context, context.raw_source, exported, recipe)
    digest = hashlib.sha256(f"{eager.digest} {canonical(recipe)}".encode()).hexdigest()
    return eager.model_copy(update={"recipe": recipe, "digest": digest, "notes": ()})


def _build_given(context: CompileContext, exported: OnnxModel, recipe: Recipe) -> Engine:
    """Build an engine of the unchanged ONNX file, in the precision of its Q/DQ if it has any."""
    if recipe.quantizer == "given":
        exported = exported.model_copy(update={"precision": recipe.precision})
    return build_engine(context, exported, recipe)


def _gpu_tools(context: CompileContext) -> tuple[Target | None, tuple[OrtProvider, ...]]:
    """Return TensorRT's target and ONNX Runtime's GPU providers; None and () without a GPU."""
    if not context.has_gpu:
        return None, ()
    try:
        target: Target | None = context.target("tensorrt")
    except BackendUnavailable:
        target = None
    return target, gpu_providers()


def _buildable(
    recipes: Iterable[Recipe],
    build: Callable[[Recipe], Engine],
) -> tuple[list[Engine], list[Note]]:
    """Build the baselines. Returns the engines, and a note for each that cannot be built."""
    engines, notes = [], []
    for recipe in recipes:
        try:
            engines.append(build(recipe))
        except CANNOT_BUILD as error:
            text = f"{recipe.label} is left out: {error.message}"
            notes.append(Note(stage="baseline", text=text))
    return engines, notes


def check_baselines(
    context: CompileContext,
    baselines: Sequence[Engine],
    reference: Engine,
    expected: ReferenceOutputs,
) -> tuple[Candidate, ...]:
    """Check the baselines on the selection set and return them as candidates.

    The reference itself is not checked. A baseline that keeps the accuracy has the state
    `measured`; any other is not used.
    """
    return tuple(_checked_baseline(context, engine, reference, expected) for engine in baselines)


def _checked_baseline(
    context: CompileContext,
    engine: Engine,
    reference: Engine,
    expected: ReferenceOutputs,
) -> Candidate:
    candidate = Candidate(
        label=engine.recipe.label,
        recipe=engine.recipe,
        origin=Origin.BASELINE,
        state="measured",
        engine=engine,
    )
    if engine.digest == reference.digest:
        return candidate
    try:
        report = check_engine(context, engine, expected, context.data.selection)
    except CANNOT_BUILD as error:
        return candidate.model_copy(update={"state": "failed", "reason": error.message})
    state = "measured" if report.passed else "failed accuracy"
    return candidate.model_copy(
        update={"state": state, "selection": report, "reason": "; ".join(report.failures)},
    )


def deliverable_candidate(
    context: CompileContext, exported: OnnxModel, baseline: Engine, expected: ReferenceOutputs
) -> Candidate:
    """Return a baseline in the form that can be delivered.

    A PyTorch baseline is delivered as a program, which must pass the accuracy gate too. Any other
    baseline is delivered as its own engine. If there is nothing to deliver, the candidate has no
    engine and its reason says why.
    """
    recipe = deliverable_recipe(baseline.recipe)
    candidate = Candidate(label=recipe.label, recipe=recipe, origin=Origin.BASELINE, state="built")
    if recipe == baseline.recipe:
        return candidate.model_copy(update={"engine": baseline})
    try:
        engine = build_engine(context, exported, recipe)
        report = check_engine(context, engine, expected, context.data.selection)
    except CANNOT_BUILD as error:
        return candidate.model_copy(update={"state": "failed", "reason": error.message})
    candidate = candidate.model_copy(update={"selection": report, "notes": engine.notes})
    if not report.passed:
        return candidate.model_copy(
            update={"state": "failed accuracy", "reason": "; ".join(report.failures)}
        )
    return candidate.model_copy(update={"engine": engine})


def fit_baselines(checked: Iterable[Candidate]) -> list[Engine]:
    """Return the baselines that keep the accuracy."""
    return [
        baseline.engine for baseline in checked if baseline.engine and baseline.state == "measured"
    ]


def unfit_notes(checked: Iterable[Candidate]) -> tuple[Note, ...]:
    """Return a note for each baseline that is not used, with the reason."""
    unfit = (baseline for baseline in checked if baseline.state != "measured")
    texts = (f"{baseline.label} is left out: {baseline.reason}" for baseline in unfit)
    return tuple(Note(stage="baseline", text=text) for text in texts)


def kept_baseline(
    context: CompileContext,
    exported: OnnxModel,
    measured: Measured,
    baselines: Iterable[Engine],
    expected: ReferenceOutputs,
) -> Candidate | None:
    """Return the fastest baseline in its deliverable form, if no candidate is faster.

    None if a candidate is faster, or if no speeds were compared. With a limit, the baseline is also
    kept if it alone is within the limit.
    """
    winner = choose(measured.candidates)
    if winner is None:
        is_kept = only_baseline_is_within(measured.candidates, measured.curve)
    else:
        is_kept = is_slower_or_equal(winner)
    if not is_kept:
        return None
    for baseline in baselines:
        if baseline.recipe.label == measured.run.baseline:
            return deliverable_candidate(context, exported, baseline, expected)
    return None


def measure(
    context: CompileContext, model: OnnxModel, baselines: list[Engine], prepared: Prepared
) -> Measured:
    """Measure the candidates interleaved with the baselines.

    A candidate that cannot be measured gets the reason. If latency does not decide, all are
    measured under load first, and all ratios refer to the baseline of the highest throughput.
    """
    load = measure_load(context, model, baselines, prepared.candidates)
    prepared = replace(
        prepared,
        candidates=tuple(after_load(candidate, load) for candidate in prepared.candidates),
    )
    entries = entries_of(baselines, prepared, load.baseline if load else "")
    engines = [entry.engine for entry in entries]
    labels = tuple(engine.recipe.label for engine in engines)
    call = StageCall(
        BENCHMARK,
        Benchmarks,
        partial(
            benchmark,
            entries,
            model,
            shorter(context.plan.benchmark, context.plan.objective),
            ENOUGH_RUNS,
        ),
        depends_on=(labels, context.quiet_environment, context.plan.profiles),
        figures=partial(figures_of, engines, [engine.recipe.label for engine in baselines]),
    )
    report_baselines(context.runner, baselines)
    run = context.runner.stage(call)
    options = context.plan.benchmark
    measure_once(context.runner, engines, options.threads, options.budget_s)
    layers = {candidate.label: candidate.layers for candidate in prepared.candidates}
    run = with_limits(run, engines, layers, options.threads)
    results = with_curves(run.results, load)
    run = run.model_copy(update={"results": results})
    found = {result.label: result for result in results}
    candidates = tuple(
        with_benchmark(candidate, found.get(candidate.label)) for candidate in prepared.candidates
    )
    ablation = Ablation(label="") if context.plan.ablate else None
    if prepared.ablated:
        ablation = ablation_from(prepared.ablated, candidates)
    return Measured(
        candidates=candidates,
        rescues=prepared.rescues,
        ablation=ablation,
        baselines=baselines_first(run, baselines),
        run=run,
        call=call_of_fastest(run, baselines),
    )


def report_baselines(runner: Runner, baselines: Iterable[Engine]) -> None:
    """Report which engines are baselines: the race does not know all of them as such."""
    for engine in baselines:
        recipe = engine.recipe
        runner.report(BENCHMARK, CandidateFigures(recipe.label, recipe.precision, is_baseline=True))


def call_of_fastest(run: Benchmarks, baselines: Iterable[Engine]) -> str:
    """Return the Python call of the fastest baseline; empty if it is not a PyTorch module."""
    recipes = (engine.recipe for engine in baselines if engine.recipe.label == run.baseline)
    return next((call_of(recipe) for recipe in recipes if recipe.backend == "pytorch"), "")


def entries_of(
    baselines: Iterable[Engine], prepared: Prepared, decisive: str = ""
) -> list[RaceEntry[Engine]]:
    """Return every engine to measure, with its role.

    `decisive` is the label of the baseline that all ratios refer to; empty: the fastest one.
    """
    compared = prepared.ablated.labels if prepared.ablated else frozenset()
    entries = []
    for engine in baselines:
        may_decide = decisive in ("", engine.recipe.label)
        entries.append(RaceEntry(engine, Role.BASELINE if may_decide else Role.SHOWN))
    for candidate in prepared.candidates:
        if candidate.engine is None or not worth_measuring(candidate, compared):
            continue
        role = Role.CANDIDATE if candidate.state == "measured" else Role.SHOWN
        if candidate.label in compared:
            role = Role.COMPARED
        entries.append(RaceEntry(candidate.engine, role))
    return entries


def baselines_first(run: Benchmarks, baselines: Iterable[Engine]) -> tuple[BenchmarkReport, ...]:
    """Return the measured baselines, the one that all ratios refer to first."""
    labels = {engine.recipe.label for engine in baselines}
    reports = [
        result
        for result in run.results
        if isinstance(result, BenchmarkReport) and result.label in labels
    ]
    return tuple(sorted(reports, key=lambda report: report.label != run.baseline))


def worth_measuring(candidate: Candidate, compared: Collection[str]) -> bool:
    """Return whether to benchmark a candidate: its precision is proved and its outputs checked.

    The accuracy may have failed: the plot of accuracy against latency shows such candidates too.
    Failed attempts of a rescue are left out, unless the ablation has `compared` them.
    """
    if candidate.selection is None or candidate.state == "mislabelled":
        return False
    is_failed_attempt = candidate.origin is Origin.FALLBACK and candidate.state != "measured"
    return not is_failed_attempt or candidate.label in compared


def with_benchmark(
    candidate: Candidate, result: BenchmarkReport | BenchmarkFailure | None
) -> Candidate:
    """Add the result of the benchmark to the candidate."""
    if isinstance(result, BenchmarkFailure):
        return candidate.model_copy(
            update={"state": "failed", "reason": f"benchmark: {result.reason}"}
        )
    return candidate.model_copy(update={"benchmark": result})


def validate_winner(
    context: CompileContext, reference: Engine, winner: Candidate | None
) -> ValidationReport | None:
    """Check the winner on the validation set, which is read only here.

    None without a validation set, or if the baseline is kept.
    """
    if winner is None or winner.engine is None or context.data.validation is None:
        return None
    if is_slower_or_equal(winner):
        return None
    expected = reference_outputs(context, reference, context.data.validation, at_every_size=False)
    return check_engine(context, winner.engine, expected, context.data.validation)


def baseline_notes(
    baselines: Sequence[Engine], candidates: Iterable[Candidate], given: Precision | None = None
) -> tuple[Note, ...]:
    """Return the notes of the baselines, and warnings about unequal comparisons.

    One warning says that a ratio between GPU and CPU compares hardware too. The other says that
    the fake quantisers of a PyTorch model slow the baseline down.
    """
    first = baselines[0].target
    on_gpu = first.compute_capability is not None
    elsewhere = [
        candidate.label
        for candidate in candidates
        if candidate.engine
        and candidate.benchmark
        and (candidate.engine.target.compute_capability is not None) != on_gpu
    ]
    warnings = []
    if elsewhere:
        warnings.append(
            f"the baseline runs on {first.device}, other hardware than {', '.join(elsewhere)}:"
            " their ratio compares hardware too"
        )
    if given is not None and first.backend == "pytorch":
        warnings.append(
            "the baseline computes the model's fake quantisers too: the model from before the"
            " quantisation-aware training has none and would be faster"
        )
    own = dict.fromkeys(note for engine in baselines for note in engine.notes)
    return (*own, *(Note(stage="benchmark", text=text) for text in warnings))


def write_up(
    context: CompileContext,
    models: Sequence[OnnxModel],
    measured: Measured,
    kept: Candidate | None,
    validation: ValidationReport | None,
    notes: Iterable[Note],
    command: str,
) -> Report:
    """Assemble the report, with the verdict.

    `kept`: the baseline in its deliverable form, which is delivered if no candidate is faster. A
    program that was built for that appears among the candidates, or the reason of its failure.
    """
    decision = decide(
        measured.candidates,
        choose(measured.candidates),
        validation,
        Baseline(measured.run.baseline, measured.call, why_undelivered(kept), measured.curve),
    )
    delivered = delivered_engine(decision, kept.engine if kept else None)
    packing = check_packing(context, delivered) if delivered else None
    graph, graph_notes = graph_with_work(context, models[-1])
    winner = decision.winner
    winner_label = winner.label if winner else None
    if decision.verdict == "keep":
        winner_label = measured.run.baseline
    return Report(
        name=context.plan.name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        plan=context.plan,
        source_digest=context.source.digest,
        environment=context.environment,
        steps=tuple(context.runner.steps),
        operators=operator_tables(models),
        graph=graph.nodes,
        graph_sizes=graph.sizes,
        reference=context.reference_name,
        baseline=measured.baselines[0] if measured.baselines else None,
        baselines=measured.baselines[1:],
        candidates=(*measured.candidates, *built_to_keep(kept, measured.candidates)),
        rescues=measured.rescues,
        ablation=measured.ablation,
        profile_width=measured.profile_width,
        winner=winner_label,
        best_point=best_point(decision, kept, measured),
        ratio=ratio_of(winner) if winner else None,
        ratio_missing=ratio_missing(winner) if winner else "",
        delivered=delivered,
        packing=packing,
        validation=validation,
        verdict=decision.verdict,
        reasons=decision.reasons,
        next_steps=decision.next_steps,
        nearest_miss=decision.nearest_miss.label if decision.nearest_miss else None,
        notes=(
            *notes,
            *data_notes(context.plan),
            *chain.from_iterable(model.notes for model in models),
            *graph_notes,
            *context.runner.store.notes,
        ),
        peaks=measured.run.peaks,
        gpu_use=measured.run.gpu_use,
        benchmarked=measured.run.created,
    )


def with_advice(
    context: CompileContext, report: Report, whole: OnnxModel, reference: Engine
) -> Report:
    """Add the advice that the plan asks for. A note says why there is none."""
    if not context.plan.advise:
        return report
    engine = report.engine_delivered
    if engine is None:
        note = Note(stage="advise", text="there is no advice: no engine is delivered")
        return report.model_copy(update={"notes": (*report.notes, note)})
    try:
        prepare = partial(prepared_model, whole)
        advice = advise_on(context, report, engine, prepare, reference)
    except ModelError as error:
        note = Note(stage="advise", text=f"there is no advice: {error.message}", level="info")
        return report.model_copy(update={"notes": (*report.notes, note)})
    return report.model_copy(update={"advice": advice, "steps": tuple(context.runner.steps)})


def graph_with_work(
    context: CompileContext, model: OnnxModel
) -> tuple[ModelGraph, tuple[Note, ...]]:
    """Return the graph of a model, with the work of its nodes at the first profile's opt sizes.

    If the work cannot be counted, the graph is without it, and a note gives the reason.
    """
    sizes = context.plan.profiles[0].sizes("opt") if context.plan.profiles else {}
    limit = TimeLimit(MAX_GRAPH_S, "counting the FLOPs and bytes of the graph")
    try:
        graph: ModelGraph = context.runner.run(
            model_graph, model.path, sizes, name="graph", limit=limit
        )
    except ChildStopped:
        raise
    except CrucibleError as error:
        text = f"the FLOPs and bytes of the graph's nodes were not counted: {error.message}"
        return model_graph(model.path), (Note(stage="graph", text=text),)
    return graph, ()


def check_packing(context: CompileContext, engine: Engine) -> PackingProof | None:
    """Prove on the delivered engine that sequences may share a row; None: it is not declared.

    A failed proof turns packing off. The engine itself is right, and serves one sequence per row.
    """
    packing = context.plan.serving.packing
    if packing is None:
        return None
    if context.plan.data.selection is None or isinstance(
        context.plan.data.selection, GeneratedData
    ):
        return PackingProof(reason="the selection set is generated, so it proves nothing")
    samples = context.data.selection.first(SAMPLES)
    work = partial(prove_packing, engine, packing, samples)
    call = StageCall(PACKING, PackingProof, work, subject=engine.recipe.label, target=engine.target)
    return context.runner.stage(call)


def built_to_keep(
    kept: Candidate | None,
    candidates: Iterable[Candidate],
) -> tuple[Candidate, ...]:
    """Return the PyTorch program of the kept baseline, unless it is among the candidates."""
    if kept is None or kept.recipe.backend != "torch":
        return ()
    labels = {candidate.label for candidate in candidates}
    return () if kept.label in labels else (kept,)


def delivered_engine(decision: Decision, kept: Engine | None) -> Engine | None:
    """Return the engine that the verdict delivers; None if it is `rejected`."""
    if decision.verdict == "rejected":
        return None
    if decision.verdict == "keep":
        return kept
    return decision.winner.engine if decision.winner else None


def best_point(decision: Decision, kept: Candidate | None, measured: Measured) -> LoadPoint | None:
    """Return the delivered engine's best point under load; None if it was not measured so.

    A PyTorch baseline was measured as a module, and is delivered as a program.
    """
    curve = None
    if decision.verdict == "keep":
        is_same = kept is not None and kept.label == measured.run.baseline
        curve = measured.curve if is_same else None
    elif decision.verdict != "rejected" and decision.winner and decision.winner.benchmark:
        curve = decision.winner.benchmark.load
    return curve.best if curve else None


def publish_report(report: Report, folder: Path) -> ReportFiles:
    """Write the delivered engine and the reports into the user's folder.

    Without a delivered engine, the engine of an earlier compile is removed from there.
    """
    if report.delivered:
        text = report.plan.serving.text
        beside = {TOKENIZER_FILE: text.file} if text else {}
        deliver_engine(report.delivered, folder / "engine", beside=beside)
    else:
        withdraw_engine(folder / "engine")
    return write_report(report, folder)


def operator_tables(models: Sequence[OnnxModel]) -> tuple[OperatorTable, ...]:
    """Count the operators of the graph after export and after simplification."""
    return tuple(
        OperatorTable(
            stage=stage,
            operators=operator_histogram(model.path),
            size_bytes=file_size(model.path),
        )
        for stage, model in zip(("export", "simplify"), models, strict=True)
    )


def data_notes(plan: Plan) -> list[Note]:
    """Return notes on generated data, on the origin of weights, and on a .pt2 as the baseline."""
    notes = (
        [Note(stage="model", text=f"weights: {plan.model.weights_from}", level="info")]
        if plan.model.weights_from
        else []
    )
    if plan.model.path and plan.model.path.suffix == ".pt2":
        text = (
            "the baseline runs the exported program of the .pt2, which on small models is slower"
            " than the module it was made from"
        )
        notes.append(Note(stage="benchmark", text=text))
    for role in ROLES:
        given = getattr(plan.data, role)
        if isinstance(given, GeneratedData):
            notes.append(Note(stage=role, text=f"random data: {given.because}"))
    return notes
