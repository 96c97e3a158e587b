"""Replace one packed product for queries, keys and values by three, so that its answer need not be
copied to be taken apart.

nn.MultiheadAttention (nn.TransformerEncoder, torchvision's ViT) computes [token, row, 3 * width],
stacks that to [3, token, row, width] and selects; timm and Swin stack [row, token, 3 * width] to
[3, row, head, token, size]. Each selection becomes a product with a third of the weight.
nn.MultiheadAttention also swaps rows and tokens of its input and output where rows come first: then
the products read the input before it is swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from pipeline.onnx_graph.rewriting import (
    chain,
    constant_of,
    floats_of,
    initializer,
    is_inner,
    operands,
    permutation,
    successor,
)

OURS = "unpacked/"  # begins the names of tensors that are put in, so that they meet no others
PARTS = "qkv"
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity"})  # nothing moves in memory
Order = tuple[int, ...]
Dim = int | str | None  # a size, a name, or unknown
BY_TOKENS: Order = (3, 1, 2, 0, 4)  # [1, token, row, 3, width], stacked
BY_ROWS: Order = (2, 0, 3, 1, 4)  # [row, token, 3, head, size], stacked
SWAPPED: Order = (1, 0, 2)  # [token, row, ...] <-> [row, token, ...]
ANSWERS: Order = (2, 0, 1, 3)  # [row, head, token, size] -> [token, row, head, size]
HEADS: dict[Order, Order] = {SWAPPED: (0, 2, 1, 3), (1, 2, 0): (0, 2, 3, 1)}
"""How [token, row * head, size] is transposed to [row, head, token, size] or, of keys, [row, head,
size, token]: how [row, token, head, size] is."""


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight + bias, the weight as [in, out]; `node` names the product, `name` the weight."""

    x: ir.Value
    node: str
    name: str
    weight: np.ndarray
    bias: np.ndarray | None

    @property
    def width(self) -> int:
        """Of queries, keys or values."""
        return int(self.weight.shape[1]) // len(PARTS)


@dataclass(frozen=True, slots=True)
class Part:
    """One of queries, keys and values, by its index in PARTS, as it is selected from a stack."""

    index: int
    value: ir.Value
    has_stack_axis: bool  # its first axis is that of the stack, of size 1


