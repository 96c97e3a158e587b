"""The graph of a model as a report shows it: its nodes, and which nodes each one reads from."""

from __future__ import annotations

from pathlib import Path

import onnx

from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import operator_of, subgraphs_of
from pipeline.results.report import GraphNode

MAX_NODES = 20_000  # about 2 MB of report.json


def model_graph(path: Path) -> tuple[GraphNode, ...]:
    """Return the inputs, nodes and outputs of a model, in execution order.

    A node with subgraphs stands for their nodes, and reads what they read. Empty if the graph has
    more than `MAX_NODES` nodes.
    """
    graph = read_proto(path, weights=False).graph
    if len(graph.node) > MAX_NODES:
        return ()
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in constants]
    nodes = [GraphNode(name=name, operator="input") for name in inputs]
    producers = {name: index for index, name in enumerate(inputs)}
    for node in graph.node:
        reads = sorted({producers[name] for name in _names_read(node) if name in producers})
        name = node.name or next(iter(node.output), "")
        producers.update((output, len(nodes)) for output in node.output)
        nodes.append(GraphNode(name=name, operator=operator_of(node), reads=tuple(reads)))
    for value in graph.output:
        found = (producers[value.name],) if value.name in producers else ()
        nodes.append(GraphNode(name=value.name, operator="output", reads=found))
    return tuple(nodes)


def _names_read(node: onnx.NodeProto) -> list[str]:
    """Return the names of the tensors that a node reads, in its subgraphs too."""
    names = list(node.input)
    for subgraph in subgraphs_of(node):
        names += [name for inner in subgraph.node for name in inner.input]
        names += [value.name for value in subgraph.output]
    return names
