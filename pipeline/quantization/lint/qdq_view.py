"""A graph read through its own Q/DQ pairs: which node reads what in 8 bits, and what it would read
without the pairs. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.onnx_graph.inspect import type_name
from pipeline.quantization.existing_qdq import QDQ, Scale, constants_of, is_constant, quantised_type
from pipeline.quantization.placement import FUSED_AFTER, SAME_SCALE, WEIGHTED, Wiring

CANCELS = 1e-5  # how far from 1 a factor may be that is 1 but for rounding
NORMS = frozenset({"Div", "Mul", "Add", "Sub", "BatchNormalization"})


@dataclass(frozen=True, slots=True)
class Pair:
    """The Q and the DQ of an activation."""

    q: onnx.NodeProto
    dq: onnx.NodeProto


class View:
    """A quantised graph: its pairs, its quantised weights, and its connections without them.

    Node names must be unique.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.constants = constants_of(graph)
        self.makers = {name: node for node in graph.node for name in node.output}
        self.outputs = {value.name for value in graph.output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self.readers[name].append(node)
        self.pairs: dict[str, Pair] = {}  # by the output of the DQ
        self.weights: dict[str, onnx.NodeProto] = {}  # DQ of a constant, by its output
        for node in graph.node:
            if node.op_type == QDQ[1]:
                self._enter(node)
        self.floats = Wiring(self._without_pairs())

    def _enter(self, dq: onnx.NodeProto) -> None:
        q = self.makers.get(dq.input[0])
        if is_constant(dq.input[0], self.graph, self.constants):
            self.weights[dq.output[0]] = dq
        elif q is not None and q.op_type == QDQ[0]:
            self.pairs[dq.output[0]] = Pair(q, dq)

    def _without_pairs(self) -> onnx.GraphProto:
        """Return the graph as it was before quantisation, without the values of its constants."""
        bare = onnx.GraphProto(input=self.graph.input, output=self.graph.output)
        bare.initializer.extend(
            onnx.TensorProto(name=name, dims=tensor.dims) for name, tensor in self.constants.items()
        )
        bare.initializer.extend(
            onnx.TensorProto(name=name, dims=self.dims(dq)) for name, dq in self.weights.items()
        )
        quantizers = {dq.name for dq in self.weights.values()}
        for pair in self.pairs.values():
            quantizers.update((pair.q.name, pair.dq.name))
        for node in self.graph.node:
            if node.name not in quantizers and node.op_type != "Constant":
                copy = bare.node.add()
                copy.CopyFrom(node)
                copy.input[:] = [self.before(name) for name in node.input]
        return bare

    def before(self, name: str) -> str:
        """Return the quantised tensor if `name` is the result of a pair."""
        while name in self.pairs:
            name = self.pairs[name].q.input[0]
        return name

    def dims(self, dq: onnx.NodeProto) -> tuple[int, ...]:
        """Return the shape of a quantised weight.

        The rank of a computed weight follows from its scale: rank 2 marks it as a weight.
        """
        weight = self.weight(dq)
        return tuple(weight.dims) if weight is not None else (1, 1)

    def weight(self, dq: onnx.NodeProto) -> onnx.TensorProto | None:
        """Return the constant behind a weight's DQ, and its Q if any; None if it is computed."""
        maker = self.makers.get(dq.input[0])
        name = maker.input[0] if maker is not None and maker.op_type == QDQ[0] else dq.input[0]
        return self.constants.get(name)

    def value(self, name: str) -> Scale:
        """Return a constant."""
        return np.asarray(numpy_helper.to_array(self.constants[name]), np.float64)

    def scale(self, node: onnx.NodeProto) -> Scale | None:
        """Return the scale of a Q or DQ; None if it is computed."""
        tensor = self.constants.get(node.input[1])
        return None if tensor is None else np.asarray(numpy_helper.to_array(tensor), np.float64)

    def zero(self, node: onnx.NodeProto) -> Scale:
        """Return the zero point of a Q or DQ; 0 if it has none, or if it is computed."""
        if len(node.input) < 3 or node.input[2] not in self.constants:
            return np.zeros(())
        return self.value(node.input[2])

    def dtype(self, node: onnx.NodeProto) -> str:
        return type_name(quantised_type(node, self.constants))

    def same(self, one: onnx.NodeProto, other: onnx.NodeProto) -> bool:
        """Return True if two Q or DQ quantise in the same way."""
        scale, other_scale = self.scale(one), self.scale(other)
        if scale is None or other_scale is None or not np.array_equal(scale, other_scale):
            return False
        if not np.array_equal(self.zero(one), self.zero(other)):
            return False
        return self.dtype(one) == self.dtype(other)

    def weighted(self) -> Iterator[onnx.NodeProto]:
        """Return Conv, Gemm and MatMul of the graph with its pairs, in order."""
        yield from (node for node in self.graph.node if node.op_type in WEIGHTED)

    def quantised(self, node: onnx.NodeProto) -> bool:
        """Return True if the data and the weight of a weighted operator are quantised."""
        return all(name in self.pairs or name in self.weights for name in node.input[:2])

    def pairs_on(self, name: str) -> list[Pair]:
        """Return the pairs that read this tensor."""
        return [pair for pair in self.pairs.values() if pair.q.input[0] == name]


# --- patterns ---


def can_pass(view: View, pair: Pair, follower: onnx.NodeProto) -> bool:
    """Return True if a pair may also be behind `follower`.

    `follower` must be the only reader of the pair, and the pair the only reader of its tensor. A
    Relu, and an operator that only moves values, commutes with rounding to a grid that contains
    zero.
    """
    has_other_readers = (
        view.readers[pair.q.input[0]] != [pair.q]
        or view.readers[pair.q.output[0]] != [pair.dq]
        or view.readers[pair.dq.output[0]] != [follower]
        or pair.dq.output[0] in view.outputs
    )
    if follower.op_type != "Relu" or has_other_readers:
        return False
    scale = view.scale(pair.q)
    return scale is not None and scale.size == 1


def relus_in_floats(view: View) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto, Pair]]:
    """Return quantised convolutions with a Relu or Clip before a pair that reaches below zero.

    ONNX Runtime 1.31 has no int8 kernel for them (seen).
    """
    for node in view.weighted():
        readers = view.readers[node.output[0]]
        if node.op_type != "Conv" or not view.quantised(node) or node.output[0] in view.outputs:
            continue
        if len(readers) != 1 or readers[0].op_type not in FUSED_AFTER:
            continue
        relu = readers[0]
        pair = next(iter(view.pairs_on(relu.output[0])), None)
        if pair is not None and _reaches_below_zero(view, pair):
            yield node, relu, pair


