"""GRU, LSTM and RNN in 16 bits, as TensorRT's ONNX parser takes them.

The parser writes each as a loop of smaller layers, and makes some of their constants itself, always
in fp32. A network whose types are written in the graph then mixes fp32 with 16 bits, and is refused
("IMatrixMultiplyLayer must have same input types"). Read off the parser's source (onnx-tensorrt,
release 10.6: onnxOpImporters.cpp, RNNHelpers.cpp) and tried with TensorRT-RTX 1.4 and 1.7:

    initial_h, initial_c   zeros in fp32 where the node has none; later releases take X's type
    sequence_lens          what lies behind a row's end is replaced by a zero in fp32
    GRU                    1 - z(t): the 1 is fp16 beside fp16, else fp32, beside bf16 too

The first is mended: the node gets zeros of its own. Simplifying takes such zeros away from a model
that PyTorch exported, since ONNX means the same without them. The others lie inside of the loop,
where a graph cannot reach: such nodes stay in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from pipeline.core import Precision
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS

STATES = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}
"""Per operator the inputs that are initial states."""

RECURRENCE, SEQUENCE_LENS = 2, 4  # places of R and of sequence_lens among a node's inputs


def is_recurrent(node: onnx.NodeProto) -> bool:
    """Return True for ONNX's own GRU, LSTM and RNN."""
    return node.op_type in STATES and node.domain in DEFAULT_DOMAINS


def parser_reasons(graph: onnx.GraphProto, precision: Precision) -> dict[str, str]:
    """Per recurrent node that TensorRT's parser takes in fp32 only: why."""
    reasons = {}
    for node in filter(is_recurrent, graph.node):
        if _input(node, SEQUENCE_LENS):
            reasons[node.name] = "with sequence_lens TensorRT's parser takes it in fp32 only"
        elif node.op_type == "GRU" and precision is Precision.BF16:
            reasons[node.name] = "TensorRT's parser takes a GRU in fp32 and fp16 only"
    return reasons


def add_initial_states(graph: onnx.GraphProto, names: Collection[str], elem_type: int) -> None:
    """Give the recurrent nodes `names` zeros of type `elem_type` for each state they lack, in
    place.

    The batch is read off X when the model runs: it may be dynamic.
    """
    writer = _StateWriter(graph, elem_type)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        lacking = [place for place in STATES.get(node.op_type, ()) if not _input(node, place)]
        shape = _state_shape(graph, node) if node.name in names and lacking else None
        if shape is not None:
            nodes += writer.zeros(shape)
            node.input.extend([""] * (max(lacking) + 1 - len(node.input)))
            for place in lacking:
                node.input[place] = writer.made[shape]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _input(node: onnx.NodeProto, place: int) -> str:
    """The name of an input, empty where it is left out."""
    return node.input[place] if len(node.input) > place else ""


@dataclass(frozen=True, slots=True)
class _StateShape:
    """The shape of a state: [directions, batch, hidden], or [batch, directions, hidden]."""

    source: str  # the tensor X
    batch_axis: int  # of X
    directions: int
    hidden: int


def _state_shape(graph: onnx.GraphProto, node: onnx.NodeProto) -> _StateShape | None:
    """The shape of a node's states; None where neither the node nor R tells the hidden size."""
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    directions = 2 if attributes.get("direction") == b"bidirectional" else 1
    recurrence = _input(node, RECURRENCE)
    dims = next((tensor.dims for tensor in graph.initializer if tensor.name == recurrence), None)
    hidden = attributes.get("hidden_size") or (dims[-1] if dims else None)
    batch_axis = 0 if attributes.get("layout") else 1
    return _StateShape(node.input[0], batch_axis, directions, hidden) if hidden else None


class _StateWriter:
    """Makes one tensor of zeros for all states of one shape: Shape, Gather, Concat, Expand."""

    def __init__(self, graph: onnx.GraphProto, elem_type: int) -> None:
        self.graph, self.elem_type = graph, elem_type
        self.taken = {
            name for node in graph.node for name in (node.name, *node.input, *node.output)
        }
        self.taken |= {tensor.name for tensor in graph.initializer}
        self.made: dict[_StateShape, str] = {}

    def zeros(self, shape: _StateShape) -> Sequence[onnx.NodeProto]:
        """The nodes that make `self.made[shape]`; none where they were made before."""
        if shape in self.made:
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
        self.made[shape] = state.name
        return source, batch, target, state

    def _node(
        self, operator: str, inputs: list[str], name: str, **attributes: int
    ) -> onnx.NodeProto:
        """A node that is called as its only output."""
        unused = self._unused(name)
        return onnx.helper.make_node(operator, inputs, [unused], name=unused, **attributes)

    def _constant(self, name: str, values: NDArray[np.generic]) -> str:
        unused = self._unused(name)
        self.graph.initializer.append(numpy_helper.from_array(values, unused))
        return unused

    def _unused(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name
