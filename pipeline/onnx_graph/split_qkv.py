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
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.onnx_graph.graphsurgeon import chain, constant_of, floats_of, maker, permutation

OURS = "unpacked/"  # begins the names of tensors that are put in, so that they meet no others
PARTS = "qkv"
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity"})  # nothing moves in memory
Order = tuple[int, ...]
BY_TOKENS: Order = (3, 1, 2, 0, 4)  # [1, token, row, 3, width], stacked
BY_ROWS: Order = (2, 0, 3, 1, 4)  # [row, token, 3, head, size], stacked
SWAPPED: Order = (1, 0, 2)  # [token, row, ...] <-> [row, token, ...]
ANSWERS: Order = (2, 0, 1, 3)  # [row, head, token, size] -> [token, row, head, size]
HEADS: dict[Order, Order] = {SWAPPED: (0, 2, 1, 3), (1, 2, 0): (0, 2, 3, 1)}
"""How [token, row * head, size] is transposed to [row, head, token, size] or, of keys, [row, head,
size, token]: how [row, token, head, size] is.
"""


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight + bias, the weight as [in, out]; `node` and `name` are those of the product and of
    the weight.
    """

    x: Any
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
    tensor: Any
    has_stack_axis: bool  # its first axis is that of the stack, of size 1


class Unpacking:
    """The rewriting of one graph. A node that does not match a known form stays as it is."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.constants: dict[str, Any] = {}  # by name: layers that share a weight share its thirds
        self.names: set[str] = set()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if permutation(node) in (BY_TOKENS, BY_ROWS):
                self._take_apart(node)
            elif node.op == "Gemm":
                self._answer_by_rows(node)

    def _take_apart(self, stack: Any) -> None:
        """Let a product of its own give each part that is selected from a stack."""
        linear, parts = self._linear(stack.inputs[0]), self._parts(stack)
        if linear is None or not parts:
            return
        by_rows = permutation(stack) == BY_ROWS
        shape = _shape(stack.inputs[0], 5)
        if by_rows:  # [row, token, 3, head, size]
            outer, count, inner = shape[:2], shape[2], shape[3:]
        else:  # [1, token, row, 3, width]
            outer, count, inner = shape[1:3], shape[3], shape[4:]
        sizes = _sizes_of(linear.width, *inner)
        if count != len(PARTS) or not sizes:
            return
        x_shape = linear.x.shape
        if x_shape is None or len(x_shape) != 3 or not _are_equal(x_shape[:2], outer):
            return  # rows and tokens were grouped anew on the way
        for part in parts:
            if by_rows:
                self._heads(linear, part.index, linear.x, sizes, HEADS[SWAPPED], part.tensor)
            elif not self._heads_by_rows(linear, part):
                self._third(linear, part.index, linear.x, part.tensor)

    def _heads_by_rows(self, linear: Linear, part: Part) -> bool:
        """Make heads of x before it was swapped from [row, token, in], where x was, and where the
        part only becomes heads. Returns True if it did.
        """
        swap = maker(linear.x)
        reshapes = self._followed(part.tensor, "Reshape")
        if not reshapes or permutation(swap) != SWAPPED:
            return False
        tensor, turned = self._after_transposes(reshapes[0].outputs[0])
        heads = self._followed(tensor, "Reshape")
        if turned not in HEADS or not heads:
            return False
        (answer,) = heads[0].outputs
        order, shape = HEADS[turned], _shape(answer, 4)
        sizes = _sizes_of(linear.width, shape[1], shape[order.index(3)])
        if not sizes:
            return False
        self._heads(linear, part.index, swap.inputs[0], sizes, order, answer)
        return True

    def _answer_by_rows(self, gemm: Any) -> None:
        """Rewrite [row, head, token, size] -> [token, row, ...] -> [token * row, width] -> Gemm ->
        [token, row, out] -> [row, token, out] without the swaps.
        """
        before = chain(gemm.inputs[0], "Reshape", "Transpose")
        if not before or permutation(before[1]) != ANSWERS:
            return
        after = self._followed(gemm.outputs[0], "Reshape", "Transpose")
        if not after or permutation(after[1]) != SWAPPED:
            return
        weight = _gemm_weight(gemm)
        if weight is None or not all(self._is_inner(node.outputs[0]) for node in before):
            return
        biases = [bias for bias in gemm.inputs[2:] if bias.name]
        if not all(map(_is_row_of_floats, biases)):
            return
        name, width = gemm.name or gemm.outputs[0].name, len(weight)
        rows = self._put("Transpose", f"{name}/rows", [before[1].inputs[0]], perm=[0, 2, 1, 3])
        shape = self._constant(f"width/{width}", np.array([0, 0, width]))
        x = self._put("Reshape", f"{name}/width", [rows, shape])
        prefix = "weight/turned" if gemm.attrs.get("transB", 0) else "weight"
        factors = [x, self._constant(f"{prefix}/{gemm.inputs[1].name}", weight)]
        (out,) = after[-1].outputs
        product = self._put("MatMul", name, factors, None if biases else out)
        for bias in biases:
            self._put("Add", f"{name}/bias", [product, bias], out)

    def _third(self, linear: Linear, index: int, x: Any, out: Any = None) -> Any:
        """x @ a third of the weight + the same third of the bias."""
        third = slice(index * linear.width, (index + 1) * linear.width)
        name = f"{linear.node}/{PARTS[index]}"
        factors = [x, self._constant(f"third/{linear.name}/{index}", linear.weight[:, third])]
        if linear.bias is None:
            return self._put("MatMul", name, factors, out)
        bias = self._constant(f"bias/{name}", linear.bias[third])
        return self._put("Add", f"{name}/bias", [self._put("MatMul", name, factors), bias], out)

    def _heads(
        self, linear: Linear, index: int, x: Any, sizes: Sequence[int], order: Order, out: Any
    ) -> None:
        """A third of [row, token, in] as [row, token, head, size], transposed."""
        name = f"{linear.node}/{PARTS[index]}"
        shape = self._constant(f"heads/{sizes[0]}x{sizes[1]}", np.array([0, 0, *sizes]))
        heads = self._put("Reshape", f"{name}/heads", [self._third(linear, index, x), shape])
        self._put("Transpose", f"{name}/turned", [heads], out, perm=list(order))

    # -- new nodes and constants

    def _put(
        self, operator: str, name: str, inputs: list[Any], out: Any = None, **attrs: Any
    ) -> Any:
        """Add a node. Returns its output: `out`, which another node made, or a new tensor."""
        import onnx_graphsurgeon as gs

        while name in self.names:
            name += "_"
        self.names.add(name)
        if out is None:
            out = gs.Variable(f"{OURS}{name}")
        out.inputs.clear()
        self.graph.nodes.append(gs.Node(operator, name, attrs, inputs, [out]))
        return out

    def _constant(self, name: str, values: np.ndarray) -> Any:
        import onnx_graphsurgeon as gs

        if name not in self.constants:
            self.constants[name] = gs.Constant(f"{OURS}{name}", np.ascontiguousarray(values))
        return self.constants[name]

    # -- matching

    def _is_inner(self, tensor: Any) -> bool:
        """Return True if one node alone reads a tensor, and it is no output of the graph."""
        return len(tensor.outputs) == 1 and not self._is_output(tensor)

    def _is_output(self, tensor: Any) -> bool:
        return any(tensor is output for output in self.graph.outputs)

    def _followed(self, tensor: Any, *operators: str) -> list[Any]:
        """The nodes of these operators that read a tensor one after the other, each alone; empty if
        it is read otherwise.
        """
        nodes: list[Any] = []
        for operator in operators:
            node = tensor.outputs[0] if self._is_inner(tensor) else None
            if node is None or node.op != operator or node.inputs[0] is not tensor:
                return []
            nodes, tensor = [*nodes, node], node.outputs[0]
        return nodes

    def _after_transposes(self, tensor: Any) -> tuple[Any, Order]:
        """Follow a tensor [0, 1, 2] through Transpose nodes, and return the last output with the
        order of its axes.
        """
        order: Order = (0, 1, 2)
        while True:
            transposes = self._followed(tensor, "Transpose")
            if not transposes or not permutation(transposes[0]):
                return tensor, order
            order = tuple(order[axis] for axis in permutation(transposes[0]))
            (tensor,) = transposes[0].outputs

    def _before_views(self, tensor: Any) -> Any:
        """The tensor of which this one is a view, which nothing else reads."""
        view = maker(tensor)
        while view is not None and view.op in VIEWS and self._is_inner(tensor):
            tensor = view.inputs[0]
            view = maker(tensor)
        return tensor

    def _linear(self, tensor: Any) -> Linear | None:
        """The product, with its bias, of which a tensor is a view; None if something else reads it
        too.
        """
        total = self._before_views(tensor)
        product, bias = total, None
        add = maker(total)
        if add is not None and add.op == "Add":
            product, addend = _constant_last(add.inputs)
            bias = floats_of(addend)
            if bias is None:
                return None
        if not self._is_inner(total) or not self._is_inner(product):
            return None
        matmul = maker(product)
        if matmul is None or matmul.op != "MatMul":
            return None
        x, factor = matmul.inputs
        weight = floats_of(factor)
        if weight is None or weight.ndim != 2 or weight.shape[1] % len(PARTS):
            return None
        if bias is not None and bias.shape != weight.shape[1:]:
            return None
        return Linear(x, matmul.name or matmul.outputs[0].name, factor.name, weight, bias)

    def _parts(self, stack: Any) -> list[Part]:
        """The parts that are selected from a stack; empty if something else reads it too, or if a
        part is selected twice.
        """
        (tensor,) = stack.outputs
        if permutation(stack) == BY_TOKENS:
            squeezed = self._followed(tensor, "Squeeze")
            if not squeezed or _axes(squeezed[0]) not in ((3,), (-2,)):
                return []
            (tensor,) = squeezed[0].outputs
        parts: list[Part] = []
        for node in tensor.outputs:
            selection = self._selected_parts(node)
            if not selection:
                return []
            parts += selection
        indices = {part.index for part in parts}
        if len(indices) < len(parts) or self._is_output(tensor):
            return []
        return parts

    def _selected_parts(self, node: Any) -> list[Part]:
        """The parts that a node selects along the first axis, without that axis; empty if the node
        does something else.
        """
        parts: list[Part] = []
        for part in _parts_along_stack(node):
            squeezed = self._without_stack_axis(part)
            if squeezed is None:
                return []
            parts.append(squeezed)
        return parts

    def _without_stack_axis(self, part: Part) -> Part | None:
        """The part after the Squeeze of its first axis; None if something else follows."""
        if not part.has_stack_axis:
            return part
        nodes = self._followed(part.tensor, "Squeeze")
        if not nodes or _axes(nodes[0]) != (0,):
            return None
        return Part(part.index, nodes[0].outputs[0], has_stack_axis=False)


