"""NNCF's post-training quantisation and weight compression for OpenVINO, on the ONNX graph.

The result is an ONNX graph with Q/DQ. NNCF on OpenVINO's IR would give the same kernels at the same
speed (ResNet-50: 11.6 ms against 11.2 ms here), but another kind of artifact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import onnx

from pipeline.backends.feed_checks import installed_version
from pipeline.core.artifacts import BuildOptions, Note, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.data.samples import CalibrationSet
from pipeline.distribution import install_command
from pipeline.errors import ModelError, UnsupportedError
from pipeline.host.environment import torch_hidden
from pipeline.onnx_graph.files import onnx_model, operator_histogram, read_proto, write_proto
from pipeline.onnx_graph.inspect import changed_interface, kept_nodes, with_same_interface
from pipeline.plan.schema import CalibrationConfig
from pipeline.quantization.half_precision import QDQ_OPSET, flatten, raise_opset
from pipeline.quantization.linear_layers import (
    check_changed,
    check_unquantised,
    constant_bytes,
    weights_note,
)

FILE = "model.onnx"
MAX_SAMPLES = 300  # NNCF's own default: its means over samples hardly change after that
BLOCKS_OPSET = 21  # the first in which DequantizeLinear has scales per block and 4-bit integers
BITS = {
    onnx.TensorProto.INT4: 4,
    onnx.TensorProto.UINT4: 4,
    onnx.TensorProto.INT8: 8,
    onnx.TensorProto.UINT8: 8,
}
SMOOTH = "nncf_smooth_quant"  # in the name of a Mul that SmoothQuant puts before a product
# With both in a graph, NNCF gets the model type of a transformer.
ATTENTION = frozenset({"Softmax", "LayerNormalization"})


@dataclass(frozen=True, slots=True)
class Samples:
    """The calibration samples one by one. NNCF iterates over them more than once.

    Batches of one, since NNCF's ranges are means over samples.
    """

    source: CalibrationSet
    count: int
    progress: Progress

    def __iter__(self) -> Iterator[Tensors]:
        for index, batch in enumerate(islice(self.source.batches(1), self.count)):
            self.progress(index / self.count, "NNCF: collecting statistics")
            yield batch.feeds


def quantize_with_nncf(
    model: OnnxModel,
    samples: CalibrationSet,
    recipe: Recipe,
    options: CalibrationConfig,
    allowed: BuildOptions,
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """Write the int8 graph as out/model.onnx, with the interface of `model`.

    NNCF chooses ranges and placement. `recipe.keep_fp32` is excluded.
    """
    installed_version("nncf", install_command("openvino"))
    with torch_hidden():
        return _quantize(model, samples, recipe, options, out, progress)


def _quantize(
    model: OnnxModel,
    samples: CalibrationSet,
    recipe: Recipe,
    options: CalibrationConfig,
    out: Path,
    progress: Progress,
) -> OnnxModel:
    proto = read_proto(model.path)
    kept = sorted(kept_nodes(proto.graph, recipe.keep_fp32))
    progress(None, "loading NNCF")
    os.environ.setdefault("NNCF_CI", "1")  # no telemetry about a user's model
    import nncf
    from nncf.quantization.advanced_parameters import (
        AdvancedQuantizationParameters,
        AdvancedSmoothQuantParameters,
        OverflowFix,
    )

    count = min(options.samples or samples.samples, samples.samples, MAX_SAMPLES)
    smooth = recipe.smooth_quant
    transformer = (
        smooth is not None
        or options.language_model
        or operator_histogram(model.path).keys() >= ATTENTION
    )
    alphas = (
        AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
        if smooth is False
        else AdvancedSmoothQuantParameters()
    )
    fix = OverflowFix.ENABLE if recipe.weight_bits == 7 else OverflowFix.DISABLE
    try:
        quantized = nncf.quantize(
            proto,
            nncf.Dataset(Samples(samples, count, progress)),
            subset_size=count,
            target_device=nncf.TargetDevice.CPU,
            model_type=nncf.ModelType.TRANSFORMER if transformer else None,
            preset=nncf.QuantizationPreset.MIXED if recipe.activation == "uint8" else None,
            ignored_scope=nncf.IgnoredScope(names=kept) if kept else None,
            advanced_parameters=AdvancedQuantizationParameters(
                overflow_fix=fix, smooth_quant_alphas=alphas
            ),
        )
    except (nncf.ValidationError, nncf.UnsupportedModelError, nncf.InternalError) as error:
        raise UnsupportedError(
            f"NNCF cannot quantise this model: {error}", "use the quantizer `crucible`"
        ) from error
    write_proto(quantized, out / FILE)
    used = Note(
        stage="convert",
        text=(
            f"NNCF took {count} of {samples.samples} calibration samples;"
            f" {_smoothed(quantized.graph, smooth)}"
        ),
        level="info",
    )
    result = onnx_model(out, FILE, Precision.INT8, (*model.notes, used))
    changed = changed_interface(model, result)
    if changed:
        raise ModelError(
            f"NNCF changed the model's interface: {changed}", "use the quantizer `crucible`"
        )
    return result


def _smoothed(graph: onnx.GraphProto, required: bool | None) -> str:
    """Return a text on the effect of SmoothQuant, from its Muls in the graph.

    UnsupportedError if it is required and changed nothing.
    """
    count = sum(node.op_type == "Mul" and SMOOTH in node.name for node in graph.node)
    if required and not count:
        raise UnsupportedError(
            "SmoothQuant found no product with a weight to move outliers into",
            "leave `smooth_quant` out",
        )
    return f"SmoothQuant rescales {count} activations" if count else "without SmoothQuant"


def compress_with_nncf(
    model: OnnxModel, recipe: Recipe, out: Path, progress: Progress = silent
) -> OnnxModel:
    """Write the graph with compressed weights as out/model.onnx, with the interface of `model`.

    `recipe.keep_fp32` is excluded. NNCF's rules: int8 has one scale per output channel. With int4,
    embeddings and the last layer get 8 bits, and weights that no block size divides stay as they
    are.
    """
    installed_version("nncf", install_command("openvino"))
    with torch_hidden():
        return _compress(model, recipe, out, progress)


def _compress(model: OnnxModel, recipe: Recipe, out: Path, progress: Progress) -> OnnxModel:
    in_blocks = recipe.precision is Precision.INT4
    proto = flatten(raise_opset(read_proto(model.path), BLOCKS_OPSET if in_blocks else QDQ_OPSET))
    check_unquantised(proto.graph)
    kept = sorted(kept_nodes(proto.graph, recipe.keep_fp32))
    progress(None, "loading NNCF")
    os.environ.setdefault("NNCF_CI", "1")
    import nncf
    from nncf.quantization.advanced_parameters import (
        AdvancedCompressionParameters,
        GroupSizeFallbackMode,
    )

    source = onnx.GraphProto()
    source.CopyFrom(proto.graph)
    try:
        compressed = nncf.compress_weights(
            proto,
            mode=(
                nncf.CompressWeightsMode.INT4_ASYM
                if in_blocks
                else nncf.CompressWeightsMode.INT8_ASYM
            ),
            group_size=recipe.block_size if in_blocks else None,
            ignored_scope=nncf.IgnoredScope(names=kept) if kept else None,
            advanced_parameters=(
                AdvancedCompressionParameters(group_size_fallback_mode=GroupSizeFallbackMode.IGNORE)
                if in_blocks
                else None
            ),
        )
    except (nncf.ValidationError, nncf.UnsupportedModelError, nncf.InternalError) as error:
        raise UnsupportedError(
            f"NNCF cannot compress the weights of this model: {error}",
            "take onnxruntime, or another precision",
        ) from error
    bits = _weight_bits(compressed.graph)
    check_changed(bits, recipe)
    write_proto(compressed, out / FILE)
    note = weights_note(source, bits, constant_bytes(source), constant_bytes(compressed.graph))
    return with_same_interface(model, onnx_model(out, FILE, recipe.precision, (note,)))


def _weight_bits(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the bits of the integer weights, by the name of the node that reads the weight."""
    integers = {
        tensor.name: BITS[tensor.data_type]
        for tensor in graph.initializer
        if tensor.data_type in BITS
    }
    bits = {
        node.output[0]: integers[node.input[0]]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in integers
    }
    result = {}
    for node in graph.node:
        for name in node.input:
            if name in bits:
                result[node.name] = bits[name]
    return result