def _reaches_below_zero(view: View, pair: Pair) -> bool:
    """Return True if the lowest integer of a pair of one scale is a value below zero."""
    scale = view.scale(pair.q)
    lowest = -128 if view.dtype(pair.q) == "int8" else 0
    if scale is None or scale.size != 1:
        return False
    return bool((view.zero(pair.q) != lowest).any())


def can_precede(view: View, relu: onnx.NodeProto, pair: Pair) -> bool:
    """Return True if a pair behind a Relu may also be before it.

    No other node may read the result of the Relu, because it would become coarser.
    """
    return (
        relu.op_type == "Relu"
        and view.readers[relu.output[0]] == [pair.q]
        and not view.outputs.intersection(relu.output)
    )


def only_pairs(view: View, pair: Pair) -> bool:
    """Return True if only DQs read the integers of a pair."""
    name = pair.q.output[0]
    return name not in view.outputs and all(node.op_type == QDQ[1] for node in view.readers[name])


def norms_behind(view: View, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes with constants behind an operator, up to the first other node."""
    chain: list[onnx.NodeProto] = []
    name = node.output[0]
    while len(view.readers[name]) == 1 and name not in view.outputs:
        reader = view.readers[name][0]
        others = [other for other in reader.input if other != name]
        if reader.op_type not in NORMS or reader.input[0] != name:
            break
        if not all(other in view.constants for other in others):
            break
        chain.append(reader)
        name = reader.output[0]
    return chain


def folded_bias(view: View, node: onnx.NodeProto) -> Scale | None:
    """Return the bias of a quantised convolution with the batch norm behind it folded in.

    The result is None if there is no norm, or if the norm changes the weights too.
    """
    if node.op_type != "Conv" or not view.quantised(node):
        return None
    chain = norms_behind(view, node)
    norm = next((norm for norm in chain if norm.op_type == "BatchNormalization"), None)
    if norm is None:
        return None
    bias_name = node.input[2] if len(node.input) > 2 else ""
    if not bias_name:
        gamma = view.value(norm.input[1])
        bias = np.zeros(gamma.shape)
    elif bias_name in view.constants:
        bias = view.value(bias_name)
    else:
        return None
    line = _as_line(view, chain, bias)
    if line is None:
        return None
    factor, summand = line
    return summand if np.allclose(factor, 1.0, rtol=0, atol=CANCELS) else None


def _as_line(view: View, chain: list[onnx.NodeProto], bias: Scale) -> tuple[Scale, Scale] | None:
    """Return factor and summand per channel of a chain; None if a part of it is not per channel."""
    factor, summand = np.ones(bias.shape), bias.copy()
    for node in chain:
        values = [view.value(name) for name in node.input[1:]]
        if node.op_type == "BatchNormalization":
            gamma, beta, mean, variance = values
            floats = {attribute.name: attribute.f for attribute in node.attribute}
            gain = gamma / np.sqrt(variance + floats.get("epsilon", 1e-5))
            factor, summand = factor * gain, (summand - mean) * gain + beta
            continue
        if values[0].size > 1 and values[0].shape[-3:] != (bias.size, 1, 1):
            return None
        value = values[0].reshape(-1)
        if node.op_type in ("Mul", "Div"):
            value = value if node.op_type == "Mul" else 1 / value
            factor, summand = factor * value, summand * value
        else:
            summand = summand + (value if node.op_type == "Add" else -value)
    return factor, summand


def repeated(view: View, pair: Pair) -> Pair | None:
    """Return the pair whose values this one quantises again in the same way.

    It is directly before this one, or before operators that only move values.
    """
    for name in (pair.q.input[0], _moved(view, pair.q.input[0])):
        before = view.pairs.get(name)
        if before is not None and view.same(before.dq, pair.q):
            return before
    return None


def _moved(view: View, name: str) -> str:
    """Return the tensor whose values were moved to this one; "" if none were.

    They may be moved several times.
    """
    source = ""
    maker = view.makers.get(name)
    while maker is not None and maker.op_type in SAME_SCALE:
        source = maker.input[0]
        maker = view.makers.get(source or name)
    return source


def moved_pair(view: View, name: str) -> Pair | None:
    """Return the pair of one scale whose values were moved to this tensor."""
    pair = view.pairs.get(_moved(view, name))
    scale = None if pair is None else view.scale(pair.dq)
    return pair if scale is not None and scale.size == 1 else None


def around_movers(view: View) -> Iterator[tuple[onnx.NodeProto, Pair, Pair]]:
    """Return the operators that move values, with the pairs before and behind them."""
    for node in view.graph.node:
        if node.op_type in SAME_SCALE and node.input[0] in view.pairs:
            yield from (
                (node, view.pairs[node.input[0]], pair) for pair in view.pairs_on(node.output[0])
            )


def equal_quantizers(view: View) -> Iterator[list[onnx.NodeProto]]:
    """Return groups of Q that read one tensor and quantise it in the same way."""
    for name in list(view.readers):
        quantizers = [
            node for node in view.readers[name] if node.op_type == QDQ[0] and node.input[0] == name
        ]
        twins = [node for node in quantizers if view.same(node, quantizers[0])]
        if len(twins) > 1 and name not in view.constants:
            yield twins