class Unpacking:
    """The rewriting of one graph. A node that does not match a known form stays as it is."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.names: set[str] = set()

    def run(self) -> None:
        for node in list(self.graph):
            if permutation(node) in (BY_TOKENS, BY_ROWS):
                self._take_apart(node)
            elif node.op_type == "Gemm":
                self._answer_by_rows(node)

    def _take_apart(self, stack: ir.Node) -> None:
        """Let a product of its own give each part that is selected from a stack."""
        (stacked,) = operands(stack)
        linear, parts = _linear(stacked), _parts(stack)
        if linear is None or not parts:
            return
        by_rows = permutation(stack) == BY_ROWS
        shape = _reshaped_dims(stacked, 5)
        if by_rows:  # [row, token, 3, head, size]
            outer, count, inner = shape[:2], shape[2], shape[3:]
        else:  # [1, token, row, 3, width]
            outer, count, inner = shape[1:3], shape[3], shape[4:]
        sizes = _sizes_of(linear.width, *inner)
        if count != len(PARTS) or not sizes:
            return
        if not _are_equal(_dims(linear.x, 3)[:2], outer):
            return  # rows and tokens were grouped anew on the way
        for part in parts:
            if by_rows:
                self._heads(linear, part.index, sizes, HEADS[SWAPPED], part.value)
            elif not self._heads_by_rows(linear, part):
                self._third(linear, part.index, part.value)

    def _heads_by_rows(self, linear: Linear, part: Part) -> bool:
        """Make heads of x before it was swapped from [row, token, in], where x was, and where the
        part only becomes heads. Returns True if it did.
        """
        swaps = chain(linear.x, "Transpose")
        reshapes = _followed(part.value, "Reshape")
        if not reshapes or not swaps or permutation(swaps[0]) != SWAPPED:
            return False
        value, turned = _after_transposes(reshapes[0].outputs[0])
        heads = _followed(value, "Reshape")
        if turned not in HEADS or not heads:
            return False
        (answer,) = heads[0].outputs
        order, shape = HEADS[turned], _reshaped_dims(answer, 4)
        sizes = _sizes_of(linear.width, shape[1], shape[order.index(3)])
        if not sizes:
            return False
        (x,) = operands(swaps[0])
        self._heads(replace(linear, x=x), part.index, sizes, order, answer)
        return True

    def _answer_by_rows(self, gemm: ir.Node) -> None:
        """Rewrite [row, head, token, size] -> [token, row, ...] -> [token * row, width] -> Gemm ->
        [token, row, out] -> [row, token, out] without the swaps.
        """
        before = chain(operands(gemm)[0], "Reshape", "Transpose")
        if not before or permutation(before[1]) != ANSWERS:
            return
        after = _followed(gemm.outputs[0], "Reshape", "Transpose")
        if not after or permutation(after[1]) != SWAPPED:
            return
        _, factor, *biases = operands(gemm)
        weight = _gemm_weight(gemm, factor)
        if weight is None or not all(is_inner(node.outputs[0]) for node in before):
            return
        if not all(map(_is_row_of_floats, biases)):
            return
        name, width = gemm.name or f"{gemm.outputs[0].name}", len(weight)
        rows = self._put("Transpose", f"{name}/rows", operands(before[1]), perm=[0, 2, 1, 3])
        shape = self._constant(f"width/{width}", np.array([0, 0, width]))
        x = self._put("Reshape", f"{name}/width", [rows, shape])
        prefix = "weight/turned" if gemm.attributes.get_int("transB", 0) else "weight"
        factors = [x, self._constant(f"{prefix}/{factor.name}", weight)]
        (out,) = after[-1].outputs
        product = self._put("MatMul", name, factors, None if biases else out)
        for bias in biases:
            self._put("Add", f"{name}/bias", [product, bias], out)

    def _third(self, linear: Linear, index: int, out: ir.Value | None = None) -> ir.Value:
        """x @ a third of the weight + the same third of the bias."""
        third = slice(index * linear.width, (index + 1) * linear.width)
        name = f"{linear.node}/{PARTS[index]}"
        weight = self._constant(f"third/{linear.name}/{index}", linear.weight[:, third])
        factors = [linear.x, weight]
        if linear.bias is None:
            return self._put("MatMul", name, factors, out)
        bias = self._constant(f"bias/{name}", linear.bias[third])
        return self._put("Add", f"{name}/bias", [self._put("MatMul", name, factors), bias], out)

    def _heads(
        self, linear: Linear, index: int, sizes: list[int], order: Order, out: ir.Value
    ) -> None:
        """A third of [row, token, in] as [row, token, head, size], transposed."""
        name = f"{linear.node}/{PARTS[index]}"
        shape = self._constant(f"heads/{sizes[0]}x{sizes[1]}", np.array([0, 0, *sizes]))
        heads = self._put("Reshape", f"{name}/heads", [self._third(linear, index), shape])
        self._put("Transpose", f"{name}/turned", [heads], out, perm=list(order))

    def _put(
        self,
        operator: str,
        name: str,
        inputs: list[ir.Value],
        out: ir.Value | None = None,
        **attributes: list[int],
    ) -> ir.Value:
        """Add a node. Returns its output, which takes the place of `out` if there is one."""
        while name in self.names:
            name += "_"
        self.names.add(name)
        output = ir.Value(name=f"{OURS}{name}") if out is None else successor(out)
        self.graph.append(ir.node(operator, inputs, attributes, outputs=[output], name=name))
        return output

    def _constant(self, name: str, values: np.ndarray) -> ir.Value:
        return initializer(self.graph, f"{OURS}{name}", values)


def _followed(value: ir.Value, *operators: str) -> list[ir.Node]:
    """The nodes of these operators that read a value one after the other, each alone; empty if it
    is read otherwise.
    """
    nodes: list[ir.Node] = []
    for operator in operators:
        node = value.consumers()[0] if is_inner(value) else None
        if node is None or node.op_type != operator or node.inputs[0] is not value:
            return []
        nodes.append(node)
        value = node.outputs[0]
    return nodes


def _after_transposes(value: ir.Value) -> tuple[ir.Value, Order]:
    """Follow a value [0, 1, 2] through Transpose nodes, and return the last output with the order
    of its axes.
    """
    order: Order = (0, 1, 2)
    while True:
        transposes = _followed(value, "Transpose")
        if not transposes or not permutation(transposes[0]):
            return value, order
        order = tuple(order[axis] for axis in permutation(transposes[0]))
        (value,) = transposes[0].outputs


def _before_views(value: ir.Value) -> ir.Value:
    """The value of which this one is a view, which nothing else reads."""
    view = value.producer()
    while view is not None and view.op_type in VIEWS and is_inner(value):
        value = operands(view)[0]
        view = value.producer()
    return value


def _linear(value: ir.Value) -> Linear | None:
    """The product, with its bias, of which a value is a view; None if others read it, too."""
    total = _before_views(value)
    product, bias = total, None
    for add in chain(total, "Add"):
        product, addend = _constant_last(operands(add))
        bias = floats_of(addend)
        if bias is None:
            return None
    products = chain(product, "MatMul")
    if not products or not is_inner(total) or not is_inner(product):
        return None
    x, factor = operands(products[0])
    weight = floats_of(factor)
    if weight is None or weight.ndim != 2 or weight.shape[1] % len(PARTS):
        return None
    if bias is not None and bias.shape != weight.shape[1:]:
        return None
    return Linear(x, products[0].name or f"{product.name}", f"{factor.name}", weight, bias)


def _parts(stack: ir.Node) -> list[Part]:
    """The parts that are selected from a stack; empty if something else reads it too, or if a part
    is selected twice.
    """
    (stacked,) = stack.outputs
    if permutation(stack) == BY_TOKENS:
        squeezed = _followed(stacked, "Squeeze")
        if not squeezed or _axes(squeezed[0]) not in ((3,), (-2,)):
            return []
        (stacked,) = squeezed[0].outputs
    parts: list[Part] = []
    for node in stacked.consumers():
        selection = _selected_parts(node)
        if not selection:
            return []
        parts += selection
    indices = {part.index for part in parts}
    if len(indices) < len(parts) or stacked.is_graph_output():
        return []
    return parts


def _selected_parts(node: ir.Node) -> list[Part]:
    """The parts that a node selects along the first axis, without that axis; empty for others."""
    parts: list[Part] = []
    for part in _parts_along_stack(node):
        squeezed = _without_stack_axis(part)
        if squeezed is None:
            return []
        parts.append(squeezed)
    return parts


def _without_stack_axis(part: Part) -> Part | None:
    """The part after the Squeeze of its first axis; None if something else follows."""
    if not part.has_stack_axis:
        return part
    nodes = _followed(part.value, "Squeeze")
    if not nodes or _axes(nodes[0]) != (0,):
        return None
    return Part(part.index, nodes[0].outputs[0], has_stack_axis=False)


def _parts_along_stack(node: ir.Node) -> list[Part]:
    """The parts that a Split, Gather or Slice takes along the first axis; empty for others."""
    readers = {"Split": _split_parts, "Gather": _gather_parts, "Slice": _slice_parts}
    return readers[node.op_type](node) if node.op_type in readers else []


def _split_parts(split: ir.Node) -> list[Part]:
    """All parts; empty unless there are as many outputs."""
    if split.attributes.get_int("axis", 0) != 0 or len(split.outputs) != len(PARTS):
        return []
    return [Part(index, value, has_stack_axis=True) for index, value in enumerate(split.outputs)]


def _gather_parts(gather: ir.Node) -> list[Part]:
    """One part, of a constant index; an index without dimensions drops the axis."""
    if gather.attributes.get_int("axis", 0) != 0:
        return []
    index = constant_of(operands(gather)[1])
    if index is None or index.size != 1:
        return []
    number = int(index.reshape(())) % len(PARTS)
    return [Part(number, gather.outputs[0], has_stack_axis=index.ndim > 0)]


def _slice_parts(slice_node: ir.Node) -> list[Part]:
    """One part, of constant bounds that are one apart."""
    if len(slice_node.inputs) < 4:
        return []
    begin, end, axis = (_single(bound) for bound in slice_node.inputs[1:4])
    if axis != 0 or begin is None or end != begin + 1:
        return []
    return [Part(begin % len(PARTS), slice_node.outputs[0], has_stack_axis=True)]


def _constant_last(inputs: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The two inputs of a node, a constant first one moved to the end."""
    first, second = inputs
    return (first, second) if constant_of(first) is None else (second, first)


