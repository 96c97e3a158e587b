"""The rewrites that a plan names, one after another, each compared with the model before it."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

from pipeline.core.artifacts import Note, OnnxModel
from pipeline.core.progress import Progress
from pipeline.errors import ChildDied, DiskFull, InternalError, ModelError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.compare import compare_graphs
from pipeline.onnx_graph.feeds import feeds_of
from pipeline.onnx_graph.files import (
    copy_model,
    external_files,
    onnx_model,
    read_proto,
    write_proto,
)
from pipeline.onnx_graph.inspect import changed_interface
from pipeline.onnx_graph.interface import restore_interface
from pipeline.onnx_graph.rewrites import Rewrite, rewrite_function
from pipeline.plan.sections.graph import DEFAULT_REWRITES
from pipeline.stages.simplify.attention_rewrite import rewrite_tolerance
from pipeline.stages.simplify.checks import FILE, STAGE, SimplifyRequest, retry_clause

FOLDER = "rewritten"


def with_rewrites(model: OnnxModel, request: SimplifyRequest, out: Path) -> OnnxModel:
    """Apply the plan's rewrites to the model under `out`. Notes say what each has changed.

    A rewrite that fails or changes the outputs is left out, with a warning. One of the defaults
    that fits nothing leaves no note.
    """
    for rewrite in request.options.rewrites:
        model = _with_rewrite(model, request, rewrite, out)
    return model


def _with_rewrite(
    model: OnnxModel, request: SimplifyRequest, rewrite: Rewrite, out: Path
) -> OnnxModel:
    folder = out / FOLDER
    folder.mkdir()
    request.progress(None, f"rewriting: {rewrite}")
    nodes, fault, retryable = list[str](), "", False
    try:
        nodes = call_in_child(
            _rewrite_file,
            rewrite,
            model.path,
            folder / FILE,
            name=rewrite,
            limit=request.limit(f"the rewrite {rewrite}"),
            progress=request.progress,
        )
        if nodes:
            request.progress(None, f"comparing with the model before {rewrite}")
            after = onnx_model(folder, FILE, model.precision)
            fault = changed_interface(model, after)
            if not fault:
                feeds = chain(request.samples, feeds_of(model, request.profiles, (), seen=True))
                tolerance = rewrite_tolerance(model)
                fault = compare_graphs(model.path, after.path, feeds, tolerance)
    except (ChildDied, DiskFull, InternalError, ModelError) as error:
        fault, retryable = error.message, error.may_pass
    if fault:
        text = f"the rewrite {rewrite} is left out{retry_clause(retryable)}: {fault}"
        note = Note(stage=STAGE, text=text)
    elif nodes:
        for file in (model.path, *external_files(model.path)):
            file.unlink()
        copy_model(folder / FILE, out / FILE)
        text = f"the rewrite {rewrite} changed {len(nodes)} nodes, and the model computes the same"
        note = Note(stage=STAGE, text=text, level="info")
    else:
        note = Note(stage=STAGE, text=f"the rewrite {rewrite} fits no node", level="info")
    shutil.rmtree(folder)
    is_silent = not fault and not nodes and rewrite in DEFAULT_REWRITES
    notes = model.notes if is_silent else (*model.notes, note)
    result = onnx_model(out, FILE, model.precision, notes)
    return result.model_copy(update={"provisional": model.provisional or retryable})


def _rewrite_file(rewrite: Rewrite, source: Path, target: Path, progress: Progress) -> list[str]:
    """Rewrite a file, in a child process. Return the nodes; without any, no file is written."""
    proto, nodes = rewrite_function(rewrite)(read_proto(source))
    if nodes:
        restore_interface(read_proto(source, weights=False), proto)
        write_proto(proto, target)
    return list(nodes)
