"""The user's own surgery: a function that changes the nodes of a graph.

The plan names it as `module:function`. It is called as `function(model)` with the complete
`onnx.ModelProto`, and returns a model that computes the same with the same inputs and outputs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import onnx

from pipeline.core.artifacts import Note, OnnxModel
from pipeline.core.progress import Progress
from pipeline.errors import ModelError, PlanError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.compare import compare_graphs
from pipeline.onnx_graph.feeds import feeds_of
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.onnx_graph.inspect import changed_interface
from pipeline.onnx_graph.interface import restore_interface
from pipeline.stages.simplify.checks import (
    FILE,
    STAGE,
    SimplifyRequest,
    operator_changes,
    tolerance_of,
)


def operate(model: OnnxModel, request: SimplifyRequest, surgery: str, out: Path) -> OnnxModel:
    """Return the model after the surgery, under `out`.

    ModelError if the interface or the outputs have changed.
    """
    out.mkdir()
    request.progress(None, f"surgery by {surgery}")
    call_in_child(
        _operate_file,
        surgery,
        request.options.python_path,
        model.path,
        out / FILE,
        name="surgery",
        limit=request.limit("surgery"),
        progress=request.progress,
    )
    request.progress(None, "comparing with the model before surgery")
    after = onnx_model(out, FILE, model.precision)
    fault = changed_interface(model, after)
    if not fault:
        feeds = feeds_of(model, request.profiles, request.samples)
        fault = compare_graphs(model.path, after.path, feeds, tolerance_of(model))
    if fault:
        raise ModelError(
            f"surgery by '{surgery}' changed the model: {fault}",
            "correct the function, or remove `simplify.surgery`",
        )
    changes = operator_changes(model, after) or "no operator"
    text = f"surgery by '{surgery}' changed {changes}, and the model still computes the same"
    return after.model_copy(update={"notes": (Note(stage=STAGE, text=text, level="info"),)})


def _operate_file(
    surgery: str, python_path: Path, source: Path, target: Path, progress: Progress
) -> None:
    """Read a model, call the user's function and write its result. Runs in a child process."""
    operation = _load_surgery(surgery, python_path)
    before = read_proto(source)
    try:
        after = operation(before)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ModelError(
            f"surgery '{surgery}' raised {type(error).__name__}: {error}",
            "run the function on the model by itself",
        ) from error
    if not isinstance(after, onnx.ModelProto):
        raise ModelError(
            f"surgery '{surgery}' returned {type(after).__name__}, expected an onnx.ModelProto",
            "return the changed model",
        )
    restore_interface(read_proto(source, weights=False), after)
    try:
        write_proto(after, target)
    except ModelError as error:
        raise ModelError(
            f"surgery '{surgery}' left a faulty model: {error.message}", "correct the function"
        ) from error


def _load_surgery(surgery: str, python_path: Path) -> Callable[[onnx.ModelProto], object]:
    module, _, name = surgery.partition(":")
    # The folder stays on the path: the function may import more when it is called.
    sys.path.insert(0, str(python_path))
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        advice = (
            "correct `simplify.surgery` or `simplify.python_path`, or install what the module"
            " imports"
        )
        raise PlanError(
            f"simplify.surgery '{surgery}' cannot be imported from '{python_path}': {error}", advice
        ) from error
    if not callable(function):
        raise PlanError(
            f"simplify.surgery '{surgery}' is of type {type(function).__name__}, expected a"
            " function",
            "correct `simplify.surgery`",
        )
    return function  # type: ignore[no-any-return]  # checked by the caller
