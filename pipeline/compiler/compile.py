"""The story: a plan in, a report out. `compile_plan` tells it; the functions below are its
sentences, in order.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from pipeline.backends.onnxruntime.backend import AS_WRITTEN, gpu_providers
from pipeline.backends.pytorch import backend as pytorch_
from pipeline.benchmark.cpu_peaks import with_limits
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.ablation import ABLATED, ablation_from
from pipeline.compiler.candidates import (
    CANNOT_BUILD,
    Prepared,
    ablate,
    build_engine,
    candidates_of,
    check_candidates,
    check_engine,
    prepare_all,
    recipes_of,
    reference_outputs,
    rescue,
)
from pipeline.compiler.context import FEEDS_FOR_CHECKS, CompileContext, open_context
from pipeline.compiler.decision import (
    Baseline,
    Decision,
    choose,
    decide,
    is_slower_or_equal,
    ratio_missing,
    ratio_of,
)
from pipeline.core import Engine, Note, OnnxModel, OrtProvider, Precision, Recipe, Target
from pipeline.errors import (
    BackendUnavailable,
)
from pipeline.execution.stage_runner import Runner, Stage, StageCall
from pipeline.execution.store import canonical
from pipeline.onnx_graph.files import file_size, operator_histogram, read_proto
from pipeline.plan.recipes import (
    AS_GIVEN,
    baseline_recipes,
    call_of,
    cpu_recipe_as_given,
    deliverable_recipe,
    gpu_recipes_as_given,
)
from pipeline.plan.schema import DataConfig, GeneratedData, Plan
from pipeline.plan.source import code_digest
from pipeline.quantization.existing_qdq import given_precision
from pipeline.report.bundle import deliver_engine, withdraw_engine
from pipeline.report.files import write_report
from pipeline.results.report import (
    Ablation,
    BenchmarkFailure,
    BenchmarkReport,
    Benchmarks,
    Candidate,
    OperatorTable,
    Report,
    ReportFiles,
    Rescue,
    ValidationReport,
)
from pipeline.serving_inputs import check_serving
from pipeline.stages.benchmark import ENOUGH_RUNS, benchmark
from pipeline.stages.export import export
from pipeline.stages.simplify import simplify
from pipeline.stages.validate import ReferenceOutputs, check_outputs

EXPORT = Stage("export", 3, ("torch", "onnx", "onnxscript", "onnxruntime"))
SIMPLIFY = Stage(
    "simplify",
    6,
    ("onnx", "onnxsim", "onnx-graphsurgeon", "onnxruntime"),
    is_cacheable=lambda model: not model.provisional,
)
BASELINE = Stage("baseline", 4, pytorch_.DISTRIBUTIONS)
COMPILE = Stage("torch.compile", 2, pytorch_.DISTRIBUTIONS)
BENCHMARK = Stage(
    "benchmark", 6, writes_files=False, is_cacheable=lambda found: not found.provisional
)
STAGES = (EXPORT, SIMPLIFY, BASELINE, COMPILE, BENCHMARK)

EAGER = Recipe(backend="pytorch", precision=Precision.FP32, variant="eager")


def compile_plan(plan: Plan, runner: Runner, command: str) -> Report:
    """Compile a plan: the report of the fastest engine that keeps its accuracy, or of why there is
    none.

    Raises a CrucibleError for a request that is impossible; an engine that is wrong or slow is part
    of the report.
    """
    context = open_context(plan, runner)
    check_candidates(context)

    exported = export_model(context)
    check_outputs(plan.accuracy, exported.outputs)
    check_serving(plan.serving, exported.inputs, exported.outputs)
    model = simplify_model(context, exported)
    context = replace(context, given=given_precision(read_proto(model.path, weights=False).graph))
    recipes, notes = recipes_of(context, size=file_size(model.path))
    reference = build_reference(context, exported)
    expected = reference_outputs(context, reference, context.data.selection)
    checked = check_baselines(context, build_baselines(context, exported), reference, expected)
    baselines = fit_baselines(checked) or [reference]
    candidates = candidates_of(prepare_all(context, model, recipes, expected))
    ablated = ablate(context, model, rescue(context, model, candidates, expected), expected)
    measured = measure(context, model, baselines, ablated)
    validation = validate_winner(context, reference, choose(measured.candidates))
    kept = kept_baseline(context, exported, measured, baselines, expected)
    notes = (
        *notes,
        *unfit_notes(checked),
        *baseline_notes(
            baselines,
            measured.candidates,
            context.given,
        ),
    )
    return write_up(context, (exported, model), measured, kept, validation, notes, command)


@dataclass(frozen=True, slots=True)
class Measured:
    """Candidates with their latencies, how some were rescued, what switches do, and the baselines
    they are compared with.
    """

    candidates: tuple[Candidate, ...]
    rescues: tuple[Rescue, ...]
    ablation: Ablation | None
    baselines: tuple[BenchmarkReport, ...]
    run: Benchmarks
    call: str = ""  # how the user calls the fastest baseline, where that is a PyTorch module


def export_model(context: CompileContext) -> OnnxModel:
    """The source as ONNX, checked against the source."""
    # what lies at the places that the plan names is in the source's digest
    places = {"path": None, "weights": None, "python_path": Path()}
    samples = context.samples.first(FEEDS_FOR_CHECKS)
    call = StageCall(
        EXPORT,
        OnnxModel,
        partial(export, context.source, context.plan.profiles, context.plan.export, samples),
        depends_on=(context.plan.model.model_copy(update=places),),
    )
    return context.runner.stage(call)


def simplify_model(context: CompileContext, exported: OnnxModel) -> OnnxModel:
    """The same function in fewer nodes, or the exported graph where that cannot be had."""
    options = context.plan.simplify
    if not (options.enabled or options.surgery or options.plain_attention):
        return exported
    surgery: tuple[object, ...] = ()
    if options.surgery:
        surgery = (code_digest(options.surgery, options.python_path, "simplify.surgery"),)
    samples = context.samples.first(FEEDS_FOR_CHECKS)
    work = partial(simplify, exported, context.plan.profiles, options, samples)
    return context.runner.stage(StageCall(SIMPLIFY, OnnxModel, work, depends_on=surgery))


def export_plan(plan: Plan, runner: Runner, simplified: bool = True) -> OnnxModel:
    """The graph that all candidates of a plan are made from; or, not simplified, what the exporter
    wrote.
    """
    context = open_context(plan, runner)
    exported = export_model(context)
    return simplify_model(context, exported) if simplified else exported


def build_reference(context: CompileContext, exported: OnnxModel) -> Engine:
    """What all answers are compared with: PyTorch eager in fp32, or ONNX Runtime on the CPU.

    The Q/DQ of an ONNX file are computed as written.
    """
    if context.source.kind != "onnx":
        return build_baseline(context, exported, EAGER)
    variant = AS_WRITTEN if context.given else AS_GIVEN
    return build_engine(
        context,
        exported,
        Recipe(backend="onnxruntime", precision=Precision.FP32, variant=variant),
    )


def build_baselines(context: CompileContext, exported: OnnxModel) -> list[Engine]:
    """What the user has today: PyTorch in the plan's ways, or the ONNX file as it is.

    The file runs on the GPU where one can run it, else on the CPU. There is always a first one.
    What cannot be built is left out, and a note of the first says why.
    """
    if context.source.kind == "onnx":
        recipes = gpu_recipes_as_given(context.given, *_gpu_tools(context))
        found, notes = _buildable(recipes, partial(_build_given, context, exported))
        found = found or [_build_given(context, exported, cpu_recipe_as_given(context.given))]
    else:
        eager = build_baseline(context, exported, EAGER)
        castable = context.source.kind != "pt2" and not context.given
        recipes = baseline_recipes(context.plan.benchmark.baselines, eager.target, castable)
        others, notes = _buildable(recipes[1:], partial(_build_other, context, exported, eager))
        found = [eager, *others]
    return [found[0].model_copy(update={"notes": (*found[0].notes, *notes)}), *found[1:]]


def build_baseline(context: CompileContext, exported: OnnxModel, recipe: Recipe) -> Engine:
    """One way to run the user's module.

    torch.compile is a step of its own: the report shows how long it took.
    """
    call = StageCall(
        COMPILE if recipe.variant == "compile" else BASELINE,
        Engine,
        partial(
            pytorch_.build_baseline,
            context.source,
            exported,
            recipe,
            context.build_options("pytorch"),
        ),
        depends_on=(canonical(context.source),),  # its files are loaded from where they lie
        subject=recipe.label,
        target=context.target("pytorch"),
    )
    return context.runner.stage(call)


def _build_other(
    context: CompileContext, exported: OnnxModel, eager: Engine, recipe: Recipe
) -> Engine:
    """A baseline beside eager in fp32, whose files say all that is to be loaded for most others."""
    if recipe.variant == "compile":
        return build_baseline(context, exported, recipe)
    digest = hashlib.sha256(f"{eager.digest} {canonical(recipe)}".encode()).hexdigest()
    return eager.model_copy(update={"recipe": recipe, "digest": digest, "notes": ()})


def _build_given(context: CompileContext, exported: OnnxModel, recipe: Recipe) -> Engine:
    """An engine of an ONNX file as it is, by the precision of its Q/DQ where it brings any."""
    quantised = recipe.quantizer == "given"
    return build_engine(
        context,
        exported.model_copy(update={"precision": recipe.precision}) if quantised else exported,
        recipe,
    )


def _gpu_tools(context: CompileContext) -> tuple[Target | None, tuple[OrtProvider, ...]]:
    """TensorRT's target and ONNX Runtime's providers on the GPU of this host, if it has one."""
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
    """The baselines that can be built, and why others cannot."""
    found, notes = [], []
    for recipe in recipes:
        try:
            found.append(build(recipe))
        except CANNOT_BUILD as error:
            text = f"{recipe.label} is left out: {error.message}"
            notes.append(Note(stage="baseline", text=text))
    return found, notes


def check_baselines(
    context: CompileContext,
    baselines: Sequence[Engine],
    reference: Engine,
    expected: ReferenceOutputs,
) -> tuple[Candidate, ...]:
    """The baselines as candidates: what each answers on the selection set.

    The reference itself is not checked.
    One in lower precision counts only if it keeps the accuracy: its state is then `measured`.
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
    """A baseline as it can be delivered; without an engine where it cannot be, and then it says
    why.

    PyTorch's is a program, which must pass the gate too. Any other is the engine that it was.
    """
    recipe = deliverable_recipe(baseline.recipe)
    candidate = Candidate(label=recipe.label, recipe=recipe, state="built")
    if recipe == baseline.recipe:
        return candidate.model_copy(update={"engine": baseline})
    try:
        engine = build_engine(context, exported, recipe)
        report = check_engine(context, engine, expected, context.data.selection)
    except CANNOT_BUILD as error:
        return candidate.model_copy(update={"state": "failed", "reason": error.message})
    found = candidate.model_copy(update={"selection": report, "notes": engine.notes})
    if not report.passed:
        return found.model_copy(
            update={"state": "failed accuracy", "reason": "; ".join(report.failures)}
        )
    return found.model_copy(update={"engine": engine})


