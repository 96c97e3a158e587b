"""The recipes to try: those of the plan, or of the default candidates, that this host can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from pipeline import backends
from pipeline.backends.onnxruntime.backend import gpu_providers
from pipeline.backends.pytorch.quantize_aware.frozen import quantises
from pipeline.backends.tensorrt.library import release_warnings
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import Note, Target
from pipeline.core.recipe import Recipe
from pipeline.errors import BackendUnavailable, PlanError, UnsupportedError
from pipeline.plan.baselines import baseline_recipes
from pipeline.plan.default_candidates import default_candidates
from pipeline.plan.recipes import distinct, recipes_from_candidate

GPU_BACKENDS = ("tensorrt", "torch")  # tried on a GPU where the plan names no candidates
# bytes of a model for which packages of AOTInductor are tried beside TensorRT
MIN_AOTI_BYTES = 100 * 2**20
TOO_SMALL_FOR_AOTI = (
    "AOTInductor is left out: the model is below 100 MiB, and each package takes up to a minute to"
    " build. To try it, name it in `candidates`: {backend: torch, precision: fp16}"
)


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
            text = f"{name} is left out: {error.message}"
            notes.append(Note(stage="candidates", text=text, level="info"))
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
