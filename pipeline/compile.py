"""The story: a plan in, a report out. `compile_plan` tells it; the functions below are its sentences, in order."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pydantic import BaseModel

from pipeline import backends, graph
from pipeline.backends import pytorch_
from pipeline.backends.openvino_nncf import quantize_with_nncf
from pipeline.config import DataConfig, GeneratedData, Plan
from pipeline.core import BuildOptions, CalibrationMethod, CalibrationTable, Engine, ModelSource, Note, OnnxModel, Precision, Recipe, TensorSpec
from pipeline.data import CalibrationSet, SampleSet, SelectionSet, ValidationSet, check_disjoint, open_set
from pipeline.decide import choose, decide, ratio_of
from pipeline.deliver import deliver_engine, withdraw_engine
from pipeline.errors import BackendUnavailable, ChildDied, InternalError, ModelError, PlanError, UnsupportedError
from pipeline.measure import Environment, environment
from pipeline.recipes import default_candidates, missing_backend_note, recipe_from_candidate
from pipeline.render import write_report
from pipeline.report import BenchmarkFailure, BenchmarkReport, Benchmarks, Candidate, OperatorTable, Report, ReportFiles, ValidationReport
from pipeline.runner import Runner, Stage
from pipeline.source import check_profiles, code_digest, source_from_config
from pipeline.stages.benchmark import benchmark, check_sizes
from pipeline.stages.build import build
from pipeline.stages.calibrate import calibrate
from pipeline.stages.convert import convert
from pipeline.stages.export import export
from pipeline.stages.simplify import simplify
from pipeline.stages.validate import ReferenceOutputs, check_outputs, run_reference, validate
from pipeline.store import canonical
from pipeline.task_metric import check_labels

GENERATED_SAMPLES = 32  # random inputs on which tensor errors are taken where there is no data
FEEDS_FOR_CHECKS = 4  # real samples on which export and simplify are checked
MOST_ROWS = 32  # samples per batch while checking accuracy: enough for speed, little enough for memory

EXPORT = Stage("export", 1, export, ("torch", "onnx", "onnxscript", "onnxruntime"))
SIMPLIFY = Stage("simplify", 1, simplify, ("onnx", "onnxsim", "onnx-graphsurgeon", "onnxruntime"))
CALIBRATE = Stage("calibrate", 1, calibrate, ("onnx", "onnxruntime"))
CONVERT = Stage("convert", 1, convert, ("onnx", "onnxruntime"))
NNCF = Stage("convert", 1, quantize_with_nncf, ("onnx", "nncf"))
BASELINE = Stage("baseline", 2, pytorch_.build_baseline, pytorch_.DISTRIBUTIONS)
REFERENCE = Stage("reference", 1, run_reference)
VALIDATE = Stage("validate", 1, validate, ("polygraphy",))
BENCHMARK = Stage("benchmark", 1, benchmark)


def compile_plan(plan: Plan, runner: Runner, command: str) -> Report:
    """Compile a plan: the report of the fastest engine that keeps its accuracy, or of why there is none.

    Raises a CrucibleError for a request that is impossible; an engine that is wrong or slow is part of the report.
    """
    job = open_job(plan, runner)
    recipes, notes = recipes_of(job)

    exported = export_model(job)
    check_outputs(plan.accuracy, exported.outputs)
    model = simplify_model(job, exported)
    reference, *others = build_baselines(job, exported)
    expected = reference_outputs(job, reference, job.data.selection)
    bugs: list[InternalError] = []
    prepared = [prepare(job, model, recipe, expected, bugs) for recipe in recipes]
    if bugs and not any(candidate.engine for candidate in prepared):
        raise bugs[0]
    measured = measure(job, model, [reference, *others], prepared)
    validation = validate_winner(job, reference, choose(measured.candidates))
    return write_up(job, (exported, model), measured, validation, notes, command)


@dataclass(frozen=True, slots=True)
class Data:
    """The three sets; selection is generated where the plan has none."""

    calibration: CalibrationSet | None
    selection: SelectionSet
    validation: ValidationSet | None


@dataclass(frozen=True, slots=True)
class Job:
    """What every sentence of the story needs."""

    plan: Plan
    runner: Runner
    source: ModelSource
    data: Data
    environment: Environment

    @property
    def samples(self) -> SampleSet:
        """Real inputs where there are any, for checks of the graph."""
        return self.data.calibration or self.data.selection

    @property
    def reference_name(self) -> str:
        return "ONNX Runtime fp32, the file as given" if self.source.kind == "onnx" else "PyTorch eager fp32, without TF32"

    @property
    def build_options(self) -> BuildOptions:
        return BuildOptions(profiles=self.plan.profiles, threads=self.plan.benchmark.threads)


@dataclass(frozen=True, slots=True)
class Measured:
    """Candidates with their latencies, and the baselines they are compared with."""

    candidates: tuple[Candidate, ...]
    baselines: tuple[BenchmarkReport, ...]
    created: str


def open_job(plan: Plan, runner: Runner) -> Job:
    """Find the source, complete the profiles, open the data: everything that can be wrong with a request is said here."""
    source = source_from_config(plan.model, plan.profiles)
    inputs = input_specs(source)
    complete = plan.model_copy(update={"profiles": check_profiles(inputs, plan.profiles)})
    check_sizes(plan.benchmark.sizes, inputs, complete.profiles)
    return Job(complete, runner, source, open_data(complete, inputs), environment())


def input_specs(source: ModelSource) -> tuple[TensorSpec, ...]:
    """The plan's inputs, or an ONNX file's own; PlanError where the plan says otherwise than the file."""
    if source.kind != "onnx" or source.path is None:
        return source.inputs
    model = graph.onnx_model(source.path.parent, source.path.name)
    asked, has = ([f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]" for spec in specs] for specs in (source.inputs, model.inputs))
    names = [spec.name for spec in model.outputs]
    for key, plans, files in (("inputs", asked, has), ("outputs", list(source.outputs), names)):
        if plans and plans != files:
            said = f"model.{key}: the plan says {', '.join(plans)}, the file has {', '.join(files)}"
            raise PlanError(said, f"leave model.{key} out: an .onnx file is taken as it is")
    if not model.inputs:
        raise ModelError(f"'{source.path}' has no inputs: its answer is a constant", "give a model that takes at least one input")
    return model.inputs


def open_data(plan: Plan, inputs: tuple[TensorSpec, ...]) -> Data:
    """Open and check the sets that the plan names; sets that overlap are an error."""
    nothing = GeneratedData(generate="random", samples=GENERATED_SAMPLES, because="the plan names no selection data", seed=plan.model.seed + 1)
    named = plan.data
    calibration = open_set(CalibrationSet, named.calibration, inputs, plan.profiles) if named.calibration is not None else None
    selection = open_set(SelectionSet, nothing if named.selection is None else named.selection, inputs, plan.profiles)
    validation = open_set(ValidationSet, named.validation, inputs, plan.profiles) if named.validation is not None else None
    check_disjoint(*(opened for opened in (calibration, selection, validation) if opened is not None))
    for judged, given in ((selection, named.selection), (validation, named.validation)):
        if judged is not None and isinstance(given, tuple):
            check_labels(plan.accuracy, judged.has_labels)
    return Data(calibration, selection, validation)


def recipes_of(job: Job) -> tuple[tuple[Recipe, ...], tuple[Note, ...]]:
    """The recipes to try. A backend that the plan names must be here; of the others, those that are."""
    calibrated = job.data.calibration is not None
    named = {candidate.backend for candidate in job.plan.candidates}
    targets, notes = {}, []
    for name in named or ("onnxruntime", "openvino"):
        try:
            targets[name] = backends.backend(name).probe()
        except BackendUnavailable as error:
            if named:
                raise
            notes.append(missing_backend_note(name, error.message))
    if not calibrated and not named:
        notes.append(Note(stage="candidates", text="int8 is left out: the plan has no calibration data", level="info"))
    candidates = job.plan.candidates or default_candidates(targets, calibrated)
    recipes = tuple(dict.fromkeys(recipe_from_candidate(each, targets[each.backend], job.plan, calibrated) for each in candidates))
    for recipe in recipes:
        backends.backend(recipe.backend).check_recipe(recipe, targets[recipe.backend])
    return recipes, tuple(notes)


def export_model(job: Job) -> OnnxModel:
    """The source as ONNX, checked against the source."""
    samples = job.samples.first(FEEDS_FOR_CHECKS)
    inputs, options = (job.source.digest, job.samples.digest), options_of(job.plan.export, job.plan.model, *job.plan.profiles)
    return job.runner.stage(EXPORT, OnnxModel, job.source, job.plan.profiles, job.plan.export, samples, inputs=inputs, options=options)


def simplify_model(job: Job, exported: OnnxModel) -> OnnxModel:
    """The same function in fewer nodes, or the exported graph where that cannot be had."""
    if not job.plan.simplify.enabled:
        return exported
    samples = job.samples.first(FEEDS_FOR_CHECKS)
    inputs, options = (exported.digest, job.samples.digest), options_of(job.plan.simplify, *job.plan.profiles)
    return job.runner.stage(SIMPLIFY, OnnxModel, exported, job.plan.profiles, job.plan.simplify, samples, inputs=inputs, options=options)


def build_baselines(job: Job, exported: OnnxModel) -> list[Engine]:
    """What the user has today; the first is also the accuracy reference. PyTorch, or ONNX Runtime fp32 for an ONNX file."""
    if job.source.kind == "onnx":
        return [build_engine(job, exported, Recipe(backend="onnxruntime", precision=Precision.FP32, variant="as given"))]
    target, engines = pytorch_.probe(), []
    for variant in dict.fromkeys(("eager", *job.plan.benchmark.baselines)):
        recipe = Recipe(backend="pytorch", precision=Precision.FP32, variant=variant)
        inputs, options = (job.source.digest, exported.digest), options_of(job.source, recipe, job.build_options)
        arguments = (job.source, exported, recipe, job.build_options)
        engines.append(job.runner.stage(BASELINE, Engine, *arguments, inputs=inputs, options=options, subject=recipe.label, target=target))
    return engines


def reference_outputs(job: Job, reference: Engine, samples: SampleSet) -> ReferenceOutputs:
    """What the reference answers to every sample of a set."""
    rows = batch_rows(job)
    inputs, options = (reference.digest, job.source.digest, samples.digest), canonical({"rows": rows})
    return job.runner.stage(REFERENCE, ReferenceOutputs, reference, samples, rows, inputs=inputs, options=options, subject=samples.role)


def prepare(job: Job, model: OnnxModel, recipe: Recipe, expected: ReferenceOutputs, bugs: list[InternalError]) -> Candidate:
    """Convert, build and check one candidate, as far as it comes. What stops it is part of the report; a bug of ours is added to `bugs` too."""
    candidate = Candidate(label=recipe.label, recipe=recipe, state="failed")
    try:
        converted = convert_model(job, model, recipe)
        engine = build_engine(job, converted, recipe)
        notes = engine.notes if converted is model else (*converted.notes, *engine.notes)
        candidate = candidate.model_copy(update={"engine": engine, "notes": notes})
        report = check_engine(job, engine, expected, job.data.selection)
    except UnsupportedError as error:
        return candidate.model_copy(update={"state": "refused", "reason": error.message})
    except BackendUnavailable as error:
        return candidate.model_copy(update={"state": "built" if candidate.engine else "refused", "reason": error.message})
    except (ModelError, ChildDied) as error:
        return candidate.model_copy(update={"reason": error.message})
    except InternalError as error:  # the others may still be right
        bugs.append(error)
        return candidate.model_copy(update={"reason": f"a bug in Crucible, please report it: {error.message}"})
    state = "measured" if report.passed else "failed accuracy"
    return candidate.model_copy(update={"state": state, "selection": report, "reason": "; ".join(report.failures)})


def convert_model(job: Job, model: OnnxModel, recipe: Recipe) -> OnnxModel:
    """The graph that this recipe asks for."""
    if recipe.precision is Precision.FP32 or recipe.realised_in == "runtime":
        return model
    if recipe.quantizer == "nncf" and job.data.calibration is not None:
        return quantize_by_nncf(job, model, recipe, job.data.calibration)
    table = calibration_table(job, model, recipe)
    samples = job.samples.first(FEEDS_FOR_CHECKS)
    inputs = (model.digest, job.samples.digest, table.root.name if table else "")
    arguments = (model, recipe, table, samples)
    converted = job.runner.stage(CONVERT, OnnxModel, *arguments, inputs=inputs, options=options_of(recipe), subject=recipe.label)
    return converted.model_copy(update={"notes": (*table.notes, *converted.notes)}) if table else converted


def quantize_by_nncf(job: Job, model: OnnxModel, recipe: Recipe, calibration: CalibrationSet) -> OnnxModel:
    """NNCF chooses ranges and placement by itself, so it stands in the place of calibrate and convert."""
    inputs, options = (model.digest, calibration.digest), options_of(recipe, job.plan.calibration)
    arguments = (model, calibration, recipe, job.plan.calibration)
    return job.runner.stage(NNCF, OnnxModel, *arguments, inputs=inputs, options=options, subject=recipe.label)


def calibration_table(job: Job, model: OnnxModel, recipe: Recipe) -> CalibrationTable | None:
    """The ranges that a recipe needs: int8 its method's, 16-bit floats the largest values. None where there is no data."""
    if job.data.calibration is None:
        return None
    method = recipe.method or CalibrationMethod.MINMAX
    inputs, options = (model.digest, job.data.calibration.digest), canonical({"method": method, **job.plan.calibration.model_dump()})
    arguments = (model, job.data.calibration, method, job.plan.calibration)
    return job.runner.stage(CALIBRATE, CalibrationTable, *arguments, inputs=inputs, options=options, subject=str(method))


