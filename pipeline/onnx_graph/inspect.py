"""What an ONNX graph holds: its tensors, operators and interface. Nothing here reads a file.

`compare.py` runs and compares graphs, `flops.py` counts their FLOPs.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import onnx

from pipeline.core import Dim, OnnxModel, TensorSpec
from pipeline.errors import InternalError, ModelError, PlanError

INTERFACE_TYPES = frozenset(
    [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
    ]
)  # what every backend can bind; the rest is refused by name
SIZED_BY_VALUES = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})
SCATTERS = frozenset(
    {"ScatterND", "ScatterElements", "Scatter"}
)  # their output has the shape of their first input
DEFAULT_DOMAINS = ("", "ai.onnx")
BETWEEN = frozenset({"Where", "Cast", "Identity", "Dropout", "QuantizeLinear", "DequantizeLinear"})
"""Operators between Softmax and the product with the values."""


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all the subgraphs of its nodes (If, Loop, Scan)."""
    yield graph
    yield from _graphs_within(graph)


def _graphs_within(body: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto]:
    for node in body.node:
        for attribute in node.attribute:
            if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                for subgraph in (attribute.g, *attribute.graphs):
                    yield from graphs_of(subgraph)


def tensors_of(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every constant of a model: initializers and attributes, dense and sparse, in subgraphs and
    functions too.
    """
    graphs = [
        *graphs_of(proto.graph),
        *(graph for function in proto.functions for graph in _graphs_within(function)),
    ]
    attributes = [
        attribute
        for body in (*graphs, *proto.functions)
        for node in body.node
        for attribute in node.attribute
    ]
    sparse = [tensor for graph in graphs for tensor in graph.sparse_initializer]
    for graph in graphs:
        yield from graph.initializer
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            sparse.append(attribute.sparse_tensor)
        sparse += attribute.sparse_tensors
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def bytes_of_tensor(tensor: onnx.TensorProto) -> int:
    """Bytes of a constant by its dims and dtype, without reading its values; 0 for strings."""
    name = type_name(tensor.data_type)
    if name in ("string", "undefined"):
        return 0
    bits = (
        4
        if name.endswith("int4") or name.startswith("float4")
        else 2
        if name.endswith("int2")
        else 0
    )
    bits = bits or 8 * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    return int(math.prod(tensor.dims) * bits + 7) // 8


def type_name(elem_type: int) -> str:
    """numpy's name of an ONNX element type; those that numpy lacks in lower case ("bfloat16",
    "string", "float8e5m2").
    """
    if elem_type not in onnx.TensorProto.DataType.values():
        raise ModelError(
            f"tensor element type {elem_type} is not one that onnx {onnx.__version__} knows",
            "export the model again",
        )
    name = str(onnx.TensorProto.DataType.Name(elem_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def operator_of(node: onnx.NodeProto) -> str:
    """`Conv`, or `com.microsoft::Gelu` outside the default domain."""
    return node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"


def kept_nodes(graph: onnx.GraphProto, patterns: tuple[str, ...]) -> frozenset[str]:
    """Names of the nodes that the patterns match; PlanError, with near names, for one that matches
    nothing.
    """
    names = [node.name for node in graph.node]
    matching: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise PlanError(
                f"keep_fp32: no node matches '{pattern}'",
                f"names of the simplified graph that come near: {', '.join(near)}",
            )
        matching.update(matches)
    return frozenset(matching)


def changed_interface(before: OnnxModel, after: OnnxModel) -> str:
    """How names, order, dtypes or dimensions of inputs or outputs changed; empty if they did
    not.
    """
    for role, old, new in (
        ("inputs", before.inputs, after.inputs),
        ("outputs", before.outputs, after.outputs),
    ):
        was, became = (
            ", ".join(
                f"{spec.name} {spec.dtype}[{', '.join(map(str, spec.shape))}]" for spec in specs
            )
            for specs in (old, new)
        )
        if was != became:
            return f"{role} were {was} and became {became}"
    return ""


def with_same_interface(source: OnnxModel, made: OnnxModel) -> OnnxModel:
    """The model made; InternalError unless it takes and gives what its source does."""
    if changed := changed_interface(source, made):
        raise InternalError(f"the conversion changed the model's interface: {changed}")
    return made


def opset_of(proto: onnx.ModelProto) -> int:
    """Version of the default operator set."""
    versions = [entry.version for entry in proto.opset_import if entry.domain in DEFAULT_DOMAINS]
    if not versions:
        raise ModelError(
            "the model imports no default operator set",
            "export the model again, with opset 13 or later",
        )
    return int(max(versions))


def specs_of(proto: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs in order. A dynamic dimension without a name is called `<tensor>_<axis>`;
    initializers are no inputs.
    """
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = tuple(
        _spec(value, "input") for value in proto.graph.input if value.name not in constants
    )
    known = {symbol for spec in inputs for symbol in spec.symbols}
    tainted = _sized_by_values(proto.graph)
    outputs = []
    for value in _ranked_outputs(proto):
        spec = _spec(value, "output")
        unknown = bool(set(spec.symbols) - known) or (bool(spec.symbols) and spec.name in tainted)
        outputs.append(spec.model_copy(update={"kind": "data-dependent"}) if unknown else spec)
    return inputs, tuple(outputs)


