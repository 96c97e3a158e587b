"""The stages of a candidate: the cache key of each, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pipeline import backends
from pipeline.accuracy.gate import gate_points
from pipeline.accuracy.metrics.libraries import LIBRARIES
from pipeline.backends.base import no_layers
from pipeline.backends.onnxruntime.backend import provider_target
from pipeline.backends.onnxruntime.weight_only import compress_with_onnxruntime
from pipeline.backends.openvino.nncf import compress_with_nncf, quantize_with_nncf
from pipeline.backends.tensorrt.calibrator import calibrate_with_tensorrt
from pipeline.backends.tensorrt.library import BINDINGS
from pipeline.backends.tensorrt.modelopt import quantize_with_modelopt
from pipeline.compiler.candidates.fallback import ANY_SHAPE
from pipeline.compiler.context import FEEDS_FOR_CHECKS, CompileContext, batch_rows
from pipeline.core.artifacts import CalibrationTable, Engine, OnnxModel
from pipeline.core.progress import CandidateFigures
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Profile
from pipeline.data.samples import CalibrationSet, SampleSet
from pipeline.execution.stage_runner import Stage, StageCall, installed, no_figures
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.plan.schema import GeneratedData
from pipeline.plan.source import accuracy_code
from pipeline.results.accuracy import ValidationReport
from pipeline.results.layer_table import LayerTable
from pipeline.stages.build import build
from pipeline.stages.calibrate import Coverage, calibrate, cover
from pipeline.stages.convert import convert
from pipeline.stages.inspect_layers import Proof, prove
from pipeline.stages.validate import ReferenceOutputs, run_reference, validate

CALIBRATE = Stage("calibrate", 2, ("onnx", "onnxruntime"))
COVER = Stage("cover", 2, ("onnx", "onnxruntime"), writes_files=False)
CONVERT = Stage("convert", 7, ("onnx", "onnxruntime"))
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
VALIDATE = Stage("validate", 9, ("polygraphy",), writes_files=False)
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


def build_engine(
    context: CompileContext, model: OnnxModel, recipe: Recipe, subject: str = ""
) -> Engine:
    """Build the engine of a converted graph. For torch it is built from the source instead.

    `subject`: shown instead of the recipe's label.
    """
    backend = backends.backend(recipe.backend)
    on_cpu = recipe.provider == "cpu"
    call = StageCall(
        replace(BUILD, tools=backend.DISTRIBUTIONS),
        Engine,
        partial(build, model, recipe, context.build_options(recipe.backend)),
        depends_on=context.plugin_digests(recipe.backend),
        subject=subject or recipe.label,
        target=context.target(recipe.backend) if on_cpu else provider_target(),
    )
    return context.runner.stage(call)


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


def check_engine(
    context: CompileContext, engine: Engine, expected: ReferenceOutputs, samples: SampleSet
) -> ValidationReport:
    """Compare one engine with the reference on one set."""
    accuracy, steps = context.plan.accuracy, context.plan.postprocess
    libraries = LIBRARIES.get(accuracy.metric, {}).values()
    versions = tuple(installed(library) for library in libraries)
    call = StageCall(
        VALIDATE,
        ValidationReport,
        partial(validate, engine, expected, samples, accuracy, steps, batch_rows(context)),
        depends_on=(engine.recipe, *accuracy_code(accuracy), *versions),
        subject=f"{engine.recipe.label} on {samples.role}",
        # the plot compares candidates, which all run the selection set
        figures=(
            partial(accuracy_figures, engine) if samples is context.data.selection else no_figures
        ),
    )
    return context.runner.stage(call)


def accuracy_figures(engine: Engine, report: ValidationReport) -> tuple[CandidateFigures, ...]:
    """Return the accuracy of an engine for the live plot."""
    return (report.figures_of(engine.recipe),)


def reference_outputs(
    context: CompileContext, reference: Engine, samples: SampleSet, at_every_size: bool = True
) -> ReferenceOutputs:
    """Run the reference on every sample of a set, and at the other sizes of every profile."""
    rows = batch_rows(context)
    points = gate_points(samples, context.plan.profiles, rows) if at_every_size else ()
    call = StageCall(
        REFERENCE,
        ReferenceOutputs,
        partial(run_reference, reference, samples, context.plan.preprocess, rows, points),
        depends_on=(context.source,),
        subject=samples.role,
    )
    return context.runner.stage(call)
