"""Find every node that a library refuses: try each distinct node as a model of its own.

A library stops at the first node that it cannot run, and its kernel registry does not tell which
attributes and dtypes a kernel supports. A model of one node gets the library's own answer in a few
milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto
from onnx.inliner import inline_local_functions

from pipeline.core.artifacts import OnnxModel, Refusal
from pipeline.onnx_graph.files import SMALL_BYTES, read_proto
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS, bytes_of_tensor, graphs_of, operator_of

TryModel = Callable[[str | bytes], str]
"""Tries a model file or a serialised model with a library.

Returns the library's error message, empty if it accepts the model.
"""

UNKNOWN_OPERATOR = ("is not a registered function/op", "No conversion rule found")
"""Parts of the messages of ONNX Runtime and OpenVINO for an operator that they do not know.

They do not depend on the operator's inputs. Both libraries give no code, only a text.
"""

REMEDY = (
    "express the node in operators that the backend has (`simplify.surgery` in the plan), or choose"
    " a backend that runs it"
)


def refused_nodes(model: OnnxModel, try_model: TryModel) -> tuple[Refusal, ...]:
    """Return every node that `try_model` refuses; none if it accepts the whole model.

    If it refuses the whole model but no single node, the model itself is returned as one.
    """
    message = try_model(str(model.path))
    if not message:
        return ()
    return _refused_single_nodes(model, try_model) or (
        Refusal(
            node="(the whole model)",
            operator="",
            opset=model.opset,
            reason=message,
            remedy=REMEDY,
        ),
    )


def _refused_single_nodes(model: OnnxModel, try_model: TryModel) -> tuple[Refusal, ...]:
    """Return the nodes that `try_model` refuses, also in subgraphs and local functions."""
    proto = _inlined(read_proto(model.path))
    skeleton = _inlined(read_proto(model.path, weights=False))
    types = _types(skeleton)
    constants = _small_constants(proto)
    reasons: dict[bytes, str] = {}
    refusals = []
    for index, node in _plain_nodes(proto):
        single, has_guess = _model_of(node, proto, types, constants)
        key = single.SerializeToString(deterministic=True)
        if key not in reasons:
            reasons[key] = try_model(key)
        reason = reasons[key]
        is_certain = not has_guess or any(text in reason for text in UNKNOWN_OPERATOR)
        if reason and is_certain:
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


def _small_constants(proto: ModelProto) -> dict[str, TensorProto]:
    """Return the initializers of up to SMALL_BYTES by name, also those of subgraphs."""
    constants: dict[str, TensorProto] = {}
    for graph in graphs_of(proto.graph):
        for tensor in graph.initializer:
            if bytes_of_tensor(tensor) <= SMALL_BYTES:
                constants[tensor.name] = tensor
    return constants


def _plain_nodes(proto: ModelProto) -> Iterator[tuple[int, NodeProto]]:
    """Yield all nodes but If, Loop and Scan, in the place of which the nodes of their bodies come.

    The number is the node's index in its graph.
    """
    for graph in graphs_of(proto.graph):
        for index, node in enumerate(graph.node):
            if not any(attribute.HasField("g") for attribute in node.attribute):
                yield index, node


def _inlined(proto: ModelProto) -> ModelProto:
    return inline_local_functions(proto) if proto.functions else proto


def _types(proto: ModelProto) -> dict[str, TypeProto]:
    """Return the types of the tensors that shape inference finds.

    Tensors after an unknown operator are missing.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    # The file does not declare an operator set, or its shapes contradict each other.
    except onnx.shape_inference.InferenceError:
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
    """Return a model of this node alone, and whether one of its input types is a guess.

    Its tensors get new names, so that equal nodes give equal models.
    """
    single = NodeProto()
    single.CopyFrom(node)
    single.name = single.doc_string = ""
    del single.metadata_props[:]
    graph = GraphProto(name="node")
    has_guess = False
    for slot, name in enumerate(node.input):
        single.input[slot] = inner = f"in{slot}" if name else ""
        if name in constants:
            tensor = graph.initializer.add()
            tensor.CopyFrom(constants[name])
            tensor.name = inner
        elif name:
            has_guess = has_guess or name not in types
            guess = onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, None)
            graph.input.append(ValueInfoProto(name=inner, type=types.get(name, guess)))
    for slot, name in enumerate(node.output):
        single.output[slot] = inner = f"out{slot}" if name else ""
        if name:
            graph.output.append(ValueInfoProto(name=inner))
    graph.node.append(single)
    model = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=graph)
    return model, has_guess


def _opset(proto: ModelProto, node: NodeProto) -> int:
    versions = [
        entry.version
        for entry in proto.opset_import
        if entry.domain == node.domain or {entry.domain, node.domain} <= set(DEFAULT_DOMAINS)
    ]
    return int(max(versions, default=0))
