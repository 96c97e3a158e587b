"""Advice on the engine of a report, for `crucible advise`."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.compiler.advice.trials import Delivered, advise
from pipeline.compiler.candidate_stages import reference_outputs
from pipeline.compiler.compile import (
    build_reference,
    export_model,
    postprocess_model,
    preprocess_model,
    simplify_model,
)
from pipeline.compiler.context import CompileContext
from pipeline.compiler.remeasure import reopen_context
from pipeline.core import Engine, OnnxModel
from pipeline.errors import ModelError
from pipeline.execution.stage_runner import Runner
from pipeline.host.gpu import Peaks
from pipeline.plan.schema import Plan
from pipeline.results.advice import Advice
from pipeline.results.report import Origin, Report

ONNX_BACKENDS = ("onnxruntime", "openvino", "tensorrt")


def advise_again(
    report: Report, plan: Plan, engine: Engine, runner: Runner, only: Iterable[str] = ()
) -> Advice:
    """Try changes on a delivered engine. Nothing is reused but what the store holds.

    ModelError for an engine that is not made from the simplified ONNX graph, and if the source has
    changed since.
    """
    made = (each for each in report.candidates if each.engine)
    winner = next((each for each in made if each.label == engine.recipe.label), None)
    if winner is None or winner.origin is Origin.BASELINE:
        raise ModelError(
            f"'{engine.recipe.label}' is your own model, which Crucible has not changed",
            "compile it with other candidates or more time, until one of them is faster",
        )
    if engine.recipe.backend not in ONNX_BACKENDS:
        raise ModelError(
            f"expected an engine of {', '.join(ONNX_BACKENDS)}, got '{engine.recipe.label}'",
            "name one of these backends in the plan's candidates",
        )
    context = reopen_context(report, plan, runner)
    exported = export_model(context)
    whole = preprocess_model(context, exported)

    def prepare(changed: CompileContext) -> OnnxModel:
        return postprocess_model(changed, simplify_model(changed, whole))

    expected = reference_outputs(
        context, build_reference(context, exported), context.data.selection
    )
    delivered = Delivered(
        engine=engine,
        table=winner.layers,
        graph=report.graph,
        graph_sizes=report.graph_sizes,
        peaks=peaks_of_engine(report.peaks, engine),
        sizes=winner.benchmark.rows[0].sizes if winner.benchmark else {},
        labels=frozenset(each.label for each in report.candidates),
    )
    return advise(context, delivered, prepare, expected, only)


def peaks_of_engine(peaks: Iterable[Peaks], engine: Engine) -> Peaks | None:
    """Return the peaks of the device on which an engine ran; None if they are not known."""
    device = engine.target.device
    # The peaks of a CPU name the number of threads, too.
    return next((each for each in peaks if f"{each.device},".startswith(f"{device},")), None)
