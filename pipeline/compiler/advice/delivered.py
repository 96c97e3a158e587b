"""Advice on the engine that a report delivers."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.compiler.advice.trials import Delivered, Prepare, advise
from pipeline.compiler.context import CompileContext
from pipeline.core import Engine
from pipeline.errors import ModelError
from pipeline.host.gpu import Peaks
from pipeline.results.advice import Advice
from pipeline.results.report import Candidate, Origin, Report

ONNX_BACKENDS = ("onnxruntime", "openvino", "tensorrt")


def advise_on(
    context: CompileContext,
    report: Report,
    engine: Engine,
    prepare: Prepare,
    reference: Engine,
    only: Iterable[str] = (),
) -> Advice:
    """Try changes on the engine of a report.

    ModelError for an engine that is not made from the simplified ONNX graph.
    """
    winner = _candidate_of(report, engine)
    delivered = Delivered(
        engine=engine,
        table=winner.layers,
        graph=report.graph,
        graph_sizes=report.graph_sizes,
        peaks=peaks_of_engine(report.peaks, engine),
        sizes=winner.benchmark.rows[0].sizes if winner.benchmark else {},
        labels=frozenset(each.label for each in report.candidates),
        gpu_use=report.gpu_use,
    )
    return advise(context, delivered, prepare, reference, only)


def _candidate_of(report: Report, engine: Engine) -> Candidate:
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
    return winner


def peaks_of_engine(peaks: Iterable[Peaks], engine: Engine) -> Peaks | None:
    """Return the peaks of the device on which an engine ran; None if they are not known."""
    device = engine.target.device
    # The peaks of a CPU name the number of threads, too.
    return next((each for each in peaks if f"{each.device},".startswith(f"{device},")), None)