def build_engine(job: Job, model: OnnxModel, recipe: Recipe) -> Engine:
    """The engine of a converted graph."""
    backend = backends.backend(recipe.backend)
    stage = Stage("build", 1, build, backend.DISTRIBUTIONS)
    options = options_of(recipe, job.build_options)
    arguments = (model, recipe, job.build_options)
    return job.runner.stage(stage, Engine, *arguments, inputs=(model.digest,), options=options, subject=recipe.label, target=backend.probe())


def check_engine(job: Job, engine: Engine, expected: ReferenceOutputs, samples: SampleSet) -> ValidationReport:
    """One engine against the reference on one set."""
    rows = batch_rows(job)
    accuracy = job.plan.accuracy
    metric = code_digest(accuracy.metric, accuracy.python_path, "accuracy.metric") if ":" in accuracy.metric else ""
    inputs, options = (engine.digest, expected.digest, samples.digest, metric), options_of(accuracy, engine.recipe)
    arguments = (engine, expected, samples, accuracy, rows)
    subject = f"{engine.recipe.label} on {samples.role}"
    return job.runner.stage(VALIDATE, ValidationReport, *arguments, inputs=inputs, options=options, subject=subject)


def batch_rows(job: Job) -> int:
    """Samples per batch while checking accuracy: what every profile allows, at most MOST_ROWS."""
    first = job.data.selection.specs[0].shape[:1]
    if not first or isinstance(first[0], int):
        return first[0] if first and isinstance(first[0], int) else 1
    ranges = [profile.dims[first[0]].max for profile in job.plan.profiles]
    return max(1, min([MOST_ROWS, *ranges]))


