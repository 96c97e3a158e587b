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

TensorRT 10.6 then runs an encoder's attention in one kernel instead of several; docs/tensorrt.md
has the speedups. Before that, a packed product of queries, keys and values is split into three
(split_qkv.py).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx

from pipeline.onnx_graph.attention_masks import Masks
from pipeline.onnx_graph.graphsurgeon import OURS, chain, exported, maker, number_of
from pipeline.onnx_graph.split_qkv import Unpacking

SCORED = ((), ("Mul",), ("Add",), ("Add", "Mul"))
"""Operators from Softmax back to the product of queries and keys: a mask, a scale."""

BETWEEN = frozenset({"Where", "Cast", "Identity", "Dropout", "QuantizeLinear", "DequantizeLinear"})
"""Operators between Softmax and the product with the values."""


def attentions(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Return the names of the Softmax nodes with a matrix product behind them.

    A classifier's last Softmax is not among them.
    """
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    names = []
    for softmax in (node for node in graph.node if node.op_type == "Softmax"):
        after = list(readers[softmax.output[0]])
        for node in after:  # the loop appends to it
            if node.op_type in BETWEEN:
                after += readers[node.output[0]]
        if any(node.op_type == "MatMul" for node in after):
            names.append(softmax.name)
    return tuple(names)


def plain_attention(model: onnx.ModelProto, masks: bool = True) -> onnx.ModelProto | None:
    """Return the model with attention in its plain form, or None if there is none to rewrite.

    Nodes of another form do not change. If `masks` is False, masks keep their numbers, and guards
    against NaN stay.
    """
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(model)
    before = _wiring(graph)
    Unpacking(graph).run()
    mask_rewriter = Masks(graph, hide=masks)
    for softmax in [node for node in graph.nodes if node.op == "Softmax"]:
        nodes = _scoring_nodes(softmax)
        if not nodes:
            continue
        first, product = nodes[0], nodes[-1]
        scaled_after(graph, product)
        transposed_once(product)
        mask_rewriter.rewrite(softmax, product, first if first.op == "Add" else None)
    if _wiring(graph) == before:
        return None
    return exported(graph, model)


def _scoring_nodes(softmax: Any) -> list[Any]:
    """Return the nodes from a Softmax back to the product of queries and keys, the last first.

    The list is empty if they have another form, or a scale that is not one number.
    """
    for between in SCORED:
        nodes = chain(softmax.inputs[0], *between, "MatMul")
        if nodes:
            scales = [node.inputs[1] for node in nodes if node.op == "Mul"]
            return [] if any(number_of(scale) is None for scale in scales) else nodes
    return []


def _wiring(graph: Any) -> list[tuple[str, list[str], list[str]]]:
    return [
        (node.op, [tensor.name for tensor in node.inputs], [tensor.name for tensor in node.outputs])
        for node in graph.nodes
    ]


def scaled_after(graph: Any, scores: Any) -> None:
    """Rewrite (a * s) @ (b * t) as (a @ b) * (s * t).

    A fused kernel accumulates in fp32, so nothing overflows there; elsewhere fp16 may overflow.
    """
    import onnx_graphsurgeon as gs

    factors = [factor for factor in map(_factor, scores.inputs) if factor]
    if len(factors) < len(scores.inputs):
        return
    numbers = [number for _, number in factors]
    scale = np.asarray(np.prod(numbers, dtype=np.float64), numbers[0].dtype)
    scores.inputs = [before for before, _ in factors]
    (product,) = scores.outputs
    plain = gs.Variable(f"{OURS}{product.name}/plain", dtype=product.dtype, shape=product.shape)
    scores.outputs = [plain]
    constant = gs.Constant(f"{OURS}{product.name}/scale", scale)
    graph.nodes.append(
        gs.Node("Mul", f"{OURS}{product.name}/scaled", inputs=[plain, constant], outputs=[product])
    )


def _factor(tensor: Any) -> tuple[Any, np.ndarray] | None:
    """Return a tensor before its multiplication by one number, and the number, or None."""
    import onnx_graphsurgeon as gs

    node = maker(tensor)
    if node is None or node.op != "Mul":
        return None
    for one, other in (node.inputs, node.inputs[::-1]):
        number = number_of(other)
        if number is not None and not isinstance(one, gs.Constant):
            return one, number
    return None


def transposed_once(scores: Any) -> None:
    """Transpose keys [b, t, h, d] to [b, h, d, t] in one step.

    They were [b, t, h, d] -> [b, h, t, d] -> [b * h, t, d] -> [b * h, d, t] -> [b, h, d, t].
    """
    nodes = chain(scores.inputs[1], "Reshape", "Transpose", "Reshape", "Transpose")
    if [node.attrs.get("perm") for node in nodes[1::2]] != [[0, 2, 1], [0, 2, 1, 3]]:
        return
    last, first = nodes[0], nodes[-1]
    last.op, last.attrs = "Transpose", {"perm": [0, 2, 3, 1]}
    last.inputs = [first.inputs[0]]
