"""The scales of a graph that holds Q/DQ already: which precision it brings, and every scale
counted, so that no stage loses one. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from pipeline.core.recipe import Precision
from pipeline.onnx_graph.inspect import graphs_of, type_name

QDQ = ("QuantizeLinear", "DequantizeLinear")
QUANTISED_TOLERANCE = 2e-2
"""As `compare_graphs` takes it, for graphs that hold Q/DQ. Two sums of fp32 in another order differ
in the last bit, and a value on the edge between two steps then falls to the other side: one step of
255, which the next layer adds up. Scales are compared exactly, by `lost_scales`.
"""

Scale = NDArray[np.float64]
Key = tuple[str, str, bytes, bytes]
"""Operator, quantised dtype, scale and zero point; all but the first empty where the graph computes
the scale.
"""

NAMED = 3


def given_precision(graph: onnx.GraphProto) -> Precision | None:
    """Return int8 or fp8 if the graph quantises activations to it; None for other graphs.

    The result is None also if only the weights are stored in few bits.
    """
    constants = constants_of(graph)
    dtypes = {
        type_name(quantised_type(node, constants))
        for node in _nodes(graph)
        if node.op_type == QDQ[0] and node.input[0] not in constants
    }
    if any(dtype.startswith("float8") for dtype in dtypes):
        return Precision.FP8
    return Precision.INT8 if dtypes & {"int8", "uint8"} else None


def constants_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return initializers, Constant nodes and their Identities by name.

    Those that a caller may replace are left out.
    """
    inputs = {value.name for value in graph.input}
    constants: dict[str, onnx.TensorProto] = {}
    for inner in graphs_of(graph):
        for tensor in inner.initializer:
            if tensor.name not in inputs:
                constants[tensor.name] = tensor
    for node in _nodes(graph):
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
        # the TorchScript exporter shares equal constants by Identity
        elif node.op_type == "Identity" and node.input[0] in constants:
            constants[node.output[0]] = constants[node.input[0]]
    return constants


def quantised_type(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> int:
    """Return the element type of the quantised side of a Q or DQ.

    It is the type of the zero point, else of an attribute or the weight, else uint8.
    """
    if len(node.input) > 2 and node.input[2] in constants:
        return int(constants[node.input[2]].data_type)
    if node.op_type == QDQ[0]:
        integers = {attribute.name: int(attribute.i) for attribute in node.attribute}
        return integers.get("output_dtype") or int(onnx.TensorProto.UINT8)
    weight = constants.get(node.input[0])
    return int(onnx.TensorProto.UINT8 if weight is None else weight.data_type)


def scales_of(graph: onnx.GraphProto) -> dict[Key, list[str]]:
    """Return the tensors of each scale and zero point, once per Q and once per DQ.

    The Q of a constant is left out, because folding it keeps the DQ of the weight, and with it the
    scale.
    """
    constants = constants_of(graph)
    tensors: dict[Key, list[str]] = defaultdict(list)
    for node in _nodes(graph):
        if node.op_type not in QDQ:
            continue
        if node.op_type == QDQ[0] and is_constant(node.input[0], graph, constants):
            continue
        tensors[node.op_type, "", b"", b""].append(node.input[0])
        if all(name in constants for name in node.input[1:3] if name):
            tensors[_key(node, constants)].append(node.input[0])
    return tensors


def scales_by_node(graph: onnx.GraphProto) -> dict[str, Scale]:
    """Return the constant scale of each Q and DQ by the name of the node."""
    constants = constants_of(graph)
    nodes = [node for node in graph.node if node.op_type in QDQ and node.input[1] in constants]
    return {
        node.name: np.asarray(numpy_helper.to_array(constants[node.input[1]]), np.float64)
        for node in nodes
    }


def is_constant(
    name: str, graph: onnx.GraphProto, constants: Mapping[str, onnx.TensorProto]
) -> bool:
    """Return True if a tensor is computed from constants only."""
    makers = {output: node for node in graph.node for output in node.output}
    stack = [name]
    visits: set[str] = set()
    while stack:
        current = stack.pop()
        if current in constants or current in visits or not current:
            continue
        visits.add(current)
        if current not in makers or not makers[current].input:
            return False
        stack += makers[current].input
    return True


def lost_scales(before: onnx.GraphProto, after: onnx.GraphProto) -> str:
    """Describe the Q/DQ or scales that `after` lacks; "" if it has all of them."""
    scales = scales_of(after)
    for key, tensors in scales_of(before).items():
        missing = len(tensors) - len(scales.get(key, ()))
        if missing > 0:
            operator, _, scale, _ = key
            description = f"{operator} of scale {_scale_text(scale)}" if scale else operator
            names = ", ".join(tensors[:NAMED])
            if len(tensors) > NAMED:
                names += ", ..."
            return f"{missing} of {len(tensors)} {description} were lost, which stood at {names}"
    return ""


def _key(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> Key:
    scale = np.asarray(numpy_helper.to_array(constants[node.input[1]]), np.float64)
    zero_point = b""  # that of zeros is the same as none
    if len(node.input) > 2 and node.input[2] in constants:
        zeros = np.asarray(numpy_helper.to_array(constants[node.input[2]]), np.float64)
        if zeros.any():
            zero_point = zeros.tobytes()
    dtype = type_name(quantised_type(node, constants))
    return node.op_type, dtype, scale.tobytes(), zero_point


def _scale_text(scale: bytes) -> str:
    values = np.frombuffer(scale, np.float64)
    if values.size == 1:
        return f"{values[0]:.6g}"
    return f"{values[0]:.6g} ... ({values.size} channels)"


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for inner in graphs_of(graph):
        yield from inner.node