def measure(job: Job, model: OnnxModel, baselines: list[Engine], candidates: list[Candidate]) -> Measured:
    """Latency of all that ran, interleaved with the baselines; a candidate that cannot be measured says why."""
    engines = [*baselines, *(candidate.engine for candidate in candidates if candidate.engine and candidate.selection)]
    quiet = job.environment.model_copy(update={"load_1min": 0.0})  # the load of the moment does not make another host
    inputs = (model.digest, *chain.from_iterable((engine.recipe.label, engine.digest) for engine in engines))
    options = options_of(job.plan.benchmark, quiet, *job.plan.profiles)
    found = job.runner.stage(BENCHMARK, Benchmarks, engines, model, job.plan.benchmark, inputs=inputs, options=options)
    by_label = {result.label: result for result in found.results}
    return Measured(
        candidates=tuple(with_benchmark(candidate, by_label.get(candidate.label)) for candidate in candidates),
        baselines=tuple(report for engine in baselines if isinstance(report := by_label[engine.recipe.label], BenchmarkReport)),
        created=found.created,
    )


def with_benchmark(candidate: Candidate, result: BenchmarkReport | BenchmarkFailure | None) -> Candidate:
    """The candidate with what the benchmark found."""
    if isinstance(result, BenchmarkFailure):
        return candidate.model_copy(update={"state": "failed", "reason": f"benchmark: {result.reason}"})
    return candidate.model_copy(update={"benchmark": result})


