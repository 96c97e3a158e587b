"""Rewrite the masks of attention: one row for all queries, numbers that fp16 holds, no NaN guard.

Exporters guard Softmax against rows that see no token at all, by a Where over all scores. With a
mask of finite numbers there is nothing to guard against. With a mask of -inf, a row that sees no
token answers 0. It still does where HIDDEN takes the place of -inf and the product is multiplied,
row by row, by 1 where a row sees a token and by 0 where it does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from pipeline.onnx_graph.graphsurgeon import OURS, chain, constant_of, floats_of, maker, number_of

# added to a score, it makes e to that power 0 in every float type; scores themselves stay far from
# it
HIDDEN = -1e4
AXES_ARE_INPUTS = 18  # the first opset whose ReduceMax takes its axes as an input
# the first opset whose Softmax without an axis goes along the last one; before, it goes along all
# from the second on
LAST_BY_DEFAULT = 13
RESHAPED = frozenset({"Unsqueeze", "Reshape", "Identity"})


@dataclass(frozen=True, slots=True)
class InfiniteMask:
    """A mask of the form Where(condition, 0, -inf) or Where(condition, -inf, 0)."""

    mask: Any
    condition: Any
    branches: tuple[Any, Any]
    numbers: tuple[np.ndarray, np.ndarray]  # of the branches

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.numbers[0].dtype

    @property
    def shape(self) -> Any:
        """Of the mask, where it is known and has the rank of the condition; else None."""
        mask_shape, condition_shape = self.mask.shape, self.condition.shape
        if mask_shape is None or condition_shape is None:
            return None
        return mask_shape if len(mask_shape) == len(condition_shape) else None


@dataclass(frozen=True, slots=True)
class FiniteMask:
    """A mask of 0 and HIDDEN, and which rows of scores see a token: 1 or 0 per row."""

    mask: Any
    visible: Any


class Masks:
    """The masks of a graph.

    Without `hide`, the only rewrite is to leave out what is repeated for every query.
    """

    def __init__(self, graph: Any, hide: bool) -> None:
        self.graph, self.hide = graph, hide
        self._outputs = {id(tensor) for tensor in graph.outputs}
        self._clipped: dict[str, Any] = {}
        self._finite: dict[str, FiniteMask] = {}

    def rewrite(self, softmax: Any, scores: Any, add: Any | None) -> None:
        """Rewrite the mask that `add` adds to the scores of a Softmax, and remove the guards after
        it, where the answers stay the same.

        `add` is None where no mask is added.
        """
        if add is not None:
            self._leave_out_queries(add.inputs[1], scores.outputs[0])
        if not self.hide or not self._over_keys(softmax):
            return
        if add is None:
            remove_guards(softmax, guards(softmax))
            return
        may_change = self._is_between(add, softmax)
        if may_change:
            add.inputs[1] = self._in_reach(add.inputs[1])
        if is_finite(add.inputs[1]):
            remove_guards(softmax, guards(softmax))
        elif may_change:
            self._replace_infinity(softmax, add)

    def _leave_out_queries(self, mask: Any, scores: Any) -> None:
        """Where(And(column, row), two numbers) with an all-True column, expanded or not, becomes
        Where(row, two numbers): the Add repeats it for every query.
        """
        nodes = chain(mask, "Where", "And") or chain(mask, "Where", "Expand", "And")
        if not nodes or id(mask) in self._outputs:
            return
        if any(reader.op not in ("Add", "ReduceMax") for reader in mask.outputs):
            return
        choice, both = nodes[0], nodes[-1]
        if not all(is_number(branch) for branch in choice.inputs[1:]):
            return
        if is_larger(mask.shape, scores.shape):
            return
        for column, row in (both.inputs, both.inputs[::-1]):
            if is_true(column) and has_rank_of(row, column):
                choice.inputs[0] = row
                mask.shape = row.shape if mask.shape else None

    def _over_keys(self, softmax: Any) -> bool:
        """Return True if a Softmax goes along the last axis: then a row of scores is a query."""
        default = -1 if self.graph.opset >= LAST_BY_DEFAULT else 1
        axis = softmax.attrs.get("axis", default)
        shape = softmax.outputs[0].shape
        return axis == -1 or bool(shape and axis == len(shape) - 1)

    def _is_between(self, add: Any, softmax: Any) -> bool:
        """Return True if nothing but the Softmax reads the masked scores."""
        (masked,) = add.outputs
        return id(masked) not in self._outputs and all(
            reader is softmax for reader in masked.outputs
        )

    def _in_reach(self, mask: Any) -> Any:
        """Return a mask that adds HIDDEN instead of the smallest number of fp32: fp16 holds it, so
        that scores and Softmax need not stay in fp32.

        It holds -inf too, which stays in a Where, as does a mask in bf16, which numpy does not
        know. Constants change if every row sees something.
        """
        import onnx_graphsurgeon as gs

        for choice in chain(mask, "Where"):
            for index in (1, 2):
                number = number_of(choice.inputs[index])
                if number is not None and -np.inf < float(number) < HIDDEN:
                    hidden = np.full_like(constant_of(choice.inputs[index]), HIDDEN)
                    choice.inputs[index] = gs.Constant(f"{OURS}{mask.name}/hidden_{index}", hidden)
        values = floats_of(mask)
        if values is None or not values.size or not (values < HIDDEN).any():
            return mask
        every_row_sees = (values > HIDDEN / 2).any(-1).all()
        if not every_row_sees:
            return mask
        if mask.name not in self._clipped:
            self._clipped[mask.name] = gs.Constant(
                f"{OURS}{mask.name}/hidden", np.maximum(values, values.dtype.type(HIDDEN))
            )
        return self._clipped[mask.name]

    def _replace_infinity(self, softmax: Any, add: Any) -> None:
        """Add HIDDEN where a mask adds -inf, and multiply the guarded products by what rows see."""
        guard_nodes = guards(softmax)
        if not self._may_multiply(softmax, guard_nodes):
            return
        match = match_infinite_mask(add.inputs[1])
        if match is None:
            return
        name = match.mask.name
        if name not in self._finite:
            self._finite[name] = self._build_finite_mask(match)
        add.inputs[1] = self._finite[name].mask
        for product in readers_of(guard.outputs[0] for guard in guard_nodes):
            self._multiply(product, self._finite[name].visible)
        remove_guards(softmax, guard_nodes)

    def _build_finite_mask(self, match: InfiniteMask) -> FiniteMask:
        """Add these nodes to the graph:

        hidden = Where(condition, 0, HIDDEN)   the finite mask; branches swapped as in the match
        best   = ReduceMax(hidden)             per row: 0 if it sees a token, else HIDDEN
        blind  = Div(best, HIDDEN)             per row: 0 if it sees a token, else 1
        sees   = Sub(1, blind)                 per row: 1 if it sees a token, else 0
        """
        import onnx_graphsurgeon as gs

        name, dtype = f"{OURS}{match.mask.name}", match.dtype
        hides = gs.Constant(f"{name}/hides", np.asarray(HIDDEN, dtype))
        one = gs.Constant(f"{name}/one", np.asarray(1, dtype))
        branches = [
            hides if np.isneginf(number) else branch
            for branch, number in zip(match.branches, match.numbers, strict=True)
        ]
        hidden = self._node(
            "Where", [match.condition, *branches], f"{name}/hidden", dtype, match.shape
        )
        best = self._row_maximum(hidden, name, dtype)
        blind = self._node("Div", [best, hides], f"{name}/blind", dtype)
        sees = self._node("Sub", [one, blind], f"{name}/sees", dtype)
        return FiniteMask(hidden, sees)

    def _row_maximum(self, tensor: Any, name: str, dtype: Any) -> Any:
        import onnx_graphsurgeon as gs

        output = f"{name}/best"
        if self.graph.opset < AXES_ARE_INPUTS:
            return self._node("ReduceMax", [tensor], output, dtype, keepdims=1, axes=[-1])
        axes = gs.Constant(f"{name}/axes", np.array([-1]))
        return self._node("ReduceMax", [tensor, axes], output, dtype, keepdims=1)

    def _node(
        self,
        operator: str,
        inputs: list[Any],
        name: str,
        dtype: Any,
        shape: Any = None,
        **attributes: Any,
    ) -> Any:
        """Add a node to the graph; returns its output."""
        import onnx_graphsurgeon as gs

        output = gs.Variable(name, dtype=dtype, shape=shape)
        self.graph.nodes.append(gs.Node(operator, name, attributes, inputs, [output]))
        return output

    def _may_multiply(self, softmax: Any, guard_nodes: list[Any]) -> bool:
        """Return True if only guards read the output of Softmax, and only matrix products of this
        graph read the output of guards, as their first factor.
        """
        if not guard_nodes:
            return False
        tests = [node for node in softmax.outputs[0].outputs if node.op == "IsNaN"]
        unguarded = [*softmax.outputs, *(test.outputs[0] for test in tests)]
        guarded = [guard.outputs[0] for guard in guard_nodes]
        if any(id(tensor) in self._outputs for tensor in (*unguarded, *guarded)):
            return False
        known = {id(node) for node in (*tests, *guard_nodes)}
        if not all(id(reader) in known for reader in readers_of(unguarded)):
            return False
        here = {id(node) for node in self.graph.nodes}
        return all(
            id(node) in here and is_matrix_product_of(node, guarded) for node in readers_of(guarded)
        )

    def _multiply(self, product: Any, visible: Any) -> None:
        """Multiply the output of a product by what its rows see."""
        import onnx_graphsurgeon as gs

        (output,) = product.outputs
        name = f"{OURS}{output.name}/of_rows_that_see"
        product.outputs = [gs.Variable(f"{name}/all", dtype=output.dtype, shape=output.shape)]
        self.graph.nodes.append(gs.Node("Mul", name, {}, [product.outputs[0], visible], [output]))


def match_infinite_mask(mask: Any) -> InfiniteMask | None:
    """Return what a mask of 0 and -inf is made of; None for another mask, and for a condition
    that is one number for all scores.
    """
    choices = chain(mask, "Where")
    if not choices:
        return None
    condition, first, second = choices[0].inputs
    if condition.shape is not None and not len(condition.shape):
        return None
    numbers = number_of(first), number_of(second)
    if numbers[0] is None or numbers[1] is None:
        return None
    if {float(numbers[0]), float(numbers[1])} != {-np.inf, 0.0}:
        return None
    return InfiniteMask(mask, condition, (first, second), (numbers[0], numbers[1]))


def readers_of(tensors: Iterable[Any]) -> list[Any]:
    """The nodes that read these tensors, in order; a node that reads several comes once for
    each.
    """
    return [reader for tensor in tensors for reader in tensor.outputs]


def is_matrix_product_of(node: Any, tensors: list[Any]) -> bool:
    """Return True for a MatMul whose second factor is no vector and none of the tensors."""
    if node.op != "MatMul" or is_vector(node.inputs[1]):
        return False
    return not any(node.inputs[1] is tensor for tensor in tensors)


def is_number(tensor: Any) -> bool:
    """Return True for a constant of at most one element."""
    value = constant_of(tensor)
    return value is not None and value.size <= 1


def is_vector(tensor: Any) -> bool:
    """Return True for a tensor whose rank is known to be 1."""
    return tensor.shape is not None and len(tensor.shape) == 1


def has_rank_of(row: Any, column: Any) -> bool:
    """Return True if the row is known to have at least the rank of the column."""
    if column.shape is None or not row.shape:
        return False
    return len(row.shape) >= len(column.shape)


def is_larger(mask: Any, scores: Any) -> bool:
    """Return True if a mask of one shape is known to repeat scores of the other."""
    if mask is None or scores is None:
        return False
    return any(
        of_mask not in (None, 1) and of_scores == 1
        for of_mask, of_scores in zip_longest(mask[::-1], scores[::-1], fillvalue=1)
    )


def is_finite(mask: Any) -> bool:
    """Return True if no row of scores can become all -inf, for which Softmax gives NaN: the mask is
    a choice of finite numbers, or constant and in reach of fp16.
    """
    choices = chain(mask, "Where")
    if choices:
        values = [constant_of(branch) for branch in choices[0].inputs[1:]]
        return all(value is not None and np.isfinite(value).all() for value in values)
    constant = floats_of(mask)
    if constant is None:
        return False
    return bool((np.isfinite(constant) & (constant >= HIDDEN)).all())


def is_true(tensor: Any) -> bool:
    """Return True if the tensor is provably all True: a constant, or `Range(start, ...) >= least`
    with a start of at least that, as transformers writes `q_idx >= 0`.
    """
    value = constant_of(tensor)
    if value is not None:
        return bool(value.all())
    test = maker(tensor)
    if test is None or test.op != "GreaterOrEqual":
        return False
    positions = maker(test.inputs[0])
    while positions is not None and positions.op in RESHAPED:
        positions = maker(positions.inputs[0])
    if positions is None or positions.op != "Range":
        return False
    start, _, step = (constant_of(bound) for bound in positions.inputs)
    least = constant_of(test.inputs[1])
    if least is None or start is None or step is None:
        return False
    return bool((least <= start).all() and (step > 0).all())


def guards(softmax: Any) -> list[Any]:
    """The Where nodes of Softmax -> IsNaN -> Where(is NaN, 0, Softmax)."""
    (weights,) = softmax.outputs
    tests = [node for node in weights.outputs if node.op == "IsNaN"]
    return [
        node
        for node in readers_of(test.outputs[0] for test in tests)
        if node.op == "Where" and node.inputs[2] is weights and is_zero(node.inputs[1])
    ]


def is_zero(tensor: Any) -> bool:
    """Return True for a constant of zeros."""
    value = constant_of(tensor)
    return value is not None and not value.any()


def remove_guards(softmax: Any, guard_nodes: list[Any]) -> None:
    """Let the readers of guards read the Softmax itself."""
    (weights,) = softmax.outputs
    for guard in guard_nodes:
        for reader in list(guard.outputs[0].outputs):
            reader.inputs[reader.inputs.index(guard.outputs[0])] = weights
