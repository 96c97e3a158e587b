"""Prepare one recipe: quantise or cast, build, prove the precision, check the outputs.

Also rescues candidates that fail their accuracy, and runs the ablation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat

from pipeline import backends
from pipeline.accuracy.gate import gate_points
from pipeline.backends.base import no_layers
from pipeline.backends.cuda import CudaError, OutOfDeviceMemory
from pipeline.backends.onnxruntime.backend import gpu_providers, provider_target
from pipeline.backends.onnxruntime.weight_only import compress_with_onnxruntime
from pipeline.backends.openvino.nncf import compress_with_nncf, quantize_with_nncf
from pipeline.backends.pytorch.qat import quantises
from pipeline.backends.tensorrt.calibrator import calibrate_with_tensorrt
from pipeline.backends.tensorrt.library import BINDINGS, release_warnings
from pipeline.backends.tensorrt.modelopt import quantize_with_modelopt
from pipeline.compiler.ablation import Ablated, base_of, reversals
from pipeline.compiler.context import FEEDS_FOR_CHECKS, CompileContext, batch_rows
from pipeline.compiler.fallback import (
    ANY_SHAPE,
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
from pipeline.core import (
    CalibrationMethod,
    CalibrationTable,
    Engine,
    Note,
    OnnxModel,
    Precision,
    Profile,
    Recipe,
    Target,
)
from pipeline.data.samples import CalibrationSet, SampleSet
from pipeline.errors import (
    BackendUnavailable,
    ChildDied,
    CrucibleError,
    InternalError,
    LoadCrashed,
    ModelError,
    PlanError,
    UnsupportedError,
)
from pipeline.execution.child_process import stop_children
from pipeline.execution.stage_runner import Stage, StageCall
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.onnx_graph.files import operator_histogram, read_proto
from pipeline.onnx_graph.inspect import attentions
from pipeline.plan.recipes import (
    baseline_recipes,
    default_candidates,
    distinct,
    missing_backend_note,
    recipes_from_candidate,
    weight_bits,
)
from pipeline.plan.schema import GeneratedData
from pipeline.plan.source import code_digest
from pipeline.quantization.half_precision import flatten
from pipeline.quantization.lint.rules import finding_notes, lint, saturation_notes
from pipeline.results.layer_table import LayerTable
from pipeline.results.precision_audit import (
    INTEGER_OPERATORS,
    attention_in_one_kernel,
    mislabelled,
    precision_notes,
)
from pipeline.results.report import Candidate, NodeRanking, Rescue, State, ValidationReport
from pipeline.stages.build import build
from pipeline.stages.calibrate import Coverage, calibrate, cover
from pipeline.stages.convert import convert
from pipeline.stages.inspect_layers import Proof, prove
from pipeline.stages.sensitivity import rank_nodes
from pipeline.stages.validate import ReferenceOutputs, run_reference, validate

GPU_BACKENDS = ("tensorrt", "torch")  # tried on a GPU where the plan names no candidates
# bytes of a model for which packages of AOTInductor are tried beside TensorRT
MIN_AOTI_BYTES = 100 * 2**20
TOO_SMALL_FOR_AOTI = (
    "AOTInductor is left out: the model is below 100 MiB, and each package takes up to a minute to"
    " build. To try it, name it in `candidates`: {backend: torch, precision: fp16}"
)
MAX_SIDE_BY_SIDE_BYTES = 50 * 2**20  # bytes of a model whose candidates are prepared side by side
POLL_S = 0.1  # between two checks whether the threads have ended
# precisions with one kernel for an attention; of fp8 that is not known
FUSED = (
    Precision.FP16,
    Precision.BF16,
    Precision.INT8,
)
CALIBRATE = Stage("calibrate", 2, ("onnx", "onnxruntime"))
COVER = Stage("cover", 2, ("onnx", "onnxruntime"), writes_files=False)
CONVERT = Stage("convert", 6, ("onnx", "onnxruntime"))
QUANTIZERS: dict[str, tuple[Stage, Callable[..., OnnxModel]]] = {
    "nncf": (Stage("convert", 2, ("onnx", "nncf")), quantize_with_nncf),
    "modelopt": (
        Stage("convert", 4, ("nvidia-modelopt", "onnx", "onnxruntime")),
        quantize_with_modelopt,
    ),
    "tensorrt": (
        Stage("calibrate", 2, ("tensorrt", *BINDINGS, "onnx", "polygraphy")),
        calibrate_with_tensorrt,
    ),
}
"""Stage and function of the libraries that choose ranges and placement by themselves."""
WEIGHT_QUANTIZERS: dict[str, tuple[Stage, Callable[..., OnnxModel]]] = {
    "nncf": (Stage("convert", 2, ("onnx", "nncf")), compress_with_nncf),
    "onnxruntime": (Stage("convert", 2, ("onnx", "onnxruntime")), compress_with_onnxruntime),
}
BUILD = Stage("build", 3)  # its tools are those of the backend
PROVE = Stage("prove", 5, writes_files=False)
REFERENCE = Stage("reference", 3)
VALIDATE = Stage("validate", 6, ("polygraphy",), writes_files=False)
RANK = Stage("rank", 3, ("onnx", "onnxruntime"))
STAGES = (
    CALIBRATE,
    COVER,
    CONVERT,
    *(stage for stage, _ in QUANTIZERS.values()),
    *(stage for stage, _ in WEIGHT_QUANTIZERS.values()),
    BUILD,
    PROVE,
    REFERENCE,
    VALIDATE,
    RANK,
)

CANNOT_BUILD = (
    UnsupportedError,
    BackendUnavailable,
    ModelError,
    ChildDied,
    CudaError,
    OutOfDeviceMemory,
)
"""Errors that stop one candidate but not the others."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The candidates with their states, and the rescues of those that failed."""

    candidates: tuple[Candidate, ...]
    rescues: tuple[Rescue, ...] = ()
    ablated: Ablated | None = None


