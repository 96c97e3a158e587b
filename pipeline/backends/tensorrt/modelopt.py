"""Quantise an ONNX graph for TensorRT with NVIDIA ModelOpt, into Q/DQ pairs of int8 or fp8.

ModelOpt chooses the ranges and the placement on the fp32 graph. The casts to 16 bits are ours:
ModelOpt's casts do not check for overflow (int8), and keep operators, not nodes, in fp32. Nodes
that read an attention mask are excluded: ModelOpt gives a tensor of 0 and -inf the scale inf
(MiniLM, `max`: the cosine to the original falls to 0.60). Without samples it would calibrate on
random values, so it always gets a reader. It replaces parts of onnxruntime in the whole process:
call this in a child process.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.backends.feed_checks import installed_version
from pipeline.core.artifacts import BuildOptions, Note, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.data.samples import CalibrationSet
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, ModelError, UnsupportedError
from pipeline.onnx_graph.activations import Bounds, observe, open_probe, rows_per_run
from pipeline.onnx_graph.files import external_files, onnx_model, read_proto, write_proto
from pipeline.onnx_graph.inspect import changed_interface, kept_nodes
from pipeline.plan.schema import CalibrationConfig
from pipeline.quantization.half_precision import (
    MAX_FP16,
    MIN_OPSET,
    QUANTIZERS,
    SAFE_FRACTION,
    SCALES_OPSET,
    flatten,
    kept_in_fp32,
    lower,
    overflow_notes,
    raise_opset,
    reasons_for_fp32,
)
from pipeline.quantization.insert_qdq import holds_qdq

FILE = "model.onnx"
INSTALL = install_command("modelopt")
ANOTHER = "use the quantizer `crucible`"
METHODS = {CalibrationMethod.ENTROPY: "entropy", CalibrationMethod.MINMAX: "max"}


class Reader:
    """The calibration samples in batches, with the interface of ONNX Runtime's calibrators.

    ModelOpt's calibrators are built on these.
    """

    def __init__(self, source: CalibrationSet, size: int, limit: int, progress: Progress) -> None:
        self.source, self.size, self.limit, self.progress = source, size, limit, progress
        self.most = 0  # samples read in the longest pass
        self.rewind()

    def rewind(self) -> None:
        self._batches = self._read()

    def get_next(self) -> Tensors | None:
        return next(self._batches, None)

    def get_first(self) -> Tensors:
        """Return a batch for its shapes: ModelOpt does not quantise matrix products of one row."""
        return next(self.source.batches(self.size)).feeds

    def _read(self) -> Iterator[Tensors]:
        used = 0
        for batch in self.source.batches(self.size):
            if used >= self.limit:
                return
            yield batch.feeds
            used += batch.samples
            self.most = max(self.most, used)
            self.progress(
                0.2 + 0.6 * min(used / self.limit, 1.0),
                f"ModelOpt: {used} of {self.limit} samples",
            )


def quantize_with_modelopt(
    model: OnnxModel,
    samples: CalibrationSet,
    recipe: Recipe,
    options: CalibrationConfig,
    allowed: BuildOptions,
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """Write the int8 or fp8 graph as out/model.onnx, with the interface of `model`.

    Other nodes are in `recipe.rest`; `recipe.keep_fp32` stays fp32. UnsupportedError for a model
    that ModelOpt cannot quantise, BackendUnavailable without ModelOpt.
    """
    installed_version("nvidia-modelopt", INSTALL)
    method = method_of(recipe)
    proto = flatten(
        raise_opset(read_proto(model.path), max(SCALES_OPSET, MIN_OPSET.get(recipe.rest, 0)))
    )
    if holds_qdq(proto.graph):
        raise UnsupportedError(
            "the model holds Q/DQ pairs already, which ModelOpt leaves as they are",
            f"{ANOTHER}, which keeps every scale",
        )
    kept = kept_nodes(proto.graph, recipe.keep_fp32)
    limit = min(options.samples or samples.samples, samples.samples)
    progress(0.0, "looking for values that 8 and 16 bits cannot hold")
    bounds = _bounds(model, samples, options.batch, limit)  # before ModelOpt changes onnxruntime
    reasons = reasons_for_fp32(proto.graph, bounds) if recipe.rest is Precision.FP16 else {}
    excluded = kept | reasons.keys() | masked(proto.graph, bounds)
    reader = Reader(samples, options.batch, limit, progress)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        quantised = _quantised(
            proto,
            Path(folder),
            "fp8" if recipe.precision is Precision.FP8 else "int8",
            method,
            excluded,
            reader,
        )
    if recipe.rest in MIN_OPSET:
        lower(quantised, recipe.rest, kept | reasons.keys())
    write_proto(quantised, out / FILE)
    used = Note(
        stage="convert",
        text=f"ModelOpt ({method}) took {reader.most} of {samples.samples} calibration samples",
        level="info",
    )
    result = onnx_model(out, FILE, recipe.precision, (used, *overflow_notes(proto.graph, reasons)))
    changed = changed_interface(model, result)
    if changed:
        raise ModelError(f"ModelOpt changed the model's interface: {changed}", ANOTHER)
    unnamed = {name: why for name, why in reasons.items() if name not in kept}
    return result.model_copy(update={"kept_fp32": kept_in_fp32(quantised.graph, unnamed)})


def method_of(recipe: Recipe) -> str:
    """Return ModelOpt's name of the recipe's calibration method.

    UnsupportedError for a method that it lacks.
    """
    if recipe.precision is Precision.FP8:
        # ModelOpt converts an int8 graph to fp8 by another scale, which is right for the largest
        # value only
        return "max"
    if recipe.method not in METHODS:
        choices = " or ".join(METHODS)
        raise UnsupportedError(
            f"ModelOpt chooses ranges by {choices}, not by {recipe.method}",
            f"take `method: {choices}`, or {ANOTHER}",
        )
    return METHODS[recipe.method]


def _bounds(model: OnnxModel, samples: CalibrationSet, batch: int, limit: int) -> dict[str, Bounds]:
    """Return the bounds of every activation on the samples that ModelOpt will read."""
    probe = open_probe(model)
    first = next(samples.batches(1))
    size = min(batch, rows_per_run(probe, first.feeds, first.samples))
    batches = (batch for batch in samples.batches(size) if batch.first < limit)
    return observe(probe, (batch.feeds for batch in batches))


def masked(graph: onnx.GraphProto, bounds: Mapping[str, Bounds]) -> frozenset[str]:
    """Return the nodes that read infinities, or values so large that they stand for infinity.

    No 8-bit scale fits these values together with the others.
    """
    infinite = {
        name
        for name, bound in bounds.items()
        if bound.nonfinite or bound.largest > SAFE_FRACTION * MAX_FP16
    }
    return frozenset(node.name for node in graph.node if infinite.intersection(node.input))


def _quantised(
    proto: onnx.ModelProto,
    folder: Path,
    mode: str,
    method: str,
    excluded: frozenset[str],
    reader: Reader,
) -> onnx.ModelProto:
    """Return the fp32 graph with ModelOpt's Q/DQ pairs, but none at the nodes `excluded`.

    `folder` is for temporary files.
    """
    source, target = folder / "source.onnx", folder / "quantised.onnx"
    write_proto(proto, source)
    patterns = [f"{re.escape(name)}$" for name in sorted(excluded)]  # regular expressions
    reader.progress(0.1, "loading ModelOpt")
    try:
        from modelopt.onnx.quantization import quantize

        quantize(
            str(source),
            quantize_mode=mode,
            calibration_data_reader=reader,
            calibration_method=method,
            calibration_eps=["cpu"],
            nodes_to_exclude=patterns,
            high_precision_dtype="fp32",
            use_external_data_format=bool(external_files(source)),
            output_path=str(target),
            log_level="ERROR",
        )
    except ImportError as error:
        raise BackendUnavailable(
            f"ModelOpt is installed and cannot be loaded: {error}", INSTALL
        ) from error
    except _failures() as error:
        raise UnsupportedError(
            f"ModelOpt cannot quantise this model: {type(error).__name__}: {error}", ANOTHER
        ) from error
    quantised = flatten(read_proto(target))
    if not holds_qdq(quantised.graph):
        raise UnsupportedError(
            f"ModelOpt found nothing to quantise, so only the label would be {mode}",
            "choose another precision",
        )
    check_scales(quantised.graph)
    return quantised


def check_scales(graph: onnx.GraphProto) -> None:
    """Raise UnsupportedError for a tensor with a scale that is not a positive number."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        scale = arrays[node.input[1]] if node.op_type in QUANTIZERS else np.ones(1)
        if not (np.isfinite(scale) & (scale > 0)).all():
            advice = f"name the nodes that read it in `keep_fp32`, or {ANOTHER}"
            raise UnsupportedError(
                f"ModelOpt gave '{node.input[0]}' the scale {scale.max():g}", advice
            )


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that ModelOpt raises. Neither it nor ONNX Runtime has a base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    of_onnxruntime = (
        kind
        for kind in vars(state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    )
    return (
        *of_onnxruntime,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    )