def _parts_along_stack(node: Any) -> list[Part]:
    """The parts that a Split, Gather or Slice takes along the first axis; empty for another
    node.
    """
    if node.op == "Split":
        return _split_parts(node)
    if node.op == "Gather":
        return _gather_parts(node)
    if node.op == "Slice":
        return _slice_parts(node)
    return []


def _split_parts(split: Any) -> list[Part]:
    """All parts; empty unless there are as many outputs."""
    if split.attrs.get("axis", 0) != 0 or len(split.outputs) != len(PARTS):
        return []
    return [Part(index, tensor, has_stack_axis=True) for index, tensor in enumerate(split.outputs)]


def _gather_parts(gather: Any) -> list[Part]:
    """One part, of a constant index; an index without dimensions drops the axis."""
    if gather.attrs.get("axis", 0) != 0:
        return []
    index = constant_of(gather.inputs[1])
    if index is None or index.size != 1:
        return []
    number = int(index.reshape(())) % len(PARTS)
    return [Part(number, gather.outputs[0], has_stack_axis=index.ndim > 0)]


def _slice_parts(slice_node: Any) -> list[Part]:
    """One part, of constant bounds that are one apart."""
    if len(slice_node.inputs) < 4:
        return []
    begin, end, axis = (_single(bound) for bound in slice_node.inputs[1:4])
    if axis != 0 or begin is None or end != begin + 1:
        return []
    return [Part(begin % len(PARTS), slice_node.outputs[0], has_stack_axis=True)]


