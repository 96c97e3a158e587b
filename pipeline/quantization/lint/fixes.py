"""Rewrites of a quantised graph that leave its arithmetic as it is: what `crucible lint --fix`
does. Every grid stays as it was trained.

Why each is exact: an int8 value q and the uint8 value q + 128 are the same number; rounding to a
grid that holds zero commutes with Relu and with what moves values; what lies on a grid is not moved
by rounding to the same grid. A batch norm whose factor cancels is left as a bias, equal but for the
last bits of fp32. `pipeline.cli.lint` runs the graph before and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from pipeline.quantization.existing_qdq import QDQ, Scale
from pipeline.quantization.insert_qdq import drop_unread
from pipeline.quantization.lint.qdq_view import (
    Pair,
    View,
    can_pass,
    can_precede,
    equal_quantizers,
    folded_bias,
    moved_pair,
    norms_behind,
    only_pairs,
    relus_in_floats,
    repeated,
)
from pipeline.quantization.lint.rules import TENSORRT


def mend(proto: onnx.ModelProto, backend: str, rules: Collection[str] = ()) -> Counter[str]:
    """Apply every fix for `backend` in place, until none applies.

    If rules are named, only their fixes are applied. Returns how often each was applied. Node names
    must be unique.
    """
    counts: Counter[str] = Counter()
    for rule, (fix, backends) in FIXES.items():
        is_wanted = not rules or rule in rules
        while backend in backends and is_wanted and fix(View(proto.graph)):
            counts[rule] += 1
    drop_unread(proto.graph)
    del proto.graph.value_info[:]  # types that were true before
    return counts


def fold_norm(view: View) -> bool:
    """Fold a batch norm behind a quantised convolution into its bias.

    This is possible if the factor of the norm only cancels that of a division before it.
    """
    for node in view.weighted():
        bias = folded_bias(view, node)
        if bias is not None:
            chain = norms_behind(view, node)
            name = _fresh(view, f"{node.name}_bias")
            view.graph.initializer.append(numpy_helper.from_array(bias.astype(np.float32), name))
            del node.input[2:]
            node.input.append(name)
            node.output[0] = chain[-1].output[0]
            _remove(view, chain)
            return True
    return False


def fold_weight(view: View) -> bool:
    """Compute the Q of a constant weight, as ONNX defines it."""
    for dq in view.weights.values():
        q = view.makers.get(dq.input[0])
        if q is None or q.input[0] not in view.constants:
            continue
        scale = view.scale(q)
        if scale is not None and view.dtype(q) in ("int8", "uint8"):
            integers = _integers_of(view, q, scale)
            view.graph.initializer.append(numpy_helper.from_array(integers, q.output[0]))
            _remove(view, [q])
            return True
    return False


def _integers_of(view: View, q: onnx.NodeProto, scale: Scale) -> NDArray[np.generic]:
    """Return the integers of a constant behind its Q."""
    values = numpy_helper.to_array(view.constants[q.input[0]]).astype(np.float32)
    attributes = {attribute.name: int(attribute.i) for attribute in q.attribute}
    zero = view.zero(q)
    channels: list[int] = []
    if scale.size > 1:
        axis = attributes.get("axis", 1) % values.ndim
        channels = [-1 if dim == axis else 1 for dim in range(values.ndim)]
    steps = np.rint(values / scale.astype(np.float32).reshape(channels))
    rounded = steps + zero.reshape(channels if zero.size > 1 else [])
    limits = np.iinfo(view.dtype(q))
    return np.asarray(np.clip(rounded, limits.min, limits.max), view.dtype(q))


def fold_bias(view: View) -> bool:
    """Replace a quantised bias by its floats."""
    for node in view.weighted():
        dq = view.weights.get(node.input[2]) if len(node.input) > 2 else None
        if dq is None:
            continue
        bias, scale = view.constants.get(dq.input[0]), view.scale(dq)
        if bias is None or scale is None:
            continue
        name = _fresh(view, f"{node.name}_bias")
        integers = numpy_helper.to_array(bias).astype(np.float32)
        floats = np.asarray(integers * scale.astype(np.float32), np.float32)
        view.graph.initializer.append(numpy_helper.from_array(floats, name))
        node.input[2] = name
        if len(view.readers[dq.output[0]]) == 1:
            _remove(view, [dq])
        return True
    return False


def to_signed(view: View) -> bool:
    """Turn uint8 with zero point 128 into int8 with zero point 0.

    All Q and DQ change at once, since they share tensors.
    """
    quantizers = [
        node
        for node in view.graph.node
        if _is_shifted(view, node) and len(node.input) > 2 and _shares_with_equals(view, node)
    ]
    if not quantizers:
        return False
    for node in quantizers:
        zero = _fresh(view, f"{node.name}_zero")
        view.graph.initializer.append(
            numpy_helper.from_array(np.zeros(view.zero(node).shape, np.int8), zero)
        )
        weight = view.constants.get(node.input[0]) if node.op_type == QDQ[1] else None
        if weight is not None:
            name = _fresh(view, f"{node.input[0]}_signed")
            integers = (numpy_helper.to_array(weight).astype(np.int16) - 128).astype(np.int8)
            view.graph.initializer.append(numpy_helper.from_array(integers, name))
            node.input[0] = name
        node.input[2] = zero
    return True


def to_unsigned(view: View) -> bool:
    """Turn int8 activations that several operators read into uint8, with zero point + 128.

    All change at once. Weights stay int8.
    """
    pairs = [
        pair
        for pair in view.pairs.values()
        if view.dtype(pair.q) == "int8" == view.dtype(pair.dq) and only_pairs(view, pair)
    ]
    if not any(len(view.readers[pair.dq.output[0]]) > 1 for pair in pairs):
        return False
    quantizers: dict[int, onnx.NodeProto] = {}  # pairs may share their Q
    for pair in pairs:
        quantizers |= {id(pair.q): pair.q, id(pair.dq): pair.dq}
    for node in quantizers.values():
        name = _fresh(view, f"{node.name}_zero")
        view.graph.initializer.append(
            numpy_helper.from_array((view.zero(node) + 128).astype(np.uint8), name)
        )
        del node.input[2:]
        node.input.append(name)
    return True


def _is_shifted(view: View, node: onnx.NodeProto) -> bool:
    """Return True for a Q or DQ of uint8 with zero point 128."""
    if node.op_type not in QDQ or view.dtype(node) != "uint8":
        return False
    return bool((view.zero(node) == 128).all())


def _shares_with_equals(view: View, node: onnx.NodeProto) -> bool:
    """Return True if only Q and DQ of the same kind share the integers of this Q or DQ."""
    name = node.output[0] if node.op_type == QDQ[0] else node.input[0]
    neighbours = list(view.readers[name])
    if name in view.makers:
        neighbours.append(view.makers[name])
    elif name not in view.constants:
        return False
    return name not in view.outputs and all(_is_shifted(view, other) for other in neighbours)


def pass_relu(view: View) -> bool:
    """Move a pair between an operator and its Relu behind the Relu."""
    for node in view.weighted():
        for pair in view.pairs_on(node.output[0]):
            relu = next(iter(view.readers[pair.dq.output[0]]), None)
            if relu is None or not can_pass(view, pair, relu):
                continue
            relu.input[0], result = node.output[0], relu.output[0]
            relu.output[0] = pair.q.input[0] = _fresh(view, f"{result}_float")
            pair.dq.output[0] = result
            _in_order(view, [relu, pair.q, pair.dq])
            return True
    return False


def drop_repeated(view: View) -> bool:
    """Remove a pair that changes nothing."""
    for name, pair in view.pairs.items():
        if repeated(view, pair) is not None and name not in view.outputs:
            for node in view.readers[name]:
                _replace_input(node, name, pair.q.input[0])
            is_only_reader = len(view.readers[pair.q.output[0]]) == 1
            _remove(view, [pair.dq, pair.q] if is_only_reader else [pair.dq])
            return True
    return False


def share_q(view: View) -> bool:
    """Use one Q for all equal Q of a tensor."""
    for first, *others in equal_quantizers(view):
        for other in others:
            for node in view.readers[other.output[0]]:
                _replace_input(node, other.output[0], first.output[0])
        if not any(view.outputs.intersection(other.output) for other in others):
            _remove(view, others)
            return True
    return False


def repeat_before(view: View) -> bool:
    """Write the pair behind a Relu before it, too.

    So the convolution returns 8 bits, and only the Relu runs in floats.
    """
    for _, relu, pair in relus_in_floats(view):
        if can_precede(view, relu, pair):
            _add_pair(view, relu, 0, pair)
            return True
    return False


def repeat_behind(view: View) -> bool:
    """Write the pair before an operator that moves values behind it, too.

    The reader of the moved values must be quantised.
    """
    for node in view.weighted():
        for index, name in enumerate(node.input[:2]):
            has_weight = any(factor in view.weights for factor in node.input[:2])
            if name in view.pairs or not has_weight:
                continue
            pair = moved_pair(view, name)
            if pair is not None:
                _add_pair(view, node, index, pair)
                return True
    return False


FIXES: dict[str, tuple[Callable[[View], bool], tuple[str, ...]]] = {
    "weight-in-floats": (fold_weight, ("onnxruntime", "openvino", *TENSORRT)),
    "norm-after": (fold_norm, ("onnxruntime", "openvino", *TENSORRT)),
    "between-fused": (pass_relu, ("openvino", *TENSORRT)),
    "signed-relu": (repeat_before, ("onnxruntime",)),
    "signed-shared": (to_unsigned, ("onnxruntime",)),
    "zero-point": (to_signed, TENSORRT),
    "quantised-bias": (fold_bias, TENSORRT),
    "split-q": (share_q, ("onnxruntime", "openvino", *TENSORRT)),
    "pair-before-mover": (repeat_behind, ("onnxruntime",)),
    "duplicate-pair": (drop_repeated, ("openvino", *TENSORRT)),
}
"""Each fix, by the rule that it mends, and the backends that gain by it, in the order in which they
are applied.
"""


def _fresh(view: View, name: str) -> str:
    """Return the name, with underscores added until it is unique."""
    names = {tensor.name for tensor in view.graph.initializer}
    for node in view.graph.node:
        names.update(node.input, node.output, [node.name])
    while name in names:
        name += "_"
    return name


def _replace_input(node: onnx.NodeProto, old: str, new: str) -> None:
    node.input[:] = [new if name == old else name for name in node.input]


def _add_pair(view: View, node: onnx.NodeProto, index: int, pair: Pair) -> None:
    """Quantise an input of a node by the parameters of `pair`."""
    name, parameters = node.input[index], list(pair.q.input[1:])
    q, dq = _fresh(view, f"{name}_q"), _fresh(view, f"{name}_dq")
    node.input[index] = dq
    position = [other.name for other in view.graph.node].index(node.name)
    new_nodes = (
        onnx.helper.make_node(QDQ[0], [name, *parameters], [q], name=q),
        onnx.helper.make_node(QDQ[1], [q, *parameters], [dq], name=dq),
    )
    for new in reversed(new_nodes):
        view.graph.node.insert(position, new)


def _remove(view: View, nodes: list[onnx.NodeProto]) -> None:
    names = {node.name for node in nodes}
    others = [node for node in view.graph.node if node.name not in names]
    del view.graph.node[:]
    view.graph.node.extend(others)


def _in_order(view: View, nodes: list[onnx.NodeProto]) -> None:
    """Put these nodes, in this order, at the position of the last of them."""
    names = [node.name for node in nodes]
    last = max(index for index, node in enumerate(view.graph.node) if node.name in names)
    ordered: list[onnx.NodeProto] = []
    for index, node in enumerate(view.graph.node):
        if index == last:
            ordered += map(_copy, nodes)
        elif node.name not in names:
            ordered.append(_copy(node))
    del view.graph.node[:]
    view.graph.node.extend(ordered)


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy of a node that remains when the graph's list of nodes is emptied."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy
