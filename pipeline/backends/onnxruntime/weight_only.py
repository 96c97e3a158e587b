"""Compress weights to 4 or 8 bits for ONNX Runtime, without any data.

ONNX Runtime's own quantiser replaces each linear layer by a MatMulNBits. It rounds to nearest, with
a scale and a zero point per block of each column. For float arithmetic, the kernel unpacks the
weights in each run. At accuracy level 4 it converts activations to int8 block by block, which is
faster and a little less exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Recipe
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.onnx_graph.inspect import graphs_of, kept_nodes, with_same_interface
from pipeline.quantization.half_precision import flatten
from pipeline.quantization.insert_qdq import drop_unread
from pipeline.quantization.linear_layers import (
    bits_of,
    check_changed,
    check_unquantised,
    constant_bytes,
    float_weights,
    linear_layers,
    weights_note,
)

FILE = "model.onnx"
# Accuracy levels of MatMulNBits, by the arithmetic.
LEVEL_OF_FLOATS, LEVEL_OF_INT8 = 0, 4


def compress_with_onnxruntime(
    model: OnnxModel, recipe: Recipe, out: Path, progress: Progress = silent
) -> OnnxModel:
    """Write the graph with compressed weights as out/model.onnx, with the interface of `model`.

    `recipe.keep_fp32` stays unchanged. A Gemm becomes a MatMul and an Add, which computes the same.
    UnsupportedError if no layer can be compressed.
    """
    proto = flatten(read_proto(model.path))
    check_unquantised(proto.graph)
    kept = kept_nodes(proto.graph, recipe.keep_fp32)
    weights = float_weights(proto.graph)
    chosen = {
        name: bits_of(recipe)
        for name, node in linear_layers(proto.graph).items()
        if name not in kept and _fits(node, weights)
    }
    check_changed(chosen, recipe)
    before, source = constant_bytes(proto.graph), onnx.GraphProto()
    source.CopyFrom(proto.graph)
    split_gemms(proto.graph, chosen.keys())
    progress(None, f"{len(chosen)} layers to {bits_of(recipe)} bits")
    quantised = _quantised(proto, recipe, set(chosen))
    write_proto(quantised, out / FILE)
    note = weights_note(source, chosen, before, constant_bytes(quantised.graph))
    return with_same_interface(model, onnx_model(out, FILE, recipe.precision, (note,)))


def _quantised(proto: onnx.ModelProto, recipe: Recipe, chosen: set[str]) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    names = {node.name for graph in graphs_of(proto.graph) for node in graph.node}
    quantizer = MatMulNBitsQuantizer(
        proto,
        bits=bits_of(recipe),
        block_size=recipe.block_size,
        is_symmetric=False,
        accuracy_level=LEVEL_OF_INT8 if recipe.activation == "int8" else LEVEL_OF_FLOATS,
        nodes_to_exclude=names - chosen,
    )
    quantizer.process()
    quantised: onnx.ModelProto = quantizer.model.model
    _drop_duplicates(quantised.graph)
    return quantised


def _fits(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> bool:
    """Return True if MatMulNBits can replace a linear layer.

    The second factor must be a matrix, and a Gemm only a product and a bias.
    """
    if node.input[1] not in weights or len(weights[node.input[1]].dims) != 2:
        return False
    attributes = {
        attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    if node.op_type == "MatMul":
        return True
    scales_product = attributes.get("alpha", 1.0) != 1.0
    scales_bias = len(node.input) > 2 and attributes.get("beta", 1.0) != 1.0
    return not (scales_product or scales_bias or attributes.get("transA", 0))


def split_gemms(graph: onnx.GraphProto, names: Set[str]) -> None:
    """Replace each of the named Gemms by a MatMul of the same name, and an Add for its bias.

    Changes the graph in place.
    """
    weights = float_weights(graph)
    taken = set(weights)
    for node in graph.node:
        taken |= {*node.input, *node.output, node.name}
    transposed: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "Gemm" or node.name not in names:
            nodes.append(node)
            continue
        weight = node.input[1]
        if any(attribute.name == "transB" and attribute.i for attribute in node.attribute):
            if weight not in transposed:
                transposed[weight] = _new_name(f"{weight}_transposed", taken)
                matrix = np.ascontiguousarray(numpy_helper.to_array(weights[weight]).T)
                graph.initializer.append(numpy_helper.from_array(matrix, transposed[weight]))
            weight = transposed[weight]
        nodes += _product_and_sum(node, weight, taken)
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unread(graph)


def _product_and_sum(
    gemm: onnx.NodeProto, weight: str, taken: set[str]
) -> Iterator[onnx.NodeProto]:
    bias = gemm.input[2] if len(gemm.input) > 2 else ""
    product = _new_name(f"{gemm.output[0]}_product", taken) if bias else gemm.output[0]
    yield onnx.helper.make_node("MatMul", [gemm.input[0], weight], [product], name=gemm.name)
    if bias:
        yield onnx.helper.make_node(
            "Add", [product, bias], [gemm.output[0]], name=_new_name(f"{gemm.name}_bias", taken)
        )


def _new_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _drop_duplicates(graph: onnx.GraphProto) -> None:
    """Remove the second of two constants with the same name, in place.

    The quantiser writes the constants twice if two layers share a weight, and ONNX Runtime refuses
    duplicate names.
    """
    first: dict[str, int] = {}
    for index, tensor in enumerate(graph.initializer):
        first.setdefault(tensor.name, index)
    for index in reversed(range(len(graph.initializer))):
        if first[graph.initializer[index].name] != index:
            del graph.initializer[index]