def fit_baselines(checked: Iterable[Candidate]) -> list[Engine]:
    """The baselines that count: those that keep the accuracy."""
    return [each.engine for each in checked if each.engine and each.state == "measured"]


def unfit_notes(checked: Iterable[Candidate]) -> tuple[Note, ...]:
    """Why other baselines do not count."""
    unfit = (each for each in checked if each.state != "measured")
    texts = (f"{each.label} is left out: {each.reason}" for each in unfit)
    return tuple(Note(stage="baseline", text=text) for text in texts)


def kept_baseline(
    context: CompileContext,
    exported: OnnxModel,
    measured: Measured,
    baselines: Iterable[Engine],
    expected: ReferenceOutputs,
) -> Candidate | None:
    """What is delivered where no candidate is faster: the fastest baseline, as it can be served.

    None where a candidate is faster, or nothing was compared.
    """
    winner = choose(measured.candidates)
    if winner is None or not is_slower_or_equal(winner):
        return None
    fastest = (each for each in baselines if each.recipe.label == measured.run.baseline)
    return next(
        (deliverable_candidate(context, exported, each, expected) for each in fastest), None
    )


def measure(
    context: CompileContext, model: OnnxModel, baselines: list[Engine], prepared: Prepared
) -> Measured:
    """Latency of all that ran, interleaved with the baselines; a candidate that cannot be measured
    says why.
    """
    entries = entries_of(baselines, prepared)
    engines = [entry.engine for entry in entries]
    # the load of the moment does not make another host
    quiet = context.environment.model_copy(update={"load_1min": 0.0})
    labels = tuple(engine.recipe.label for engine in engines)
    call = StageCall(
        BENCHMARK,
        Benchmarks,
        partial(benchmark, entries, model, context.plan.benchmark, ENOUGH_RUNS),
        depends_on=(labels, quiet, context.plan.profiles),
    )
    found = context.runner.stage(call)
    found = with_limits(
        found,
        engines,
        {candidate.label: candidate.layers for candidate in prepared.candidates},
        context.plan.benchmark.threads,
    )
    by_label = {result.label: result for result in found.results}
    candidates = tuple(
        with_benchmark(candidate, by_label.get(candidate.label))
        for candidate in prepared.candidates
    )
    return Measured(
        candidates=candidates,
        rescues=prepared.rescues,
        ablation=(
            ablation_from(prepared.ablated, candidates)
            if prepared.ablated
            else Ablation(label="")
            if context.plan.ablate
            else None
        ),
        baselines=baselines_first(found, baselines),
        run=found,
        call=call_of_fastest(found, baselines),
    )


