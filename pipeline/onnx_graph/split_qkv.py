"""One packed product for queries, keys and values becomes three, so that its answer need not be
copied to be taken apart.

nn.MultiheadAttention (nn.TransformerEncoder, torchvision's ViT) computes [token, row, 3 * width],
stacks that to [3, token, row, width] and selects; timm and Swin stack [row, token, 3 * width] to
[3, row, head, token, size]. A product with a third of the weight is what is selected. The former
also swaps rows and tokens of what goes in and comes out, where rows come first: then the products
are taken of what came, in its own order.
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


class Unpacking:
    """The rewriting of one graph. What does not look as it is known stays as it is."""

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
        by_rows, linear, parts = (
            permutation(stack) == BY_ROWS,
            self._linear(stack.inputs[0]),
            self._parts(stack),
        )
        if linear is None or not parts:
            return
        shape = _shape(stack.inputs[0], 5)
        outer, three, inner = (
            (shape[:2], shape[2], shape[3:]) if by_rows else (shape[1:3], shape[3], shape[4:])
        )
        sizes = _product_is(linear.width, *inner)
        if three != len(PARTS) or not sizes:
            return
        if (
            linear.x.shape is None
            or len(linear.x.shape) != 3
            or not _alike(linear.x.shape[:2], outer)
        ):
            return  # rows and tokens were grouped anew on the way
        for index, part in parts:
            if by_rows:
                self._heads(linear, index, linear.x, sizes, HEADS[SWAPPED], part)
            elif not self._heads_by_rows(linear, index, part):
                self._third(linear, index, linear.x, part)

    def _heads_by_rows(self, linear: Linear, index: int, part: Any) -> bool:
        """Where x is [row, token, in], swapped, and `part` only becomes heads: make these of what x
        was before. Whether they were made.
        """
        turned: Order = (0, 1, 2)
        nodes = self._followed(part, "Reshape")
        while (
            nodes
            and (turns := self._followed(nodes[-1].outputs[0], "Transpose"))
            and (order := permutation(turns[0]))
        ):
            nodes, turned = turns, tuple(turned[axis] for axis in order)
        heads = self._followed(nodes[-1].outputs[0], "Reshape") if nodes else []
        if turned not in HEADS or not heads or permutation(maker(linear.x)) != SWAPPED:
            return False
        (answer,) = heads[0].outputs
        order, shape = HEADS[turned], _shape(answer, 4)
        sizes = _product_is(linear.width, shape[1], shape[order.index(3)])
        if sizes:
            self._heads(linear, index, maker(linear.x).inputs[0], sizes, order, answer)
        return bool(sizes)

    def _answer_by_rows(self, gemm: Any) -> None:
        """[row, head, token, size] -> [token, row, ...] -> [token * row, width] -> Gemm -> [token,
        row, out] -> [row, token, out]: unswapped.
        """
        before, after = (
            chain(gemm.inputs[0], "Reshape", "Transpose"),
            self._followed(gemm.outputs[0], "Reshape", "Transpose"),
        )
        if (
            not before
            or not after
            or (permutation(before[1]), permutation(after[1])) != (ANSWERS, SWAPPED)
        ):
            return
        weight, biases = floats_of(gemm.inputs[1]), [bias for bias in gemm.inputs[2:] if bias.name]
        plain = (
            gemm.attrs.get("alpha", 1.0),
            gemm.attrs.get("beta", 1.0),
            gemm.attrs.get("transA", 0),
        ) == (1.0, 1.0, 0)
        alone = all(self._is_inner(node.outputs[0]) for node in before)
        if (
            weight is None
            or not plain
            or not alone
            or any((values := floats_of(bias)) is None or values.ndim > 1 for bias in biases)
        ):
            return
        turned, name = bool(gemm.attrs.get("transB", 0)), gemm.name or gemm.outputs[0].name
        weight = weight.T if turned else weight
        made = self._put("Transpose", f"{name}/rows", [before[1].inputs[0]], perm=[0, 2, 1, 3])
        made = self._put(
            "Reshape",
            f"{name}/width",
            [made, self._constant(f"width/{len(weight)}", np.array([0, 0, len(weight)]))],
        )
        factors = [
            made,
            self._constant(f"weight{'/turned' * turned}/{gemm.inputs[1].name}", weight),
        ]
        (out,) = after[-1].outputs
        made = self._put("MatMul", name, factors, None if biases else out)
        for bias in biases:
            self._put("Add", f"{name}/bias", [made, bias], out)

    def _third(self, linear: Linear, index: int, x: Any, out: Any = None) -> Any:
        """x @ a third of the weight + the same of the bias."""
        third, name = (
            slice(index * linear.width, (index + 1) * linear.width),
            f"{linear.node}/{PARTS[index]}",
        )
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
        made = self._put("Reshape", f"{name}/heads", [self._third(linear, index, x), shape])
        self._put("Transpose", f"{name}/turned", [made], out, perm=list(order))

    # -- what is put in
    # ------------------------------------------------------------------------------

    def _put(
        self, operator: str, name: str, inputs: list[Any], out: Any = None, **attrs: Any
    ) -> Any:
        """The output of a new node: `out`, which another made until now, or a new one."""
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

    # -- what is there
    # ------------------------------------------------------------------------------

    def _is_inner(self, tensor: Any) -> bool:
        """Whether one node alone reads a tensor, and no user."""
        return len(tensor.outputs) == 1 and all(tensor is not each for each in self.graph.outputs)

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

    def _linear(self, tensor: Any) -> Linear | None:
        """The product, with its bias, of which a tensor is a view; None if something else reads it
        too.
        """
        while (view := maker(tensor)) is not None and view.op in VIEWS and self._is_inner(tensor):
            tensor = view.inputs[0]
        node, bias, read = maker(tensor), None, [tensor]
        if node is not None and node.op == "Add":
            product, added = (
                node.inputs if constant_of(node.inputs[0]) is None else node.inputs[::-1]
            )
            node, bias, read = maker(product), floats_of(added), [tensor, product]
            if bias is None:
                return None
        weight = (
            floats_of(node.inputs[1])
            if node is not None and node.op == "MatMul" and all(map(self._is_inner, read))
            else None
        )
        if (
            weight is None
            or weight.ndim != 2
            or weight.shape[1] % len(PARTS)
            or (bias is not None and bias.shape != weight.shape[1:])
        ):
            return None
        return Linear(
            node.inputs[0], node.name or node.outputs[0].name, node.inputs[1].name, weight, bias
        )

    def _parts(self, stack: Any) -> list[tuple[int, Any]]:
        """What is selected from a stack, with its number; empty if it is read otherwise, too, or
        one of the parts twice.
        """
        (tensor,) = stack.outputs
        if permutation(stack) == BY_TOKENS:
            squeezed = self._followed(tensor, "Squeeze")
            if not squeezed or _axes(squeezed[0]) not in ((3,), (-2,)):
                return []
            (tensor,) = squeezed[0].outputs
        found: list[tuple[int, Any]] = []
        for node in tensor.outputs:
            chosen = self._chosen(node)
            if not chosen:
                return []
            found += chosen
        given = any(tensor is each for each in self.graph.outputs)
        return [] if given or len({index for index, _ in found}) < len(found) else found

    def _chosen(self, node: Any) -> list[tuple[int, Any]]:
        """What a node takes along the first axis, with its number; empty if it does something
        else.
        """
        pieces: list[tuple[int, Any]] = []
        if (
            node.op == "Split"
            and node.attrs.get("axis", 0) == 0
            and len(node.outputs) == len(PARTS)
        ):
            pieces = list(enumerate(node.outputs))
        elif (
            node.op == "Gather"
            and node.attrs.get("axis", 0) == 0
            and (index := constant_of(node.inputs[1])) is not None
            and index.size == 1
        ):
            pieces = [(int(index.reshape(())) % len(PARTS), node.outputs[0])]
            if index.ndim == 0:
                return pieces
        elif node.op == "Slice" and len(node.inputs) > 3:
            begin, end, axis = (_single(each) for each in node.inputs[1:4])
            if axis == 0 and begin is not None and end == begin + 1:
                pieces = [(begin % len(PARTS), node.outputs[0])]
        squeezed = [(index, self._followed(piece, "Squeeze")) for index, piece in pieces]
        if any(not nodes or _axes(nodes[0]) != (0,) for _, nodes in squeezed):
            return []
        return [(index, nodes[0].outputs[0]) for index, nodes in squeezed]


def _single(tensor: Any) -> int | None:
    values = constant_of(tensor)
    return int(values.reshape(())) if values is not None and values.size == 1 else None


def _axes(squeeze: Any) -> Order | None:
    axes = constant_of(squeeze.inputs[1]) if len(squeeze.inputs) > 1 else squeeze.attrs.get("axes")
    return None if axes is None else tuple(int(axis) for axis in np.ravel(axes))


def _shape(tensor: Any, rank: int) -> list[int | str | None]:
    """The dimensions of a tensor, from what it is reshaped to where they are not known otherwise;
    None for one that is not known.
    """
    known: list[int | str | None] = (
        list(tensor.shape)
        if tensor.shape is not None and len(tensor.shape) == rank
        else [None] * rank
    )
    made = maker(tensor)
    target = constant_of(made.inputs[1]) if made is not None and made.op == "Reshape" else None
    if target is not None and target.size == rank:
        known = [
            int(wanted) if wanted > 0 else dim for dim, wanted in zip(known, target, strict=True)
        ]
    return known


def _product_is(width: int, *sizes: int | str | None) -> list[int]:
    """The sizes, where all are known and their product is `width`; else none."""
    known = [size for size in sizes if isinstance(size, int)]
    return known if len(known) == len(sizes) and np.prod(known) == width else []


def _alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether rows and tokens are the same on both sides: where both are known, and so for one of
    them at least. Then the other is, too.
    """
    pairs = [
        (one, other)
        for one, other in zip(some, others, strict=True)
        if _is_known(one) and _is_known(other)
    ]
    return bool(pairs) and all(one == other for one, other in pairs)


def _is_known(dim: Any) -> bool:
    """Names that shape inference makes up tell nothing."""
    return bool(dim) and not str(dim).startswith("unk__")
