"""Write attention plainly, with new masks or, if those change outputs, with the old ones."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import onnx

from pipeline.core.artifacts import Note, OnnxModel
from pipeline.core.progress import Progress
from pipeline.errors import ChildDied, DiskFull, InternalError, ModelError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.compare import compare_graphs
from pipeline.onnx_graph.feeds import feeds_of
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.onnx_graph.interface import restore_interface
from pipeline.stages.simplify.checks import (
    FILE,
    STAGE,
    SimplifyRequest,
    losses,
    operator_changes,
    retry_clause,
    tolerance_of,
)

HALF_TOLERANCE = 8e-3  # what compare_graphs allows outputs in fp16
HALF = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})


@dataclass(frozen=True, slots=True)
class Success:
    """The rewritten model computes the same."""

    model: OnnxModel


@dataclass(frozen=True, slots=True)
class Difference:
    """The rewritten model computes something else."""

    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """There is no rewritten model, or it cannot be compared."""

    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class NothingToRewrite:
    """The graph has no attention to rewrite."""


Outcome = Success | Difference | Failure | NothingToRewrite


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The model after the rewrite, which is the model before it if `fault` is not empty."""

    model: OnnxModel
    fault: str = ""


def with_plain_attention(model: OnnxModel, request: SimplifyRequest, out: Path) -> Rewrite:
    """Return the model with attention written plainly, under `out`, with a note.

    New masks are tried first, then the old ones. If both change outputs, or if the rewrite fails,
    the model itself is returned with a warning.
    """
    difference = ""
    for masks in (True, False):
        outcome = _attempt(model, request, out, masks)
        if isinstance(outcome, Success):
            return Rewrite(_with_note(model, outcome.model, difference))
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(outcome, Failure):
            return _unchanged(model, outcome.message, outcome.retryable)
        if isinstance(outcome, NothingToRewrite):
            break
        difference = difference or outcome.text
    return _unchanged(model, difference, retryable=False)


def _attempt(model: OnnxModel, request: SimplifyRequest, out: Path, masks: bool) -> Outcome:
    """Rewrite attention in a child process, and compare. Use new masks if `masks` is True.

    Generated inputs mask no row completely: a model's output for such a row has no meaning, and the
    samples show whether such rows occur.
    """
    request.progress(None, "rewriting attention")
    out.mkdir()
    try:
        call_in_child(
            _attend_file,
            masks,
            model.path,
            out / FILE,
            name="plain attention",
            limit=request.limit("the rewriting of attention"),
            progress=request.progress,
        )
        if not (out / FILE).is_file():
            return NothingToRewrite()
        request.progress(None, "comparing with the original attention")
        after = onnx_model(out, FILE, model.precision)
        difference = losses(model, after)
        if not difference:
            feeds = chain(request.samples, feeds_of(model, request.profiles, (), seen=True))
            difference = compare_graphs(model.path, after.path, feeds, rewrite_tolerance(model))
    except (ChildDied, DiskFull, InternalError, ModelError) as error:
        return Failure(error.message, error.may_pass)
    return Difference(difference) if difference else Success(after)


def _with_note(before: OnnxModel, after: OnnxModel, difference: str) -> OnnxModel:
    """Add a note to the rewritten model; `difference` is that of the attempt with new masks."""
    text = "attention is written plainly"
    changes = operator_changes(before, after)
    if changes:
        text += f" ({changes})"
    text += " and computes the same"
    if difference:
        text += f", but for its masks and what they hide: with new ones {difference}"
    return after.model_copy(update={"notes": (Note(stage=STAGE, text=text, level="info"),)})


def _unchanged(model: OnnxModel, fault: str, retryable: bool) -> Rewrite:
    """Return the original model, with a warning if there is a fault."""
    notes: tuple[Note, ...] = ()
    if fault:
        text = f"attention stays as it was written{retry_clause(retryable)}: {fault}"
        notes = (Note(stage=STAGE, text=text),)
    return Rewrite(model.model_copy(update={"notes": notes, "provisional": retryable}), fault)


def _attend_file(masks: bool, source: Path, target: Path, progress: Progress) -> None:
    """Rewrite a file, in a child process. Write no file if there is no attention to rewrite."""
    from pipeline.onnx_graph.attention import plain_attention

    plain = plain_attention(read_proto(source), masks)
    if plain is not None:
        restore_interface(read_proto(source, weights=False), plain)
        write_proto(plain, target)


def rewrite_tolerance(model: OnnxModel) -> float:
    """Return the tolerance for plain attention, which rounds in other places.

    fp32 outputs of a model with 16-bit constants may come from 16-bit values.
    """
    constants = read_proto(model.path, weights=False).graph.initializer
    tolerance = tolerance_of(model)
    if any(tensor.data_type in HALF for tensor in constants):
        return max(tolerance, HALF_TOLERANCE)
    return tolerance
