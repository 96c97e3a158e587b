"""Attention whose queries, keys and values come out of one packed product: three products instead, so that nothing is moved to take it apart.

nn.MultiheadAttention (nn.TransformerEncoder, torchvision's ViT) computes [token, row, 3 * width], transposes it to [3, token, row, width]
and selects; timm and Swin do alike with [row, token, 3 * width]. That copies all three in each layer, and the former turns its input and its
answer round as well where rows come first. Products with a third of the weight each give what is selected, in the order of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.wiring import constant_of, floats_of, maker, number_of, only_reader

OURS = "unpacked/"  # begins the names that are put in, so that they meet no others
PARTS = 3  # queries, keys, values
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity"})  # nothing moves in memory
BETWEEN = frozenset({"Add", "Mul", "Div", "Reshape"})  # scores and their Softmax: scales and masks

Order = tuple[int, ...]
SWAPPED: Order = (1, 0, 2)  # [token, row, width] <-> [row, token, width]
SELECTED: Order = ()  # stands among orders for the choice of one of three
BY_TOKENS: tuple[Order, ...] = ((1, 0, 2), SELECTED, (3, 1, 2, 0, 4))  # nn.MultiheadAttention: [row, head, token, size] back to the product
BY_ROWS: tuple[Order, ...] = (SELECTED, (2, 0, 3, 1, 4))  # timm, Swin
KEYS: dict[tuple[Order, ...], tuple[Order, ...]] = {
    ((1, 2, 0), *BY_TOKENS[1:]): BY_TOKENS,  # as simplifiers write it
    **{(turned, *orders): orders for turned in ((0, 1, 3, 2), (0, 2, 1)) for orders in (BY_TOKENS, BY_ROWS)},
}
"""What turns keys to [row, head, size, token]: the orders of the transpositions, the last first, and which of the two it comes to."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where heads come from: which third of a packed product, and the orders of the transpositions since, the last first."""

    packed: Any
    index: int
    orders: tuple[Order, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight + bias; the weight is [in, out]."""

    x: Any
    name: str
    weight: np.ndarray
    bias: np.ndarray | None


class Unpacking:
    """One graph's rewriting. Layers that share a weight share its thirds."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.constants: dict[str, Any] = {}

    def attention(self, softmax: Any, product: Any) -> None:
        """Give a Softmax's scores, and the product with its values, heads of products of their own. What does not look like it stays as it is."""
        scores, values = _scores(softmax), product.inputs[1]
        sizes = _sizes(values)
        if scores is None or sizes is None:
            return
        places = [_entry(scores, 0), _entry(scores, 1), _entry(product, 1)]
        orders, linear = _common([_part(node.inputs[place]) for node, place in places])
        if linear is None or linear.weight.shape[1] != PARTS * sizes[0] * sizes[1]:
            return
        x, rows_first = linear.x, orders == BY_ROWS
        if not rows_first and _swaps(maker(x)):
            x, rows_first = maker(x).inputs[0], True
        row, token = (0, 1) if rows_first else (1, 0)
        if x.shape is None or len(x.shape) != 3 or not (_agree(x.shape[row], values.shape[0]) and _agree(x.shape[token], values.shape[2])):
            return  # rows and tokens were grouped anew on the way
        for index, (node, place) in enumerate(places):
            order = [row, 2, 3, token] if index == 1 else [row, 2, token, 3]
            node.inputs[place] = self._heads(x, linear, index, sizes, order, f"{product.outputs[0].name}/{'qkv'[index]}")
        self._answer_by_rows(product.outputs[0], sizes[0] * sizes[1])

    def _heads(self, x: Any, linear: Linear, index: int, sizes: tuple[int, int], order: list[int], name: str) -> Any:
        """x @ a third of the weight + the same of the bias, from [row, token, head * size] to the order of axes that is wanted."""
        width = sizes[0] * sizes[1]
        third = slice(index * width, (index + 1) * width)
        made = self._product(name, x, f"{linear.name}/{index}", linear.weight[:, third])
        if linear.bias is not None:
            made = self._node("Add", f"{name}/sum", [made, self._constant(f"{name}/bias", linear.bias[third])])
        made = self._node("Reshape", f"{name}/heads", [made, self._constant(f"heads/{sizes[0]}x{sizes[1]}", np.array([0, 0, *sizes]))])
        return self._node("Transpose", f"{name}/turned", [made], perm=order)

    def _answer_by_rows(self, answer: Any, width: int) -> None:
        """[row, head, token, size] -> [token, row, ...] -> [token * row, width] -> Gemm -> [token, row, out] -> [row, token, out]: unturned."""
        nodes = _readers(answer, "Transpose", "Reshape", "Gemm", "Reshape", "Transpose")
        if not nodes or nodes[0].attrs.get("perm") != [2, 0, 1, 3] or not _swaps(nodes[-1]):
            return
        gemm, last = nodes[2], nodes[-1]
        weight, attrs = floats_of(gemm.inputs[1]), gemm.attrs
        if weight is None or attrs.get("transA", 0) or (attrs.get("alpha", 1.0), attrs.get("beta", 1.0)) != (1.0, 1.0):
            return
        name, turned = last.outputs[0].name, bool(attrs.get("transB", 0))
        made = self._node("Transpose", f"{name}/turned", [answer], perm=[0, 2, 1, 3])
        made = self._node("Reshape", f"{name}/width", [made, self._constant(f"width/{width}", np.array([0, 0, width]))])
        made = self._product(name, made, f"{gemm.inputs[1].name}/{'turned' if turned else 'whole'}", weight.T if turned else weight)
        for bias in gemm.inputs[2:]:
            made = self._node("Add", f"{name}/sum", [made, bias])
        (final,) = last.outputs
        last.outputs.clear()
        made.inputs[0].outputs = [final]

    def _product(self, name: str, x: Any, weight: str, values: np.ndarray) -> Any:
        return self._node("MatMul", f"{name}/product", [x, self._constant(weight, values)])

    def _node(self, operator: str, name: str, inputs: list[Any], **attrs: Any) -> Any:
        """The output of a new node."""
        import onnx_graphsurgeon as gs

        made = gs.Variable(f"{OURS}{name}")
        self.graph.nodes.append(gs.Node(operator, f"{OURS}{name}", attrs, inputs, [made]))
        return made

    def _constant(self, name: str, values: np.ndarray) -> Any:
        import onnx_graphsurgeon as gs

        return self.constants.setdefault(name, gs.Constant(f"{OURS}{name}", np.ascontiguousarray(values)))


def product_of(softmax: Any) -> Any:
    """The product of a Softmax's answer with values; None if there is none, or more than one."""
    found, tensors = [], list(softmax.outputs)
    for tensor in tensors:  # grows
        for node in tensor.outputs:
            if node.op == "MatMul" and node.inputs[0] is tensor:
                found.append(node)
            elif node.op == "Where":  # a guard against NaN
                tensors += node.outputs
    return found[0] if len(found) == 1 else None


def _scores(softmax: Any) -> Any:
    node = maker(softmax.inputs[0])
    while node is not None and node.op in BETWEEN:
        node = maker(node.inputs[0])
    return node if node is not None and node.op == "MatMul" else None


def _sizes(values: Any) -> tuple[int, int] | None:
    """Heads, and the size of each, of [row, head, token, size]; None where they are not known."""
    shape = values.shape
    known = shape is not None and len(shape) == 4 and all(isinstance(shape[axis], int) and shape[axis] > 0 for axis in (1, 3))
    return (shape[1], shape[3]) if known else None


def _agree(one: Any, other: Any) -> bool:
    """Whether two dimensions may be the same: numbers are, or names, but not those that shape inference makes up."""
    unknown = any(not each or str(each).startswith("unk__") for each in (one, other))
    return unknown or one == other


def _entry(node: Any, place: int) -> tuple[Any, int]:
    """Where heads come in: here, or before they are multiplied by a number."""
    before = maker(node.inputs[place])
    if before is not None and before.op == "Mul":
        for own, other in ((0, 1), (1, 0)):
            if number_of(before.inputs[other]) is not None:
                return _entry(before, own)
    return node, place


def _part(heads: Any) -> Part | None:
    tensor, orders, index = heads, [], None
    while (node := maker(tensor)) is not None:
        chosen = _chosen(node, tensor) if index is None else None
        if node.op == "Transpose" and "perm" in node.attrs:
            orders.append(tuple(node.attrs["perm"]))
        elif chosen is not None:
            index = chosen
            orders.append(SELECTED)
        elif node.op not in VIEWS:
            break
        tensor = node.inputs[0]
    return None if index is None else Part(tensor, index, tuple(orders))


def _chosen(node: Any, answer: Any) -> int | None:
    """Which one along the first axis a node takes; None if it does something else."""
    if node.op == "Split" and node.attrs.get("axis", 0) == 0 and len(node.outputs) == PARTS:
        return int(next(index for index, each in enumerate(node.outputs) if each is answer))
    if node.op == "Gather" and node.attrs.get("axis", 0) == 0:
        return _single(node.inputs[1])
    if node.op == "Slice" and len(node.inputs) > 3 and _single(node.inputs[3]) == 0:
        begin, end = _single(node.inputs[1]), _single(node.inputs[2])
        return begin if begin is not None and end == begin + 1 else None
    return None


def _single(tensor: Any) -> int | None:
    values = constant_of(tensor)
    return int(values.reshape(())) if values is not None and values.size == 1 else None


def _common(parts: list[Part | None]) -> tuple[tuple[Order, ...], Linear | None]:
    """The packed product that queries, keys and values are thirds of, and how the queries came out of it."""
    queries, keys, values = parts
    if queries is None or keys is None or values is None or not queries.packed is keys.packed is values.packed:
        return (), None
    alike = queries.orders == values.orders == KEYS.get(keys.orders) and (queries.index, keys.index, values.index) == (0, 1, 2)
    others = len(queries.packed.outputs) > 1  # who would have it computed besides
    return queries.orders, _linear(queries.packed) if alike and not others else None


def _linear(packed: Any) -> Linear | None:
    """What a product is made of, and the bias that is added to it, if that is all."""
    node, bias = maker(packed), None
    if node is not None and node.op == "Add":
        product, added = node.inputs if constant_of(node.inputs[0]) is None else node.inputs[::-1]
        node, bias = maker(product), floats_of(added)
        if bias is None:
            return None
    weight = floats_of(node.inputs[1]) if node is not None and node.op == "MatMul" else None
    if weight is None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[1:]):
        return None
    return Linear(node.inputs[0], node.inputs[1].name, weight, bias)


def _swaps(node: Any) -> bool:
    return node is not None and node.op == "Transpose" and tuple(node.attrs.get("perm", ())) == SWAPPED


def _readers(tensor: Any, *operators: str) -> list[Any]:
    """The nodes of these operators that read a tensor one after the other, each alone; empty if others do."""
    nodes: list[Any] = []
    for operator in operators:
        node = only_reader(tensor, operator)
        if node is None:
            return []
        nodes, tensor = [*nodes, node], node.outputs[0]
    return nodes
