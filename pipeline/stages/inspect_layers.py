"""Inspect layers: read the precision and the time of every kernel of an engine.

`pipeline.results.precision_audit` judges the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline import backends
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Tensors
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import graphs_of, operator_of
from pipeline.results.layer_table import LayerTable


class Proof(Frozen):
    """The layers of one engine; None if its backend does not report them."""

    table: LayerTable | None = None


def prove(
    engine: Engine,
    feeds: Tensors,
    model: OnnxModel | None = None,
    profile: int = 0,
    progress: Progress = silent,
) -> Proof:
    """Return the layer table of one profile of an engine.

    The layers are timed on `feeds` by plain enqueue, in this process. `model` is the converted
    graph of the engine: it tells the operator of each node, which the names of fusions need.
    """
    progress(None, "timing every layer")
    table = backends.backend(engine.target.backend).layers(engine, feeds, profile)
    if table is not None and model is not None:
        table = with_operators(table, operators_of(model.path))
    return Proof(table=table)


def with_operators(table: LayerTable, operators: Mapping[str, str]) -> LayerTable:
    """Add the operator of every node to the layers of a table."""
    layers = []
    for layer in table.layers:
        of_layer = tuple(operators.get(node, "") for node in layer.nodes)
        layers.append(layer.model_copy(update={"operators": of_layer}))
    return table.model_copy(update={"layers": tuple(layers)})


def operators_of(path: Path) -> dict[str, str]:
    """Return the operators of all nodes by node name, subgraphs included.

    The key of a node without a name is its first output.
    """
    operators = {}
    for graph in graphs_of(read_proto(path, weights=False).graph):
        for node in graph.node:
            name = node.name or next(iter(node.output), "")
            operators[name] = operator_of(node)
    return operators