def validate_winner(job: Job, reference: Engine, winner: Candidate | None) -> ValidationReport | None:
    """The validation set, read once: for the reference and the winner."""
    if winner is None or winner.engine is None or job.data.validation is None:
        return None
    expected = reference_outputs(job, reference, job.data.validation)
    return check_engine(job, winner.engine, expected, job.data.validation)


def write_up(
    job: Job, models: Sequence[OnnxModel], measured: Measured, validation: ValidationReport | None, notes: Iterable[Note], command: str
) -> Report:
    """All of it in one value, with the verdict."""
    winner = choose(measured.candidates)
    decision = decide(measured.candidates, winner, validation)
    return Report(
        name=job.plan.name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        plan=job.plan,
        source_digest=job.source.digest,
        environment=job.environment,
        steps=tuple(job.runner.steps),
        operators=operator_tables(models),
        reference=job.reference_name,
        baseline=measured.baselines[0] if measured.baselines else None,
        baselines=measured.baselines[1:],
        candidates=measured.candidates,
        winner=decision.winner.label if decision.winner else None,
        ratio=ratio_of(decision.winner) if decision.winner else None,
        validation=validation,
        verdict=decision.verdict,
        reasons=decision.reasons,
        next_steps=decision.next_steps,
        nearest_miss=decision.nearest_miss.label if decision.nearest_miss else None,
        notes=(*notes, *data_notes(job.plan), *chain.from_iterable(model.notes for model in models), *job.runner.store.notes),
        benchmarked=measured.created,
    )


