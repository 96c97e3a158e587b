"""Read-only ONNX inspection and careful file access. `compare.py` runs and compares graphs,
`flops.py` counts their FLOPs.

A file is trusted with nothing: external data is read only from the model's own folder, and what
cannot be bound to arrays is refused by name.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from pipeline.core import Dim, Note, OnnxModel, Precision, Tensors, TensorSpec, dtype_of
from pipeline.errors import InternalError, ModelError, PlanError

PROTOBUF_LIMIT_BYTES = 2**31 - 1  # protobuf's own; more must lie in external data
EXTERNAL_ABOVE_BYTES = 1_500_000_000  # below the limit, with room for the graph itself
SMALL_BYTES = (
    65_536  # tensors up to here may hold shapes and axes, so they are read even without weights
)

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


# --- files ---


def read_proto(path: Path, weights: bool = True) -> onnx.ModelProto:
    """Read a model; ModelError if it is corrupt or its external data is missing, cut short or
    outside its folder.

    Without `weights` the values of tensors over 64 KiB are left out; their names, dtypes and dims
    stay, and the location of external ones.
    """
    if not path.is_file():
        raise ModelError(f"no model at '{path}'", "give the path of an .onnx file")
    if path.stat().st_size > PROTOBUF_LIMIT_BYTES:
        raise ModelError(
            f"'{path}' is over 2 GiB, more than protobuf can hold",
            "save it with its weights as external data",
        )
    try:
        proto = onnx.ModelProto.FromString(path.read_bytes())
    except DecodeError as error:
        raise ModelError(
            f"'{path}' is not a whole ONNX file: {error}", "copy or export the model again"
        ) from error
    if not proto.graph.output:
        raise ModelError(
            f"'{path}' holds no ONNX graph with outputs", "copy or export the model again"
        )
    for tensor in tensors_of(proto):
        keep = bytes_of_tensor(tensor) <= SMALL_BYTES or weights
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _read_external(tensor, path, keep)
        elif not keep:
            for field in (
                "raw_data",
                "float_data",
                "int32_data",
                "int64_data",
                "double_data",
                "uint64_data",
            ):
                tensor.ClearField(field)
    _check_wiring(proto.graph, path)
    return proto


def _read_external(tensor: onnx.TensorProto, model: Path, load: bool) -> None:
    """Check where a tensor's bytes lie, and take them into the tensor if `load`."""
    file, offset, length = _external_range(tensor, model)
    if not load:
        return
    with file.open("rb") as stream:
        stream.seek(offset)
        tensor.raw_data = stream.read(length)
    tensor.data_location = onnx.TensorProto.DEFAULT
    tensor.ClearField("external_data")


def _external_range(tensor: onnx.TensorProto, model: Path) -> tuple[Path, int, int]:
    """The file, offset and length of an external tensor; ModelError unless the file is inside the
    model's folder and long enough.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"tensor '{tensor.name}' of '{model}' has external data at '{location}'"
    parts = PurePosixPath(location).parts
    if (
        not location
        or location.startswith("/")
        or ".." in parts
        or {"\\", "\0"} & set(location)
        or PureWindowsPath(location).is_absolute()
    ):
        raise ModelError(
            f"{where}: expected a relative path without '..'",
            "keep the data in the model's own folder",
        )
    folder = model.parent.resolve()
    file = (folder / location).resolve()
    if not file.is_relative_to(folder):
        raise ModelError(
            f"{where}, a link to outside the model's folder",
            "put the data itself into the model's own folder",
        )
    if not file.is_file():
        raise ModelError(
            f"{where}, which is missing", f"put '{PurePosixPath(location).name}' beside the model"
        )
    size = file.stat().st_size
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size - offset))
    except ValueError as error:
        raise ModelError(
            f"{where} with offset or length that is not a number: {error}", "export the model again"
        ) from error
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            f"{where}: expected bytes {offset} to {offset + length}, the file has {size}",
            "copy or export the model again",
        )
    if length != bytes_of_tensor(tensor):
        raise ModelError(
            f"{where}: expected {bytes_of_tensor(tensor)} bytes for its shape, got {length}",
            "export the model again",
        )
    return file, offset, length


def _check_wiring(graph: onnx.GraphProto, path: Path) -> None:
    """ModelError if a node of the main graph, or an output, reads a tensor that nothing before it
    makes.
    """
    made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    made |= {tensor.values.name for tensor in graph.sparse_initializer} | {""}
    advice = "the file is damaged or not sorted: export the model again"
    for node in graph.node:
        missing = [name for name in node.input if name not in made]
        if missing:
            raise ModelError(
                f"node '{node.name}' ({node.op_type}) of '{path}' reads '{missing[0]}', which"
                " nothing before it makes",
                advice,
            )
        made.update(node.output)
    for value in graph.output:
        if value.name not in made:
            raise ModelError(f"output '{value.name}' of '{path}' is made by no node", advice)


def write_proto(
    proto: onnx.ModelProto, path: Path, external_above_bytes: int = EXTERNAL_ABOVE_BYTES
) -> None:
    """Write a model and read it back to check it. Weights of more than 1.5 GB go to `<file>.data`
    beside it, and leave `proto`.
    """
    data = path.with_name(path.name + ".data")
    data.unlink(missing_ok=True)  # onnx appends to a file that is there
    if sum(bytes_of_tensor(tensor) for tensor in tensors_of(proto)) > external_above_bytes:
        for tensor in proto.graph.initializer:
            if (
                not tensor.HasField("raw_data") and tensor.data_type != onnx.TensorProto.STRING
            ):  # only raw data can lie outside
                tensor.CopyFrom(
                    onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name)
                )
        onnx.save_model(
            proto,
            str(path),
            save_as_external_data=True,
            location=data.name,
            size_threshold=SMALL_BYTES,
        )
    else:
        path.write_bytes(proto.SerializeToString())
    read_proto(path, weights=False)


def external_files(path: Path) -> tuple[Path, ...]:
    """The files that hold a model's external data, sorted, each once."""
    proto = onnx.ModelProto.FromString(path.read_bytes())
    return tuple(
        sorted(
            {
                _external_range(t, path)[0]
                for t in tensors_of(proto)
                if t.data_location == onnx.TensorProto.EXTERNAL
            }
        )
    )


