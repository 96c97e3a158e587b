"""Run graphs in ONNX Runtime without optimisations, and compare their outputs.

Every graph transform is checked by this module.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from pipeline.core.shapes import Tensors
from pipeline.errors import ModelError

if TYPE_CHECKING:
    from onnxruntime import OrtValue

Runner = Callable[[Tensors], dict[str, NDArray[Any]]]


def open_reference(path: Path) -> Runner:
    """Load a graph in ONNX Runtime on the CPU, without optimisations. The result runs feeds.

    ModelError if the graph does not load or run.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # failures come as exceptions
    state = onnxruntime.capi.onnxruntime_pybind11_state
    load_failures = (
        state.Fail,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
        state.RuntimeException,
    )
    failures: tuple[type[Exception], ...] = (
        *load_failures,
        state.InvalidArgument,
        state.EPFail,
        ValueError,
    )
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except failures as error:
        raise ModelError(
            f"ONNX Runtime cannot load '{path}': {error}", "check the model with `crucible inspect`"
        ) from error
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Tensors) -> dict[str, NDArray[Any]]:
        try:
            results = session.run_with_ort_values(
                names, {name: ort_value(array) for name, array in feeds.items()}
            )
        except failures as error:
            shapes = ", ".join(
                f"{name} {array.dtype}{list(array.shape)}" for name, array in feeds.items()
            )
            raise ModelError(
                f"ONNX Runtime cannot run '{path}' on {shapes}: {error}",
                "check the shapes and values of the inputs",
            ) from error
        return {name: array_from_ort(value) for name, value in zip(names, results, strict=True)}

    return run


def ort_value(array: NDArray[np.generic]) -> OrtValue:
    """Return an ONNX Runtime tensor over a host array.

    bfloat16 is passed as its bits, because ONNX Runtime does not know numpy's dtype for it.
    """
    import onnxruntime

    contiguous = np.require(array, requirements="C")
    if contiguous.dtype == ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            contiguous.view(np.uint16), onnx.TensorProto.BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(contiguous)


def array_from_ort(value: OrtValue) -> NDArray[np.generic]:
    """Copy an ONNX Runtime tensor to host memory."""
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    bits = np.empty(value.shape(), np.uint16)
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits.view(ml_dtypes.bfloat16)


def compare_graphs(
    before: Path,
    after: Path,
    feeds_list: Iterable[Tensors],
    tolerance: float = 1e-4,
    prepare: Callable[[Tensors], Tensors] = lambda feeds: feeds,
    finish: Callable[[Tensors], Tensors] = lambda outputs: outputs,
) -> str:
    """Describe the first difference of two graphs' outputs; "" if all are equal on all feeds.

    `prepare` makes the feeds of `before` from those of `after`, and `finish` makes the outputs of
    `after` from those of `before`.

    The sentence names the output, the error and the shapes. `tolerance` limits the largest
    difference of a float output, in units of that output's largest magnitude; other outputs must be
    equal. Feeds that `before` cannot run (sizes that do not fit each other) are skipped. ModelError
    if no feeds remain.
    """
    reference = open_reference(before)
    compared = 0
    reason = ModelError(f"there are no inputs to compare '{before}' on", "give samples or sizes")
    try:
        candidate = open_reference(after)
    except ModelError as error:
        return error.message
    for feeds in feeds_list:
        try:
            expected = finish(reference(prepare(feeds)))
        except ModelError as error:
            reason = error
            continue
        try:
            fault = compare_outputs(expected, candidate(feeds), tolerance)
        except ModelError as error:
            fault = error.message
        if fault:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
            return f"{fault}, on inputs {shapes}"
        compared += 1
    if not compared:
        raise reason
    return ""


def compare_outputs(expected: Tensors, actual: Tensors, tolerance: float) -> str:
    """Describe the first difference between two sets of outputs; "" if there is none.

    `tolerance` is that of `compare_graphs`.
    """
    if list(expected) != list(actual):
        return f"expected outputs {', '.join(expected)}, got {', '.join(actual)}"
    for name, reference in expected.items():
        array = actual[name]
        if reference.shape != array.shape or reference.dtype != array.dtype:
            return (
                f"output '{name}': expected {reference.dtype}{list(reference.shape)}, got"
                f" {array.dtype}{list(array.shape)}"
            )
        error = _difference(reference, array)
        allowed = 0.0
        if _is_float(reference.dtype):
            allowed = max(tolerance, 8 * _epsilon(reference.dtype))
        if not error <= allowed:
            return (
                f"output '{name}' differs by {error:.3g} of its largest magnitude (allowed"
                f" {allowed:.3g})"
            )
    return ""


def _is_float(dtype: np.dtype[np.generic]) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _epsilon(dtype: np.dtype[np.generic]) -> float:
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _difference(expected: NDArray[np.generic], actual: NDArray[np.generic]) -> float:
    """Return the largest difference over the largest magnitude.

    It is infinite if NaN or infinities are at different positions.
    """
    if not _is_float(expected.dtype):
        return 0.0 if np.array_equal(expected, actual) else math.inf
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(a)
    if (
        not np.array_equal(a[~finite], b[~finite], equal_nan=True)
        or not np.isfinite(b[finite]).all()
    ):
        return math.inf
    scale = np.abs(a[finite]).max(initial=0.0)
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0) / (scale or 1.0))
