"""Helpers that rewrite graphs with onnx-ir: import and export, producers, constants, new values."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from pipeline.errors import ModelError

OURS = "plain_attention/"
"""Prefix of the names of added nodes and values, so that they differ from all others."""


def imported(proto: onnx.ModelProto) -> ir.Model:
    """Import a model; ModelError if it has sparse initializers, which onnx-ir would lose."""
    if proto.graph.sparse_initializer:
        raise ModelError("the graph has sparse initializers", "store them as dense ones")
    return ir.serde.deserialize_model(proto)


def operands(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node without those that it leaves out."""
    return [value for value in node.inputs if value is not None]


def chain(value: ir.Value, *operators: str) -> list[ir.Node]:
    """Follow first inputs back from a value through nodes of these operators, the last first.

    The list is empty if the producers have other operators.
    """
    nodes: list[ir.Node] = []
    for operator in operators:
        node = value.producer()
        if node is None or node.op_type != operator:
            return []
        nodes.append(node)
        value = operands(node)[0]
    return nodes


def is_inner(value: ir.Value) -> bool:
    """Return True if one node alone reads a value, and it is no output of the graph."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def permutation(node: ir.Node) -> tuple[int, ...]:
    """Return the axes' order of a Transpose node; empty for other nodes and without an order."""
    return tuple(node.attributes.get_ints("perm", ())) if node.op_type == "Transpose" else ()


def constant_of(value: ir.Value) -> np.ndarray | None:
    """Return the array of an initializer or of a `Constant` node; None for other values."""
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def floats_of(value: ir.Value) -> np.ndarray | None:
    """Return the array of an fp16 or fp32 constant; None for bf16, which numpy does not know."""
    array = constant_of(value)
    return array if array is not None and array.dtype in (np.float16, np.float32) else None


def number_of(value: ir.Value) -> np.ndarray | None:
    """Return the number of an fp16 or fp32 constant with one element, without dimensions."""
    array = floats_of(value)
    return array.reshape(()) if array is not None and array.size == 1 else None


def initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Return the initializer of this name; a new one of this array if there is none."""
    if name not in graph.initializers:
        ir.tape.Tape(graph).initializer(ir.tensor(array, name=name))
    return graph.initializers[name]


def successor(value: ir.Value) -> ir.Value:
    """Return a value, for a new node, that takes the name, type, shape and readers of another."""
    new = ir.Value(name=value.name, type=value.type, shape=value.shape)
    value.replace_all_uses_with(new, replace_graph_outputs=True)
    return new


def exported(model: ir.Model) -> onnx.ModelProto:
    """Export a changed model without nodes and initializers that nothing reads."""
    model.ir_version = max(model.ir_version, 4)  # initializers need not be inputs
    common.RemoveInitializersFromInputsPass()(model)
    _sort_by_distance(model.graph)
    common.TopologicalSortPass()(model)  # subgraphs read values, too
    common.RemoveUnusedNodesPass()(model)
    return ir.to_proto(model)


def _sort_by_distance(graph: ir.Graph) -> None:
    """Sort nodes by their distance from the inputs, as GraphSurgeon does in `fold_constants`.

    onnxsim keeps the first of equal nodes, so the order decides names.
    """
    distances: dict[ir.Node, int] = {}

    def distance(node: ir.Node) -> int:
        if node not in distances:
            distances[node] = max(map(distance, node.predecessors()), default=0) + 1
        return distances[node]

    for node in graph:
        distance(node)
    graph.extend(sorted(distances, key=distance))
