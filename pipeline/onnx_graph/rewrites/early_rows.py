"""Take rows before the products that compute them, instead of after.

A classifier that reads one token takes it from the output of its last block: the products of this
block compute all other tokens in vain. Here the Slice or Gather moves up through every node that
computes each row by itself. The values of the rows stay the same.

1. Backwards through the graph: a value is *taken* if each of its readers reads these rows only.
2. A node whose output is taken, and whose rows depend on the same rows of its inputs, shrinks.
3. The selection moves to the inputs of shrunk nodes that others need as a whole.

A selection of most rows, such as all tokens but the first, stays: copies of the inputs could cost
more than the few rows save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from pipeline.onnx_graph.inspect import opset_of
from pipeline.onnx_graph.rewriting import constant_of, exported, imported, operands

MOST_ROWS = 1 / 2  # of an axis of known size; of any other axis one row is taken

Axes = tuple[int | None, ...]
"""Of each input the axis on which it is taken; None: all of it is read."""

AXES_ARE_INPUTS = 13  # the first opset whose Squeeze takes axes as an input
PRODUCTS = frozenset({"MatMul", "Gemm"})
UNARY = frozenset(
    """Abs Cast Ceil Celu Clip Cos Dropout Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity
    LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt
    Swish Tanh""".split()  # noqa: SIM905
)
BINARY = frozenset(
    """Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mul Or PRelu Pow Sub Sum
    Where Xor""".split()  # noqa: SIM905
)
REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"})


@dataclass(frozen=True, slots=True)
class Selection:
    """A Gather or Slice of constant rows of one axis."""

    node: ir.Node
    axis: int  # from the front
    rows: np.ndarray | None  # of a Gather, one dimension
    slices: tuple[int, int] | None  # of a Slice with steps of 1: start and end
    drops_axis: bool  # a Gather of one number
    count: int | None  # of rows; None: not known before running

    @property
    def data(self) -> ir.Value:
        return operands(self.node)[0]


def take_rows_early(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return the model with selections before products, and the names of the shrunk nodes.

    No names: there is nothing to move.
    """
    if opset_of(model) < AXES_ARE_INPUTS:
        return model, ()
    shaped = model
    if model.ByteSize() <= onnx.checker.MAXIMUM_PROTOBUF:  # else only the shapes that it has
        shaped = onnx.shape_inference.infer_shapes(model, data_prop=True)
    rewritten = imported(shaped)
    names: list[str] = []
    for node in list(rewritten.graph):
        if selection := selection_of(node):
            names += _Move(rewritten.graph, selection).run()
    return (exported(rewritten), tuple(names)) if names else (model, ())


def selection_of(node: ir.Node) -> Selection | None:
    """Return what a node selects; None for nodes that select nothing constant."""
    if node.op_type not in ("Gather", "Slice") or node.domain not in ("", "ai.onnx"):
        return None
    shape = operands(node)[0].shape
    if shape is None:
        return None
    constants = [constant_of(value) for value in operands(node)[1:]]
    if not constants or any(constant is None for constant in constants):
        return None
    arrays = [np.asarray(constant) for constant in constants]
    if node.op_type == "Gather":
        rows = arrays[0]
        axis = node.attributes.get_int("axis", 0) % len(shape)
        if rows.ndim > 1 or not _is_worth_moving(rows.size, shape[axis]):
            return None
        return Selection(node, axis, rows.reshape(-1), None, rows.ndim == 0, rows.size)
    starts, ends, *rest = arrays
    steps = rest[1] if len(rest) > 1 else np.ones_like(starts)
    if starts.size != 1 or not rest or int(steps[0]) != 1:
        return None
    axis, start, end = int(rest[0][0]) % len(shape), int(starts[0]), int(ends[0])
    size = shape[axis]
    count = len(range(*slice(start, end).indices(size))) if isinstance(size, int) else None
    if not _is_worth_moving(_most_rows(start, end) if count is None else count, size):
        return None
    return Selection(node, axis, None, (start, end), False, count)


def _most_rows(start: int, end: int) -> int | None:
    """Return the largest number of rows of a slice of any axis; None if there is no limit."""
    if (start < 0) == (end < 0):
        return max(end - start, 0)
    return -start if start < 0 else None