def _constant_last(inputs: Sequence[Any]) -> tuple[Any, Any]:
    """The two inputs of a node, a constant first one moved to the end."""
    first, second = inputs
    return (first, second) if constant_of(first) is None else (second, first)


def _gemm_weight(gemm: Any) -> np.ndarray | None:
    """The weight of a Gemm as [in, out]; None if it is not constant, or if the Gemm scales its
    terms or transposes its first factor.
    """
    weight, attrs = floats_of(gemm.inputs[1]), gemm.attrs
    if attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0 or attrs.get("transA", 0):
        return None
    return weight.T if weight is not None and attrs.get("transB", 0) else weight


def _is_row_of_floats(tensor: Any) -> bool:
    """Return True for a constant in fp16 or fp32 with at most one dimension."""
    values = floats_of(tensor)
    return values is not None and values.ndim <= 1


def _single(tensor: Any) -> int | None:
    """The one integer of a constant; None if it is none, or has more."""
    values = constant_of(tensor)
    return int(values.reshape(())) if values is not None and values.size == 1 else None


def _axes(squeeze: Any) -> Order | None:
    axes = constant_of(squeeze.inputs[1]) if len(squeeze.inputs) > 1 else squeeze.attrs.get("axes")
    return None if axes is None else tuple(int(axis) for axis in np.ravel(axes))


def _shape(tensor: Any, rank: int) -> list[int | str | None]:
    """The dimensions of a tensor, those to which it is reshaped first; None for one that is not
    known.
    """
    dims: list[int | str | None] = [None] * rank
    if tensor.shape is not None and len(tensor.shape) == rank:
        dims = list(tensor.shape)
    reshape = maker(tensor)
    if reshape is None or reshape.op != "Reshape":
        return dims
    target = constant_of(reshape.inputs[1])
    if target is None or target.size != rank:
        return dims
    return [int(size) if size > 0 else dim for dim, size in zip(dims, target, strict=True)]


def _sizes_of(width: int, *dims: int | str | None) -> list[int]:
    """The dimensions, where all are numbers whose product is `width`; else an empty list."""
    sizes = [dim for dim in dims if isinstance(dim, int)]
    return sizes if len(sizes) == len(dims) and np.prod(sizes) == width else []


def _are_equal(dims: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if rows and tokens are the same on both sides, where both are known.

    One of the two must be known on both sides; then the other is the same, too.
    """
    pairs = [
        (dim, other)
        for dim, other in zip(dims, others, strict=True)
        if _is_known(dim) and _is_known(other)
    ]
    return bool(pairs) and all(dim == other for dim, other in pairs)


def _is_known(dim: Any) -> bool:
    """Return False for the names that shape inference makes up: equal ones say nothing."""
    return bool(dim) and not str(dim).startswith("unk__")
