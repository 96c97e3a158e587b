"""The linear layers of a graph, and what they weigh: for the quantisers that change weights
alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx

from pipeline.core.artifacts import Note
from pipeline.core.recipe import Recipe
from pipeline.errors import UnsupportedError
from pipeline.onnx_graph.inspect import bytes_of_tensor
from pipeline.quantization.insert_qdq import holds_qdq

NAMED = 5  # layers that a note names one by one
MIB = 2**20


def float_weights(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the fp32 constants of a flat graph by name.

    A constant that is also an input is left out, because each run may change it.
    """
    inputs = {value.name for value in graph.input}
    return {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name not in inputs
    }


def linear_layers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return, by name, every MatMul and Gemm of a flat graph with an fp32 weight on one side only.

    The other side is no constant.
    """
    weights = float_weights(graph)
    constants = {tensor.name for tensor in graph.initializer}
    layers: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            factors = constants.intersection(node.input[:2])
            if len(factors) == 1 and factors <= weights.keys():
                layers[node.name] = node
    return layers


def check_unquantised(graph: onnx.GraphProto) -> None:
    """Raise UnsupportedError for a graph that has Q/DQ pairs: its precision is fixed already."""
    if holds_qdq(graph):
        raise UnsupportedError(
            "the model holds Q/DQ pairs already, so not only its weights have few bits",
            "leave `weight_only` out",
        )


def check_changed(bits: Mapping[str, int], recipe: Recipe) -> None:
    """Raise UnsupportedError unless a weight has the bits of the recipe."""
    if bits_of(recipe) not in bits.values():
        message = (
            f"no linear layer can hold its weights in {bits_of(recipe)} bits, so {recipe.precision}"
            " weight-only would only be its name"
        )
        raise UnsupportedError(message, "choose another precision, or keep fewer nodes in fp32")


def bits_of(recipe: Recipe) -> int:
    return int(recipe.precision.removeprefix("int"))


def constant_bytes(graph: onnx.GraphProto) -> int:
    """Return the bytes of all constants of a flat graph."""
    return sum(map(bytes_of_tensor, graph.initializer))


def weights_note(source: onnx.GraphProto, bits: Mapping[str, int], before: int, after: int) -> Note:
    """Return a note on the layers of `source` that changed, with the bytes of all constants.

    `bits` holds, by node, the bits of the weights that are integers now.
    """
    linear = linear_layers(source)
    counts = Counter(bits[name] for name in linear if name in bits)
    parts = [
        f"{count} of {len(linear)} linear layers hold their weights in {width} bits"
        for width, count in sorted(counts.items())
    ]
    others = Counter(
        (node.op_type, bits[node.name])
        for node in source.node
        if node.name in bits and node.name not in linear
    )
    parts += [
        f"so do {count} {operator}, in {width} bits"
        for (operator, width), count in sorted(others.items())
    ]
    float_layers = [name for name in linear if name not in bits]
    if float_layers:
        names = ", ".join(float_layers[:NAMED])
        if len(float_layers) > NAMED:
            names += f" and {len(float_layers) - NAMED} more"
        parts.append(f"as they were: {names}")
    parts.append(
        f"all constants together: {before / MIB:.1f} MiB before, {after / MIB:.1f} MiB after"
    )
    return Note(stage="convert", text="; ".join(parts), level="info")