def call_of_fastest(found: Benchmarks, baselines: Iterable[Engine]) -> str:
    """How the user calls the baseline that ratios refer to; empty unless it is PyTorch's."""
    recipes = (engine.recipe for engine in baselines if engine.recipe.label == found.baseline)
    return next((call_of(recipe) for recipe in recipes if recipe.backend == "pytorch"), "")


def entries_of(baselines: Iterable[Engine], prepared: Prepared) -> list[RaceEntry]:
    """Every engine that is to be measured, and why."""
    compared = prepared.ablated.labels if prepared.ablated else frozenset()
    entries = [RaceEntry(engine, Role.BASELINE) for engine in baselines]
    for candidate in prepared.candidates:
        if candidate.engine is None or not worth_measuring(candidate):
            continue
        role = Role.CANDIDATE if candidate.state == "measured" else Role.SHOWN
        entries.append(
            RaceEntry(candidate.engine, Role.COMPARED if candidate.label in compared else role),
        )
    return entries


def baselines_first(found: Benchmarks, baselines: Iterable[Engine]) -> tuple[BenchmarkReport, ...]:
    """The baselines that were measured, first the one that all ratios refer to."""
    labels = {engine.recipe.label for engine in baselines}
    reports = [
        each
        for each in found.results
        if isinstance(
            each,
            BenchmarkReport,
        )
        and each.label in labels
    ]
    return tuple(sorted(reports, key=lambda report: report.label != found.baseline))


