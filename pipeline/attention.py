"""Attention as fused kernels know it: one transposition of the keys, one scale after their product, a mask of one row, Softmax, product.

torch.export writes scaled_dot_product_attention out with the root of the scale on both sides, the keys through three dimensions, and a Where
against rows without any token (NaN). With a mask that adds the smallest finite number there are none, and the other two are the same numbers.
That number does not fit fp16, which would keep every Softmax in fp32 between two casts; a smaller one hides as well. Only a row without any token
then answers otherwise: the mean of all values before, attention to all of them after. With a mask of -inf such a row has an answer, and all stays.
It also writes the mask out for every query, by an And with a column of nothing but true: 8 MB at 2,048 tokens, which each head would read again.
TensorRT 10.6 then runs an encoder's attention in one kernel where it took several, or not at all: docs/tensorrt.md says how much that is worth.
First of all queries, keys and values get products of their own, where one gave all three (projections.py).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx

from pipeline.projections import Unpacking
from pipeline.wiring import chain, constant_of, exported, maker, number_of

HIDDEN = -1e4  # added to a score, it makes e to that power 0 in every float type
OURS = "plain_attention/"  # begins the names that are put in, so that they meet no others
BETWEEN = frozenset({"Where", "Cast", "Identity", "Dropout", "QuantizeLinear", "DequantizeLinear"})  # Softmax and the product with the values


def attentions(graph: onnx.GraphProto) -> tuple[str, ...]:
    """The names of the Softmax nodes whose answer is multiplied by a matrix next: not of a classifier's last one."""
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    found = []
    for softmax in (node for node in graph.node if node.op_type == "Softmax"):
        after = list(readers[softmax.output[0]])
        for node in after:  # grows
            after += readers[node.output[0]] if node.op_type in BETWEEN else []
        found += [softmax.name] if any(node.op_type == "MatMul" for node in after) else []
    return tuple(found)


def plain_attention(model: onnx.ModelProto, masks: bool = True) -> onnx.ModelProto | None:
    """The model with every written-out attention in its plain form; None where none is written out. What does not look like it stays as it is.

    Without `masks` no number that hides is changed and no guard against NaN is left out: rows without any token, too, answer as before.
    """
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(model)
    before = _wiring(graph)
    Unpacking(graph).run()
    for softmax in [node for node in graph.nodes if node.op == "Softmax"]:
        made = chain(softmax.inputs[0], "MatMul") or chain(softmax.inputs[0], "Add", "MatMul")
        added = [add.inputs[1] for add in made[:-1]]
        for mask in added:
            alike_for_all_queries(mask)
            if masks:
                in_reach_of_fp16(mask)
        if made:
            scaled_after(graph, made[-1])
            transposed_once(made[-1])
            if masks and all(map(is_finite, added)):
                without_nan(softmax)
    if _wiring(graph) == before:
        return None
    return exported(graph, model)


def _wiring(graph: Any) -> list[tuple[str, list[str], list[str]]]:
    return [(node.op, [tensor.name for tensor in node.inputs], [tensor.name for tensor in node.outputs]) for node in graph.nodes]


def is_finite(mask: Any) -> bool:
    """Whether a mask is a choice of two finite numbers: then no row of scores is all -inf, of which Softmax makes NaN."""
    values = [constant_of(each) for choice in chain(mask, "Where") for each in choice.inputs[1:]]
    return bool(values) and all(value is not None and np.isfinite(value).all() for value in values)


def without_nan(softmax: Any) -> None:
    """Softmax -> IsNaN -> Where(it, 0, Softmax): the Softmax alone."""
    (answer,) = softmax.outputs
    for test in [node for node in answer.outputs if node.op == "IsNaN"]:
        for choice in [node for node in test.outputs[0].outputs if node.op == "Where" and node.inputs[2] is answer]:
            for reader in list(choice.outputs[0].outputs):
                reader.inputs[reader.inputs.index(choice.outputs[0])] = answer


def alike_for_all_queries(mask: Any) -> None:
    """Where(And(column, row), two numbers) of a column of nothing but true: Where(row, the same), which the Add repeats."""
    made = chain(mask, "Where", "And")
    if not made:
        return
    choice, both = made
    values = [constant_of(each) for each in choice.inputs[1:]]
    if any(value is None or value.size > 1 for value in values):
        return
    for column, row in (both.inputs, both.inputs[::-1]):
        value = constant_of(column)
        if value is not None and value.all() and row.shape and len(row.shape) >= value.ndim:
            choice.inputs[0] = row
            choice.outputs[0].shape = row.shape if choice.outputs[0].shape else None


def in_reach_of_fp16(mask: Any) -> None:
    """A mask that adds the smallest number of fp32 adds HIDDEN instead: fp16 holds it, so that scores and Softmax need not stay in fp32.

    It holds -inf too, which stays, as does a mask in bf16, which numpy does not know.
    """
    import onnx_graphsurgeon as gs

    for choice in chain(mask, "Where"):
        for place in (1, 2):
            number = number_of(choice.inputs[place])
            if number is not None and -np.inf < float(number) < HIDDEN:
                hidden = np.full_like(constant_of(choice.inputs[place]), HIDDEN)
                choice.inputs[place] = gs.Constant(f"{OURS}{choice.outputs[0].name}/hidden_{place}", hidden)


def scaled_after(graph: Any, scores: Any) -> None:
    """(a * s) @ (b * t): (a @ b) * (s * t). In the floats of a fused kernel nothing overflows by that; elsewhere fp16 may."""
    import onnx_graphsurgeon as gs

    factors = [factor for tensor in scores.inputs if (factor := _factor(tensor))]
    if len(factors) < len(scores.inputs):
        return
    numbers = [number for _, number in factors]
    scale = np.asarray(np.prod(numbers, dtype=np.float64), numbers[0].dtype)
    scores.inputs = [before for before, _ in factors]
    (product,) = scores.outputs
    plain = gs.Variable(f"{OURS}{product.name}/plain", dtype=product.dtype, shape=product.shape)
    scores.outputs = [plain]
    constant = gs.Constant(f"{OURS}{product.name}/scale", scale)
    graph.nodes.append(gs.Node("Mul", f"{OURS}{product.name}/scaled", inputs=[plain, constant], outputs=[product]))


def _factor(tensor: Any) -> tuple[Any, np.ndarray] | None:
    """What a tensor is before it is multiplied by one number, and the number."""
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
    """Keys [b, t, h, d] -> [b, h, t, d] -> [b * h, t, d] -> [b * h, d, t] -> [b, h, d, t]: at once."""
    found = chain(scores.inputs[1], "Reshape", "Transpose", "Reshape", "Transpose")
    if [node.attrs.get("perm") for node in found[1::2]] != [[0, 2, 1], [0, 2, 1, 3]]:
        return
    last, first = found[0], found[-1]
    last.op, last.attrs = "Transpose", {"perm": [0, 2, 3, 1]}
    last.inputs = [first.inputs[0]]