def _ranked_outputs(proto: onnx.ModelProto) -> Iterable[onnx.ValueInfoProto]:
    """The graph's outputs, their shapes completed by shape inference where the file leaves
    something open.
    """
    declared = list(proto.graph.output)
    if all(
        not v.type.HasField("tensor_type")
        or (_is_ranked(v) and all(map(_is_named, v.type.tensor_type.shape.dim)))
        for v in declared
    ):
        return declared
    try:
        outputs = list(onnx.shape_inference.infer_shapes(proto, data_prop=True).graph.output)
    except (
        onnx.shape_inference.InferenceError
    ):  # contradictions inside; the declared interface still stands
        return declared
    for dim in (dim for value in outputs for dim in value.type.tensor_type.shape.dim):
        if dim.dim_param.startswith("unk__"):  # shape inference's own name for "unknown"
            dim.ClearField("dim_param")
    return outputs


def _is_ranked(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


def _is_named(dim: onnx.TensorShapeProto.Dimension) -> bool:
    return bool(dim.dim_param) or dim.HasField("dim_value")


def _spec(value: onnx.ValueInfoProto, role: str) -> TensorSpec:
    kind = value.type.WhichOneof("value") or "no type"
    advice = "change the model so that it takes and returns plain numeric tensors"
    if kind != "tensor_type":
        raise ModelError(
            f"{role} '{value.name}' is of kind {kind.removesuffix('_type')}, expected a tensor",
            advice,
        )
    dtype = type_name(value.type.tensor_type.elem_type)
    if dtype not in INTERFACE_TYPES:
        raise ModelError(
            f"{role} '{value.name}' holds {dtype}, expected one of"
            f" {', '.join(sorted(INTERFACE_TYPES))}",
            advice,
        )
    if not _is_ranked(value):
        raise ModelError(
            f"{role} '{value.name}' has no shape, not even a rank",
            "export the model with the shapes of its inputs and outputs",
        )
    shape = tuple(
        _dim(dim, f"{value.name}_{axis}")
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
    )
    return TensorSpec(
        name=value.name,
        dtype=dtype,
        shape=shape,
        kind="dynamic" if any(isinstance(d, str) for d in shape) else "static",
    )


def _dim(dim: onnx.TensorShapeProto.Dimension, unnamed: str) -> Dim:
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # some exporters write -1 for "dynamic"
        return int(dim.dim_value)
    return str(dim.dim_param) or unnamed


def _sized_by_values(graph: onnx.GraphProto) -> set[str]:
    """Tensors whose size may depend on values: made through NonZero and the like."""
    tainted: set[str] = set()
    for node in graph.node:
        read = node.input[:1] if node.op_type in SCATTERS else node.input
        inner = {
            deep.op_type
            for a in node.attribute
            if a.type == onnx.AttributeProto.GRAPH
            for g in graphs_of(a.g)
            for deep in g.node
        }
        if SIZED_BY_VALUES & {node.op_type, *inner} or tainted & set(read):
            tainted.update(node.output)
    return tainted


def attentions(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Return the names of the Softmax nodes with a matrix product behind them.

    A classifier's last Softmax is not among them.
    """
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    names = []
    for softmax in (node for node in graph.node if node.op_type == "Softmax"):
        after = list(readers[softmax.output[0]])
        for node in after:  # the loop appends to it
            if node.op_type in BETWEEN:
                after += readers[node.output[0]]
        if any(node.op_type == "MatMul" for node in after):
            names.append(softmax.name)
    return tuple(names)
