"""Prepare one candidate: quantise or cast, build, prove the precision, check the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline import backends
from pipeline.backends.cuda import CudaError, OutOfDeviceMemory
from pipeline.compiler.candidates.stages import (
    build_engine,
    check_engine,
    convert_model,
    prove_engine,
    ranges_misfit,
)
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import Engine, Note, OnnxModel, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import (
    BackendUnavailable,
    ChildDied,
    CrucibleError,
    InternalError,
    LoadCrashed,
    ModelError,
    UnsupportedError,
)
from pipeline.onnx_graph.files import operator_histogram, read_proto
from pipeline.onnx_graph.inspect import attentions
from pipeline.plan.precisions import weight_bits
from pipeline.quantization.half_precision import flatten
from pipeline.quantization.lint.rules import finding_notes, lint, saturation_notes
from pipeline.results.accuracy import DataFault
from pipeline.results.candidates import Candidate, Origin, State
from pipeline.results.layer_table import LayerTable
from pipeline.results.precision_audit import (
    INTEGER_OPERATORS,
    attention_in_one_kernel,
    mislabelled,
    precision_notes,
)
from pipeline.stages.validate import ReferenceOutputs

# precisions with one kernel for an attention; of fp8 that is not known
FUSED = (
    Precision.FP16,
    Precision.BF16,
    Precision.INT8,
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
class Outcome:
    """A candidate with its state, and the InternalError that stopped it, if there is one."""

    candidate: Candidate
    bug: InternalError | None = None


def prepare(
    context: CompileContext,
    model: OnnxModel,
    recipe: Recipe,
    expected: ReferenceOutputs,
    origin: Origin = Origin.PLAN,
) -> Outcome:
    """Convert, build and check one candidate. An error that stops it becomes its reason."""
    candidate = Candidate(label=recipe.label, recipe=recipe, origin=origin, state="failed")
    try:
        backends.backend(recipe.backend).check_recipe(recipe, context.target(recipe.backend))
        check_crashed(context, recipe)
        converted = convert_model(context, model, recipe)
        engine = build_engine(context, converted, recipe)
        candidate = with_engine(candidate, engine, model, converted)
        tables = prove_engine(context, engine, converted)
        rewrite_attention = context.plan.simplify.rewrite_attention
        candidate = with_layers(candidate, tables, converted, rewrite_attention)
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
            faults = (*report.data_faults, DataFault.CALIBRATION)
            update["selection"] = report.model_copy(update={"data_faults": faults})
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


def with_layers(
    candidate: Candidate,
    tables: Sequence[LayerTable],
    converted: OnnxModel,
    rewrite_attention: bool,
) -> Candidate:
    """Add the layer table of each profile to the candidate.

    Its state is `mislabelled` if in one profile the engine does not run the precision of its
    label. `rewrite_attention`: the setting of the plan.
    """
    for table in tables:
        audited = _with_table(candidate, table, converted, rewrite_attention)
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
    candidate: Candidate, table: LayerTable, converted: OnnxModel, rewrite_attention: bool
) -> Candidate:
    """Add the layer table of one profile to the candidate, with its notes and its verdict."""
    recipe = candidate.recipe
    precision, kept, forced = recipe.precision, recipe.keep_fp32, converted.kept_fp32
    notes = [
        *candidate.notes,
        *precision_notes(table, None if recipe.weight_only else precision, kept, forced),
    ]
    if recipe.backend == "tensorrt" and precision in FUSED:
        notes += _attention_notes(table, converted, rewrite_attention)
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
    table: LayerTable, converted: OnnxModel, rewrite_attention: bool
) -> tuple[Note, ...]:
    """Return a note if not every attention of the graph runs in one kernel."""
    graph = read_proto(converted.path, weights=False).graph
    fused, places = attention_in_one_kernel(table, attentions(graph))
    if fused >= places:
        return ()
    text = f"attention is in one kernel in {fused} of {places} places"
    if not rewrite_attention:
        text += ": `simplify: {rewrite_attention: true}` may bring it there"
    return (Note(stage="prove", text=text, level="info"),)
