"""The tensors, operators and interface of an ONNX graph. Nothing here reads a file.

`compare.py` runs and compares graphs, `flops.py` counts their FLOPs.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import onnx

from pipeline import postprocess, preprocess
from pipeline.core.artifacts import OnnxModel
from pipeline.core.shapes import Dim, TensorSpec
from pipeline.errors import InternalError, ModelError, PlanError

# What every backend can bind; inputs and outputs of other types are refused by name.
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
)
SIZED_BY_VALUES = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})
# Operators whose output has the shape of their first input.
SCATTERS = frozenset({"ScatterND", "ScatterElements", "Scatter"})
DEFAULT_DOMAINS = ("", "ai.onnx")
ADDED = (preprocess.NODE_PREFIX, postprocess.NODE_PREFIX)
"""Prefixes of the nodes that the plan adds to a model."""
BETWEEN = frozenset({"Where", "Cast", "Identity", "Dropout", "QuantizeLinear", "DequantizeLinear"})
"""Operators between Softmax and the product with the values."""


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and all the subgraphs of its nodes (If, Loop, Scan)."""
    yield graph
    yield from _graphs_within(graph)


def _graphs_within(body: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto]:
    for node in body.node:
        yield from subgraphs_of(node)


def subgraphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the subgraphs of a node, and those of the nodes in them."""
    for attribute in node.attribute:
        if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
            for subgraph in (attribute.g, *attribute.graphs):
                yield from graphs_of(subgraph)


def tensors_of(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every constant of a model, including those in subgraphs, functions and training graphs.

    Constants are initializers and attributes, dense and sparse.
    """
    graphs = [
        *graphs_of(proto.graph),
        *(graph for function in proto.functions for graph in _graphs_within(function)),
        *(graph for info in proto.training_info for graph in graphs_of(info.initialization)),
        *(graph for info in proto.training_info for graph in graphs_of(info.algorithm)),
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
    """Return the bytes of a constant by its dims and dtype, without its values; 0 for strings."""
    name = type_name(tensor.data_type)
    if name in ("string", "undefined"):
        return 0
    if name.endswith("int4") or name.startswith("float4"):
        bits = 4
    elif name.endswith("int2"):
        bits = 2
    else:
        bits = 8 * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    return int(math.prod(tensor.dims) * bits + 7) // 8


def type_name(elem_type: int) -> str:
    """Return numpy's name of an ONNX element type.

    Types that numpy lacks have ONNX's name in lower case ("bfloat16", "string", "float8e5m2").
    """
    if elem_type not in onnx.TensorProto.DataType.values():
        raise ModelError(
            f"tensor element type {elem_type} is not one that onnx {onnx.__version__} knows",
            "export the model again",
        )
    name = str(onnx.TensorProto.DataType.Name(elem_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def operator_of(node: onnx.NodeProto) -> str:
    """Return `Conv`, or `com.microsoft::Gelu` outside the default domain."""
    return node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"


def kept_nodes(graph: onnx.GraphProto, patterns: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the nodes that stay in fp32: those that the patterns match.

    The steps of `preprocess` stay too: in 16 bits, the difference of a pixel and the mean would
    lose bits that the model's own input has. So do those of `postprocess`: scores that differ would
    become equal. PlanError, with similar names, for a pattern that matches no node.
    """
    names = [node.name for node in graph.node]
    matching = {name for name in names if name.startswith(ADDED)}
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise PlanError(
                f"keep_fp32: no node matches '{pattern}'",
                f"similar names in the simplified graph: {', '.join(near)}",
            )
        matching.update(matches)
    return frozenset(matching)


def changed_interface(before: OnnxModel, after: OnnxModel) -> str:
    """Describe a change in names, order, dtypes or dimensions of inputs or outputs; "" if none."""
    for role, old, new in (
        ("inputs", before.inputs, after.inputs),
        ("outputs", before.outputs, after.outputs),
    ):
        old_text, new_text = _specs_text(old), _specs_text(new)
        if old_text != new_text:
            return f"{role} were {old_text} and became {new_text}"
    return ""


def _specs_text(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(
        f"{spec.name} {spec.dtype}[{', '.join(map(str, spec.shape))}]" for spec in specs
    )


def with_same_interface(source: OnnxModel, result: OnnxModel) -> OnnxModel:
    """Return `result`; InternalError unless its inputs and outputs are those of `source`."""
    change = changed_interface(source, result)
    if change:
        raise InternalError(f"the conversion changed the model's interface: {change}")
    return result


def opset_of(proto: onnx.ModelProto) -> int:
    """Return the version of the default operator set."""
    versions = [entry.version for entry in proto.opset_import if entry.domain in DEFAULT_DOMAINS]
    if not versions:
        raise ModelError(
            "the model imports no default operator set",
            "export the model again, with opset 13 or later",
        )
    return int(max(versions))


def specs_of(proto: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return inputs and outputs in order.

    A dynamic dimension without a name is called `<tensor>_<axis>`. Initializers are no inputs.
    """
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = tuple(
        _spec(value, "input") for value in proto.graph.input if value.name not in constants
    )
    known = {symbol for spec in inputs for symbol in spec.symbols}
    sized_by_values = _sized_by_values(proto.graph)
    outputs = []
    for value in _ranked_outputs(proto):
        spec = _spec(value, "output")
        has_new_symbols = bool(set(spec.symbols) - known)
        if has_new_symbols or (spec.symbols and spec.name in sized_by_values):
            spec = spec.model_copy(update={"kind": "data-dependent"})
        outputs.append(spec)
    return inputs, tuple(outputs)


def _ranked_outputs(proto: onnx.ModelProto) -> Iterable[onnx.ValueInfoProto]:
    """Return the graph's outputs. Shape inference completes shapes that the file leaves open."""
    declared = list(proto.graph.output)
    if all(_is_complete(value) for value in declared):
        return declared
    try:
        outputs = list(onnx.shape_inference.infer_shapes(proto, data_prop=True).graph.output)
    # Shapes inside the graph contradict each other; the declared interface still holds.
    except onnx.shape_inference.InferenceError:
        return declared
    for value in outputs:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.startswith("unk__"):  # shape inference's own name for "unknown"
                dim.ClearField("dim_param")
    return outputs


def _is_complete(value: onnx.ValueInfoProto) -> bool:
    """Return True unless the rank of a tensor, or the size and name of a dimension, is missing."""
    if not value.type.HasField("tensor_type"):
        return True
    return _is_ranked(value) and all(map(_is_named, value.type.tensor_type.shape.dim))


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


def _dim(dim: onnx.TensorShapeProto.Dimension, default_name: str) -> Dim:
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # some exporters write -1 for "dynamic"
        return int(dim.dim_value)
    return str(dim.dim_param) or default_name


def _sized_by_values(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors whose size may depend on values: results of NonZero and the like."""
    tensors: set[str] = set()
    for node in graph.node:
        sources = node.input[:1] if node.op_type in SCATTERS else node.input
        if SIZED_BY_VALUES & _operators_within(node) or tensors & set(sources):
            tensors.update(node.output)
    return tensors


def _operators_within(node: onnx.NodeProto) -> set[str]:
    """Return the operator of a node and those of its subgraphs."""
    operators = {node.op_type}
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for graph in graphs_of(attribute.g):
                operators.update(inner.op_type for inner in graph.node)
    return operators


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
