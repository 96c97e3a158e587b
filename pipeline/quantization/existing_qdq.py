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

from pipeline.core import Precision
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
    """int8 or fp8 if the graph quantises activations to that; None for a plain graph, and for one
    whose weights alone are stored in few bits.
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
    """Initializers, Constant nodes and their Identities by name; not those that a caller may
    replace.
    """
    inputs = {value.name for value in graph.input}
    constants = {
        tensor.name: tensor
        for inner in graphs_of(graph)
        for tensor in inner.initializer
        if tensor.name not in inputs
    }
    for node in _nodes(graph):
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
        elif (
            node.op_type == "Identity" and node.input[0] in constants
        ):  # the TorchScript exporter shares equal constants so
            constants[node.output[0]] = constants[node.input[0]]
    return constants


def quantised_type(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> int:
    """Element type of the quantised side of a Q or DQ: that of its zero point, else what an
    attribute or the weight says, else uint8.
    """
    if len(node.input) > 2 and node.input[2] in constants:
        return int(constants[node.input[2]].data_type)
    attribute = next(
        (
            int(each.i)
            for each in node.attribute
            if each.name == "output_dtype" and node.op_type == QDQ[0]
        ),
        0,
    )
    weight = constants.get(node.input[0]) if node.op_type == QDQ[1] else None
    return attribute or (
        int(weight.data_type) if weight is not None else int(onnx.TensorProto.UINT8)
    )


def scales_of(graph: onnx.GraphProto) -> dict[Key, list[str]]:
    """The tensors that each scale and zero point belongs to, once per Q and once per DQ.

    The Q of a constant is left out: folding it keeps the weight's DQ, and with it the scale.
    """
    constants = constants_of(graph)
    found: dict[Key, list[str]] = defaultdict(list)
    for node in _nodes(graph):
        if node.op_type in QDQ and not (
            node.op_type == QDQ[0] and is_constant(node.input[0], graph, constants)
        ):
            found[node.op_type, "", b"", b""].append(node.input[0])
            if all(name in constants for name in node.input[1:3] if name):
                found[_key(node, constants)].append(node.input[0])
    return found


def scales_by_node(graph: onnx.GraphProto) -> dict[str, Scale]:
    """The constant scale of each Q and DQ, by the node's name."""
    constants = constants_of(graph)
    nodes = [node for node in graph.node if node.op_type in QDQ and node.input[1] in constants]
    return {
        node.name: np.asarray(numpy_helper.to_array(constants[node.input[1]]), np.float64)
        for node in nodes
    }


def is_constant(
    name: str, graph: onnx.GraphProto, constants: Mapping[str, onnx.TensorProto]
) -> bool:
    """Whether a tensor is computed from constants only."""
    makers = {output: node for node in graph.node for output in node.output}
    open_, seen = [name], set()
    while open_:
        current = open_.pop()
        if current in constants or current in seen or not current:
            continue
        seen.add(current)
        if current not in makers or not makers[current].input:
            return False
        open_ += makers[current].input
    return True


def lost_scales(before: onnx.GraphProto, after: onnx.GraphProto) -> str:
    """Which Q/DQ, or their scales, `after` lacks; empty if it has them all."""
    was, has = scales_of(before), scales_of(after)
    for (operator, dtype, scale, _), tensors in was.items():
        missing = len(tensors) - len(has.get((operator, dtype, scale, _), ()))
        if missing > 0:
            shown = f" of scale {_shown(scale)}" if scale else ""
            named = ", ".join(tensors[:NAMED]) + (", ..." if len(tensors) > NAMED else "")
            return (
                f"{missing} of {len(tensors)} {operator}{shown} were lost, which stood at {named}"
            )
    return ""


def _key(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> Key:
    scale = np.asarray(numpy_helper.to_array(constants[node.input[1]]), np.float64)
    zero = (
        numpy_helper.to_array(constants[node.input[2]])
        if len(node.input) > 2 and node.input[2] in constants
        else np.zeros(())
    )
    zeros = np.asarray(zero, np.float64)
    return (
        node.op_type,
        type_name(quantised_type(node, constants)),
        scale.tobytes(),
        zeros.tobytes() if zeros.any() else b"",
    )


def _shown(scale: bytes) -> str:
    values = np.frombuffer(scale, np.float64)
    return (
        f"{values[0]:.6g}" if values.size == 1 else f"{values[0]:.6g} ... ({values.size} channels)"
    )


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for inner in graphs_of(graph):
        yield from inner.node
