"""Parse a model with TensorRT's ONNX parser, and find every node that it refuses.

The functions take the imported library, so that TensorRT and TensorRT-RTX share them.

The parser checks operators one by one but stops at the first node with unsuitable inputs;
`supports_model_v2` refuses the same nodes as `parse` and stops at the same place. To find every
refused node, the graph is parsed again without the refused nodes until there are no more errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from pipeline.backends import cuda
from pipeline.backends.tensorrt.messages import builders_logger_of, listening, messages_of
from pipeline.core.artifacts import OnnxModel, Refusal
from pipeline.errors import ModelError, PlanError
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS, graphs_of, operator_of, type_name

BINDABLE = frozenset({"float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"})
ANOTHER_BACKEND = "or compile this model for onnxruntime"
QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}
MAX_TOP_K = 3840  # by ITopKLayer in NVIDIA's documentation
MIN_OPSET = 13  # the oldest that a plan may choose for its export
OWN_PLUGINS = "libnvinfer_plugin.so"  # NVIDIA's own plugins, a part of TensorRT
# A host without a GPU adds "driver version is insufficient" (catchCudaError) to every message.
NOISE = ("catchCudaError", "Invalid Node - ")


@dataclass(frozen=True, slots=True)
class Fault:
    """One error of the parser."""

    index: int  # of the node in the main graph; -1: not about a node
    node: str
    operator: str
    inside: tuple[str, ...]  # the If, Loop or function it lies in
    reason: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed network. Its builder and parser own memory that the network points to."""

    builder: Any
    parser: Any
    network: Any
    faults: tuple[Fault, ...]


def parse(
    trt: Any, raw: bytes, path: Path, strongly_typed: bool = True, plugins: Sequence[Path] = ()
) -> Parsed:
    """Parse a serialized model. External data is read from the folder of `path`.

    Nodes that cannot be parsed are in `faults`; they raise nothing. Strongly typed: every precision
    is as written in the graph. Otherwise builder flags allow other precisions, up to TensorRT 10.
    From 11 on all networks are strongly typed and the argument is ignored.
    """
    return _parse_with(trt, new_builder(trt, plugins), raw, path, strongly_typed)


def new_builder(trt: Any, plugins: Sequence[Path] = ()) -> Any:
    """Return a builder that knows NVIDIA's own plugins and those of the plugin libraries.

    PlanError for a library that cannot be loaded. OutOfDeviceMemory if the GPU has too little
    memory for the builder itself.
    """
    messages_of(trt).clear()
    logger = builders_logger_of(trt)
    with listening(trt):
        # without it EfficientNMS_TRT, ScatterElements and others are unknown
        trt.init_libnvinfer_plugins(logger, "")
        try:
            builder = trt.Builder(logger)
        except TypeError as error:  # pybind11's error for a null pointer
            raise cuda.out_of_memory(cuda.runtime()) from error
    load_plugins(trt, builder.get_plugin_registry(), plugins, listening)
    return builder


