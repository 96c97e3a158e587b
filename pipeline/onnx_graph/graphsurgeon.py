"""A graph as GraphSurgeon has it: what made a tensor, what is constant, and the way back to a
model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

OURS = "plain_attention/"  # begins the names that are put in, so that they meet no others
SEPARATE = (
    4  # the first IR version whose initializers need not be inputs, which GraphSurgeon leaves out
)


def chain(tensor: Any, *operators: str) -> list[Any]:
    """The nodes of these operators that made a tensor, the last first, by their first inputs; empty
    if it was made otherwise.
    """
    nodes: list[Any] = []
    for operator in operators:
        node = maker(tensor)
        if node is None or node.op != operator:
            return []
        nodes, tensor = [*nodes, node], node.inputs[0]
    return nodes


def maker(tensor: Any) -> Any:
    """The node that made a tensor; None for an input or a constant."""
    return tensor.inputs[0] if tensor.inputs else None


def permutation(node: Any) -> tuple[int, ...]:
    """The order of the axes that a node transposes to; empty of any other node, and where it does
    not say one.
    """
    return tuple(node.attrs.get("perm", ())) if node is not None and node.op == "Transpose" else ()


def constant(tensor: Any) -> Any:
    """The initializer that a tensor is, or the tensor in the node `Constant` that makes it; None
    where it is neither.
    """
    import onnx_graphsurgeon as gs

    node = maker(tensor)
    if node is not None and node.op == "Constant" and "value" in node.attrs:
        tensor = node.attrs["value"]
    return tensor if isinstance(tensor, gs.Constant) else None


def constant_of(tensor: Any) -> np.ndarray | None:
    """The array of a constant."""
    initializer = constant(tensor)
    return None if initializer is None else np.asarray(initializer.values)


def floats_of(tensor: Any) -> np.ndarray | None:
    """The array of a constant in fp16 or fp32; None in bf16, which numpy does not know."""
    initializer = constant(tensor)
    if initializer is None or initializer.dtype not in (np.float16, np.float32):
        return None
    return np.asarray(initializer.values)


def number_of(tensor: Any) -> np.ndarray | None:
    """The one number of a constant in fp16 or fp32, without dimensions."""
    values = floats_of(tensor)
    return values.reshape(()) if values is not None and values.size == 1 else None


def exported(graph: Any, source: onnx.ModelProto) -> onnx.ModelProto:
    """The model of a graph that was changed, with what GraphSurgeon does not keep of the model that
    it came from.
    """
    import onnx_graphsurgeon as gs

    model: onnx.ModelProto = gs.export_onnx(graph.cleanup().toposort())
    model.ir_version = max(model.ir_version, SEPARATE)
    del model.metadata_props[:]
    model.metadata_props.extend(source.metadata_props)
    return model
