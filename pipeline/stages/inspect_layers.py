"""Prove: which precision every kernel of an engine really runs in, and for how long. The verdict on
it is `pipeline.results.precision_audit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline import backends
from pipeline.core import Engine, Frozen, OnnxModel, Progress, Tensors, silent
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import graphs_of, operator_of
from pipeline.results.layer_table import LayerTable


class Proof(Frozen):
    """What one engine really runs; None where its backend gives no evidence."""

    table: LayerTable | None = None


def prove(
    engine: Engine,
    feeds: Tensors,
    model: OnnxModel | None = None,
    profile: int = 0,
    progress: Progress = silent,
) -> Proof:
    """The layer table of one profile of an engine, timed on `feeds` by plain enqueue, in this
    process.

    `model` is the converted graph that the engine was built from: it gives each node its operator,
    without which no fusion can be named.
    """
    progress(None, "timing every layer")
    table = backends.backend(engine.target.backend).layers(engine, feeds, profile)
    return Proof(
        table=with_operators(table, operators_of(model.path))
        if table is not None and model is not None
        else table
    )


def with_operators(table: LayerTable, operators: Mapping[str, str]) -> LayerTable:
    """The table with the operator of every node of every layer."""
    layers = (
        layer.model_copy(
            update={"operators": tuple(operators.get(node, "") for node in layer.nodes)}
        )
        for layer in table.layers
    )
    return table.model_copy(update={"layers": tuple(layers)})


def operators_of(path: Path) -> dict[str, str]:
    """Operator by node name, subgraphs too; a node without a name goes by its first output."""
    nodes = (
        node for inner in graphs_of(read_proto(path, weights=False).graph) for node in inner.node
    )
    return {node.name or next(iter(node.output), ""): operator_of(node) for node in nodes}