def load_plugins(
    trt: Any,
    registry: Any,
    plugins: Sequence[Path],
    listen: Callable[[Any], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Load plugin libraries into the registry of a builder or a runtime, not of the process.

    A builder needs `listen=listening`, since it prints its messages. PlanError for a library that
    cannot be loaded.
    """
    for plugin in plugins:
        if is_own(plugin):
            continue  # registered already; a second registration is an error
        start = len(messages_of(trt))
        with listen(trt):
            handle = registry.load_library(str(plugin))
        messages = [
            sentence(text)
            for severity, text in messages_of(trt)[start:]
            if severity != "WARNING" and "catchCudaError" not in text
        ]
        # None without a message: all of its plugins are registered already
        if handle is None and messages:
            advice = (
                "give a library made for this version of TensorRT that exports getCreators or"
                " getPluginCreators"
            )
            raise PlanError(
                f"the plugin library '{plugin}' cannot be loaded: {messages[0]}", advice
            )


def is_own(plugin: Path) -> bool:
    """Return True for the plugin library that is a part of TensorRT."""
    return plugin.name.startswith(OWN_PLUGINS)


def _parse_with(
    trt: Any, builder: Any, raw: bytes, path: Path, strongly_typed: bool = True
) -> Parsed:
    flags = 0
    # from 11 on there is no such flag
    if strongly_typed and int(trt.__version__.split(".")[0]) < 11:
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    with listening(trt):
        parser = trt.OnnxParser(network, builders_logger_of(trt))
        parsed = parser.parse(raw, str(path))
    faults = tuple(_fault(parser.get_error(i)) for i in range(parser.num_errors))
    if not parsed and not faults:
        raise ModelError(
            f"TensorRT cannot read '{path.name}' and does not say why",
            "run `crucible inspect` with the backend onnxruntime",
        )
    return Parsed(builder, parser, network, faults)


def _fault(error: Any) -> Fault:
    inside = tuple(frame.rpartition(" (")[0] for frame in error.local_function_stack())
    reason = re.sub(rf"^({re.escape(error.node_name())}|node_of_\S+): ", "", _reason(error.desc()))
    # If an input cannot be bound, file() is the name of its tensor.
    if error.node() < 0 and error.file() and "." not in error.file():
        reason = f"tensor '{error.file()}': {reason}"
    return Fault(error.node(), error.node_name(), error.node_operator(), inside, reason)


def _reason(desc: str) -> str:
    """Return the parser's description of an error as a sentence for users."""
    if desc == "false":
        return "TensorRT has no importer for this operator"
    if "Plugin not found" in desc:
        return "not an ONNX operator that TensorRT knows, and no plugin of this name is loaded"
    return sentence(desc)


def sentence(text: str) -> str:
    """Return TensorRT's sentence without C++ details: functions, assertions, source lines."""
    lines = [
        line for line in text.splitlines() if line and not any(noise in line for noise in NOISE)
    ]
    line = lines[0] if lines else text
    # "IBuilder::x: Error Code 4: API Usage Error ("
    line = re.sub(r"^.*?Error Code \d+: [\w ]+\(", "", line)
    line = re.sub(r"\.? Please set k[A-Z]\w+ .*$", "", line)  # flags for other hardware
    line = re.sub(r"\.? In \w+ at \S+( \(.*)?$", "", line)
    line = re.sub(r"^\[[^]]*\] ", "", line.removeprefix("("))  # "[pass.cpp:337: check] "
    if line.startswith("Assertion failed: "):
        line = line.removeprefix("Assertion failed: ").rpartition(": ")[2]
    if line.count(")") > line.count("("):  # the end of the parenthesis after the error code
        line = line.removesuffix(")").removesuffix(".")
    return line.strip()


def refusals(
    trt: Any, model: OnnxModel, plugins: Sequence[Path] = (), renames: bool = True
) -> tuple[Refusal, ...]:
    """Return every node, input and output that TensorRT refuses or would misinterpret.

    `renames`: users of the engine see TensorRT's own tensor names, so an input that is an output
    too counts as refused. Our sessions map the names back.
    """
    builder = new_builder(trt, plugins)  # one for all rounds: on a GPU each takes a second
    proto = _with_types(model)
    known = (*_quantizers(proto), *_large_top_ks(proto))
    refused: dict[int, list[Refusal]] = {index: [refusal] for index, refusal in known}
    interface = list(_interface(model, renames))
    unreadable = {spec.name for spec in model.inputs if spec.dtype not in (*BINDABLE, "float64")}
    foreign: set[str] = set()
    while True:
        reduced, indices = _without(proto, refused, foreign)
        parsed = _parse_with(trt, builder, reduced.SerializeToString(), model.path)
        new = [
            (indices[fault.index], fault)
            for fault in parsed.faults
            if 0 <= fault.index < len(indices)
        ]
        for index, fault in new:
            refused.setdefault(index, []).append(_refusal(proto, index, fault))
        if not new and foreign == unreadable:
            break
        # Only from the second round on: in the first one, operators are checked for any inputs.
        foreign = unreadable
    if not (refused or interface):
        interface = [_refusal(proto, -1, fault) for fault in parsed.faults]
    nodes: list[Refusal] = []
    for index in sorted(refused):
        all_of_node = (*_bodies(proto, index, parsed.parser), *refused[index])
        nodes += {(refusal.node, refusal.operator): refusal for refusal in all_of_node}.values()
    return (*interface, *nodes)


def count_float64(model: OnnxModel) -> int:
    """Count the float64 tensors of the model, which TensorRT silently computes in float32."""
    return sum(dtype == "float64" for dtype in _element_types(_with_types(model)).values())


def _with_types(model: OnnxModel) -> onnx.ModelProto:
    """Return the graph with the inferred types of its tensors. External data stays on disk."""
    proto = onnx.load(str(model.path), load_external_data=False)
    try:
        return onnx.shape_inference.infer_shapes(proto)
    # The graph contradicts itself: the parser will name the node.
    except onnx.shape_inference.InferenceError:
        return proto


def _refusal(proto: onnx.ModelProto, index: int, fault: Fault) -> Refusal:
    node = proto.graph.node[index] if index >= 0 else onnx.NodeProto(name="model")
    is_outer = not fault.inside and node.op_type == fault.operator
    if fault.inside:
        name = "/".join((*fault.inside, fault.node or fault.operator))
    else:
        name = node.name or node.output[0]
    operator = operator_of(node) if is_outer else fault.operator
    return Refusal(
        node=name,
        operator=operator,
        opset=_opset(proto, operator),
        reason=fault.reason,
        remedy=_remedy(fault.reason, operator),
    )


def _bodies(proto: onnx.ModelProto, index: int, parser: Any) -> Iterator[Refusal]:
    """Yield the operators without an importer in the branches and bodies of a refused node.

    The parser names only the first of them.
    """
    outer = proto.graph.node[index]
    for graph in _subgraphs(outer):
        for node in graph.node:
            if not parser.supports_operator(node.op_type):
                inside = (outer.name, graph.name)
                yield _refusal(
                    proto, index, Fault(index, node.name, node.op_type, inside, _reason("false"))
                )


def _remedy(reason: str, operator: str) -> str:
    # by TensorRT's text: it has no error code for a zero point or a missing plugin
    if "zero point" in reason:
        return "quantise to int8 with zero point 0 (activation: int8)"
    if re.search(r"\btypes?\b", reason):
        return f"insert a Cast before this node (`simplify.surgery`), {ANOTHER_BACKEND}"
    if "importer" in reason or "plugin" in reason:
        return f"{_way_around(operator)}, {ANOTHER_BACKEND}"
    return f"correct this node in the model (`simplify.surgery`), {ANOTHER_BACKEND}"


def _way_around(operator: str) -> str:
    """Return the advice for an operator that TensorRT does not know."""
    surgery = "replace it by surgery (`simplify.surgery`)"
    opsets = [
        schema.since_version
        for schema in onnx.defs.get_all_schemas_with_history()
        if operator_of_schema(schema) == operator
    ]
    first = min(opsets, default=0)
    if first == 0:  # not ONNX's own
        return (
            "load the library of its plugin (backend tensorrt: `tensorrt.plugins`, or `--plugin`"
            f" of inspect), {surgery}"
        )
    if first > MIN_OPSET:
        return (
            f"export with opset {first - 1} (`export.opset`), which writes it in older operators,"
            f" {surgery}"
        )
    return (
        f"rewrite the model without {operator}: simplifying folds it where its inputs are constant;"
        f" else {surgery}"
    )


def operator_of_schema(schema: Any) -> str:
    return f"{schema.domain}::{schema.name}" if schema.domain else str(schema.name)


def _opset(proto: onnx.ModelProto, operator: str) -> int:
    domain = operator.rpartition("::")[0]
    names = DEFAULT_DOMAINS if domain in DEFAULT_DOMAINS else (domain,)
    versions = [int(entry.version) for entry in proto.opset_import if entry.domain in names]
    return max(versions, default=0)


def _interface(model: OnnxModel, renames: bool) -> Iterator[Refusal]:
    """Yield the inputs and outputs with a dtype or a name that the engine could not keep."""
    names = {spec.name for spec in model.inputs}
    for role, specs in (("input", model.inputs), ("output", model.outputs)):
        for spec in specs:
            if spec.dtype not in BINDABLE:
                narrowed = (
                    ", which TensorRT would silently narrow to float32"
                    if spec.dtype == "float64"
                    else ""
                )
                reason = (
                    f"{role} '{spec.name}' is {spec.dtype}{narrowed}; expected one of"
                    f" {', '.join(sorted(BINDABLE))}"
                )
                remedy = (
                    f"cast it inside the model, so that the {role} itself is one of these,"
                    f" {ANOTHER_BACKEND}"
                )
                yield Refusal(
                    node=spec.name, operator=role, opset=model.opset, reason=reason, remedy=remedy
                )
            elif renames and role == "output" and spec.name in names:
                reason = f"output '{spec.name}' is an input passed through, which TensorRT renames"
                yield Refusal(
                    node=spec.name,
                    operator=role,
                    opset=model.opset,
                    reason=reason,
                    remedy="return it by a name of its own",
                )


def _quantizers(proto: onnx.ModelProto) -> Iterator[tuple[int, Refusal]]:
    """Yield the Q and DQ nodes of uint8.

    The parser only warns and treats them as int8, so that every value over 127 is wrong.
    """
    types = _element_types(proto)
    for index, node in enumerate(proto.graph.node):
        if node.op_type in QUANTIZERS and node.domain in DEFAULT_DOMAINS:
            quantized = types.get(
                node.output[0] if node.op_type == "QuantizeLinear" else node.input[0], ""
            )
            if quantized == "uint8":
                reason = (
                    "quantised to uint8, which TensorRT takes for int8: values over 127 would be"
                    " wrong"
                )
                fault = Fault(index, node.name, node.op_type, (), reason)
                remedy = _remedy("zero point", node.op_type)
                refusal = _refusal(proto, index, fault)
                yield index, refusal.model_copy(update={"remedy": remedy})


def _large_top_ks(proto: onnx.ModelProto) -> Iterator[tuple[int, Refusal]]:
    """Yield the TopK nodes with a constant k that no kernel has. The parser accepts them."""
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for index, node in enumerate(proto.graph.node):
        if node.op_type != "TopK" or node.domain not in DEFAULT_DOMAINS:
            continue
        if tensor := constants.get("".join(node.input[1:2])):
            count = int(onnx.numpy_helper.to_array(tensor).max())
            if count > MAX_TOP_K:
                reason = f"its k is {count}, TensorRT's largest is {MAX_TOP_K}"
                refusal = _refusal(proto, index, Fault(index, node.name, node.op_type, (), reason))
                remedy = (
                    f"lower k (`postprocess` in the plan if it is from there), {ANOTHER_BACKEND}"
                )
                yield index, refusal.model_copy(update={"remedy": remedy})


def _element_types(proto: onnx.ModelProto) -> Mapping[str, str]:
    """Return numpy's dtype names of the tensors of the main graph whose type is known."""
    values = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
    types = {value.name: type_name(value.type.tensor_type.elem_type) for value in values}
    return types | {tensor.name: type_name(tensor.data_type) for tensor in proto.graph.initializer}


def _without(
    proto: onnx.ModelProto, refused: Container[int], foreign: set[str]
) -> tuple[onnx.ModelProto, list[int]]:
    """Return the graph without the refused nodes and the `foreign` inputs.

    The list holds the original index of each remaining node. An output of a refused node becomes
    an input if its type and rank are known. Otherwise the nodes that read it are removed too.
    """
    known = {
        value.name: value
        for value in (*proto.graph.value_info, *proto.graph.output)
        if _is_known(value)
    }
    reduced = onnx.ModelProto()
    reduced.CopyFrom(proto)
    for field in ("node", "input", "output"):
        reduced.graph.ClearField(field)
    reduced.graph.input.extend(value for value in proto.graph.input if value.name not in foreign)
    lost = {value.name for value in proto.graph.input if value.name in foreign}
    indices: list[int] = []
    for index, node in enumerate(proto.graph.node):
        if index not in refused and not lost & set(_reads(node)):
            reduced.graph.node.append(node)
            indices.append(index)
            continue
        stand_ins = [name for name in node.output if index in refused and name in known]
        reduced.graph.input.extend(known[name] for name in stand_ins)
        lost |= set(node.output) - set(stand_ins)
    outputs = {name for index in indices for name in proto.graph.node[index].output}
    reduced.graph.output.extend(
        value for value in proto.graph.output if value.name in outputs and value.name not in foreign
    )
    return reduced, indices


def _is_known(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type) and value.type.tensor_type.HasField("shape")


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield from graphs_of(attribute.g)


def _reads(node: onnx.NodeProto) -> Sequence[str]:
    """Return the tensors that a node and the nodes of its subgraphs read."""
    tensors = list(node.input)
    for graph in _subgraphs(node):
        for inner in graph.node:
            tensors += inner.input
    return tensors