def worth_measuring(candidate: Candidate) -> bool:
    """All that are what they are called and gave answers: the plot shows what a loss of accuracy
    would have bought. But no vain rescue's attempt.
    """
    gave = candidate.selection is not None and candidate.state != "mislabelled"
    return gave and (candidate.state == "measured" or candidate.recipe.variant in ("", ABLATED))


def with_benchmark(
    candidate: Candidate, result: BenchmarkReport | BenchmarkFailure | None
) -> Candidate:
    """The candidate with what the benchmark found."""
    if isinstance(result, BenchmarkFailure):
        return candidate.model_copy(
            update={"state": "failed", "reason": f"benchmark: {result.reason}"}
        )
    return candidate.model_copy(update={"benchmark": result})


def validate_winner(
    context: CompileContext, reference: Engine, winner: Candidate | None
) -> ValidationReport | None:
    """The validation set, read once: for the reference and the winner. Not read where what the user
    has is kept.
    """
    if (
        winner is None
        or winner.engine is None
        or context.data.validation is None
        or is_slower_or_equal(
            winner,
        )
    ):
        return None
    expected = reference_outputs(context, reference, context.data.validation, at_every_size=False)
    return check_engine(context, winner.engine, expected, context.data.validation)


def baseline_notes(
    baselines: Sequence[Engine], candidates: Iterable[Candidate], given: Precision | None = None
) -> tuple[Note, ...]:
    """What the baselines say of themselves; where GPU meets CPU, that the ratio compares hardware
    too; and what fake quantisers cost PyTorch.
    """
    first = baselines[0].target
    on_gpu = first.compute_capability is not None
    others = [
        each.label
        for each in candidates
        if each.engine
        and each.benchmark
        and (each.engine.target.compute_capability is not None) != on_gpu
    ]
    text = (
        f"the baseline runs on {first.device}, other hardware than {', '.join(others)}: their ratio"
        " compares hardware too"
    )
    own = dict.fromkeys(note for engine in baselines for note in engine.notes)
    faked = (
        "the baseline computes the model's fake quantisers too, which the model as it was before"
        " that training does not have: it would be faster"
    )
    slowed = given is not None and first.backend == "pytorch"
    said = [text] * bool(others) + [faked] * slowed
    return (*own, *(Note(stage="benchmark", text=each) for each in said))


