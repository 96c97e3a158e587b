"""Simplify a graph: fewer nodes, the same function.

Four steps, each in a child process, and each compared with its input:

1. `surgery.py`: the user's own surgery, if the plan names one. Changed outputs are an error.
2. `attention_rewrite.py`: attention is rewritten plainly, or kept if that fails. The step is
   repeated after step 3, because TorchScript's exports have no shapes and compute their constants
   before.
3. `simplifier.py`: onnxsim and GraphSurgeon. A simplifier may crash, hang, fix the batch size of
   its example, or remove nodes that a backend needs (Q/DQ). Then its result is discarded.
4. `named_rewrites.py`: the rewrites that the plan names.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.core.artifacts import Note, OnnxModel
from pipeline.core.progress import Progress
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import ChildDied, InternalError, ModelError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.compare import compare_graphs
from pipeline.onnx_graph.feeds import feeds_of
from pipeline.onnx_graph.files import (
    copy_model,
    file_size,
    onnx_model,
    operator_histogram,
    read_proto,
)
from pipeline.onnx_graph.inspect import attentions
from pipeline.plan.schema import SimplifyConfig
from pipeline.stages.simplify.attention_rewrite import with_plain_attention
from pipeline.stages.simplify.checks import (
    FILE,
    STAGE,
    SimplifyRequest,
    losses,
    retry_clause,
    tolerance_of,
)
from pipeline.stages.simplify.named_rewrites import with_rewrites
from pipeline.stages.simplify.simplifier import Simplifier, run_onnxsim, simplify_file
from pipeline.stages.simplify.surgery import operate

# folders of a model around simplification
OPERATED, ATTENDED, AT_LAST = "operated", "attended", "at last"


def simplify(
    model: OnnxModel,
    profiles: tuple[Profile, ...],
    options: SimplifyConfig,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress,
    simplifier: Simplifier = run_onnxsim,
) -> OnnxModel:
    """Return a model under `out` that computes the same with fewer nodes, and notes on the steps.

    Its interface is the same, and its outputs are equal on all samples and on generated inputs at
    min, opt, max and an odd size of every profile. Otherwise the result is a copy of the input
    model with a warning. A surgery that changes the outputs is a ModelError.
    """
    request = SimplifyRequest(profiles, options, samples, progress)
    notes: tuple[Note, ...] = ()
    if options.surgery:
        model = operate(model, request, options.surgery, out / OPERATED)
        notes += model.notes
    rewrite = None
    if options.rewrite_attention and attentions(read_proto(model.path, weights=False).graph):
        rewrite = with_plain_attention(model, request, out / ATTENDED)
        model = rewrite.model
        notes += model.notes
    result = _simplified(model, request, out, simplifier) if options.enabled else _copy(model, out)
    if rewrite and not rewrite.fault and options.enabled:
        # Computed values of the graph may be constants now.
        last = with_plain_attention(result, request, out / AT_LAST).model
        result = _last_or_before(last, result, out)
    for folder in (out / OPERATED, out / ATTENDED, out / AT_LAST):
        shutil.rmtree(folder, ignore_errors=True)
    result = with_rewrites(result, request, out)
    return result.model_copy(
        update={
            "notes": (*notes, *result.notes),
            "provisional": result.provisional or model.provisional,
        }
    )


def _simplified(
    model: OnnxModel, request: SimplifyRequest, out: Path, simplifier: Simplifier
) -> OnnxModel:
    """Return the simplified model, or a copy of the model with a note on the failure."""
    target, retryable = out / FILE, False
    try:
        call_in_child(
            simplify_file,
            simplifier,
            model.path,
            target,
            name=STAGE,
            limit=request.limit("simplification"),
            progress=request.progress,
        )
        request.progress(None, "comparing with the input model")
        fault = losses(model, onnx_model(out, FILE, model.precision))
        if not fault:
            feeds = feeds_of(model, request.profiles, request.samples)
            fault = compare_graphs(model.path, target, feeds, tolerance_of(model))
    except (ChildDied, InternalError, ModelError) as error:
        fault, retryable = error.message, error.may_pass
    if fault:
        text = (
            "simplification was discarded and the original graph is used"
            f"{retry_clause(retryable)}: {fault}"
        )
        copy = _copy(model, out, Note(stage=STAGE, text=text))
        return copy.model_copy(update={"provisional": retryable})
    nodes_before = sum(operator_histogram(model.path).values())
    nodes_after = sum(operator_histogram(target).values())
    text = (
        f"{nodes_before} nodes became {nodes_after}, {file_size(model.path):,} bytes became"
        f" {file_size(target):,}"
    )
    return onnx_model(out, FILE, model.precision, (Note(stage=STAGE, text=text, level="info"),))


def _last_or_before(last: OnnxModel, before: OnnxModel, out: Path) -> OnnxModel:
    """Return the model of the last rewrite under `out`, or the one before if it changed nothing.

    If the last rewrite failed and may succeed next time, its note is added and the result is
    provisional.
    """
    is_changed = last.path != before.path
    if not is_changed and not last.provisional:
        return before
    result = _copy(last, out) if is_changed else before
    return result.model_copy(
        update={
            "notes": (*before.notes, *last.notes),
            "provisional": before.provisional or last.provisional,
        }
    )


def _copy(model: OnnxModel, out: Path, *notes: Note) -> OnnxModel:
    """The input model with its external data, under `out`."""
    for file in out.glob("*.onnx*"):  # what a simplifier left half-written
        file.unlink()
    copy_model(model.path, out / FILE)
    return onnx_model(out, FILE, model.precision, notes)
