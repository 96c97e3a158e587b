"""Write attention plainly, with new masks or, where those change an answer, with the old ones."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import onnx

from pipeline.core import Note, OnnxModel, Progress
from pipeline.errors import ChildDied, DiskFull, InternalError, ModelError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.attention import plain_attention
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
    """No attention is written out."""


Outcome = Success | Difference | Failure | NothingToRewrite


def with_plain_attention(model: OnnxModel, request: SimplifyRequest, out: Path) -> OnnxModel:
    """Return the model with attention written plainly, under `out`; its notes say how.

    New masks are tried first, then the old ones. Where both change an answer, or where the rewrite
    fails, the model itself is returned, with a warning.
    """
    difference = ""
    for masks in (True, False):
        outcome = _attempt(model, request, out, masks)
        if isinstance(outcome, Success):
            return _with_note(model, outcome.model, difference)
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(outcome, Failure):
            return _unchanged(model, outcome.message, outcome.retryable)
        if isinstance(outcome, NothingToRewrite):
            break
        difference = difference or outcome.text
    return _unchanged(model, difference, retryable=False)


def _attempt(model: OnnxModel, request: SimplifyRequest, out: Path, masks: bool) -> Outcome:
    """Rewrite attention in a child process, and compare; without new `masks` if False.

    Generated inputs hide no row entirely: what a model answers to that is no answer, and the
    samples show whether such rows come.
    """
    request.progress(None, "writing attention plainly")
    out.mkdir()
    try:
        call_in_child(
            _attend_file,
            masks,
            model.path,
            out / FILE,
            name="plain attention",
            deadline_s=request.options.timeout_s,
            progress=request.progress,
        )
        if not (out / FILE).is_file():
            return NothingToRewrite()
        request.progress(None, "comparing with the model as it was written")
        after = onnx_model(out, FILE, model.precision)
        difference = losses(model, after)
        if not difference:
            feeds = chain(request.samples, feeds_of(model, request.profiles, (), seen=True))
            difference = compare_graphs(model.path, after.path, feeds, rewrite_tolerance(model))
    except (ChildDied, DiskFull, InternalError, ModelError) as error:
        return Failure(error.message, error.may_pass)
    return Difference(difference) if difference else Success(after)


def _with_note(before: OnnxModel, after: OnnxModel, difference: str) -> OnnxModel:
    """The rewritten model with a note; `difference` is that of the attempt with new masks."""
    text = "attention is written plainly"
    changes = operator_changes(before, after)
    if changes:
        text += f" ({changes})"
    text += " and computes the same"
    if difference:
        text += f", but for its masks and what they hide: with new ones {difference}"
    return after.model_copy(update={"notes": (Note(stage=STAGE, text=text, level="info"),)})


def _unchanged(model: OnnxModel, fault: str, retryable: bool) -> OnnxModel:
    """The model as it was, with a warning if there is a fault."""
    notes: tuple[Note, ...] = ()
    if fault:
        text = f"attention stays as it was written{retry_clause(retryable)}: {fault}"
        notes = (Note(stage=STAGE, text=text),)
    return model.model_copy(update={"notes": notes, "provisional": retryable})


def _attend_file(masks: bool, source: Path, target: Path, progress: Progress) -> None:
    """The child's work; nothing is written where no attention is written out."""
    plain = plain_attention(read_proto(source), masks)
    if plain is not None:
        restore_interface(read_proto(source, weights=False), plain)
        write_proto(plain, target)


def rewrite_tolerance(model: OnnxModel) -> float:
    """The tolerance for plain attention, which rounds elsewhere: what comes out in fp32 may have
    been in 16 bits before.
    """
    constants = read_proto(model.path, weights=False).graph.initializer
    holds_halves = any(tensor.data_type in HALF for tensor in constants)
    return max(tolerance_of(model), HALF_TOLERANCE if holds_halves else 0.0)
