"""Writes Q/DQ pairs into a graph: `quantization.py` says where, and does the arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from pipeline.core import TensorRange
from pipeline.onnx_graph.inspect import graphs_of
from pipeline.quantization.placement import (
    Affine,
    Sites,
    WeightSite,
    bias_floor,
    bias_of,
    signed_activation,
    unsigned_activation,
    weight,
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How numbers become 8 bits."""

    unsigned: bool  # activations uint8 with a zero point, else int8 with zero point 0
    weight_bits: int
    half_scales: bool  # scales that float16 holds exactly: the rest of the graph runs in it


def holds_qdq(graph: onnx.GraphProto) -> bool:
    """Whether a graph is quantised already."""
    return any(
        node.op_type in ("QuantizeLinear", "DequantizeLinear")
        for inner in graphs_of(graph)
        for node in inner.node
    )


def insert_qdq(
    proto: onnx.ModelProto, sites: Sites, ranges: Mapping[str, TensorRange], scheme: Scheme
) -> None:
    """Make the nodes at `sites` read quantised values: one pair per activation, one integer copy
    per weight. In place.
    """
    writer = _Writer(
        proto.graph,
        {tensor: ranges[sites.same_scale.get(tensor, tensor)] for tensor in sites.tensors},
        scheme,
    )
    nodes = {node.name: node for node in proto.graph.node}
    for site in sites.activations:
        nodes[site.node].input[site.index] = writer.activation(site.tensor)
    for weights in sites.weights:
        writer.weight(nodes[weights.node], weights)
    writer.finish()


class _Writer:
    """Collects new nodes by the tensor they follow ("" = the start), then puts the graph
    together.
    """

    def __init__(
        self, graph: onnx.GraphProto, ranges: Mapping[str, TensorRange], scheme: Scheme
    ) -> None:
        self.graph, self.ranges, self.scheme = graph, ranges, scheme
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.new: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self.done: dict[tuple[str, int], str] = {}
        self.taken = {
            name for node in graph.node for name in (*node.input, *node.output, node.name)
        } | set(self.constants)

    def activation(self, tensor: str) -> str:
        """The dequantised copy of an activation, made once."""
        key = (tensor, -1)
        if key not in self.done:
            scale, zero = self.parameters(tensor, self.affine(tensor))
            quantised, self.done[key] = self.fresh(f"{tensor}_q"), self.fresh(f"{tensor}_dq")
            self.new[tensor] += [
                onnx.helper.make_node(
                    "QuantizeLinear", [tensor, scale, zero], [quantised], name=quantised
                ),
                onnx.helper.make_node(
                    "DequantizeLinear",
                    [quantised, scale, zero],
                    [self.done[key]],
                    name=self.done[key],
                ),
            ]
        return self.done[key]

    def affine(self, tensor: str) -> Affine:
        seen = self.ranges[tensor]
        return (
            unsigned_activation(seen.low, seen.high)
            if self.scheme.unsigned
            else signed_activation(seen.low, seen.high, self.scheme.half_scales)
        )

    def weight(self, node: onnx.NodeProto, site: WeightSite) -> None:
        values = numpy_helper.to_array(self.constants[site.tensor])
        bias = numpy_helper.to_array(self.constants[site.bias]) if site.bias else None
        floor = None if bias is None else bias_floor(bias, self.affine(site.activation))
        affine = weight(
            values,
            site.axis if site.axis >= 0 else None,
            self.scheme.weight_bits,
            self.scheme.half_scales,
            floor,
        )
        key = (site.tensor, site.axis)
        if key not in self.done or bias is not None:  # with an integer bias the scale depends on it
            self.done[key] = self.constant_pair(site.tensor, affine, affine.quantize(values))
        node.input[site.index] = self.done[key]
        if bias is not None:
            integer = bias_of(self.affine(site.activation), affine)
            node.input[2] = self.constant_pair(site.bias, integer, integer.quantize(bias))

    def constant_pair(self, tensor: str, affine: Affine, quantised: NDArray[np.generic]) -> str:
        """An integer initializer and the node that makes floats of it."""
        name, output = self.fresh(f"{tensor}_q"), self.fresh(f"{tensor}_dq")
        scale, zero = self.parameters(tensor, affine)
        self.graph.initializer.append(numpy_helper.from_array(quantised, name))
        axis = {} if affine.axis is None else {"axis": affine.axis}
        self.new[""].append(
            onnx.helper.make_node(
                "DequantizeLinear", [name, scale, zero], [output], name=output, **axis
            )
        )
        return output

    def parameters(self, tensor: str, affine: Affine) -> tuple[str, str]:
        names = self.fresh(f"{tensor}_scale"), self.fresh(f"{tensor}_zero_point")
        self.graph.initializer.extend(
            [
                numpy_helper.from_array(affine.scale, names[0]),
                numpy_helper.from_array(affine.zero_point, names[1]),
            ]
        )
        return names

    def fresh(self, name: str) -> str:
        unique = name
        while unique in self.taken:
            unique += "_"
        self.taken.add(unique)
        return unique

    def finish(self) -> None:
        """Sort the new nodes in, and drop the float weights that nothing reads any more."""
        ordered = [*self.new.pop("", [])]
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
    read = {name for inner in graphs_of(graph) for node in inner.node for name in node.input}
    read |= {value.name for inner in graphs_of(graph) for value in inner.output} | {
        value.name for value in graph.input
    }
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in read:
            del graph.initializer[index]
