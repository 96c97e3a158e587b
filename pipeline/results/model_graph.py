"""The graph of a model as a report shows it: its nodes, which ones each reads, and their work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from pipeline.core.progress import Progress, silent
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.flops import (
    SizedTensor,
    bytes_read,
    bytes_written,
    node_cost,
    sized_tensors,
)
from pipeline.onnx_graph.inspect import operator_of, subgraphs_of
from pipeline.results.graph_node import GraphNode, NodeWork

MAX_NODES = 20_000  # about 4 MB of report.json


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The inputs, nodes and outputs of a model, in execution order."""

    nodes: tuple[GraphNode, ...]
    sizes: dict[str, int] | None  # at which the work of the nodes is counted; None: it is not


def model_graph(
    path: Path, sizes: Mapping[str, int] | None = None, progress: Progress = silent
) -> ModelGraph:
    """Return the graph of a model, with the work of its nodes if all symbols have `sizes`.

    A node with subgraphs stands for their nodes, and reads what they read. No nodes if the graph
    has more than `MAX_NODES`. ModelError names a symbol without a size.
    """
    graph = read_proto(path, weights=False).graph
    if len(graph.node) > MAX_NODES:
        return ModelGraph((), None)
    progress(None, "counting FLOPs and bytes")
    known = {} if sizes is None else sized_tensors(path, sizes)
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in constants]
    nodes = [
        GraphNode(name=name, operator="input", work=_input_work(known.get(name))) for name in inputs
    ]
    producers = {name: index for index, name in enumerate(inputs)}
    for node in graph.node:
        reads = sorted({producers[name] for name in _names_read(node) if name in producers})
        name = node.name or next(iter(node.output), "")
        work = None if sizes is None else _work(node, reads, producers, known)
        producers.update((output, len(nodes)) for output in node.output if output)
        nodes.append(
            GraphNode(name=name, operator=operator_of(node), reads=tuple(reads), work=work)
        )
    for value in graph.output:
        found = (producers[value.name],) if value.name in producers else ()
        nodes.append(GraphNode(name=value.name, operator="output", reads=found))
    return ModelGraph(tuple(nodes), None if sizes is None else dict(sizes))


def _input_work(tensor: SizedTensor | None) -> NodeWork | None:
    """Return the size of an input, which itself computes and moves nothing."""
    if tensor is None:
        return None
    written_bytes = math.ceil(tensor.bytes)
    return NodeWork(flops=0.0, moved_bytes=0, written_bytes=written_bytes, dtype=tensor.dtype)


def _work(
    node: onnx.NodeProto,
    reads: list[int],
    producers: Mapping[str, int],
    known: Mapping[str, SizedTensor],
) -> NodeWork | None:
    """Return the work of a node; None if the size of something that it moves is not known."""
    cost, bytes_by_name = node_cost(node, known), bytes_read(node, known)
    outputs = [known[name] for name in node.output if name in known]
    written_bytes = bytes_written(node, known)
    if cost.bytes_read is None or cost.bytes_written is None:
        return None
    if bytes_by_name is None or written_bytes is None:  # of a view, which moves nothing
        return None
    has_branches = next(subgraphs_of(node), None) is not None  # what they read is not counted
    if has_branches or not outputs:
        return None
    read_bytes: Counter[int] = Counter()
    constants: dict[str, float] = {}
    for name, count in bytes_by_name.items():
        if name in producers:
            read_bytes[producers[name]] += math.ceil(count)
        else:
            constants[name] = count
    largest = max(constants, key=lambda name: constants[name], default=None)
    return NodeWork(
        flops=cost.flops,
        moved_bytes=cost.bytes_read + cost.bytes_written,
        weight_bytes=math.ceil(sum(constants.values())),
        read_bytes=tuple(read_bytes[index] for index in reads),
        written_bytes=written_bytes,
        dtype=outputs[0].dtype,
        weight_dtype=known[largest].dtype if largest else "",
    )


def _names_read(node: onnx.NodeProto) -> list[str]:
    """Return the names of the tensors that a node reads, in its subgraphs too."""
    names = list(node.input)
    for subgraph in subgraphs_of(node):
        names += [name for inner in subgraph.node for name in inner.input]
        names += [value.name for value in subgraph.output]
    return names
