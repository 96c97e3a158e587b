"""Weights in 4 or 8 bits for ONNX Runtime: its own quantiser makes a MatMulNBits of each linear
layer. No data is needed.

Round to nearest with a scale and a zero point per block of each column. What is multiplied is the
node's own affair: of floats, weights are unpacked in each run; at accuracy level 4 activations
become int8 as they come, block by block, which is faster and a little less exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.core import OnnxModel, Progress, Recipe, silent
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
OF_FLOATS, OF_INT8 = 0, 4  # accuracy levels of MatMulNBits


def compress_with_onnxruntime(
    model: OnnxModel, recipe: Recipe, out: Path, progress: Progress = silent
) -> OnnxModel:
    """The graph with few bits in its weights as out/model.onnx, with the interface of `model`;
    `recipe.keep_fp32` stays as it is.

    A Gemm becomes a MatMul and an Add, which is the same sum. Raises UnsupportedError where no
    layer can be changed.
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
    made = _quantised(proto, recipe, set(chosen))
    write_proto(made, out / FILE)
    note = weights_note(source, chosen, before, constant_bytes(made.graph))
    return with_same_interface(model, onnx_model(out, FILE, recipe.precision, (note,)))


def _quantised(proto: onnx.ModelProto, recipe: Recipe, chosen: set[str]) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    others = {
        node.name
        for inner in graphs_of(proto.graph)
        for node in inner.node
        if node.name not in chosen
    }
    quantizer = MatMulNBitsQuantizer(
        proto,
        bits=bits_of(recipe),
        block_size=recipe.block_size,
        is_symmetric=False,
        accuracy_level=OF_INT8 if recipe.activation == "int8" else OF_FLOATS,
        nodes_to_exclude=others,
    )
    quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    _drop_twins(made.graph)
    return made


def _fits(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> bool:
    """Whether MatMulNBits can stand for a linear layer: a matrix as the second factor, and of a
    Gemm nothing but a product and a bias.
    """
    if node.input[1] not in weights or len(weights[node.input[1]].dims) != 2:
        return False
    attributes = {
        attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    scaled = attributes.get("alpha", 1.0) != 1.0 or (
        len(node.input) > 2 and attributes.get("beta", 1.0) != 1.0
    )
    return node.op_type == "MatMul" or not (scaled or attributes.get("transA", 0))


def split_gemms(graph: onnx.GraphProto, names: Set[str]) -> None:
    """Write each Gemm named as a MatMul of the same name, then an Add where it has a bias. In
    place.
    """
    weights = float_weights(graph)
    taken = {
        name for node in graph.node for name in (*node.input, *node.output, node.name)
    } | weights.keys()
    turned: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "Gemm" or node.name not in names:
            nodes.append(node)
            continue
        weight = node.input[1]
        if any(attribute.name == "transB" and attribute.i for attribute in node.attribute):
            if weight not in turned:
                turned[weight] = _fresh(f"{weight}_transposed", taken)
                graph.initializer.append(
                    numpy_helper.from_array(
                        np.ascontiguousarray(numpy_helper.to_array(weights[weight]).T),
                        turned[weight],
                    )
                )
            weight = turned[weight]
        nodes += _product_and_sum(node, weight, taken)
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unread(graph)


def _product_and_sum(
    gemm: onnx.NodeProto, weight: str, taken: set[str]
) -> Iterator[onnx.NodeProto]:
    bias = gemm.input[2] if len(gemm.input) > 2 else ""
    product = _fresh(f"{gemm.output[0]}_product", taken) if bias else gemm.output[0]
    yield onnx.helper.make_node("MatMul", [gemm.input[0], weight], [product], name=gemm.name)
    if bias:
        yield onnx.helper.make_node(
            "Add", [product, bias], [gemm.output[0]], name=_fresh(f"{gemm.name}_bias", taken)
        )


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _drop_twins(graph: onnx.GraphProto) -> None:
    """Of two layers that share a weight the quantiser makes the same constants twice; ONNX Runtime
    refuses a name that stands twice. In place.
    """
    first: dict[str, int] = {}
    for index, tensor in enumerate(graph.initializer):
        first.setdefault(tensor.name, index)
    for index in reversed(range(len(graph.initializer))):
        if first[graph.initializer[index].name] != index:
            del graph.initializer[index]
