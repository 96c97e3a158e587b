"""Masks of attention: one row where every query sees the same, numbers that fp16 holds, and no
guard between Softmax and the product.

Exporters guard Softmax against rows that see no token at all, by a Where over all scores. With a
mask of finite numbers there is nothing to guard against. With one of -inf such rows answer 0: they
still do where HIDDEN takes its place and the product is multiplied by what each row sees, 0 or 1.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from pipeline.onnx_graph.graphsurgeon import OURS, chain, constant_of, floats_of, maker, number_of

# added to a score, it makes e to that power 0 in every float type; scores themselves stay far from
# it
HIDDEN = -1e4
AXES_ARE_INPUTS = 18  # the first opset whose ReduceMax takes them so
# the first opset whose Softmax goes along the last axis if it does not say one; before, along all
# from the second on
LAST_BY_DEFAULT = 13
RESHAPED = frozenset({"Unsqueeze", "Reshape", "Identity"})


class Masks:
    """The masks of a graph. Unless it may `hide` otherwise, only what is repeated for every query
    is left out.
    """

    def __init__(self, graph: Any, hide: bool) -> None:
        self.graph, self.hide = graph, hide
        self._outputs = {id(tensor) for tensor in graph.outputs}
        self._clipped: dict[str, Any] = {}
        self._hidden: dict[str, tuple[Any, Any]] = {}

    def write(self, softmax: Any, scores: Any, add: Any | None) -> None:
        """What `add` adds to the scores of a Softmax, if it does, written anew, and no guard after
        it, where that answers the same.
        """
        if add is not None:
            self._alike_for_all_queries(add.inputs[1], scores.outputs[0])
        if not self.hide or not self._over_keys(softmax):
            return
        found = guards(softmax)
        if add is not None and self._is_between(add, softmax):
            add.inputs[1] = self._in_reach(add.inputs[1])
        if add is None or is_finite(add.inputs[1]):
            without_guards(softmax, found)
        elif (
            self._is_between(add, softmax)
            and self._may_multiply(softmax, found)
            and (pair := self._finite(add.inputs[1]))
        ):
            add.inputs[1], sees = pair
            for product in [reader for guard in found for reader in guard.outputs[0].outputs]:
                self._multiply(product, sees)
            without_guards(softmax, found)

    def _alike_for_all_queries(self, mask: Any, scores: Any) -> None:
        """Where(And(column, row), two numbers) of a column of nothing but true, expanded or not:
        Where(row, the same), which the Add repeats.
        """
        made = chain(mask, "Where", "And") or chain(mask, "Where", "Expand", "And")
        if (
            not made
            or id(mask) in self._outputs
            or any(reader.op not in ("Add", "ReduceMax") for reader in mask.outputs)
        ):
            return
        choice, both = made[0], made[-1]
        values = [constant_of(each) for each in choice.inputs[1:]]
        if any(value is None or value.size > 1 for value in values) or is_larger(
            mask.shape, scores.shape
        ):
            return
        for column, row in (both.inputs, both.inputs[::-1]):
            if (
                is_true(column)
                and column.shape is not None
                and row.shape
                and len(row.shape) >= len(column.shape)
            ):
                choice.inputs[0] = row
                mask.shape = row.shape if mask.shape else None

    def _over_keys(self, softmax: Any) -> bool:
        """Whether it goes along the last axis, by which rows see something or nothing here."""
        axis, shape = (
            softmax.attrs.get("axis", -1 if self.graph.opset >= LAST_BY_DEFAULT else 1),
            softmax.outputs[0].shape,
        )
        return axis == -1 or bool(shape and axis == len(shape) - 1)

    def _is_between(self, add: Any, softmax: Any) -> bool:
        """Whether nothing else reads the masked scores."""
        (masked,) = add.outputs
        return id(masked) not in self._outputs and all(
            reader is softmax for reader in masked.outputs
        )

    def _in_reach(self, mask: Any) -> Any:
        """A mask that adds the smallest number of fp32 adds HIDDEN instead: fp16 holds it, so that
        scores and Softmax need not stay in fp32.

        It holds -inf too, which stays in a Where, as does a mask in bf16, which numpy does not
        know. Constants change if every row sees something.
        """
        import onnx_graphsurgeon as gs

        for choice in chain(mask, "Where"):
            for place in (1, 2):
                number = number_of(choice.inputs[place])
                if number is not None and -np.inf < float(number) < HIDDEN:
                    hidden = np.full_like(constant_of(choice.inputs[place]), HIDDEN)
                    choice.inputs[place] = gs.Constant(f"{OURS}{mask.name}/hidden_{place}", hidden)
        values = floats_of(mask)
        if (
            values is not None
            and values.size
            and (values < HIDDEN).any()
            and (values > HIDDEN / 2).any(-1).all()
        ):
            clipped = gs.Constant(
                f"{OURS}{mask.name}/hidden", np.maximum(values, values.dtype.type(HIDDEN))
            )
            return self._clipped.setdefault(mask.name, clipped)
        return mask

    def _finite(self, mask: Any) -> tuple[Any, Any] | None:
        """Of Where(seen, 0, -inf) the same with HIDDEN, and what each row sees, 0 or 1. None of
        another mask.
        """
        import onnx_graphsurgeon as gs

        choices = chain(mask, "Where")
        if not choices:
            return None
        seen, *tensors = choices[0].inputs
        if seen.shape is not None and not len(seen.shape):
            return None
        numbers = [number for tensor in tensors if (number := number_of(tensor)) is not None]
        if sorted(map(float, numbers)) != [-np.inf, 0.0]:
            return None
        if mask.name not in self._hidden:
            name, dtype = f"{OURS}{mask.name}", numbers[0].dtype
            hides, one = (
                gs.Constant(f"{name}/hides", np.asarray(HIDDEN, dtype)),
                gs.Constant(f"{name}/one", np.asarray(1, dtype)),
            )
            either = [
                hides if np.isneginf(number) else tensor
                for number, tensor in zip(numbers, tensors, strict=True)
            ]
            as_large = (
                seen.shape is not None
                and mask.shape is not None
                and len(seen.shape) == len(mask.shape)
            )
            hidden = self._node(
                "Where", [seen, *either], f"{name}/hidden", dtype, mask.shape if as_large else None
            )
            in_opset = {"axes": [-1]} if self.graph.opset < AXES_ARE_INPUTS else {}
            axes = [] if in_opset else [gs.Constant(f"{name}/axes", np.array([-1]))]
            best = self._node(
                "ReduceMax", [hidden, *axes], f"{name}/best", dtype, keepdims=1, **in_opset
            )
            blind = self._node("Div", [best, hides], f"{name}/blind", dtype)
            self._hidden[mask.name] = hidden, self._node("Sub", [one, blind], f"{name}/sees", dtype)
        return self._hidden[mask.name]

    def _node(
        self,
        operator: str,
        inputs: list[Any],
        name: str,
        dtype: Any,
        shape: Any = None,
        **attributes: Any,
    ) -> Any:
        import onnx_graphsurgeon as gs

        made = gs.Variable(name, dtype=dtype, shape=shape)
        self.graph.nodes.append(gs.Node(operator, name, attributes, inputs, [made]))
        return made

    def _may_multiply(self, softmax: Any, found: list[Any]) -> bool:
        """Whether only guards read what Softmax gives, and only products of this graph, as their
        first factor, what those let through.
        """
        tests = [node for node in softmax.outputs[0].outputs if node.op == "IsNaN"]
        within = [*softmax.outputs, *(test.outputs[0] for test in tests)]
        guarded = [guard.outputs[0] for guard in found]
        products = [reader for tensor in guarded for reader in tensor.outputs]
        here, known = (
            {id(node) for node in self.graph.nodes},
            {id(node) for node in (*tests, *found)},
        )
        return (
            bool(found)
            and not any(id(tensor) in self._outputs for tensor in (*within, *guarded))
            and all(id(reader) in known for tensor in within for reader in tensor.outputs)
            and all(
                node.op == "MatMul" and id(node) in here and not is_vector(node.inputs[1])
                for node in products
            )
            and not any(node.inputs[1] is tensor for tensor in guarded for node in products)
        )

    def _multiply(self, product: Any, sees: Any) -> None:
        import onnx_graphsurgeon as gs

        (whole,) = product.outputs
        name = f"{OURS}{whole.name}/of_rows_that_see"
        product.outputs = [gs.Variable(f"{name}/all", dtype=whole.dtype, shape=whole.shape)]
        self.graph.nodes.append(gs.Node("Mul", name, {}, [product.outputs[0], sees], [whole]))


def is_vector(tensor: Any) -> bool:
    """Whether it is known to be one."""
    return tensor.shape is not None and len(tensor.shape) == 1


def is_larger(mask: Any, scores: Any) -> bool:
    """Whether a mask of one shape is known to repeat scores of the other."""
    if mask is None or scores is None:
        return False
    return any(
        of_mask not in (None, 1) and of_scores == 1
        for of_mask, of_scores in zip_longest(mask[::-1], scores[::-1], fillvalue=1)
    )


def is_finite(mask: Any) -> bool:
    """Whether a mask is a choice of finite numbers, or constant and in reach of fp16: no row of
    scores is all -inf then, which gives NaN.
    """
    values = [constant_of(each) for choice in chain(mask, "Where") for each in choice.inputs[1:]]
    if values:
        return all(value is not None and np.isfinite(value).all() for value in values)
    fixed = floats_of(mask)
    return fixed is not None and bool((np.isfinite(fixed) & (fixed >= HIDDEN)).all())


def is_true(tensor: Any) -> bool:
    """Whether nothing but true is in it: a constant, or whether positions from a constant on are at
    least that: transformers' `q_idx >= 0`.
    """
    value = constant_of(tensor)
    if value is not None:
        return bool(value.all())
    test = maker(tensor)
    if test is None or test.op != "GreaterOrEqual":
        return False
    positions, least = maker(test.inputs[0]), constant_of(test.inputs[1])
    while positions is not None and positions.op in RESHAPED:
        positions = maker(positions.inputs[0])
    if positions is None or positions.op != "Range" or least is None:
        return False
    start, step = (constant_of(positions.inputs[place]) for place in (0, 2))
    return (
        start is not None and step is not None and bool((least <= start).all() and (step > 0).all())
    )


def guards(softmax: Any) -> list[Any]:
    """Softmax -> IsNaN -> Where(it, 0, Softmax): the Where of each."""
    (answer,) = softmax.outputs
    tests = [node for node in answer.outputs if node.op == "IsNaN"]
    choices = [
        node
        for test in tests
        for node in test.outputs[0].outputs
        if node.op == "Where" and node.inputs[2] is answer
    ]
    return [
        node
        for node in choices
        if (zero := constant_of(node.inputs[1])) is not None and not zero.any()
    ]


def without_guards(softmax: Any, found: list[Any]) -> None:
    """What they let through is the Softmax itself."""
    (answer,) = softmax.outputs
    for guard in found:
        for reader in list(guard.outputs[0].outputs):
            reader.inputs[reader.inputs.index(guard.outputs[0])] = answer
