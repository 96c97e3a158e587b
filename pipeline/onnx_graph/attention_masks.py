"""Rewrite the masks of attention: one row for all queries, numbers that fp16 holds, no NaN guard.

Exporters guard Softmax against rows that see no token at all, by a Where over all scores. With a
mask of finite numbers there is nothing to guard against. With a mask of -inf, a row that sees no
token answers 0. It still does where HIDDEN takes the place of -inf and the product is multiplied,
row by row, by 1 where a row sees a token and by 0 where it does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations, zip_longest

import numpy as np
import onnx_ir as ir

from pipeline.onnx_graph.rewriting import (
    OURS,
    chain,
    constant_of,
    floats_of,
    initializer,
    is_inner,
    number_of,
    operands,
    successor,
)

# added to a score, it makes e to that power 0 in every float type; no score comes near it
HIDDEN = -1e4
AXES_ARE_INPUTS = 18  # the first opset whose ReduceMax takes its axes as an input
# the first opset whose Softmax without an axis goes along the last one; before, it goes along all
# from the second on
LAST_BY_DEFAULT = 13
RESHAPED = frozenset({"Unsqueeze", "Reshape", "Identity"})


@dataclass(frozen=True, slots=True)
class InfiniteMask:
    """A mask of the form Where(condition, 0, -inf) or Where(condition, -inf, 0)."""

    mask: ir.Value
    condition: ir.Value
    branches: tuple[ir.Value, ir.Value]
    numbers: tuple[np.ndarray, np.ndarray]  # of the branches

    @property
    def shape(self) -> ir.Shape | None:
        """Of the mask, where it is known and has the rank of the condition; else None."""
        mask_shape, condition_shape = self.mask.shape, self.condition.shape
        if mask_shape is None or condition_shape is None:
            return None
        return mask_shape if len(mask_shape) == len(condition_shape) else None


@dataclass(frozen=True, slots=True)
class FiniteMask:
    """A mask of 0 and HIDDEN, and which rows of scores see a token: 1 or 0 per row."""

    mask: ir.Value
    visible: ir.Value


class Masks:
    """The masks of a graph.

    Without `hide`, the only rewrite is to leave out what is repeated for every query.
    """

    def __init__(self, graph: ir.Graph, opset: int, hide: bool) -> None:
        self.graph, self.opset, self.hide = graph, opset, hide
        self._finite: dict[ir.Value, FiniteMask] = {}

    def rewrite(self, softmax: ir.Node, scores: ir.Node, add: ir.Node | None) -> None:
        """Rewrite the mask that `add` adds to the scores of a Softmax, and remove the guards after
        it, where the answers stay the same.

        `add` is None where no mask is added.
        """
        if add is not None:
            leave_out_queries(operands(add)[1], scores.outputs[0])
        if not self.hide or not self._over_keys(softmax):
            return
        if add is None:
            remove_guards(softmax, guards(softmax))
            return
        may_change = is_inner(add.outputs[0])  # the Softmax alone reads the masked scores
        if may_change:
            add.replace_input_with(1, self._in_reach(operands(add)[1]))
        if is_finite(operands(add)[1]):
            remove_guards(softmax, guards(softmax))
        elif may_change:
            self._replace_infinity(softmax, add)

    def _over_keys(self, softmax: ir.Node) -> bool:
        """Return True if a Softmax goes along the last axis: then a row of scores is a query."""
        default = -1 if self.opset >= LAST_BY_DEFAULT else 1
        axis = softmax.attributes.get_int("axis", default)
        shape = softmax.outputs[0].shape
        return axis == -1 or bool(shape and axis == len(shape) - 1)

    def _in_reach(self, mask: ir.Value) -> ir.Value:
        """Return a mask that adds HIDDEN instead of the smallest number of fp32: fp16 holds it, so
        that scores and Softmax need not stay in fp32.

        It holds -inf too, which stays in a Where, as does a mask in bf16, which numpy does not
        know. Constants change if every row sees something.
        """
        name = f"{OURS}{mask.name}/hidden"
        for choice in chain(mask, "Where"):
            for index in (1, 2):
                values = floats_of(operands(choice)[index])
                if values is not None and values.size == 1 and -np.inf < values.item() < HIDDEN:
                    number = np.full_like(values, HIDDEN)
                    hidden = initializer(self.graph, f"{name}_{index}", number)
                    choice.replace_input_with(index, hidden)
        values = floats_of(mask)
        if values is None or not values.size or not (values < HIDDEN).any():
            return mask
        every_row_sees = (values > HIDDEN / 2).any(-1).all()
        if not every_row_sees:
            return mask
        return initializer(self.graph, name, np.maximum(values, values.dtype.type(HIDDEN)))

    def _replace_infinity(self, softmax: ir.Node, add: ir.Node) -> None:
        """Add HIDDEN where a mask adds -inf, and multiply the guarded products by what rows see."""
        guard_nodes = guards(softmax)
        if not self._may_multiply(softmax, guard_nodes):
            return
        match = match_infinite_mask(operands(add)[1])
        if match is None:
            return
        if match.mask not in self._finite:
            self._finite[match.mask] = self._build_finite_mask(match)
        finite = self._finite[match.mask]
        add.replace_input_with(1, finite.mask)
        for product in readers_of(guard.outputs[0] for guard in guard_nodes):
            self._multiply(product, finite.visible)
        remove_guards(softmax, guard_nodes)

    def _build_finite_mask(self, match: InfiniteMask) -> FiniteMask:
        """Add these nodes to the graph:

        hidden = Where(condition, 0, HIDDEN)   the finite mask; branches swapped as in the match
        best   = ReduceMax(hidden)             per row: 0 if it sees a token, else HIDDEN
        blind  = Div(best, HIDDEN)             per row: 0 if it sees a token, else 1
        sees   = Sub(1, blind)                 per row: 1 if it sees a token, else 0
        """
        name, dtype = f"{OURS}{match.mask.name}", match.numbers[0].dtype
        hides = initializer(self.graph, f"{name}/hides", np.asarray(HIDDEN, dtype))
        one = initializer(self.graph, f"{name}/one", np.asarray(1, dtype))
        branches = [
            hides if np.isneginf(number) else branch
            for branch, number in zip(match.branches, match.numbers, strict=True)
        ]
        hidden = self._node("Where", f"{name}/hidden", [match.condition, *branches])
        hidden.shape = match.shape
        best = self._row_maximum(hidden, name)
        blind = self._node("Div", f"{name}/blind", [best, hides])
        visible = self._node("Sub", f"{name}/sees", [one, blind])
        for value in (hidden, best, blind, visible):
            value.type = hides.type
        return FiniteMask(hidden, visible)

    def _row_maximum(self, value: ir.Value, name: str) -> ir.Value:
        output = f"{name}/best"
        if self.opset < AXES_ARE_INPUTS:
            return self._node("ReduceMax", output, [value], keepdims=1, axes=[-1])
        axes = initializer(self.graph, f"{name}/axes", np.array([-1]))
        return self._node("ReduceMax", output, [value, axes], keepdims=1)

    def _node(
        self, operator: str, name: str, inputs: list[ir.Value], **attributes: int | list[int]
    ) -> ir.Value:
        """Add a node to the graph; returns its output, of the same name."""
        output = ir.Value(name=name)
        self.graph.append(ir.node(operator, inputs, attributes, outputs=[output], name=name))
        return output

    def _may_multiply(self, softmax: ir.Node, guard_nodes: list[ir.Node]) -> bool:
        """Return True if only guards read the output of Softmax, and only matrix products of this
        graph read the output of guards, as their first factor.
        """
        if not guard_nodes:
            return False
        (weights,) = softmax.outputs
        tests = [node for node in weights.consumers() if node.op_type == "IsNaN"]
        unguarded = [weights, *(test.outputs[0] for test in tests)]
        guarded = [guard.outputs[0] for guard in guard_nodes]
        if any(value.is_graph_output() for value in (*unguarded, *guarded)):
            return False
        if not set(readers_of(unguarded)) <= {*tests, *guard_nodes}:
            return False
        return all(
            node.graph is self.graph and is_matrix_product_of(node, guarded)
            for node in readers_of(guarded)
        )

    def _multiply(self, product: ir.Node, visible: ir.Value) -> None:
        """Multiply the output of a product by what its rows see."""
        (output,) = product.outputs
        result = successor(output)
        name = f"{OURS}{result.name}/of_rows_that_see"
        output.name = f"{name}/all"
        self.graph.append(ir.node("Mul", [output, visible], outputs=[result], name=name))


def leave_out_queries(mask: ir.Value, scores: ir.Value) -> None:
    """Where(And(column, row), two numbers) with an all-True column, expanded or not, becomes
    Where(row, two numbers): the Add repeats it for every query.
    """
    nodes = chain(mask, "Where", "And") or chain(mask, "Where", "Expand", "And")
    if not nodes or mask.is_graph_output():
        return
    if any(reader.op_type not in ("Add", "ReduceMax") for reader in mask.consumers()):
        return
    choice, both = nodes[0], nodes[-1]
    if not all(is_number(branch) for branch in operands(choice)[1:]):
        return
    if is_larger(mask.shape, scores.shape):
        return
    for column, row in permutations(operands(both)):
        if is_true(column) and has_rank_of(row, column):
            choice.replace_input_with(0, row)
            mask.shape = row.shape if mask.shape else None


def match_infinite_mask(mask: ir.Value) -> InfiniteMask | None:
    """Return what a mask of 0 and -inf is made of; None for another mask, and for a condition
    that is one number for all scores.
    """
    choices = chain(mask, "Where")
    if not choices:
        return None
    condition, first, second = operands(choices[0])
    if condition.shape is not None and not len(condition.shape):
        return None
    numbers = number_of(first), number_of(second)
    if numbers[0] is None or numbers[1] is None:
        return None
    if {float(numbers[0]), float(numbers[1])} != {-np.inf, 0.0}:
        return None
    return InfiniteMask(mask, condition, (first, second), (numbers[0], numbers[1]))


def readers_of(values: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that read these values, in order; a node that reads several comes once for each."""
    return [reader for value in values for reader in value.consumers()]


