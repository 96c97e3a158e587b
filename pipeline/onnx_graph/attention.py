"""Rewrite attention in the form that fused kernels match.

This form has one transposition of the keys, one scale after their product, a mask of one row,
Softmax, and the product with the values. Exporters write scaled_dot_product_attention differently:

- the square root of the scale is on both sides of the product;
- the keys are transposed through three dimensions;
- a Where guards against rows without any token (NaN);
- the mask holds numbers that overflow fp16, or is expanded for every query: 8 MB at 2,048 tokens,
  which each head reads again.

With the masks of attention_masks.py, the outputs are the same without the Where. There is one
exception: if a mask adds the smallest finite number, a row without any token gave the mean of all
values before, and attends to all of them after.

TensorRT 10.6 then runs an encoder's attention in one kernel instead of several;
docs/explain/attention.md describes it. Before that, a packed product of queries, keys and values is
split into three (split_qkv.py).
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import onnx
import onnx_ir as ir

from pipeline.onnx_graph.attention_masks import Masks
from pipeline.onnx_graph.inspect import opset_of
from pipeline.onnx_graph.rewriting import (
    OURS,
    chain,
    exported,
    imported,
    initializer,
    number_of,
    operands,
    permutation,
    successor,
)
from pipeline.onnx_graph.split_qkv import Unpacking

SCORED = ((), ("Mul",), ("Add",), ("Add", "Mul"))
"""Operators from Softmax back to the product of queries and keys: a mask, a scale."""


def plain_attention(model: onnx.ModelProto, masks: bool = True) -> onnx.ModelProto | None:
    """Return the model with attention in its plain form, or None if there is none to rewrite.

    Nodes of another form do not change. If `masks` is False, masks keep their numbers, and guards
    against NaN stay.
    """
    rewritten = imported(model)
    graph = rewritten.graph
    before = _wiring(graph)
    Unpacking(graph).run()
    mask_rewriter = Masks(graph, opset_of(model), hide=masks)
    for softmax in [node for node in graph if node.op_type == "Softmax"]:
        nodes = _scoring_nodes(softmax)
        if not nodes:
            continue
        first, product = nodes[0], nodes[-1]
        scaled_after(graph, product)
        transposed_once(product)
        mask_rewriter.rewrite(softmax, product, first if first.op_type == "Add" else None)
    return None if _wiring(graph) == before else exported(rewritten)


def _scoring_nodes(softmax: ir.Node) -> list[ir.Node]:
    """Return the nodes from a Softmax back to the product of queries and keys, the last first.

    The list is empty if they have another form, or a scale that is not one number.
    """
    for between in SCORED:
        nodes = chain(operands(softmax)[0], *between, "MatMul")
        if nodes:
            scales = [operands(node)[1] for node in nodes if node.op_type == "Mul"]
            return [] if any(number_of(scale) is None for scale in scales) else nodes
    return []


def _wiring(graph: ir.Graph) -> list[tuple[ir.Node, str, tuple[ir.Value | None, ...]]]:
    return [(node, node.op_type, tuple(node.inputs)) for node in graph]


def scaled_after(graph: ir.Graph, scores: ir.Node) -> None:
    """Rewrite (a * s) @ (b * t) as (a @ b) * (s * t).

    A fused kernel accumulates in fp32, so nothing overflows there; elsewhere fp16 may overflow.
    """
    factors = [factor for factor in map(_factor, operands(scores)) if factor]
    if len(factors) < len(scores.inputs):
        return
    numbers = [number for _, number in factors]
    scale = np.asarray(np.prod(numbers, dtype=np.float64), numbers[0].dtype)
    for index, (before, _) in enumerate(factors):
        scores.replace_input_with(index, before)
    (plain,) = scores.outputs
    product = successor(plain)
    name = f"{OURS}{product.name}"
    plain.name = f"{name}/plain"
    constant = initializer(graph, f"{name}/scale", scale)
    graph.append(ir.node("Mul", [plain, constant], outputs=[product], name=f"{name}/scaled"))


def _factor(value: ir.Value) -> tuple[ir.Value, np.ndarray] | None:
    """Return a value before its multiplication by one number, and the number, or None."""
    for node in chain(value, "Mul"):
        for one, other in permutations(operands(node)):
            number = number_of(other)
            if number is not None and not one.is_initializer():
                return one, number
    return None


def transposed_once(scores: ir.Node) -> None:
    """Transpose keys [b, t, h, d] to [b, h, d, t] in one step.

    They were [b, t, h, d] -> [b, h, t, d] -> [b * h, t, d] -> [b * h, d, t] -> [b, h, d, t].
    """
    nodes = chain(operands(scores)[1], "Reshape", "Transpose", "Reshape", "Transpose")
    if [permutation(node) for node in nodes[1::2]] != [(0, 2, 1), (0, 2, 1, 3)]:
        return
    last, order = nodes[0], {"perm": [0, 2, 3, 1]}
    turned = successor(last.outputs[0])
    last.append(ir.node("Transpose", nodes[-1].inputs, order, outputs=[turned], name=last.name))