def _is_worth_moving(most: int | None, size: int | ir.SymbolicDim) -> bool:
    """Return True if the rows are certainly few, of an axis of this size."""
    if most is None:
        return False
    return most <= MOST_ROWS * size if isinstance(size, int) else most == 1


class _Move:
    """The move of one selection."""

    def __init__(self, graph: ir.Graph, selection: Selection) -> None:
        self.graph, self.selection = graph, selection
        self.taken: dict[ir.Value, int] = {}  # only these rows of it are read
        self.shrunk: dict[ir.Node, Axes] = {}
        self.early: dict[tuple[ir.Value, int], ir.Value] = {}

    def run(self) -> list[str]:
        """Move the selection, and return the names of the shrunk nodes; none if no product is."""
        self._mark()
        if not any(node.op_type in PRODUCTS for node in self.shrunk):
            return []
        for node, axes in self.shrunk.items():
            self._shrink(node, axes)
        self._replace_selection()
        return [node.name or node.outputs[0].name or "" for node in self.shrunk]

    # -- which nodes shrink ---------------------------------------------------

    def _mark(self) -> None:
        wanted: dict[tuple[ir.Node, int], int] = {(self.selection.node, 0): self.selection.axis}
        order = {node: index for index, node in enumerate(self.graph)}
        pending = [*_produced(self.selection.data, order)]
        while pending:  # the latest first, so that all readers of a value are known
            node, value = max(pending, key=lambda each: order[each[0]])
            pending.remove((node, value))
            axis = _common_axis(value, wanted)
            if axis is None or value in self.taken:
                continue
            axes = self._axes(node, axis)
            if axes is None:
                continue
            self.taken[value] = axis
            self.shrunk[node] = axes
            for index, (operand, operand_axis) in enumerate(zip(node.inputs, axes, strict=True)):
                if operand is not None and operand_axis is not None:
                    wanted[node, index] = operand_axis
                    pending += _produced(operand, order)
        self.shrunk = dict(sorted(self.shrunk.items(), key=lambda item: order[item[0]]))

    def _axes(self, node: ir.Node, axis: int) -> Axes | None:
        """Return the axes on which the inputs of a node may be taken; None if they may not."""
        if len(node.outputs) != 1 or node.domain not in ("", "ai.onnx"):
            return None
        if any(value is not None and value.shape is None for value in node.inputs[:1]):
            return None
        rule = RULES.get(node.op_type)
        return rule(node, axis, self.selection.count) if rule else None

    # -- the move -------------------------------------------------------------

    def _shrink(self, node: ir.Node, axes: Axes) -> None:
        output_axis = self.taken[node.outputs[0]]
        if node.op_type == "Reshape":
            _resize(self.graph, node, output_axis, self.selection.count)
        for index, (operand, axis) in enumerate(zip(node.inputs, axes, strict=True)):
            if operand is not None and axis is not None and operand not in self.taken:
                node.replace_input_with(index, self._early_rows(operand, axis))
        node.outputs[0].shape = _taken_shape(node.outputs[0], output_axis, self.selection.count)

    def _early_rows(self, value: ir.Value, axis: int) -> ir.Value:
        """Return the selected rows of a value that others need as a whole."""
        if (value, axis) not in self.early:
            tape = ir.tape.Tape(self.graph)
            name = f"{value.name}_rows_{axis}_{self.selection.node.outputs[0].name}"

            def constant(suffix: str, numbers: Sequence[int]) -> ir.Value:
                array = np.array(numbers, np.int64)
                return tape.initializer(ir.tensor(array, name=f"{name}_{suffix}"))

            rows, slices = self.selection.rows, self.selection.slices
            if rows is not None:
                inputs = [value, constant("indices", rows.tolist())]
                node = ir.node("Gather", inputs, {"axis": axis})
            else:
                assert slices is not None
                start, end = slices
                inputs = [
                    value,
                    constant("start", [start]),
                    constant("end", [end]),
                    constant("axis", [axis]),
                ]
                node = ir.node("Slice", inputs)
            node.name = node.outputs[0].name = name
            node.outputs[0].type = value.type
            node.outputs[0].shape = _taken_shape(value, axis, self.selection.count)
            self.graph.append(node)
            self.early[value, axis] = node.outputs[0]
        return self.early[value, axis]

    def _replace_selection(self) -> None:
        selection = self.selection
        output, data = selection.node.outputs[0], selection.data
        operator, inputs = "Identity", [data]
        if selection.drops_axis:
            tape = ir.tape.Tape(self.graph)
            axes = ir.tensor(np.array([selection.axis], np.int64), name=f"{output.name}_axes")
            operator, inputs = "Squeeze", [data, tape.initializer(axes)]
        name = output.name
        new = ir.Value(name=name, type=output.type, shape=output.shape)
        node = ir.node(operator, inputs, outputs=[new], name=selection.node.name)
        output.replace_all_uses_with(new, replace_graph_outputs=True)
        output.name = f"{name}_late"
        self.graph.append(node)


