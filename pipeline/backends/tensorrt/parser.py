"""What TensorRT's ONNX parser says of a model: functions that take the imported library, so that
every flavour of TensorRT can use them.

The parser checks operators one by one but stops at the first node whose inputs do not fit;
`supports_model_v2` complains of the same nodes as `parse` and stops where that stops. To name every
refused node it is asked again, with the refused ones cut out of the graph, until it has nothing
more to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import onnx

from pipeline.backends import cuda
from pipeline.backends.tensorrt.messages import builders_logger_of, listening, messages_of
from pipeline.core import OnnxModel, Refusal
from pipeline.errors import ModelError, PlanError
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS, graphs_of, operator_of, type_name

BINDABLE = frozenset({"float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"})
ANOTHER_BACKEND = "or compile this model for onnxruntime"
QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}
MIN_OPSET = 13  # the least that a plan may ask its export for
OWN_PLUGINS = "libnvinfer_plugin.so"  # NVIDIA's own plugins, a part of TensorRT
NOISE = (
    "catchCudaError",
    "Invalid Node - ",
)  # a host without a GPU adds "driver version is insufficient" to every message


@dataclass(frozen=True, slots=True)
class Fault:
    """One complaint of the parser."""

    index: int  # of the node in the main graph; -1: not about a node
    node: str
    operator: str
    inside: tuple[str, ...]  # the If, Loop or function it lies in
    reason: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed network; the builder and the parser own memory that the network points to."""

    builder: Any
    parser: Any
    network: Any
    faults: tuple[Fault, ...]


def parse(
    trt: Any, raw: bytes, path: Path, strongly_typed: bool = True, plugins: Sequence[Path] = ()
) -> Parsed:
    """Parse a serialized model; external data is read from beside `path`. What cannot be parsed is
    in `faults`, not raised.

    Strongly typed: every precision is as written in the graph. Otherwise builder flags allow more,
    up to TensorRT 10; from 11 on all networks are strongly typed, whatever they are asked to be.
    """
    return _parse_with(trt, new_builder(trt, plugins), raw, path, strongly_typed)


def new_builder(trt: Any, plugins: Sequence[Path] = ()) -> Any:
    """A builder that knows NVIDIA's own plugins and those of the given libraries.

    PlanError for a library that cannot be loaded, OutOfDeviceMemory where the GPU has no room for
    the builder itself.
    """
    messages_of(trt).clear()
    logger = builders_logger_of(trt)
    with listening(trt):
        trt.init_libnvinfer_plugins(
            logger, ""
        )  # EfficientNMS_TRT, ScatterElements and others are unknown without it
        try:
            builder = trt.Builder(logger)
        except TypeError as error:  # pybind11's word for a null pointer
            raise cuda.out_of_memory(cuda.runtime()) from error
    load_plugins(trt, builder.get_plugin_registry(), plugins, listening)
    return builder