def write_up(
    context: CompileContext,
    models: Sequence[OnnxModel],
    measured: Measured,
    kept: Candidate | None,
    validation: ValidationReport | None,
    notes: Iterable[Note],
    command: str,
) -> Report:
    """All of it in one value, with the verdict.

    `kept`: the baseline as it can be delivered, which it is if nothing is faster. A program that
    was built for that is shown among the candidates, or why there is none.
    """
    decision = decide(
        measured.candidates,
        choose(measured.candidates),
        validation,
        Baseline(
            measured.run.baseline, measured.call, kept is not None and kept.engine is not None
        ),
    )
    winner = decision.winner
    return Report(
        name=context.plan.name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        plan=context.plan,
        source_digest=context.source.digest,
        environment=context.environment,
        steps=tuple(context.runner.steps),
        operators=operator_tables(models),
        reference=context.reference_name,
        baseline=measured.baselines[0] if measured.baselines else None,
        baselines=measured.baselines[1:],
        candidates=(*measured.candidates, *built_to_keep(kept, measured.candidates)),
        rescues=measured.rescues,
        ablation=measured.ablation,
        winner=(
            measured.run.baseline
            if decision.verdict == "keep"
            else winner.label
            if winner
            else None
        ),
        ratio=ratio_of(winner) if winner else None,
        ratio_missing=ratio_missing(winner) if winner else "",
        delivered=delivered_engine(decision, kept.engine if kept else None),
        validation=validation,
        verdict=decision.verdict,
        reasons=decision.reasons,
        next_steps=decision.next_steps,
        nearest_miss=decision.nearest_miss.label if decision.nearest_miss else None,
        notes=(
            *notes,
            *data_notes(context.plan),
            *chain.from_iterable(model.notes for model in models),
            *context.runner.store.notes,
        ),
        peaks=measured.run.peaks,
        gpu_use=measured.run.gpu_use,
        benchmarked=measured.run.created,
    )


def built_to_keep(
    kept: Candidate | None,
    candidates: Iterable[Candidate],
) -> tuple[Candidate, ...]:
    """The program that stands for a baseline, unless it is a candidate already."""
    known = {each.label for each in candidates}
    is_program = kept is not None and kept.recipe.backend == "torch"
    return (kept,) if kept and is_program and kept.label not in known else ()


def delivered_engine(decision: Decision, kept: Engine | None) -> Engine | None:
    """The engine that a verdict stands for; None where it was rejected."""
    if decision.verdict == "rejected":
        return None
    if decision.verdict == "keep":
        return kept
    return decision.winner.engine if decision.winner else None


def publish_report(report: Report, folder: Path) -> ReportFiles:
    """Write the delivered engine and the reports into the user's folder; an engine of an earlier
    compile is not left there.
    """
    if report.delivered:
        deliver_engine(report.delivered, folder / "engine")
    else:
        withdraw_engine(folder / "engine")
    return write_report(report, folder)


def operator_tables(models: Sequence[OnnxModel]) -> tuple[OperatorTable, ...]:
    """What the graph held after export, and after simplification."""
    return tuple(
        OperatorTable(
            stage=stage,
            operators=operator_histogram(model.path),
            size_bytes=file_size(model.path),
        )
        for stage, model in zip(("export", "simplify"), models, strict=True)
    )


def data_notes(plan: Plan) -> list[Note]:
    """What the reader must know of weights and data that are not real."""
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
    for role in DataConfig.model_fields:
        given = getattr(plan.data, role)
        if isinstance(given, GeneratedData):
            notes.append(Note(stage=role, text=f"random data: {given.because}"))
    return notes