def check_candidates(context: CompileContext) -> None:
    """Raise the errors of the plan's candidates before the export starts.

    int8 needs calibration data, unless the PyTorch model has scales of its own. The model runs
    once to find that out, but only if the plan has int8 and no calibration data.
    """
    if context.source.kind != "onnx":
        castable = context.source.kind != "pt2"
        baseline_recipes(context.plan.benchmark.baselines, context.target("pytorch"), castable)
    try:
        recipes_of(context)
    except PlanError:
        if context.data.calibration is not None or context.source.kind == "onnx":
            raise
        recipes_of(context, exported=False)  # raises all errors that need no loaded model
        if not context.runner.run(
            quantises, context.source, *context.samples.first(1), name="does the model quantise?"
        ):
            raise


def recipes_of(
    context: CompileContext, exported: bool = True, size: int | None = None
) -> tuple[tuple[Recipe, ...], tuple[Note, ...]]:
    """Return the recipes to try, with notes on backends and precisions that are left out.

    BackendUnavailable if the plan names a backend that is not installed. Without names in the
    plan, the installed backends are used.

    `exported`: False before the export, when a PyTorch model may still have scales of its own, so
    that int8 may need no calibration data. `size`: bytes of the exported model. If TensorRT is
    used, a model below MIN_AOTI_BYTES is not compiled by AOTInductor, unless the plan names torch.
    """
    calibrated = context.data.calibration is not None or not (
        exported or context.source.kind == "onnx"
    )
    named = {candidate.backend for candidate in context.plan.candidates}
    targets, notes = {}, []
    gpu_backends = GPU_BACKENDS if context.has_gpu else ()
    is_small = size is not None and size < MIN_AOTI_BYTES
    for name in named or (*gpu_backends, "onnxruntime", "openvino"):
        if name == "torch" and not named and context.source.kind == "onnx":
            continue
        if name == "torch" and not named and "tensorrt" in targets and is_small:
            notes.append(Note(stage="candidates", text=TOO_SMALL_FOR_AOTI, level="info"))
            continue
        try:
            targets[name] = context.target(name)
        except BackendUnavailable as error:
            if named:
                raise
            notes.append(missing_backend_note(name, error.message))
    if not calibrated and not named and not context.given:
        notes.append(
            Note(
                stage="candidates",
                text="int8 is left out: the plan has no calibration data",
                level="info",
            )
        )
    candidates = context.plan.candidates or default_candidates(
        targets,
        calibrated,
        context.given,
        gpu_providers() if context.has_gpu else (),
    )
    expanded = (
        recipes_from_candidate(
            candidate, targets[candidate.backend], context.plan, calibrated, context.given
        )
        for candidate in candidates
    )
    recipes = distinct(chain.from_iterable(expanded))
    check_any(recipes, targets)
    return recipes, (*notes, *release_notes(targets), *unused_notes(context))