def load_plugins(
    trt: Any,
    registry: Any,
    plugins: Sequence[Path],
    heard: Callable[[Any], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Load plugin libraries into the registry of a builder, which is `heard` by listening, or of a
    runtime; not into that of the process.
    """
    for plugin in plugins:
        if is_own(plugin):
            continue  # registered already, and twice is an error
        start = len(messages_of(trt))
        with heard(trt):
            handle = registry.load_library(str(plugin))
        messages = [
            sentence(text)
            for severity, text in messages_of(trt)[start:]
            if severity != "WARNING" and "catchCudaError" not in text
        ]
        if (
            handle is None and messages
        ):  # None without a word: all of its plugins are registered already
            advice = (
                "give a library made for this version of TensorRT that exports getCreators or"
                " getPluginCreators"
            )
            raise PlanError(
                f"the plugin library '{plugin}' cannot be loaded: {messages[0]}", advice
            )


def is_own(plugin: Path) -> bool:
    """Whether this is the plugin library that comes with TensorRT itself."""
    return plugin.name.startswith(OWN_PLUGINS)


def _parse_with(
    trt: Any, builder: Any, raw: bytes, path: Path, strongly_typed: bool = True
) -> Parsed:
    asks = (
        strongly_typed and int(trt.__version__.split(".")[0]) < 11
    )  # from 11 on there is nothing to ask for
    network = builder.create_network(
        1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if asks else 0
    )
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
    if (
        error.node() < 0 and error.file() and "." not in error.file()
    ):  # the tensor's name, where an input cannot be taken
        reason = f"tensor '{error.file()}': {reason}"
    return Fault(error.node(), error.node_name(), error.node_operator(), inside, reason)


def _reason(desc: str) -> str:
    """The parser's words as a sentence for people."""
    if desc == "false":
        return "TensorRT has no importer for this operator"
    if "Plugin not found" in desc:
        return "not an ONNX operator that TensorRT knows, and no plugin of this name is loaded"
    return sentence(desc)


def sentence(text: str) -> str:
    """TensorRT's own sentence, without the C++ around it: functions, assertions, source lines."""
    lines = [
        line for line in text.splitlines() if line and not any(noise in line for noise in NOISE)
    ]
    line = lines[0] if lines else text
    line = re.sub(
        r"^.*?Error Code \d+: [\w ]+\(", "", line
    )  # "IBuilder::x: Error Code 4: API Usage Error ("
    line = re.sub(r"\.? Please set k[A-Z]\w+ .*$", "", line)  # flags for other hardware
    line = re.sub(r"\.? In \w+ at \S+( \(.*)?$", "", line)
    line = re.sub(r"^\[[^]]*\] ", "", line.removeprefix("("))  # "[pass.cpp:337: check] "
    if line.startswith("Assertion failed: "):
        line = line.removeprefix("Assertion failed: ").rpartition(": ")[2]
    if line.count(")") > line.count("("):  # it closed what the error code had opened
        line = line.removesuffix(")").removesuffix(".")
    return line.strip()


def refusals(
    trt: Any, model: OnnxModel, plugins: Sequence[Path] = (), renames: bool = True
) -> tuple[Refusal, ...]:
    """Every node, input and output of the model that TensorRT cannot take, or would take for
    something else.

    `renames`: whether users meet TensorRT's own names, among them that of an input that is an
    output too; our sessions know them.
    """
    builder = new_builder(trt, plugins)  # one for all rounds: on a GPU each takes a second
    proto = _with_types(model)
    found: dict[int, list[Refusal]] = {index: [refusal] for index, refusal in _quantizers(proto)}
    interface = list(_interface(model, renames))
    foreign: set[str] = set()
    while True:
        rest, indices = _without(proto, found, foreign)
        parsed = _parse_with(trt, builder, rest.SerializeToString(), model.path)
        new = [
            (indices[fault.index], fault)
            for fault in parsed.faults
            if 0 <= fault.index < len(indices)
        ]
        for index, fault in new:
            found.setdefault(index, []).append(_refusal(proto, index, fault))
        unreadable = {
            spec.name for spec in model.inputs if spec.dtype not in (*BINDABLE, "float64")
        }
        if not new and foreign == unreadable:
            break
        # from the second time on: the first time, operators are checked whatever their inputs
        foreign = unreadable
    if not (found or interface):
        interface = [_refusal(proto, -1, fault) for fault in parsed.faults]
    inner = {
        index: (*_bodies(proto, index, parsed.parser), *found[index]) for index in sorted(found)
    }
    nodes = (
        {(refusal.node, refusal.operator): refusal for refusal in every}.values()
        for every in inner.values()
    )
    return (*interface, *chain.from_iterable(nodes))


def count_float64(model: OnnxModel) -> int:
    """How many tensors inside the model are float64, which TensorRT computes in float32 without a
    word.
    """
    return sum(dtype == "float64" for dtype in _element_types(_with_types(model)).values())


def _with_types(model: OnnxModel) -> onnx.ModelProto:
    """The graph with the inferred types of its tensors; external data stays on disk."""
    proto = onnx.load(str(model.path), load_external_data=False)
    try:
        return onnx.shape_inference.infer_shapes(proto)
    except (
        onnx.shape_inference.InferenceError
    ):  # contradictions inside: the parser will name the node
        return proto


def _refusal(proto: onnx.ModelProto, index: int, fault: Fault) -> Refusal:
    node = proto.graph.node[index] if index >= 0 else onnx.NodeProto(name="model")
    is_outer = not fault.inside and node.op_type == fault.operator
    name = (
        "/".join((*fault.inside, fault.node or fault.operator))
        if fault.inside
        else node.name or node.output[0]
    )
    operator = operator_of(node) if is_outer else fault.operator
    return Refusal(
        node=name,
        operator=operator,
        opset=_opset(proto, operator),
        reason=fault.reason,
        remedy=_remedy(fault.reason, operator),
    )


def _bodies(proto: onnx.ModelProto, index: int, parser: Any) -> Iterator[Refusal]:
    """Operators without an importer in the branches and bodies of a refused node, of which the
    parser names only the first.
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
    if "zero point" in reason:
        return "quantise to int8 with zero point 0 (activation: int8)"
    if re.search(r"\btypes?\b", reason):
        return f"insert a Cast before this node (`simplify.surgery`), {ANOTHER_BACKEND}"
    if "importer" in reason or "plugin" in reason:
        return f"{_way_around(operator)}, {ANOTHER_BACKEND}"
    return f"correct this node in the model (`simplify.surgery`), {ANOTHER_BACKEND}"


def _way_around(operator: str) -> str:
    """How a model does without an operator that TensorRT does not know."""
    surgery = "replace it by surgery (`simplify.surgery`)"
    first = min(
        (
            schema.since_version
            for schema in onnx.defs.get_all_schemas_with_history()
            if operator_of_schema(schema) == operator
        ),
        default=0,
    )
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
    wanted = DEFAULT_DOMAINS if domain in DEFAULT_DOMAINS else (domain,)
    return max(
        (int(entry.version) for entry in proto.opset_import if entry.domain in wanted), default=0
    )


def _interface(model: OnnxModel, renames: bool) -> Iterator[Refusal]:
    """Inputs and outputs whose dtype or name the engine could not keep."""
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
    """Q and DQ nodes of uint8: the parser only warns, takes them for int8, and every value over 127
    is wrong.
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
                yield (
                    index,
                    _refusal(proto, index, fault).model_copy(
                        update={"remedy": _remedy("zero point", node.op_type)}
                    ),
                )


def _element_types(proto: onnx.ModelProto) -> Mapping[str, str]:
    """numpy's name of the dtype of every tensor of the main graph that is known."""
    values = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
    types = {value.name: type_name(value.type.tensor_type.elem_type) for value in values}
    return types | {tensor.name: type_name(tensor.data_type) for tensor in proto.graph.initializer}


def _without(
    proto: onnx.ModelProto, refused: Container[int], foreign: set[str]
) -> tuple[onnx.ModelProto, list[int]]:
    """The graph without the refused nodes and without `foreign` inputs, and where each node that is
    left was.

    What a refused node makes becomes an input where its type and rank are known; where they are
    not, the nodes that read it go too.
    """
    known = {
        value.name: value
        for value in (*proto.graph.value_info, *proto.graph.output)
        if _is_known(value)
    }
    rest = onnx.ModelProto()
    rest.CopyFrom(proto)
    for field in ("node", "input", "output"):
        rest.graph.ClearField(field)
    rest.graph.input.extend(value for value in proto.graph.input if value.name not in foreign)
    lost = {value.name for value in proto.graph.input if value.name in foreign}
    kept: list[int] = []
    for index, node in enumerate(proto.graph.node):
        if index not in refused and not lost & set(_reads(node)):
            rest.graph.node.append(node)
            kept.append(index)
            continue
        stand_ins = [name for name in node.output if index in refused and name in known]
        rest.graph.input.extend(known[name] for name in stand_ins)
        lost |= set(node.output) - set(stand_ins)
    made = {name for index in kept for name in proto.graph.node[index].output}
    rest.graph.output.extend(
        value for value in proto.graph.output if value.name in made and value.name not in foreign
    )
    return rest, kept


def _is_known(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type) and value.type.tensor_type.HasField("shape")


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield from graphs_of(attribute.g)


def _reads(node: onnx.NodeProto) -> Sequence[str]:
    """Tensors a node reads, those that its subgraphs take from outside too."""
    return [
        *node.input,
        *(name for graph in _subgraphs(node) for deep in graph.node for name in deep.input),
    ]