def _produced(value: ir.Value, order: Mapping[ir.Node, int]) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield the producer of a value and the value, unless it is an input or of another graph."""
    node = value.producer()
    if node is not None and node in order:
        yield node, value


def _common_axis(value: ir.Value, wanted: dict[tuple[ir.Node, int], int]) -> int | None:
    """Return the axis on which every reader takes a value; None if one needs all of it."""
    if value.is_graph_output():
        return None
    axes = {wanted.get((use.node, use.idx)) for use in value.uses()}
    return axes.pop() if len(axes) == 1 else None


def _taken_shape(value: ir.Value, axis: int, count: int | None) -> ir.Shape | None:
    if value.shape is None:
        return None
    dims = list(value.shape)
    dims[axis] = count if count is not None else ir.SymbolicDim(None)
    return ir.Shape(dims)


# -- on which axis an operator's inputs are taken ------------------------------


def _same(node: ir.Node, axis: int, count: int | None) -> Axes:
    """Take the first input on the same axis; the others have no rows."""
    return (axis, *[None] * (len(node.inputs) - 1))


def _broadcast(node: ir.Node, axis: int, count: int | None) -> Axes | None:
    """Take each input that has this axis and does not repeat itself along it."""
    return _aligned(node.outputs[0], node.inputs, axis)


def _aligned(output: ir.Value, inputs: Sequence[ir.Value | None], axis: int) -> Axes | None:
    if output.shape is None:
        return None
    size = output.shape[axis]
    axes: list[int | None] = []
    for value in inputs:
        if value is None or value.shape is None:
            return None
        own = axis - (len(output.shape) - len(value.shape))
        if own < 0 or (value.shape[own] == 1 and size != 1):
            axes.append(None)
        elif _is_known(size) and value.shape[own] == size:
            axes.append(own)
        else:
            return None
    return tuple(axes) if any(each is not None for each in axes) else None


def _is_known(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, int) or size.value is not None


def _matmul(node: ir.Node, axis: int, count: int | None) -> Axes | None:
    left, right = operands(node)
    output = node.outputs[0]
    if left.shape is None or right.shape is None or output.shape is None:
        return None
    if min(len(left.shape), len(right.shape)) < 2 or axis == len(output.shape) - 1:
        return None
    if axis == len(output.shape) - 2:
        return len(left.shape) - 2, None
    return _aligned(output, (left, right), axis)


def _gemm(node: ir.Node, axis: int, count: int | None) -> Axes | None:
    if axis != 0:
        return None
    bias: tuple[int | None, ...] = (None,) * (len(node.inputs) - 2)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        shape = node.inputs[2].shape
        if shape is None or (len(shape) == 2 and shape[0] != 1):
            return None
    return (1 if node.attributes.get_int("transA", 0) else 0, None, *bias)


def _normalising(default_axis: int) -> Callable[[ir.Node, int, int | None], Axes | None]:
    """Return the rule of an operator that computes along its axis, or along all from there."""

    def rule(node: ir.Node, axis: int, count: int | None) -> Axes | None:
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        if shape is None:
            return None
        own = node.attributes.get_int("axis", default_axis) % len(shape)
        fits = axis < own if node.op_type == "LayerNormalization" else axis != own
        return _same(node, axis, count) if fits else None

    return rule


def _reduction(node: ir.Node, axis: int, count: int | None) -> Axes | None:
    data = operands(node)[0]
    axes = list(node.attributes.get_ints("axes", ()))
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = constant_of(node.inputs[1])
        axes = [] if constant is None else constant.tolist()
    if not axes or data.shape is None:
        return None
    reduced = {each % len(data.shape) for each in axes}
    stays = node.attributes.get_int("keepdims", 1) or min(reduced) > axis
    return _same(node, axis, count) if stays and axis not in reduced else None


def _transpose(node: ir.Node, axis: int, count: int | None) -> Axes | None:
    order = node.attributes.get_ints("perm", ())
    return (order[axis],) if order else None


def _concat(node: ir.Node, axis: int, count: int | None) -> Axes | None:
    output = node.outputs[0]
    if output.shape is None or node.attributes.get_int("axis", 0) % len(output.shape) == axis:
        return None
    return (axis,) * len(node.inputs)


def _reshape(node: ir.Node, axis: int, count: int | None) -> Axes | None:
    """Take the axis of the input that becomes this axis, with nothing moved across it."""
    data, output = operands(node)[0], node.outputs[0]
    if data.shape is None or output.shape is None or not _is_known(output.shape[axis]):
        return None
    before = _volume(output.shape[:axis])
    for own, size in enumerate(data.shape):
        if size == output.shape[axis] and _volume(data.shape[:own]) == before:
            return (own, None) if _is_resizable(node, own, axis, count) else None
    return None


def _volume(dims: Sequence[int | ir.SymbolicDim]) -> tuple[int, tuple[str, ...]]:
    """Return the product of the known sizes, and the symbols."""
    numbers = [size for size in dims if isinstance(size, int)]
    symbols = sorted(str(size.value) for size in dims if not isinstance(size, int))
    return int(np.prod(numbers, dtype=np.int64)), tuple(symbols)


def _is_resizable(node: ir.Node, own: int, axis: int, count: int | None) -> bool:
    """Return True if the shape of a Reshape fits the taken rows, or can be made to fit."""
    found = _size_constant(node, axis)
    if found is None:
        return False
    size = int(found[1].reshape(-1)[found[2]])
    if size == 0:
        return own == axis and not node.attributes.get_int("allowzero", 0)
    return size == -1 or count is not None


def _size_constant(node: ir.Node, axis: int) -> tuple[ir.Value, np.ndarray, int] | None:
    """Return the constant that holds the size of an axis, its array, and the position in it.

    The shape is a constant, or a Concat of parts of which the one for this axis is a constant.
    """
    shape = operands(node)[1]
    if (whole := constant_of(shape)) is not None:
        return shape, whole, axis
    producer = shape.producer()
    if producer is None or producer.op_type != "Concat":
        return None
    start = 0
    for part in operands(producer):
        if part.shape is None or len(part.shape) != 1 or not isinstance(part.shape[0], int):
            return None
        if start <= axis < start + part.shape[0]:
            array = constant_of(part)
            return None if array is None else (part, array, axis - start)
        start += part.shape[0]
    return None


def _resize(graph: ir.Graph, node: ir.Node, axis: int, count: int | None) -> None:
    """Write the number of rows into the shape of a Reshape that names the old one."""
    found = _size_constant(node, axis)
    assert found is not None
    constant, array, position = found
    if array.reshape(-1)[position] <= 0:
        return
    sizes = array.reshape(-1).copy()
    sizes[position] = count
    tape = ir.tape.Tape(graph)
    name = f"{node.outputs[0].name}_{constant.name}"
    new = tape.initializer(ir.tensor(sizes, name=name))
    shape = operands(node)[1]
    if constant is shape:
        node.replace_input_with(1, new)
        return
    old = shape.producer()
    assert old is not None
    parts = [new if part is constant else part for part in operands(old)]
    concat = ir.node("Concat", parts, {"axis": 0})
    concat.name = concat.outputs[0].name = f"{name}_shape"
    concat.outputs[0].type, concat.outputs[0].shape = shape.type, shape.shape
    graph.append(concat)
    node.replace_input_with(1, concat.outputs[0])


RULES: dict[str, Callable[[ir.Node, int, int | None], Axes | None]] = {
    **dict.fromkeys(UNARY, _same),
    **dict.fromkeys(BINARY, _broadcast),
    **dict.fromkeys(REDUCTIONS, _reduction),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Softmax": _normalising(-1),
    "LogSoftmax": _normalising(-1),
    "LayerNormalization": _normalising(-1),
    "Transpose": _transpose,
    "Concat": _concat,
    "Reshape": _reshape,
}
