"""The model as an ONNX graph: exported, with its preprocessing and postprocessing, simplified."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.compiler.context import FEEDS_FOR_CHECKS, CompileContext, open_context
from pipeline.core.artifacts import OnnxModel
from pipeline.execution.stage_runner import Runner, Stage, StageCall
from pipeline.plan.schema import Plan
from pipeline.plan.source import code_digest
from pipeline.preprocess import preprocessed
from pipeline.stages.export import export
from pipeline.stages.postprocess import postprocess
from pipeline.stages.preprocess import preprocess
from pipeline.stages.simplify import simplify

EXPORT = Stage("export", 3, ("torch", "onnx", "onnxscript", "onnxruntime"))
PREPROCESS = Stage("preprocess", 1, ("onnx", "onnx-ir", "onnxruntime"))
POSTPROCESS = Stage("postprocess", 1, ("onnx", "onnx-ir", "onnxruntime"))
SIMPLIFY = Stage(
    "simplify",
    8,
    ("onnx", "onnx-ir", "onnxsim", "onnx-graphsurgeon", "onnxruntime"),
    is_cacheable=lambda model: not model.provisional,
)
STAGES = (EXPORT, PREPROCESS, SIMPLIFY, POSTPROCESS)


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
