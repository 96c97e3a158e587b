"""Merge products of one input whose results are added, such as an adapter beside its layer.

A fine-tuned model with LoRA computes x W + s (x A) B. With W + s A B as its only weight it computes
the same, up to rounding, in one product instead of three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir

from pipeline.onnx_graph.rewriting import exported, floats_of, imported, operands

PASSED = frozenset({"Identity", "Dropout"})


@dataclass(frozen=True, slots=True)
class Linear:
    """A value as input @ weight + bias, and the nodes that compute it so."""

    input: ir.Value
    weight: np.ndarray  # [in, out], float64
    bias: np.ndarray  # [out] or one number
    nodes: tuple[ir.Node, ...]
    size: int  # numbers in the weights of these nodes


def merge_products(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return the model with one product for each sum, and the names of the replaced nodes."""
    rewritten = imported(model)
    names: list[str] = []
    for node in list(rewritten.graph):
        if node.op_type == "Add" and (merged := _merged(node)):
            names += [each.name for each in (*merged.nodes, node) if each.name]
            _write(rewritten.graph, node, merged)
    return (exported(rewritten), tuple(dict.fromkeys(names))) if names else (model, ())


def _merged(node: ir.Node) -> Linear | None:
    """Return the sum of two products of one input; None for any other sum."""
    first, second = (linear(value) for value in operands(node))
    if first is None or second is None or first.input is not second.input:
        return None
    size = first.size + second.size
    if first.weight.shape != second.weight.shape or first.weight.size > size:
        return None  # two products of few ranks are less work than a whole one
    return Linear(
        first.input,
        first.weight + second.weight,
        first.bias + second.bias,
        (*first.nodes, *second.nodes),
        size,
    )


def linear(value: ir.Value) -> Linear | None:
    """Return a value that this reader alone reads as a product with a constant weight."""
    node = value.producer()
    if node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if node.op_type in PASSED:
        return _with(linear(operands(node)[0]), node)
    if node.op_type == "MatMul":
        return _product(node)
    if node.op_type in ("Add", "Mul") and len(operands(node)) == 2:
        return _shifted(node)
    return None


def _product(node: ir.Node) -> Linear | None:
    data, factor = operands(node)
    weight = floats_of(factor)
    if weight is None or weight.ndim != 2:
        return None
    weight = weight.astype(np.float64)
    if inner := linear(data):
        bias = np.broadcast_to(inner.bias, weight.shape[:1]) @ weight
        size = inner.size + weight.size
        return Linear(inner.input, inner.weight @ weight, bias, (*inner.nodes, node), size)
    return Linear(data, weight, np.zeros(()), (node,), weight.size)


def _shifted(node: ir.Node) -> Linear | None:
    """Return a product after the addition of a bias, or after the multiplication by a number."""
    for data, other in (operands(node), operands(node)[::-1]):
        constant = floats_of(other)
        if constant is None or constant.ndim > 1 or (inner := linear(data)) is None:
            continue
        factor = constant.astype(np.float64)
        nodes = (*inner.nodes, node)
        if node.op_type == "Add":
            return replace(inner, bias=inner.bias + factor, nodes=nodes)
        return replace(inner, weight=inner.weight * factor, bias=inner.bias * factor, nodes=nodes)
    return None


def _with(inner: Linear | None, node: ir.Node) -> Linear | None:
    return inner and replace(inner, nodes=(*inner.nodes, node))


def _write(graph: ir.Graph, node: ir.Node, merged: Linear) -> None:
    """Write input @ weight + bias in place of a sum."""
    output = node.outputs[0]
    dtype = output.dtype.numpy() if output.dtype else np.dtype(np.float32)
    tape = ir.tape.Tape(graph)

    def constant(suffix: str, array: np.ndarray) -> ir.Value:
        return tape.initializer(ir.tensor(array.astype(dtype), name=f"{output.name}_{suffix}"))

    data = ir.Value(name=f"{output.name}_product", type=output.type, shape=output.shape)
    product = ir.node("MatMul", [merged.input, constant("weight", merged.weight)], outputs=[data])
    product.name = f"{node.name}_product"
    bias = np.broadcast_to(merged.bias, merged.weight.shape[1:])
    name = output.name
    new = ir.Value(name=name, type=output.type, shape=output.shape)
    added = ir.node("Add", [data, constant("bias", bias)], outputs=[new], name=node.name)
    output.replace_all_uses_with(new, replace_graph_outputs=True)
    output.name = f"{name}_before"
    graph.extend([product, added])
