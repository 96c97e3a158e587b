"""Fold constants: compute the nodes that depend on constants only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from pipeline.onnx_graph.inspect import graphs_of

FOLD_LIMIT_BYTES = 2**20  # larger results of Tile, Expand and the like are computed at run time
RANDOM = frozenset(
    {
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Multinomial",
        "Bernoulli",
        "Dropout",
    }
)
CONSTANT_DTYPES = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}
"""The dtype of the attribute that gives a `Constant` its value."""


def fold_constants(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Compute nodes that depend on constants only, and remove nodes that no output needs.

    All outputs stay.
    """
    import onnx_graphsurgeon

    _spell_out_constants(proto)
    graph = onnx_graphsurgeon.import_onnx(proto)
    graph.toposort()
    graph.fold_constants(
        size_threshold=FOLD_LIMIT_BYTES,
        partitioning="basic",  # a node that cannot be computed does not stop the others
        should_exclude_node=lambda node: node.op in RANDOM,
        # GraphSurgeon recurses endlessly in a subgraph that uses constants of its outer graph.
        recurse_subgraphs=False,
    )
    graph.cleanup().toposort()
    return onnx_graphsurgeon.export_onnx(graph)


def _spell_out_constants(proto: onnx.ModelProto) -> None:
    """Rewrite `Constant<value_float = 2.0>` as a tensor of its dtype.

    GraphSurgeon would read a double.
    """
    for node in _nodes_of(proto):
        if node.op_type != "Constant" or len(node.attribute) != 1:
            continue
        attribute = node.attribute[0]
        dtype = CONSTANT_DTYPES.get(attribute.name)
        if dtype is not None:
            array = np.asarray(onnx.helper.get_attribute_value(attribute), dtype)
            tensor = onnx.numpy_helper.from_array(array)
            attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))


def _nodes_of(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a model, also in subgraphs and functions."""
    for body in (*graphs_of(proto.graph), *proto.functions):
        yield from body.node
