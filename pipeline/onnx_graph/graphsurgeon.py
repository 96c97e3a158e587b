"""Helpers for graphs of GraphSurgeon: producers, constants, and the export to a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

OURS = "plain_attention/"
"""Prefix of the names of added nodes and tensors, so that they differ from all others."""

MIN_IR_VERSION = 4
"""First IR version in which initializers need not be inputs, as GraphSurgeon writes them."""


def chain(tensor: Any, *operators: str) -> list[Any]:
    """Follow first inputs back from a tensor through nodes of these operators, the last first.

    The list is empty if the producers have other operators.
    """
    nodes: list[Any] = []
    for operator in operators:
        node = maker(tensor)
        if node is None or node.op != operator:
            return []
        nodes, tensor = [*nodes, node], node.inputs[0]
    return nodes


def maker(tensor: Any) -> Any:
    """Return the node that produces a tensor; None for an input or a constant."""
    return tensor.inputs[0] if tensor.inputs else None


def permutation(node: Any) -> tuple[int, ...]:
    """Return the axes' order of a Transpose node; empty for other nodes and without an order."""
    return tuple(node.attrs.get("perm", ())) if node is not None and node.op == "Transpose" else ()


def constant(tensor: Any) -> Any:
    """Return a tensor that is an initializer, or the value of the `Constant` that produces it.

    The result is None for other tensors.
    """
    import onnx_graphsurgeon as gs

    node = maker(tensor)
    if node is not None and node.op == "Constant" and "value" in node.attrs:
        tensor = node.attrs["value"]
    return tensor if isinstance(tensor, gs.Constant) else None


def constant_of(tensor: Any) -> np.ndarray | None:
    """Return the array of a constant."""
    initializer = constant(tensor)
    return None if initializer is None else np.asarray(initializer.values)


def floats_of(tensor: Any) -> np.ndarray | None:
    """Return the array of an fp16 or fp32 constant; None for bf16, which numpy does not know."""
    initializer = constant(tensor)
    if initializer is None or initializer.dtype not in (np.float16, np.float32):
        return None
    return np.asarray(initializer.values)


def number_of(tensor: Any) -> np.ndarray | None:
    """Return the number of an fp16 or fp32 constant with one element, without dimensions."""
    values = floats_of(tensor)
    return values.reshape(()) if values is not None and values.size == 1 else None


def exported(graph: Any, source: onnx.ModelProto) -> onnx.ModelProto:
    """Export a changed graph, with the metadata of its source that GraphSurgeon drops."""
    import onnx_graphsurgeon as gs

    model: onnx.ModelProto = gs.export_onnx(graph.cleanup().toposort())
    model.ir_version = max(model.ir_version, MIN_IR_VERSION)
    del model.metadata_props[:]
    model.metadata_props.extend(source.metadata_props)
    return model
