"""The reference and the baselines: build them, check them, and deliver one that is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pipeline.backends.onnxruntime.backend import gpu_providers
from pipeline.backends.pytorch import backend as pytorch_
from pipeline.backends.pytorch.findings import examine_module
from pipeline.compiler.candidates.prepare import CANNOT_BUILD
from pipeline.compiler.candidates.stages import build_engine, check_engine
from pipeline.compiler.context import CompileContext
from pipeline.compiler.decision import choose, only_baseline_is_within
from pipeline.compiler.measure import Measured
from pipeline.compiler.speed import is_slower_or_equal
from pipeline.core.artifacts import Engine, ModelSource, Note, OnnxModel, Target
from pipeline.core.recipe import OrtProvider, Precision, Recipe
from pipeline.errors import BackendUnavailable, ChildStopped, CrucibleError
from pipeline.execution.stage_runner import Stage, StageCall
from pipeline.execution.store import canonical
from pipeline.plan.baselines import (
    AS_GIVEN,
    AS_WRITTEN,
    baseline_recipes,
    cpu_recipe_as_given,
    deliverable_recipe,
    gpu_recipes_as_given,
)
from pipeline.results.candidates import Candidate, Origin
from pipeline.results.module_findings import ModuleFindings
from pipeline.stages.validate import ReferenceOutputs

BASELINE = Stage("baseline", 4, pytorch_.DISTRIBUTIONS)
MODULE = Stage("module", 1, pytorch_.DISTRIBUTIONS, writes_files=False)
COMPILE = Stage("torch.compile", 2, pytorch_.DISTRIBUTIONS)
STAGES = (BASELINE, MODULE, COMPILE)

EAGER = Recipe(backend="pytorch", precision=Precision.FP32, variant="eager")


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
        context, exported, Recipe(backend="onnxruntime", precision=Precision.FP32, variant=variant)
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
            pytorch_.build_baseline, source, exported, recipe, context.build_options("pytorch")
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
    recipes: Iterable[Recipe], build: Callable[[Recipe], Engine]
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
    context: CompileContext, engine: Engine, reference: Engine, expected: ReferenceOutputs
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
        update={"state": state, "selection": report, "reason": "; ".join(report.failures)}
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


def built_to_keep(kept: Candidate | None, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the PyTorch program of the kept baseline, unless it is among the candidates."""
    if kept is None or kept.recipe.backend != "torch":
        return ()
    labels = {candidate.label for candidate in candidates}
    return () if kept.label in labels else (kept,)
