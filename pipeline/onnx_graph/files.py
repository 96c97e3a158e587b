"""Access to the files of an ONNX model, which are untrusted.

External data is read only from the model's own folder. Inputs and outputs that cannot be bound to
arrays are refused by name.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from google.protobuf.message import DecodeError

from pipeline.core.artifacts import Note, OnnxModel
from pipeline.core.recipe import Precision
from pipeline.errors import ModelError
from pipeline.onnx_graph.inspect import (
    bytes_of_tensor,
    graphs_of,
    operator_of,
    opset_of,
    specs_of,
    tensors_of,
)

PROTOBUF_LIMIT_BYTES = 2**31 - 1  # protobuf's own limit; larger models need external data
EXTERNAL_ABOVE_BYTES = 1_500_000_000  # below the limit, with room for the graph itself
# Tensors of up to this size may hold shapes and axes. They are read even without weights.
SMALL_BYTES = 65_536
VALUE_FIELDS = (
    "raw_data",
    "float_data",
    "int32_data",
    "int64_data",
    "double_data",
    "uint64_data",
)
"""The fields of a TensorProto that hold its values."""


def read_proto(path: Path, weights: bool = True) -> onnx.ModelProto:
    """Read a model.

    Without `weights` the values of tensors over 64 KiB are left out. Their names, dtypes and dims
    stay, and also the location of external data. ModelError if the file is damaged, or if external
    data is missing, too short or outside its folder.
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
            f"'{path}' is not a complete ONNX file: {error}", "copy or export the model again"
        ) from error
    if not proto.graph.output:
        raise ModelError(
            f"'{path}' holds no ONNX graph with outputs", "copy or export the model again"
        )
    for tensor in tensors_of(proto):
        with_values = bytes_of_tensor(tensor) <= SMALL_BYTES or weights
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _read_external(tensor, path, with_values)
        elif not with_values:
            for field in VALUE_FIELDS:
                tensor.ClearField(field)
    _check_order(proto.graph, path)
    return proto


def _read_external(tensor: onnx.TensorProto, model: Path, load: bool) -> None:
    """Check the location of a tensor's bytes, and copy them into the tensor if `load`."""
    file, offset, length = _external_range(tensor, model)
    if not load:
        return
    with file.open("rb") as stream:
        stream.seek(offset)
        tensor.raw_data = stream.read(length)
    tensor.data_location = onnx.TensorProto.DEFAULT
    tensor.ClearField("external_data")


def _external_range(tensor: onnx.TensorProto, model: Path) -> tuple[Path, int, int]:
    """Return the file, offset and length of an external tensor.

    ModelError unless the file is inside the model's folder and long enough.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"tensor '{tensor.name}' of '{model}' has external data at '{location}'"
    file = _external_file(location, model.parent.resolve(), where)
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


def _external_file(location: str, folder: Path, where: str) -> Path:
    """Return the file at a location inside the model's folder. `where` begins each message."""
    if (
        not location
        or location.startswith("/")
        or ".." in PurePosixPath(location).parts
        or {"\\", "\0"} & set(location)
        or PureWindowsPath(location).is_absolute()
    ):
        raise ModelError(
            f"{where}: expected a relative path without '..'",
            "keep the data in the model's own folder",
        )
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
    return file


def _check_order(graph: onnx.GraphProto, path: Path) -> None:
    """Raise ModelError if a node or an output reads a tensor that no earlier node produces.

    Only the main graph is checked.
    """
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    known |= {tensor.values.name for tensor in graph.sparse_initializer} | {""}
    advice = "the file is damaged or not sorted: export the model again"
    for node in graph.node:
        missing = [name for name in node.input if name not in known]
        if missing:
            raise ModelError(
                f"node '{node.name}' ({node.op_type}) of '{path}' reads '{missing[0]}', which"
                " no earlier node produces",
                advice,
            )
        known.update(node.output)
    for value in graph.output:
        if value.name not in known:
            raise ModelError(f"output '{value.name}' of '{path}' is produced by no node", advice)


def write_proto(
    proto: onnx.ModelProto, path: Path, external_above_bytes: int = EXTERNAL_ABOVE_BYTES
) -> None:
    """Write a model and read it back as a check.

    Weights of more than 1.5 GB move from `proto` to the file `<file>.data` beside it.
    """
    data = path.with_name(path.name + ".data")
    data.unlink(missing_ok=True)  # onnx appends to an existing file
    if sum(bytes_of_tensor(tensor) for tensor in tensors_of(proto)) > external_above_bytes:
        for tensor in proto.graph.initializer:
            # only raw data can be external
            if not tensor.HasField("raw_data") and tensor.data_type != onnx.TensorProto.STRING:
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
    """Return the files with a model's external data, sorted, without repetitions."""
    proto = onnx.ModelProto.FromString(path.read_bytes())
    files: set[Path] = set()
    for tensor in tensors_of(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            file, *_ = _external_range(tensor, path)
            files.add(file)
    return tuple(sorted(files))


def copy_model(source: Path, target: Path) -> None:
    """Copy a graph file to `target`, and its external data to the same relative paths."""
    shutil.copyfile(source, target)
    for file in external_files(source):
        copy = target.parent / file.relative_to(source.parent.resolve())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def file_size(path: Path) -> int:
    """Return the bytes of a model with its external data."""
    return path.stat().st_size + sum(file.stat().st_size for file in external_files(path))


def file_digest(path: Path) -> str:
    """Return the sha256 of the graph file and of all its external data, streamed."""
    total = hashlib.sha256()
    for file in (path, *external_files(path)):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def operator_histogram(path: Path) -> dict[str, int]:
    """Count the nodes of each operator, also in subgraphs, the most frequent operator first.

    Operators outside the default domain are `domain::Operator`.
    """
    proto = read_proto(path, weights=False)
    counts = Counter(operator_of(node) for graph in graphs_of(proto.graph) for node in graph.node)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def onnx_model(
    root: Path, file: str, precision: Precision = Precision.FP32, notes: tuple[Note, ...] = ()
) -> OnnxModel:
    """Describe the model at root/file: digest, opset, inputs and outputs.

    ModelError if it cannot be read, or if its interface cannot be bound to arrays.
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