def copy_model(source: Path, target: Path) -> None:
    """Copy a graph file to `target`, and its external data to the same places beside it."""
    shutil.copyfile(source, target)
    for file in external_files(source):
        place = target.parent / file.relative_to(source.parent.resolve())
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


def file_size(path: Path) -> int:
    """Bytes of a model with its external data."""
    return path.stat().st_size + sum(file.stat().st_size for file in external_files(path))


def file_digest(path: Path) -> str:
    """sha256 of the graph file and of all its external data, streamed."""
    whole = hashlib.sha256()
    for file in (path, *external_files(path)):
        with file.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


# --- what a graph holds ---


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all the subgraphs of its nodes (If, Loop, Scan)."""
    yield graph
    yield from _graphs_within(graph)


def _graphs_within(body: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto]:
    for node in body.node:
        for attribute in node.attribute:
            for inner in (
                (attribute.g, *attribute.graphs)
                if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
                else ()
            ):
                yield from graphs_of(inner)


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
    sparse = [each for graph in graphs for each in graph.sparse_initializer]
    for graph in graphs:
        yield from graph.initializer
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        sparse += [
            *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
            *attribute.sparse_tensors,
        ]
    for each in sparse:
        yield from (each.values, each.indices)


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


def operator_histogram(path: Path) -> dict[str, int]:
    """Nodes per operator, subgraphs counted too, most frequent first; `domain::Operator` outside
    the default domain.
    """
    proto = read_proto(path, weights=False)
    counts = Counter(operator_of(node) for graph in graphs_of(proto.graph) for node in graph.node)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def operator_of(node: onnx.NodeProto) -> str:
    """`Conv`, or `com.microsoft::Gelu` outside the default domain."""
    return node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"


def kept_nodes(graph: onnx.GraphProto, patterns: tuple[str, ...]) -> frozenset[str]:
    """Names of the nodes that the patterns match; PlanError, with near names, for one that matches
    nothing.
    """
    names = [node.name for node in graph.node]
    kept: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise PlanError(
                f"keep_fp32: no node matches '{pattern}'",
                f"names of the simplified graph that come near: {', '.join(near)}",
            )
        kept.update(matches)
    return frozenset(kept)


# --- the interface ---


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


def onnx_model(
    root: Path, file: str, precision: Precision = Precision.FP32, notes: tuple[Note, ...] = ()
) -> OnnxModel:
    """Describe the model at root/file: digest, opset, specs. ModelError if it cannot be read or its
    interface cannot be bound to arrays.
    """
    path = root / file
    proto = read_proto(path, weights=False)
    inputs, outputs = specs_of(proto)
    digest = file_digest(path)
    return OnnxModel(
        root=root,
        file=file,
        digest=digest,
        opset=opset_of(proto),
        inputs=inputs,
        outputs=outputs,
        precision=precision,
        notes=notes,
    )


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


# --- generated inputs ---


def draw_feeds(
    specs: tuple[TensorSpec, ...],
    sizes: Mapping[str, int],
    seed: int,
    values: Mapping[str, Sequence[int]] | None = None,
    seen: bool = False,
) -> Tensors:
    """Generated inputs: floats standard normal, bool even odds, (u)int8 their full range, wider
    integers 0 or 1.

    Wider integers are mostly ids and masks, and 0 and 1 are valid in every table, however small.
    Inputs named in `values` hold those: `profile.values_at(point)` for what decides a shape.
    `seen`: every row of bool and wider integers begins with 1, so that no mask hides all of it.
    """
    random = np.random.default_rng(seed)
    drawn = {spec.name: _draw(random, dtype_of(spec.dtype), spec.resolve(sizes)) for spec in specs}
    for array in drawn.values() if seen else ():
        if array.ndim and array.dtype.kind in "iub" and array.dtype.name not in ("int8", "uint8"):
            array[..., :1] = 1
    fixed = {
        name: np.array(values[name], array.dtype).reshape(array.shape)
        for name, array in drawn.items()
        if values and name in values
    }
    return drawn | fixed


def _draw(
    random: np.random.Generator, dtype: np.dtype[np.generic], shape: tuple[int, ...]
) -> NDArray[np.generic]:
    if dtype.name in ("int8", "uint8"):
        limits = np.iinfo(dtype.name)
        return np.asarray(random.integers(limits.min, limits.max, shape, endpoint=True)).astype(
            dtype
        )
    if dtype.kind in "iub":
        return np.asarray(random.integers(0, 2, shape)).astype(dtype)
    return np.asarray(random.standard_normal(shape)).astype(dtype)
