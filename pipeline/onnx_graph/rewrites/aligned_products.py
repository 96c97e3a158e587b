"""Pad products whose width misses a multiple of what matrix units take at once.

Tensor cores and AMX compute blocks: a layer of 127 columns takes as long as one of 128, or longer,
because rows no longer start at aligned addresses. Zeros fill the last columns. If only element-wise
operators lie between this product and the next, the next one gets rows of zeros for them, so that
they add nothing; else a Slice removes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from pipeline.onnx_graph.rewriting import exported, floats_of, imported, operands, successor

MULTIPLES = (128, 64, 32, 16, 8)  # the largest that adds little work: TF32 takes 32, int8 128
MOST_PADDING = 1 / 16  # of the columns
FEWEST = 32  # columns; padding a small layer saves nothing
# operators that compute a finite number of 0, element by element
FINITE_AT_ZERO = frozenset(
    """Abs Cast Clip Dropout Elu Erf Exp Gelu HardSigmoid HardSwish Identity LeakyRelu Mish Neg Relu
    Selu Sigmoid Softplus Softsign Sqrt Swish Tanh""".split()  # noqa: SIM905
)
JOINING = frozenset({"Add", "Sub", "Mul", "Max", "Min"})


def align_products(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return the model with padded products, and the names of all nodes that are wider now."""
    rewritten = imported(model)
    names: list[str] = []
    for node in list(rewritten.graph):
        if columns := _columns(node):
            names += _pad(rewritten.graph, node, columns)
    return (exported(rewritten), tuple(dict.fromkeys(names))) if names else (model, ())


def aligned(columns: int) -> int:
    """Return the number of columns to pad to: the number itself if no padding is worth it."""
    for multiple in MULTIPLES:
        padded = -(-columns // multiple) * multiple
        if padded - columns <= MOST_PADDING * columns:
            return padded
    return columns


def _columns(node: ir.Node) -> int:
    """Return the columns of a product with a constant weight; 0 if there is nothing to pad."""
    if node.op_type not in ("MatMul", "Gemm"):
        return 0
    weight = floats_of(operands(node)[1])
    if weight is None or weight.ndim != 2 or node.outputs[0].is_graph_output():
        return 0
    columns = int(weight.shape[_out_axis(node)])
    return columns if columns >= FEWEST and aligned(columns) != columns else 0


def _out_axis(node: ir.Node) -> int:
    return 0 if node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0)) else 1


def _pad(graph: ir.Graph, node: ir.Node, columns: int) -> list[str]:
    more = aligned(columns) - columns
    between, readers = _region(node.outputs[0], columns)
    if readers:
        for each in (*between, *readers):
            _pad_constants(graph, each, columns, more, each in readers)
            if each in between:
                _widen(each.outputs[0], columns + more)
    else:
        _slice_back(graph, node.outputs[0], columns)
    _pad_constants(graph, node, columns, more, is_reader=False)
    _widen(node.outputs[0], columns + more)
    return [each.name for each in (node, *between, *readers) if each.name]


def _region(start: ir.Value, columns: int) -> tuple[Sequence[ir.Node], Sequence[ir.Node]]:
    """Return the element-wise nodes behind a product, and the products that read them.

    Both are empty unless all readers are of these two kinds.
    """
    inside, between, readers, pending = {start}, list[ir.Node](), list[ir.Node](), [start]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return (), ()
        for use in value.uses():
            if _is_product_of(use.node, use.idx):
                readers.append(use.node)
            elif use.node.op_type in FINITE_AT_ZERO | JOINING:
                if use.node not in between:
                    between.append(use.node)
                    pending.append(use.node.outputs[0])
                    inside.add(use.node.outputs[0])
            else:
                return (), ()
    for node in between:
        for value in operands(node):
            constant = floats_of(value)
            fits = constant is not None and (constant.size == 1 or constant.shape == (columns,))
            if value not in inside and not fits:
                return (), ()
    return between, readers


def _is_product_of(node: ir.Node, index: int) -> bool:
    """Return True for a product of this input by a constant weight."""
    if node.op_type not in ("MatMul", "Gemm") or index != 0:
        return False
    weight = floats_of(operands(node)[1])
    transposed = node.op_type == "Gemm" and bool(node.attributes.get_int("transA", 0))
    return weight is not None and weight.ndim == 2 and not transposed


def _pad_constants(
    graph: ir.Graph, node: ir.Node, columns: int, more: int, is_reader: bool
) -> None:
    """Add zeros to the constants of a node: rows to the weight of a reader, else columns."""
    for index, value in enumerate(node.inputs):
        constant = floats_of(value) if value is not None else None
        if constant is None or value is None:
            continue
        axes = [axis for axis, size in enumerate(constant.shape) if size == columns]
        if node.op_type in ("MatMul", "Gemm") and index == 1:
            axes = [1 - _out_axis(node) if is_reader else _out_axis(node)]
        elif is_reader or not axes:
            continue
        widths = [(0, more if axis == axes[-1] else 0) for axis in range(constant.ndim)]
        name = f"{value.name}_{node.outputs[0].name}_{'rows' if is_reader else 'columns'}"
        padded = ir.tensor(np.pad(constant, widths), name=name)
        node.replace_input_with(index, ir.tape.Tape(graph).initializer(padded))


def _widen(value: ir.Value, columns: int) -> None:
    if value.shape is not None:
        value.shape = ir.Shape([*list(value.shape)[:-1], columns])


def _slice_back(graph: ir.Graph, value: ir.Value, columns: int) -> None:
    """Remove the padded columns behind a product."""
    tape = ir.tape.Tape(graph)
    numbers = [
        tape.initializer(ir.tensor(np.array([number], np.int64), name=f"{value.name}_{name}"))
        for name, number in (("start", 0), ("end", columns), ("axis", -1))
    ]
    new = successor(value)
    value.name = f"{value.name}_padded"
    node = ir.node("Slice", [value, *numbers], outputs=[new], name=f"{value.name}_slice")
    graph.append(node)