def release_notes(targets: Mapping[str, Target]) -> tuple[Note, ...]:
    """Return notes on known wrong results of the installed TensorRT release.

    They are not stored with engines, because a stored engine would lack later reports.
    """
    version = targets["tensorrt"].version if "tensorrt" in targets else ""
    return tuple(Note(stage="build", text=text) for text in release_warnings(version))


def check_any(recipes: Sequence[Recipe], targets: Mapping[str, Target]) -> None:
    """Raise UnsupportedError if this host supports none of the recipes.

    If it supports some, `prepare` reports the others as refused.
    """
    errors = []
    for recipe in recipes:
        try:
            backends.backend(recipe.backend).check_recipe(recipe, targets[recipe.backend])
        except UnsupportedError as error:
            errors.append(error)
    if recipes and len(errors) == len(recipes):
        raise errors[0]


def unused_notes(context: CompileContext) -> tuple[Note, ...]:
    """Return notes on settings that have no effect because the model has its own Q/DQ."""
    if context.given is None:
        return ()
    unused = []
    if context.data.calibration is not None:
        unused.append("calibration data is not needed")
    if context.plan.ablate:
        unused.append("`ablate` has no switches to reverse")
    return tuple(
        Note(stage="calibrate", text=f"{text}: the model brings its own Q/DQ", level="info")
        for text in unused
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate with its state, and the InternalError that stopped it, if there is one."""

    candidate: Candidate
    bug: InternalError | None = None


def prepare(
    context: CompileContext, model: OnnxModel, recipe: Recipe, expected: ReferenceOutputs
) -> Outcome:
    """Convert, build and check one candidate. An error that stops it becomes its reason."""
    candidate = Candidate(label=recipe.label, recipe=recipe, state="failed")
    try:
        backends.backend(recipe.backend).check_recipe(recipe, context.target(recipe.backend))
        check_crashed(context, recipe)
        converted = convert_model(context, model, recipe)
        engine = build_engine(context, converted, recipe)
        candidate = with_engine(candidate, engine, model, converted)
        tables = prove_engine(context, engine, converted)
        plain_attention = context.plan.simplify.plain_attention
        candidate = with_layers(candidate, tables, converted, plain_attention)
        candidate = with_answers(context, model, candidate, engine, expected)
    except InternalError as error:  # other candidates may still work
        reason = f"a bug in Crucible, please report it: {error.message}"
        return Outcome(stopped(candidate, "failed", reason), error)
    except CANNOT_BUILD as error:
        if isinstance(error, LoadCrashed):
            context.crashed[recipe.form or ""] = recipe.label
        return Outcome(stopped(candidate, state_after(error, candidate), error.message))
    return Outcome(candidate)


def state_after(error: CrucibleError, candidate: Candidate) -> State:
    """Return the state of a candidate that an error has stopped."""
    if isinstance(error, UnsupportedError):
        return "refused"
    if isinstance(error, BackendUnavailable):
        return "built" if candidate.engine else "refused"
    return "failed"


def with_engine(
    candidate: Candidate, engine: Engine, model: OnnxModel, converted: OnnxModel
) -> Candidate:
    """Add the engine, and the notes of conversion and build, to the candidate."""
    notes = engine.notes
    if converted is not model:
        findings = lint_notes(converted, candidate.recipe, engine.target)
        notes = (*converted.notes, *findings, *engine.notes)
    return candidate.model_copy(
        update={"engine": engine, "kept_fp32": converted.kept_fp32, "notes": notes}
    )


def with_answers(
    context: CompileContext,
    model: OnnxModel,
    candidate: Candidate,
    engine: Engine,
    expected: ReferenceOutputs,
) -> Candidate:
    """Check the engine on the selection set and set the candidate's state accordingly.

    A mislabelled candidate stays mislabelled: the check is reported, but it cannot win.
    """
    report = check_engine(context, engine, expected, context.data.selection)
    if candidate.state == "mislabelled":
        return candidate.model_copy(update={"selection": report})
    misfit = ranges_misfit(context, model, candidate.recipe)
    update: dict[str, object] = {"selection": report, "reason": "; ".join(report.failures)}
    if report.passed:
        update["state"] = "measured"
        if misfit:  # the outputs are accurate nevertheless
            note = Note(stage="calibrate", text=misfit)
            update["notes"] = (*candidate.notes, note)
    else:
        update["state"] = "failed accuracy"
        if misfit:
            update["reason"] = "; ".join((misfit, *report.failures))
    return candidate.model_copy(update=update)


def check_crashed(context: CompileContext, recipe: Recipe) -> None:
    """Raise UnsupportedError if the same form of program crashed in another precision.

    A build takes about a minute and would crash again.
    """
    if recipe.form in context.crashed:
        other = context.crashed[recipe.form]
        raise UnsupportedError(
            f"not built: {other}, which is built in the same way, crashed on this host",
            f"read the reason of {other}",
        )


def prepare_all(
    context: CompileContext, model: OnnxModel, recipes: Sequence[Recipe], expected: ReferenceOutputs
) -> list[Outcome]:
    """Prepare every candidate, in order. They run in parallel if that disturbs no timing."""
    if context.runner.workers == 1 or not may_overlap(model, recipes, context.has_gpu):
        return [prepare(context, model, recipe, expected) for recipe in recipes]
    branches = [context.runner.branch() for _ in recipes]
    contexts = [replace(context, runner=branch) for branch in branches]
    try:
        with ThreadPoolExecutor(context.runner.workers) as pool:
            arguments = zip(contexts, repeat(model), recipes, repeat(expected))
            return results_of([pool.submit(prepare, *values) for values in arguments])
    finally:
        for branch in branches:
            context.runner.take_over(branch)


def candidates_of(outcomes: Sequence[Outcome]) -> list[Candidate]:
    """Return the candidates. Raises the first InternalError if there is no engine at all."""
    candidates = [outcome.candidate for outcome in outcomes]
    bugs = [outcome.bug for outcome in outcomes if outcome.bug]
    if bugs and not any(candidate.engine for candidate in candidates):
        raise bugs[0]
    return candidates


def results_of(futures: Sequence[Future[Outcome]]) -> list[Outcome]:
    """Return the results of the threads, in order. The first error stops all threads."""
    try:
        for done in wait(futures, return_when=FIRST_EXCEPTION).done:
            done.result()
        return [future.result() for future in futures]
    except BaseException:  # Ctrl-C, or an error that stops the whole compile
        for future in futures:
            future.cancel()
        while any(not future.done() for future in futures):
            stop_children()  # again: a thread may have started its next child meanwhile
            wait(futures, POLL_S)
        raise


def may_overlap(model: OnnxModel, recipes: Sequence[Recipe], has_gpu: bool) -> bool:
    """Return whether candidates may be prepared in parallel.

    False on a GPU, where TensorRT and inductor time kernels while they build. False for large
    models: each of their stages uses all cores and needs much memory.
    """
    on_cpu = all(recipe.backend in ("onnxruntime", "openvino") for recipe in recipes)
    size = sum(file.stat().st_size for file in model.root.rglob("*") if file.is_file())
    return on_cpu and size <= MAX_SIDE_BY_SIDE_BYTES and not has_gpu


def stopped(candidate: Candidate, state: State, reason: str) -> Candidate:
    """Set the state and reason of a candidate that an error stopped.

    A mislabelled candidate keeps its state.
    """
    if candidate.state == "mislabelled":
        return candidate.model_copy(
            update={"reason": f"{candidate.reason}; its outputs were not checked: {reason}"}
        )
    return candidate.model_copy(update={"state": state, "reason": reason})


def lint_notes(converted: OnnxModel, recipe: Recipe, target: Target) -> tuple[Note, ...]:
    """Return notes on the cost of the model's own Q/DQ on this backend and host.

    Empty for Q/DQ pairs that Crucible has placed.
    """
    if recipe.quantizer != "given":
        return ()
    flat = flatten(read_proto(converted.path)).graph
    saturated = saturation_notes(flat) if weight_bits(target) < 8 else ()
    return (*saturated, *finding_notes(lint(flat, recipe.backend), recipe.backend))


def rescue(
    context: CompileContext,
    model: OnnxModel,
    candidates: Sequence[Candidate],
    expected: ReferenceOutputs,
) -> Prepared:
    """Rescue the candidates that failed their accuracy, and return all candidates.

    pipeline.compiler.fallback defines the steps of a rescue.
    """
    known = {candidate.label: candidate for candidate in candidates}
    stories = []
    for failed in to_rescue(candidates) if context.plan.rescue else ():
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
                outcome = prepare(replace(context, plan=tuned), model, attempt.recipe, expected)
                known[label] = outcome.candidate
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
        yield from with_nodes_kept(best, rank(context, model, best), context.plan.keep_builds)
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
            known[label] = prepare(context, model, reversal.recipe, expected).candidate
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


def with_layers(
    candidate: Candidate, tables: Sequence[LayerTable], converted: OnnxModel, plain_attention: bool
) -> Candidate:
    """Add the layer table of each profile to the candidate.

    Its state is `mislabelled` if in one profile the engine does not run the precision of its
    label. `plain_attention`: the setting of the plan.
    """
    for table in tables:
        audited = _with_table(candidate, table, converted, plain_attention)
        if table.profile:
            where = f"profile {table.profile + 1}: "
            notes = tuple(
                note.model_copy(update={"text": where + note.text})
                for note in audited.notes[len(candidate.notes) :]
            )
            is_first_mismatch = audited.state == "mislabelled" and candidate.state != "mislabelled"
            verdict = {"state": audited.state, "reason": where + audited.reason}
            audited = candidate.model_copy(
                update={
                    "other_layers": (*candidate.other_layers, table),
                    "notes": (*candidate.notes, *notes),
                },
            )
            if is_first_mismatch:
                audited = audited.model_copy(update=verdict)
        candidate = audited
    return candidate


def _with_table(
    candidate: Candidate, table: LayerTable, converted: OnnxModel, plain_attention: bool
) -> Candidate:
    """Add the layer table of one profile to the candidate, with its notes and its verdict."""
    recipe = candidate.recipe
    precision, kept, forced = recipe.precision, recipe.keep_fp32, converted.kept_fp32
    notes = [
        *candidate.notes,
        *precision_notes(table, None if recipe.weight_only else precision, kept, forced),
    ]
    if recipe.backend == "tensorrt" and precision in FUSED:
        notes += _attention_notes(table, converted, plain_attention)
    mismatch = mislabelled(precision, table, kept, recipe.weight_only, forced)
    if mismatch and precision is Precision.FP32:
        own_operators = INTEGER_OPERATORS & operator_histogram(converted.path).keys()
        if own_operators:
            text = (
                "fp32 is the precision of this model's float operators: it has 8-bit operators of"
                f" its own ({', '.join(sorted(own_operators))})"
            )
            notes.append(Note(stage="prove", text=text, level="info"))
            mismatch = ""
    state = "mislabelled" if mismatch else candidate.state
    return candidate.model_copy(
        update={"layers": table, "notes": tuple(notes), "state": state, "reason": mismatch}
    )


def _attention_notes(
    table: LayerTable, converted: OnnxModel, plain_attention: bool
) -> tuple[Note, ...]:
    """Return a note if not every attention of the graph runs in one kernel."""
    graph = read_proto(converted.path, weights=False).graph
    fused, places = attention_in_one_kernel(table, attentions(graph))
    if fused >= places:
        return ()
    text = f"attention is in one kernel in {fused} of {places} places"
    if not plain_attention:
        text += ": `simplify: {plain_attention: true}` may bring it there"
    return (Note(stage="prove", text=text, level="info"),)


def prove_engine(
    context: CompileContext, engine: Engine, converted: OnnxModel
) -> tuple[LayerTable, ...]:
    """Return the layer table of each profile: the precision and time of every kernel.

    Kernels are timed at the opt size. If the backend builds one engine for all shapes, every
    profile has the same kernels, and only the first one is inspected. Empty if the backend gives
    no layers.
    """
    backend = engine.target.backend
    if backends.backend(backend).layers is no_layers:
        return ()
    profiles = engine.profiles[:1] if backend in ANY_SHAPE else engine.profiles
    tables = []
    for index, profile in enumerate(profiles or (Profile(),)):
        feeds = draw_feeds(engine.inputs, profile.sizes("opt"), 0, profile.values_at("opt"))
        subject = engine.recipe.label
        if index:
            subject += f", profile {index + 1}"
        work = partial(prove, engine, feeds, converted, index)
        proof = context.runner.stage(
            StageCall(PROVE, Proof, work, subject=subject, target=engine.target)
        )
        if proof.table:
            tables.append(proof.table)
    return tuple(tables)


def convert_model(context: CompileContext, model: OnnxModel, recipe: Recipe) -> OnnxModel:
    """Convert the graph for this recipe."""
    if recipe.weight_only:  # needs no data
        stage, compress = WEIGHT_QUANTIZERS[recipe.quantizer]
        work = partial(compress, model, recipe)
        return context.runner.stage(StageCall(stage, OnnxModel, work, subject=recipe.label))
    quantizer: str = recipe.quantizer
    if recipe.realised_in == "flags" and recipe.precision is Precision.INT8:
        quantizer = "tensorrt"
    if quantizer in QUANTIZERS and context.data.calibration is not None:
        return quantize_by(quantizer, context, model, recipe, context.data.calibration)
    if recipe.precision is Precision.FP32 or recipe.realised_in != "graph":
        return model
    table = calibration_table(context, model, recipe)
    work = partial(convert, model, recipe, table, context.samples.first(FEEDS_FOR_CHECKS))
    converted = context.runner.stage(StageCall(CONVERT, OnnxModel, work, subject=recipe.label))
    if table is None:
        return converted
    return converted.model_copy(update={"notes": (*table.notes, *converted.notes)})


def quantize_by(
    quantizer: str,
    context: CompileContext,
    model: OnnxModel,
    recipe: Recipe,
    calibration: CalibrationSet,
) -> OnnxModel:
    """Quantise with a library that chooses ranges and placement by itself.

    It replaces the stages calibrate and convert.
    """
    stage, quantize = QUANTIZERS[quantizer]
    options = context.build_options(recipe.backend)
    call = StageCall(
        stage,
        OnnxModel,
        partial(quantize, model, calibration, recipe, context.plan.calibration, options),
        depends_on=context.plugin_digests(recipe.backend),
        subject=recipe.label,
        target=context.target(recipe.backend),
    )
    return context.runner.stage(call)


def calibration_table(
    context: CompileContext, model: OnnxModel, recipe: Recipe
) -> CalibrationTable | None:
    """Return the ranges that a recipe needs: by its method for int8, else the largest values.

    None if there is no calibration data, or if the model has its own Q/DQ.
    """
    if context.data.calibration is None or recipe.quantizer == "given":
        return None
    method = recipe.method or CalibrationMethod.MINMAX
    work = partial(calibrate, model, context.data.calibration, method, context.plan.calibration)
    return context.runner.stage(StageCall(CALIBRATE, CalibrationTable, work, subject=str(method)))


def ranges_misfit(context: CompileContext, model: OnnxModel, recipe: Recipe) -> str:
    """Return why the calibration set does not fit the selection set.

    Empty if it fits, or if this cannot be determined.
    """
    ranged = recipe.precision is Precision.INT8 and not recipe.weight_only
    table = calibration_table(context, model, recipe) if ranged else None
    selection = context.plan.data.selection
    if table is None or selection is None or isinstance(selection, GeneratedData):
        return ""
    work = partial(cover, model, table, context.data.selection)
    call = StageCall(COVER, Coverage, work, subject=str(table.method))
    return context.runner.stage(call).failure


def build_engine(context: CompileContext, model: OnnxModel, recipe: Recipe) -> Engine:
    """Build the engine of a converted graph. For torch it is built from the source instead."""
    backend = backends.backend(recipe.backend)
    on_cpu = recipe.provider == "cpu"
    call = StageCall(
        replace(BUILD, tools=backend.DISTRIBUTIONS),
        Engine,
        partial(build, model, recipe, context.build_options(recipe.backend)),
        depends_on=context.plugin_digests(recipe.backend),
        subject=recipe.label,
        target=context.target(recipe.backend) if on_cpu else provider_target(),
    )
    return context.runner.stage(call)


def check_engine(
    context: CompileContext, engine: Engine, expected: ReferenceOutputs, samples: SampleSet
) -> ValidationReport:
    """Compare one engine with the reference on one set."""
    accuracy = context.plan.accuracy
    code: tuple[object, ...] = ()
    if ":" in accuracy.metric:  # the user's function
        code = (code_digest(accuracy.metric, accuracy.python_path, "accuracy.metric"),)
    call = StageCall(
        VALIDATE,
        ValidationReport,
        partial(validate, engine, expected, samples, accuracy, batch_rows(context)),
        depends_on=(engine.recipe, *code),
        subject=f"{engine.recipe.label} on {samples.role}",
    )
    return context.runner.stage(call)


def reference_outputs(
    context: CompileContext, reference: Engine, samples: SampleSet, at_every_size: bool = True
) -> ReferenceOutputs:
    """Run the reference on every sample of a set, and at the other sizes of every profile."""
    rows = batch_rows(context)
    points = gate_points(samples, context.plan.profiles, rows) if at_every_size else ()
    call = StageCall(
        REFERENCE,
        ReferenceOutputs,
        partial(run_reference, reference, samples, rows, points),
        depends_on=(context.source,),
        subject=samples.role,
    )
    return context.runner.stage(call)
