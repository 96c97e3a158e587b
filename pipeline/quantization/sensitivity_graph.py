"""Two graphs that show what low precision does to a model, both computed in fp32, so that any CPU
can run them.

The lossy graph is the low one with every 16-bit tensor as an fp32 tensor that is rounded to 16 bits
where it is made (Q/DQ pairs round already): what its tensors differ by from the model's has
accumulated from the start. The other graph is the model itself; beside each node that runs low
stands its shadow: the node of the lossy graph, with its own weights, on the model's exact values
rounded as the node would read them. What a shadow differs by is that node's own loss, and not what
the nodes before it have lost.

Running the low graph as it is would not tell: ONNX Runtime computes most 16-bit nodes on a CPU in
fp32, and drops Casts between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from pipeline.onnx_graph.inspect import opset_of
from pipeline.quantization.half_precision import QUANTIZERS, flatten, raise_opset
from pipeline.quantization.placement import SAME_SCALE

FLOAT = TensorProto.FLOAT
SIXTEEN_BITS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
ONLY_SHAPES = frozenset({"Shape", "Size"})


@dataclass(frozen=True, slots=True)
class Shadow:
    """A node that runs low, with its tensors.

    They are in the model, in the lossy graph and beside the model.
    """

    node: str
    operator: str
    tensors: tuple[str, ...]  # what it reads and writes, in the model
    # each output in the model, beside it, and in the lossy graph
    outputs: tuple[tuple[str, str, str], ...]


def source_as_converted(source: onnx.ModelProto, low: onnx.ModelProto) -> onnx.ModelProto:
    """Return the fp32 model with the opset and node names from which `low` was made.

    Its 16-bit tensors are lifted to fp32.
    """
    exact = flatten(raise_opset(source, opset_of(low)))
    lift(exact)
    return exact


def add_shadows(
    exact: onnx.ModelProto, low: onnx.ModelProto, halves: Mapping[str, int]
) -> tuple[Shadow, ...]:
    """Make `low` the lossy graph, and give `exact` the shadows of its low nodes, both in place.

    `halves`: the 16-bit tensors of `low`. An 8-bit node that only moves bytes has no shadow,
    because it loses nothing itself.
    """
    quantised: set[str] = set()
    for node in low.graph.node:
        if node.op_type == "DequantizeLinear":
            quantised.update(node.output)
    names = {node.name for node in low.graph.node if _is_low(node, quantised, halves)}
    round_16_bits(low, halves)
    exact_nodes = {node.name: node for node in exact.graph.node}
    drawer = _Drawer(exact.graph, low.graph)
    shadows: list[Shadow] = []
    for node in low.graph.node:
        if node.name in names and node.name in exact_nodes:
            drawer.draw(node)
            shadows.append(_shadow(exact_nodes[node.name], node))
    drawer.finish()
    return tuple(shadows)


def _shadow(exact: onnx.NodeProto, low: onnx.NodeProto) -> Shadow:
    tensors = tuple(name for name in (*exact.input, *exact.output) if name)
    outputs = tuple(
        (exact_name, _beside(low_name), low_name)
        for exact_name, low_name in zip(exact.output, low.output, strict=True)
        if exact_name
    )
    return Shadow(low.name, low.op_type, tensors, outputs)


def tensors_of_16_bits(proto: onnx.ModelProto) -> dict[str, int]:
    """Return names and types of all fp16 and bf16 tensors of the top level.

    The values of weights are not read.
    """
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    types |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    return {name: kind for name, kind in types.items() if kind in SIXTEEN_BITS}


def _is_low(node: onnx.NodeProto, quantised: set[str], halves: Mapping[str, int]) -> bool:
    if node.op_type in QUANTIZERS | ONLY_SHAPES | {"Cast"}:
        return False
    reads_8_bits = not quantised.isdisjoint(node.input) and node.op_type not in SAME_SCALE
    return reads_8_bits or any(name in halves for name in (*node.input, *node.output))


def lift(proto: onnx.ModelProto) -> None:
    """Turn the 16-bit tensors of a graph into fp32, in place. Weights keep their rounded values."""
    graph = proto.graph
    for tensor in graph.initializer:
        if tensor.data_type in SIXTEEN_BITS:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for node in graph.node:
        if node.op_type == "Cast":
            for attribute in node.attribute:  # `saturate` may stand before `to`
                if attribute.name == "to" and attribute.i in SIXTEEN_BITS:
                    attribute.i = FLOAT
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in SIXTEEN_BITS:
            value.type.tensor_type.elem_type = FLOAT
    del graph.value_info[:]


def round_16_bits(proto: onnx.ModelProto, halves: Mapping[str, int]) -> None:
    """Lift a graph, and round each of the tensors `halves` to 16 bits, in place.

    The rounding is behind the producer of the tensor.
    """
    lift(proto)
    nodes = []
    for node in proto.graph.node:
        low_outputs = [name for name in node.output if name in halves]
        node.output[:] = [f"{name}/unrounded" if name in halves else name for name in node.output]
        nodes.append(node)
        for name in low_outputs:
            nodes.append(_cast(f"{name}/unrounded", f"{name}/16_bits", halves[name]))
            nodes.append(_cast(f"{name}/16_bits", name, FLOAT))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [source], [target], name=f"{target}/cast", to=kind)


def _beside(name: str) -> str:
    return f"{name}/beside"


class _Drawer:
    """Copies nodes of the lossy graph to the exact one, with the rounding of their inputs."""

    def __init__(self, exact: onnx.GraphProto, lossy: onnx.GraphProto) -> None:
        self.exact = exact
        self.exact_nodes = {node.name: node for node in exact.node}
        self.makers = {
            name: (node, index) for node in lossy.node for index, name in enumerate(node.output)
        }
        self.constants = {tensor.name: tensor for tensor in lossy.initializer}
        self.sources: dict[str, str] = {"": ""}  # beside the model, by name in the lossy graph
        self.nodes: list[onnx.NodeProto] = []

    def draw(self, node: onnx.NodeProto) -> None:
        """Copy a node, on the values that it would read, with other names for its outputs."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = _beside(node.name)
        copy.input[:] = [self.source_of(name) for name in node.input]
        copy.output[:] = [_beside(name) if name else "" for name in node.output]
        self.nodes.append(copy)

    def source_of(self, name: str) -> str:
        """Return the exact values of a tensor, rounded as in the lossy graph.

        The tensor is created once, beside the model.
        """
        if name not in self.sources:
            self.sources[name] = self._source_of(name)
        return self.sources[name]

    def _source_of(self, name: str) -> str:
        if name in self.constants:
            copy = self.exact.initializer.add()
            copy.CopyFrom(self.constants[name])
            copy.name = _beside(name)
            return _beside(name)
        if name not in self.makers:  # an input of the model
            return name
        node, index = self.makers[name]
        if node.name in self.exact_nodes:
            return str(self.exact_nodes[node.name].output[index])
        self.draw(node)
        return _beside(name)

    def finish(self) -> None:
        self.exact.node.extend(self.nodes)