def publish_report(report: Report, folder: Path) -> ReportFiles:
    """Write the winner's engine and the reports into the user's folder; a rejected engine is not left there, nor that of an earlier compile."""
    winner = next((candidate for candidate in report.candidates if candidate.label == report.winner), None)
    if winner and winner.engine and report.verdict != "rejected":
        deliver_engine(winner.engine, folder / "engine")
    else:
        withdraw_engine(folder / "engine")
    return write_report(report, folder)


def operator_tables(models: Sequence[OnnxModel]) -> tuple[OperatorTable, ...]:
    """What the graph held after export, and after simplification."""
    return tuple(
        OperatorTable(stage=stage, operators=graph.operator_histogram(model.path), size_bytes=graph.file_size(model.path))
        for stage, model in zip(("export", "simplify"), models, strict=True)
    )


def data_notes(plan: Plan) -> list[Note]:
    """What the reader must know of weights and data that are not real."""
    notes = [Note(stage="model", text=f"weights: {plan.model.weights_from}", level="info")] if plan.model.weights_from else []
    if plan.model.path and plan.model.path.suffix == ".pt2":
        text = "the baseline runs the exported program of the .pt2, which on small models is slower than the module it was made from"
        notes.append(Note(stage="benchmark", text=text))
    for role in DataConfig.model_fields:
        given = getattr(plan.data, role)
        if isinstance(given, GeneratedData):
            notes.append(Note(stage=role, text=f"random data: {given.because}"))
    return notes


def options_of(*options: BaseModel) -> str:
    """Canonical JSON of several option values."""
    return "\n".join(canonical(option) for option in options)
