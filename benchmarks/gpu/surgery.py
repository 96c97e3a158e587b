"""Attention as TensorRT's fused kernels know it: one transposition of the keys, one scale after their product, Softmax, product.

torch.export writes out scaled_dot_product_attention with the root of the scale on both sides, the keys through three dimensions, and a Where
against rows without any token (NaN). With a mask that adds the smallest finite number there are none, and the other two are the same numbers.
That number does not fit fp16, which would keep every Softmax in fp32 between two casts; a smaller one hides as well (but for rows without a token).
For the plan: `--set simplify.surgery=surgery:plain_attention --set simplify.python_path=benchmarks/gpu`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

HIDDEN = -1e4  # added to a score, it makes e to that power 0 in every float type


def plain_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every written-out attention in its plain form; what does not look like it stays."""
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(model)
    for node in [node for node in graph.nodes if node.op == "Softmax"]:
        without_nan(node)
        made = chain(node.inputs[0], "MatMul") or chain(node.inputs[0], "Add", "MatMul")
        if len(made) > 1:
            in_reach_of_fp16(made[0].inputs[1])
        if made:
            scaled_after(graph, made[-1])
            transposed_once(made[-1])
    return gs.export_onnx(graph.cleanup().toposort())


def chain(tensor: Any, *operators: str) -> list[Any]:
    """The nodes of these operators that made a tensor, the last first, by their first inputs; empty if it was made otherwise."""
    nodes: list[Any] = []
    for operator in operators:
        node = tensor.inputs[0] if tensor.inputs else None
        if node is None or node.op != operator:
            return []
        nodes, tensor = [*nodes, node], node.inputs[0]
    return nodes


def without_nan(softmax: Any) -> None:
    """Softmax -> IsNaN -> Where(it, 0, Softmax): the Softmax alone."""
    (answer,) = softmax.outputs
    for test in [node for node in answer.outputs if node.op == "IsNaN"]:
        for choice in [node for node in test.outputs[0].outputs if node.op == "Where" and node.inputs[2] is answer]:
            for reader in list(choice.outputs[0].outputs):
                reader.inputs[reader.inputs.index(choice.outputs[0])] = answer


def in_reach_of_fp16(mask: Any) -> None:
    """A mask that adds the smallest number of fp32 adds HIDDEN instead: fp16 holds it, so that scores and Softmax need not stay in fp32."""
    import onnx_graphsurgeon as gs

    for choice in chain(mask, "Where"):
        for place in (1, 2):
            value = _value(choice.inputs[place])
            if value is not None and value.size == 1 and float(value.reshape(())) < HIDDEN:
                constant = np.full_like(value, HIDDEN)
                choice.inputs[place] = gs.Constant(f"{choice.outputs[0].name}_hidden_{place}", constant)


def scaled_after(graph: Any, scores: Any) -> None:
    """(a * s) @ (b * t): (a @ b) * (s * t)."""
    import onnx_graphsurgeon as gs

    factors = [_factor(tensor) for tensor in scores.inputs]
    if None in factors:
        return
    scale = np.asarray(np.prod([factor[1] for factor in factors], dtype=np.float64), np.float32)
    scores.inputs = [factor[0] for factor in factors]
    (product,) = scores.outputs
    plain = gs.Variable(f"{product.name}_plain", dtype=product.dtype, shape=product.shape)
    scores.outputs = [plain]
    constant = gs.Constant(f"{product.name}_scale", scale)
    graph.nodes.append(gs.Node("Mul", f"{product.name}_scaled", inputs=[plain, constant], outputs=[product]))


def _factor(tensor: Any) -> tuple[Any, float] | None:
    """What a tensor is before it is multiplied by one number, and the number."""
    import onnx_graphsurgeon as gs

    node = tensor.inputs[0] if tensor.inputs else None
    if node is None or node.op != "Mul":
        return None
    for one, other in (node.inputs, node.inputs[::-1]):
        value = _value(other)
        if value is not None and value.size == 1 and not isinstance(one, gs.Constant):
            return one, float(value.reshape(()))
    return None


def _value(tensor: Any) -> np.ndarray | None:
    """The array of a constant, however the exporter wrote it."""
    import onnx_graphsurgeon as gs

    if isinstance(tensor, gs.Constant):
        return tensor.values
    made = tensor.inputs[0] if tensor.inputs else None
    return made.attrs["value"].values if made is not None and made.op == "Constant" and "value" in made.attrs else None


def transposed_once(scores: Any) -> None:
    """Keys [b, t, h, d] -> [b, h, t, d] -> [b * h, t, d] -> [b * h, d, t] -> [b, h, d, t]: at once."""
    found = chain(scores.inputs[1], "Reshape", "Transpose", "Reshape", "Transpose")
    if [list(node.attrs["perm"]) for node in found[1::2]] != [[0, 2, 1], [0, 2, 1, 3]]:
        return
    last, first = found[0], found[-1]
    last.op, last.attrs = "Transpose", {"perm": [0, 2, 3, 1]}
    last.inputs = [first.inputs[0]]
