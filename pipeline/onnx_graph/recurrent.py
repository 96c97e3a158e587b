"""GRU, LSTM and RNN in 16 bits, in the form that TensorRT's ONNX parser accepts.

The parser turns each into a loop of smaller layers, and adds some constants, always in fp32. A
strongly typed network then mixes fp32 with 16 bits, and TensorRT refuses it ("IMatrixMultiplyLayer
must have same input types"). The constants, by the parser's source (onnx-tensorrt, release 10.6:
onnxOpImporters.cpp, RNNHelpers.cpp) and by tries with TensorRT-RTX 1.4 and 1.7:

    initial_h, initial_c   zeros in fp32 if the node has none; later releases use the type of X
    sequence_lens          values behind the end of a row become a zero in fp32
    GRU                    the 1 in 1 - z(t) is fp16 beside fp16, otherwise fp32, also beside bf16

The first is solved: the node gets zeros of its own. Simplification removes such zeros from a model
that PyTorch exported, since ONNX means the same without them. The other constants are inside the
loop, and no change of the graph reaches them: such nodes stay in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from pipeline.core.recipe import Precision
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS

STATES = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}
"""The indices of the inputs that are initial states, by operator."""

RECURRENCE, SEQUENCE_LENS = 2, 4  # indices of the inputs R and sequence_lens


def is_recurrent(node: onnx.NodeProto) -> bool:
    """Return True for ONNX's own GRU, LSTM and RNN."""
    return node.op_type in STATES and node.domain in DEFAULT_DOMAINS


def parser_reasons(graph: onnx.GraphProto, precision: Precision) -> dict[str, str]:
    """Return, by name, why TensorRT's parser takes a recurrent node in fp32 only."""
    reasons = {}
    for node in filter(is_recurrent, graph.node):
        if _input(node, SEQUENCE_LENS):
            reasons[node.name] = "with sequence_lens TensorRT's parser takes it in fp32 only"
        elif node.op_type == "GRU" and precision is Precision.BF16:
            reasons[node.name] = "TensorRT's parser takes a GRU in fp32 and fp16 only"
    return reasons


def add_initial_states(graph: onnx.GraphProto, names: Collection[str], elem_type: int) -> None:
    """Add zeros of type `elem_type` in place for missing states of the recurrent nodes `names`.

    The size of the batch is read from X at run time, since it may be dynamic.
    """
    writer = _StateWriter(graph, elem_type)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        missing = [index for index in STATES.get(node.op_type, ()) if not _input(node, index)]
        shape = _state_shape(graph, node) if node.name in names and missing else None
        if shape is not None:
            nodes += writer.zeros(shape)
            node.input.extend([""] * (max(missing) + 1 - len(node.input)))
            for index in missing:
                node.input[index] = writer.states[shape]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _input(node: onnx.NodeProto, index: int) -> str:
    """Return the name of an input; "" if it is left out."""
    return node.input[index] if len(node.input) > index else ""


@dataclass(frozen=True, slots=True)
class _StateShape:
    """The shape of a state: [directions, batch, hidden], or [batch, directions, hidden]."""

    source: str  # the tensor X
    batch_axis: int  # of X
    directions: int
    hidden: int


def _state_shape(graph: onnx.GraphProto, node: onnx.NodeProto) -> _StateShape | None:
    """Return the shape of a node's states; None if neither the node nor R has the hidden size."""
    attributes = {
        attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    directions = 2 if attributes.get("direction") == b"bidirectional" else 1
    recurrence = _input(node, RECURRENCE)
    dims = next((tensor.dims for tensor in graph.initializer if tensor.name == recurrence), None)
    hidden = attributes.get("hidden_size") or (dims[-1] if dims else None)
    batch_axis = 0 if attributes.get("layout") else 1
    return _StateShape(node.input[0], batch_axis, directions, hidden) if hidden else None


class _StateWriter:
    """Adds one tensor of zeros for all states of one shape: Shape, Gather, Concat, Expand."""

    def __init__(self, graph: onnx.GraphProto, elem_type: int) -> None:
        self.graph, self.elem_type = graph, elem_type
        self.names = {tensor.name for tensor in graph.initializer}
        for node in graph.node:
            self.names.update((node.name, *node.input, *node.output))
        self.states: dict[_StateShape, str] = {}  # the tensors of zeros so far

    def zeros(self, shape: _StateShape) -> Sequence[onnx.NodeProto]:
        """Return the nodes that produce `self.states[shape]`; none if they were returned before."""
        if shape in self.states:
            return ()
        base = f"{shape.source}_initial_state"
        dtype = onnx.helper.tensor_dtype_to_np_dtype(self.elem_type)
        zero = self._constant(f"{base}_zero", np.zeros(1, dtype))
        axis = self._constant(f"{base}_axis", np.array([shape.batch_axis]))
        directions = self._constant(f"{base}_directions", np.array([shape.directions]))
        hidden = self._constant(f"{base}_hidden", np.array([shape.hidden]))
        source = self._node("Shape", [shape.source], f"{base}_source")
        batch = self._node("Gather", [source.name, axis], f"{base}_batch")
        lead = [batch.name, directions] if shape.batch_axis == 0 else [directions, batch.name]
        target = self._node("Concat", [*lead, hidden], f"{base}_shape", axis=0)
        state = self._node("Expand", [zero, target.name], base)
        self.states[shape] = state.name
        return source, batch, target, state

    def _node(
        self, operator: str, inputs: list[str], name: str, **attributes: int
    ) -> onnx.NodeProto:
        """Return a node with the name of its only output."""
        unused = self._unused(name)
        return onnx.helper.make_node(operator, inputs, [unused], name=unused, **attributes)

    def _constant(self, name: str, values: NDArray[np.generic]) -> str:
        unused = self._unused(name)
        self.graph.initializer.append(numpy_helper.from_array(values, unused))
        return unused

    def _unused(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name