def is_matrix_product_of(node: ir.Node, values: list[ir.Value]) -> bool:
    """Return True for a MatMul whose second factor is no vector and none of the values."""
    if node.op_type != "MatMul":
        return False
    factor = operands(node)[1]
    is_vector = factor.shape is not None and len(factor.shape) == 1
    return factor not in values and not is_vector


def is_number(value: ir.Value) -> bool:
    """Return True for a constant of at most one element."""
    array = constant_of(value)
    return array is not None and array.size <= 1


def has_rank_of(row: ir.Value, column: ir.Value) -> bool:
    """Return True if the row is known to have at least the rank of the column."""
    if column.shape is None or not row.shape:
        return False
    return len(row.shape) >= len(column.shape)


def is_larger(mask: ir.Shape | None, scores: ir.Shape | None) -> bool:
    """Return True if a mask of one shape is known to repeat scores of the other."""
    if mask is None or scores is None:
        return False
    return any(
        of_mask not in (None, 1) and of_scores == 1
        for of_mask, of_scores in zip_longest(mask[::-1], scores[::-1], fillvalue=1)
    )


def is_finite(mask: ir.Value) -> bool:
    """Return True if no row of scores can become all -inf, for which Softmax gives NaN: the mask is
    a choice of finite numbers, or constant and in reach of fp16.
    """
    choices = chain(mask, "Where")
    if choices:
        arrays = [constant_of(branch) for branch in operands(choices[0])[1:]]
        return all(array is not None and np.isfinite(array).all() for array in arrays)
    array = floats_of(mask)
    if array is None:
        return False
    return bool((np.isfinite(array) & (array >= HIDDEN)).all())


