"""Writes Q/DQ pairs into a graph: `placement.py` says where, `arithmetic.py` quantises."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from pipeline.core.artifacts import TensorRange
from pipeline.onnx_graph.inspect import graphs_of
from pipeline.quantization.arithmetic import (
    Affine,
    bias_floor,
    bias_of,
    signed_activation,
    unsigned_activation,
    weight,
)
from pipeline.quantization.placement import Sites, WeightSite


@dataclass(frozen=True, slots=True)
class Scheme:
    """The arithmetic by which numbers become 8 bits."""

    unsigned: bool  # activations uint8 with a zero point, else int8 with zero point 0
    weight_bits: int
    half_scales: bool  # scales that float16 holds exactly: the rest of the graph runs in it


def holds_qdq(graph: onnx.GraphProto) -> bool:
    """Return True if a graph is quantised already."""
    return any(
        node.op_type in ("QuantizeLinear", "DequantizeLinear")
        for inner in graphs_of(graph)
        for node in inner.node
    )


def insert_qdq(
    proto: onnx.ModelProto, sites: Sites, ranges: Mapping[str, TensorRange], scheme: Scheme
) -> None:
    """Let the nodes at `sites` read quantised values, in place.

    There is one pair per activation, and one integer copy per weight.
    """
    site_ranges = {tensor: ranges[sites.same_scale.get(tensor, tensor)] for tensor in sites.tensors}
    writer = _Writer(proto.graph, site_ranges, scheme)
    nodes = {node.name: node for node in proto.graph.node}
    for site in sites.activations:
        nodes[site.node].input[site.index] = writer.activation(site.tensor)
    for weights in sites.weights:
        writer.weight(nodes[weights.node], weights)
    writer.finish()


class _Writer:
    """Collects new nodes by the tensor that they follow ("" = the start), then adds them."""

    def __init__(
        self, graph: onnx.GraphProto, ranges: Mapping[str, TensorRange], scheme: Scheme
    ) -> None:
        self.graph, self.ranges, self.scheme = graph, ranges, scheme
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.new: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self.copies: dict[tuple[str, int], str] = {}  # by tensor and axis; -1: none
        self.taken = set(self.constants)
        for node in graph.node:
            self.taken.update(node.input, node.output, [node.name])

    def activation(self, tensor: str) -> str:
        """Return the dequantised copy of an activation. It is created once."""
        key = (tensor, -1)
        if key not in self.copies:
            scale, zero = self.parameters(tensor, self.affine(tensor))
            q, dq = self.fresh(f"{tensor}_q"), self.fresh(f"{tensor}_dq")
            self.new[tensor] += [
                onnx.helper.make_node("QuantizeLinear", [tensor, scale, zero], [q], name=q),
                onnx.helper.make_node("DequantizeLinear", [q, scale, zero], [dq], name=dq),
            ]
            self.copies[key] = dq
        return self.copies[key]

    def affine(self, tensor: str) -> Affine:
        bounds = self.ranges[tensor]
        if self.scheme.unsigned:
            return unsigned_activation(bounds.low, bounds.high)
        return signed_activation(bounds.low, bounds.high, self.scheme.half_scales)

    def weight(self, node: onnx.NodeProto, site: WeightSite) -> None:
        values = numpy_helper.to_array(self.constants[site.tensor])
        axis = site.axis if site.axis >= 0 else None
        bits, half = self.scheme.weight_bits, self.scheme.half_scales
        key = (site.tensor, site.axis)
        if site.bias:  # the scale depends on it, so the copy is this node's own
            bias = numpy_helper.to_array(self.constants[site.bias])
            activation = self.affine(site.activation)
            affine = weight(values, axis, bits, half, bias_floor(bias, activation))
            self.copies[key] = self.constant_pair(site.tensor, affine, affine.quantize(values))
            integer = bias_of(activation, affine)
            node.input[2] = self.constant_pair(site.bias, integer, integer.quantize(bias))
        elif key not in self.copies:
            affine = weight(values, axis, bits, half)
            self.copies[key] = self.constant_pair(site.tensor, affine, affine.quantize(values))
        node.input[site.index] = self.copies[key]

    def constant_pair(self, tensor: str, affine: Affine, integers: NDArray[np.generic]) -> str:
        """Return an integer initializer and the node that converts it to floats."""
        name, output = self.fresh(f"{tensor}_q"), self.fresh(f"{tensor}_dq")
        scale, zero = self.parameters(tensor, affine)
        self.graph.initializer.append(numpy_helper.from_array(integers, name))
        axis = {} if affine.axis is None else {"axis": affine.axis}
        self.new[""].append(
            onnx.helper.make_node(
                "DequantizeLinear", [name, scale, zero], [output], name=output, **axis
            )
        )
        return output

    def parameters(self, tensor: str, affine: Affine) -> tuple[str, str]:
        """Return new initializers for a scale and a zero point, by name."""
        scale, zero_point = self.fresh(f"{tensor}_scale"), self.fresh(f"{tensor}_zero_point")
        self.graph.initializer.append(numpy_helper.from_array(affine.scale, scale))
        self.graph.initializer.append(numpy_helper.from_array(affine.zero_point, zero_point))
        return scale, zero_point

    def fresh(self, name: str) -> str:
        unique = name
        while unique in self.taken:
            unique += "_"
        self.taken.add(unique)
        return unique

    def finish(self) -> None:
        """Add the new nodes in order, and drop float weights that no node reads any more."""
        ordered = self.new.pop("", [])
        for value in self.graph.input:
            ordered += self.new.pop(value.name, [])
        for node in self.graph.node:
            ordered.append(node)
            for name in node.output:
                ordered += self.new.pop(name, [])
        del self.graph.node[:]
        self.graph.node.extend(ordered)
        drop_unread(self.graph)


def drop_unread(graph: onnx.GraphProto) -> None:
    """Remove initializers that no node and no output reads. In place."""
    names = {value.name for value in graph.input}
    for inner in graphs_of(graph):
        names.update(value.name for value in inner.output)
        for node in inner.node:
            names.update(node.input)
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in names:
            del graph.initializer[index]
