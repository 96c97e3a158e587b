"""Advice on the engine that a report delivers."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.benchmark.cpu_peaks import measure_once, peaks_of
from pipeline.compiler.advice.trials import Delivered, Prepare, advise
from pipeline.compiler.candidates.stages import build_engine, convert_model
from pipeline.compiler.context import CompileContext
from pipeline.compiler.decision import choose
from pipeline.core.artifacts import Engine
from pipeline.errors import ModelError
from pipeline.host.gpu import Peaks
from pipeline.results.advice import Advice
from pipeline.results.candidates import Candidate, Origin
from pipeline.results.report import Report

NO_PEAKS = (
    "The peaks of this CPU are not known, so neither is which layers wait for their weights:"
    " `crucible doctor --measure` on a quiet host measures them."
)
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

    Where `engine` is the user's own model or one of PyTorch, which no rule changes, try them on the
    best accurate candidate that is made from the ONNX graph. ModelError if there is none.
    """
    subject, only = _subject_of(report, engine), tuple(only)
    is_delivered = subject.label == engine.recipe.label
    if not is_delivered:
        converted = convert_model(context, prepare(context), subject.recipe)
        engine = build_engine(context, converted, subject.recipe)
    peaks = peaks_of_engine(report.peaks, engine) or _measured_peaks(context, engine)
    delivered = Delivered(
        engine=engine,
        table=subject.layers,
        graph=report.graph,
        graph_sizes=report.graph_sizes,
        peaks=peaks,
        sizes=subject.benchmark.rows[0].sizes if subject.benchmark else {},
        labels=frozenset(each.label for each in report.candidates),
        gpu_use=report.gpu_use,
    )
    found = advise(context, delivered, prepare, reference, only)
    notes = [] if is_delivered else [_note(report, subject)]
    if peaks is None and not engine.is_on_gpu and (not only or "narrow_weights" in only):
        notes.append(NO_PEAKS)
    return found.model_copy(update={"note": " ".join(notes)})


def _measured_peaks(context: CompileContext, engine: Engine) -> Peaks | None:
    """Measure what the compile had no time for, or no quiet host."""
    options = context.plan.benchmark
    measure_once(context.runner, (engine,), options.threads, options.budget_s)
    return peaks_of(engine.target, options.threads)


def _subject_of(report: Report, engine: Engine) -> Candidate:
    """Return the candidate to change: that of the engine, or else the best one that rules fit."""
    fit = [
        each
        for each in report.candidates
        if each.engine
        and each.origin is not Origin.BASELINE
        and each.recipe.backend in ONNX_BACKENDS
    ]
    own = next((each for each in fit if each.label == engine.recipe.label), None)
    subject = own or choose(fit)
    if subject is None:
        raise ModelError(
            f"'{engine.recipe.label}' is delivered, and no accurate candidate is made from the"
            " ONNX graph, which is what advice changes",
            f"name one of {', '.join(ONNX_BACKENDS)} in the plan's candidates, and compile again",
        )
    return subject


def _note(report: Report, subject: Candidate) -> str:
    """Say that another engine was delivered, and how far the changed one is behind."""
    text = f"{report.winner} is delivered, which advice does not change."
    kept = report.benchmark_delivered or report.baseline
    if kept is None or subject.benchmark is None:
        return text
    times = subject.benchmark.rows[0].end_to_end.median_s / kept.rows[0].end_to_end.median_s
    return f"{text} {subject.label} took {times:.2f} times as long as {kept.label}."


def peaks_of_engine(peaks: Iterable[Peaks], engine: Engine) -> Peaks | None:
    """Return the peaks of the device on which an engine ran; None if they are not known."""
    device = engine.target.device
    # The peaks of a CPU name the number of threads, too.
    return next((each for each in peaks if f"{each.device},".startswith(f"{device},")), None)