def is_true(value: ir.Value) -> bool:
    """Return True if the value is provably all True: a constant, or `Range(start, ...) >= least`
    with a start of at least that, as transformers writes `q_idx >= 0`.
    """
    array = constant_of(value)
    if array is not None:
        return bool(array.all())
    for test in chain(value, "GreaterOrEqual"):
        positions, least = operands(test)[0].producer(), constant_of(operands(test)[1])
        while positions is not None and positions.op_type in RESHAPED:
            positions = operands(positions)[0].producer()
        if least is None or positions is None or positions.op_type != "Range":
            return False
        start, _, step = (constant_of(bound) for bound in operands(positions))
        if start is not None and step is not None:
            return bool((least <= start).all() and (step > 0).all())
    return False


def guards(softmax: ir.Node) -> list[ir.Node]:
    """The Where nodes of Softmax -> IsNaN -> Where(is NaN, 0, Softmax)."""
    (weights,) = softmax.outputs
    tests = [node for node in weights.consumers() if node.op_type == "IsNaN"]
    return [
        node
        for node in readers_of(test.outputs[0] for test in tests)
        if node.op_type == "Where" and node.inputs[2] is weights and is_zero(operands(node)[1])
    ]


def is_zero(value: ir.Value) -> bool:
    """Return True for a constant of zeros."""
    array = constant_of(value)
    return array is not None and not array.any()


def remove_guards(softmax: ir.Node, guard_nodes: list[ir.Node]) -> None:
    """Let the readers of guards read the Softmax itself."""
    (weights,) = softmax.outputs
    for guard in guard_nodes:
        for reader, index in guard.outputs[0].uses():
            reader.replace_input_with(index, weights)
