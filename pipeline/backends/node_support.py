"""Finds every node that a library refuses, by offering it each distinct node as a model of its own.

A library stops at the first node that it cannot take, and its registry of kernels does not tell
which attributes and dtypes they serve. A model of one node gets the library's own answer, in a few
milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto
from onnx.inliner import inline_local_functions

from pipeline.core import OnnxModel, Refusal
from pipeline.onnx_graph.files import SMALL_BYTES, read_proto
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS, bytes_of_tensor, graphs_of, operator_of

TryModel = Callable[[bytes], str]
"""Offers a serialised model to a library: its complaint, or an empty string."""

UNKNOWN_OPERATOR = ("is not a registered function/op", "No conversion rule found")
"""What ONNX Runtime and OpenVINO say of an operator that they do not know, whatever its inputs."""

REMEDY = (
    "express the node in operators that the backend has (`simplify.surgery` in the plan), or choose"
    " a backend that runs it"
)


def refused_nodes(model: OnnxModel, try_model: TryModel) -> tuple[Refusal, ...]:
    """The nodes, those of subgraphs and local functions too, that `try_model` refuses."""
    proto, skeleton = (
        _inlined(read_proto(model.path)),
        _inlined(read_proto(model.path, weights=False)),
    )
    types = _types(skeleton)
    constants = {
        t.name: t
        for graph in graphs_of(proto.graph)
        for t in graph.initializer
        if bytes_of_tensor(t) <= SMALL_BYTES
    }
    answers: dict[bytes, str] = {}
    refusals = []
    for index, node in _plain_nodes(proto):
        alone, guessed = _model_of(node, proto, types, constants)
        key = alone.SerializeToString(deterministic=True)
        if key not in answers:
            answers[key] = try_model(key)
        reason = answers[key]
        if reason and (not guessed or any(text in reason for text in UNKNOWN_OPERATOR)):
            refusals.append(
                Refusal(
                    node=node.name or f"#{index}",
                    operator=operator_of(node),
                    opset=_opset(proto, node),
                    reason=reason,
                    remedy=REMEDY,
                )
            )
    return tuple(refusals)


def _plain_nodes(proto: ModelProto) -> Iterator[tuple[int, NodeProto]]:
    """All nodes but If, Loop and Scan, whose bodies' nodes come instead."""
    for graph in graphs_of(proto.graph):
        for index, node in enumerate(graph.node):
            if not any(attribute.HasField("g") for attribute in node.attribute):
                yield index, node


def _inlined(proto: ModelProto) -> ModelProto:
    return inline_local_functions(proto) if proto.functions else proto


def _types(proto: ModelProto) -> dict[str, TypeProto]:
    """The type of every tensor as far as shape inference finds it; what comes after an unknown
    operator is missing.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except (
        onnx.shape_inference.InferenceError
    ):  # an operator set that the file does not declare, or shapes that contradict each other
        inferred = proto
    values = (
        value
        for graph in graphs_of(inferred.graph)
        for value in (*graph.input, *graph.value_info, *graph.output)
    )
    types = {value.name: value.type for value in values if value.type.WhichOneof("value")}
    for graph in graphs_of(proto.graph):
        for tensor in graph.initializer:
            types[tensor.name] = onnx.helper.make_tensor_type_proto(
                tensor.data_type, tuple(tensor.dims)
            )
    return types


def _model_of(
    node: NodeProto,
    proto: ModelProto,
    types: Mapping[str, TypeProto],
    constants: Mapping[str, TensorProto],
) -> tuple[ModelProto, bool]:
    """A model of this node alone, with names of its own so that equal nodes give equal models; and
    whether a type was guessed.
    """
    alone = NodeProto()
    alone.CopyFrom(node)
    alone.name = alone.doc_string = ""
    del alone.metadata_props[:]
    graph = GraphProto(name="node")
    guessed = False
    for slot, name in enumerate(node.input):
        alone.input[slot] = inner = f"in{slot}" if name else ""
        if name in constants:
            tensor = graph.initializer.add()
            tensor.CopyFrom(constants[name])
            tensor.name = inner
        elif name:
            guessed = guessed or name not in types
            known = types.get(name) or onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, None)
            graph.input.append(ValueInfoProto(name=inner, type=known))
    for slot, name in enumerate(node.output):
        alone.output[slot] = inner = f"out{slot}" if name else ""
        if name:
            graph.output.append(ValueInfoProto(name=inner))
    graph.node.append(alone)
    return (
        ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=graph),
        guessed,
    )


def _opset(proto: ModelProto, node: NodeProto) -> int:
    same = [
        entry.version
        for entry in proto.opset_import
        if entry.domain == node.domain or {entry.domain, node.domain} <= set(DEFAULT_DOMAINS)
    ]
    return int(max(same, default=0))