def _gemm_weight(gemm: ir.Node, factor: ir.Value) -> np.ndarray | None:
    """The weight of a Gemm as [in, out]; None if it is not constant, or if the Gemm scales its
    terms or transposes its first factor.
    """
    weight, attributes = floats_of(factor), gemm.attributes
    if attributes.get_float("alpha", 1.0) != 1 or attributes.get_float("beta", 1.0) != 1:
        return None
    if attributes.get_int("transA", 0) or weight is None:
        return None
    return weight.T if attributes.get_int("transB", 0) else weight


def _is_row_of_floats(value: ir.Value) -> bool:
    """Return True for a constant in fp16 or fp32 with at most one dimension."""
    array = floats_of(value)
    return array is not None and array.ndim <= 1


def _single(value: ir.Value | None) -> int | None:
    """The one integer of a constant; None if it is none, or has more."""
    array = None if value is None else constant_of(value)
    return int(array.reshape(())) if array is not None and array.size == 1 else None


def _axes(squeeze: ir.Node) -> Order | None:
    _, *inputs = operands(squeeze)
    axes = constant_of(inputs[0]) if inputs else squeeze.attributes.get_ints("axes")
    return None if axes is None else tuple(int(axis) for axis in np.ravel(axes))


def _dims(value: ir.Value, rank: int) -> list[Dim]:
    """The dimensions of a value; None for one that is not known."""
    if value.shape is None or len(value.shape) != rank:
        return [None] * rank
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def _reshaped_dims(value: ir.Value, rank: int) -> list[Dim]:
    """The dimensions of a value, those to which it is reshaped first."""
    dims = _dims(value, rank)
    for reshape in chain(value, "Reshape"):
        target = constant_of(operands(reshape)[1])
        if target is not None and target.size == rank:
            return [int(size) if size > 0 else dim for dim, size in zip(dims, target, strict=True)]
    return dims


def _sizes_of(width: int, *dims: Dim) -> list[int]:
    """The dimensions, where all are numbers whose product is `width`; else an empty list."""
    sizes = [dim for dim in dims if isinstance(dim, int)]
    return sizes if len(sizes) == len(dims) and np.prod(sizes) == width else []


def _are_equal(dims: Sequence[Dim], others: Sequence[Dim]) -> bool:
    """Return True if rows and tokens are the same on both sides, where both are known.

    One of the two must be known on both sides; then the other is the same, too.
    """
    pairs = [
        (dim, other)
        for dim, other in zip(dims, others, strict=True)
        if _is_known(dim) and _is_known(other)
    ]
    return bool(pairs) and all(dim == other for dim, other in pairs)


def _is_known(dim: Dim) -> bool:
    """Return False for the names that shape inference makes up: equal ones say nothing."""
    return bool(dim) and not str(dim).startswith("unk__")
