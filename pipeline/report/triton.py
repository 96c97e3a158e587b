"""Export an engine as a model of Triton Inference Server.

The files are DIR/NAME/config.pbtxt and DIR/NAME/VERSION/model.plan or model.onnx.

    batch = call_in_child(prove_batch, engine, (), name="batch proof")      Triton pads nothing
    export_triton(engine, batch, parse_name("resnet50/3"), Path("models"))

The config is written as a message of Triton's model_config.proto. It was never run under Triton.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pipeline.core.artifacts import CODE_BACKENDS, Engine
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import PlanError, UnsupportedError
from pipeline.report.bundle import check_if_sealed
from pipeline.serving_inputs import BatchSpec

# The name that Triton's backend expects.
FILES = {"tensorrt": "model.plan", "onnxruntime": "model.onnx"}
TYPES = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "bool": "BOOL",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
}
DESCRIPTORS = Path(__file__).with_name("model_config.binpb")  # of Triton's proto: `make protos`
OURS = ("engine.json", "artifact.json")  # files of Crucible beside the engine
# Triton takes numbers without a leading 0 as versions.
NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model, as Triton's folders name it."""

    name: str
    version: int


def parse_name(text: str) -> ModelVersion:
    """Parse `resnet50/3`. PlanError for anything else."""
    match = NAME.fullmatch(text)
    if match is None:
        raise PlanError(
            f"expected NAME/VERSION, a name and a number from 1 on, got '{text}'",
            "for example --triton resnet50/1",
        )
    return ModelVersion(match[1], int(match[2]))


def rows_together(engine: Engine, batch: BatchSpec) -> int:
    """Return the largest batch that Triton may form; 1 if every request must run alone.

    It follows from the proof in `batch`. Triton batches along axis 0 of every input and output, and
    a batch has any number of rows from 1 on.
    """
    if not batch.proved or set(batch.axes.values()) != {0}:
        return 1
    return min(batch.maximum, _reach(engine.profiles, str(engine.inputs[0].shape[0])))


def config_text(engine: Engine, batch: BatchSpec, name: str) -> str:
    """Return the text of config.pbtxt.

    If rows may run together, shapes are without the batch axis, as Triton expects.
    """
    return _text(_config(engine, batch, name))


def check_target(engine: Engine, model: ModelVersion, folder: Path) -> Path:
    """Return the version's folder.

    UnsupportedError for an engine that cannot be exported. PlanError if the version exists already.
    """
    if engine.target.backend in CODE_BACKENDS:
        message = "a PyTorch program needs a PyTorch backend of Triton's that takes .pt2 packages"
        raise UnsupportedError(
            f"{message}, which was never tried",
            "serve it by `crucible promote` and `load`, or compile with candidates of tensorrt",
        )
    if engine.target.backend not in FILES:
        message = (
            f"expected an engine of {' or '.join(FILES)} for Triton, got one of"
            f" {engine.target.backend}"
        )
        raise UnsupportedError(message, "compile with such a candidate")
    target = folder / model.name / str(model.version)
    if target.exists():
        raise PlanError(f"'{target}' exists already", "give another version, or remove that one")
    return target


def export_triton(engine: Engine, batch: BatchSpec, model: ModelVersion, folder: Path) -> Path:
    """Write the model below `folder`, a repository that may hold other models and versions.

    Returns the model's folder. Errors are those of `check_target`, and PlanError if other versions
    need a different config, because Triton has one config for all versions of a model.
    """
    home, target = folder / model.name, check_target(engine, model, folder)
    config = _config(engine, batch, model.name)
    _check_others(home, config)
    home.mkdir(parents=True, exist_ok=True)
    work = home / f".{model.version}.{os.getpid()}"
    try:
        _copy_files(engine, work)
        check_if_sealed(engine)  # the copy is of the engine that was proved
        work.joinpath("config.pbtxt").write_text(_text(config), encoding="utf-8")
        work.joinpath("config.pbtxt").replace(home / "config.pbtxt")
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return home


def remarks(engine: Engine, batch: BatchSpec) -> list[str]:
    """Return what the operator of Triton must know about this engine."""
    target = engine.target
    if target.backend == "tensorrt":
        lines = [
            f"Triton must have TensorRT {target.version}, and a GPU of compute capability"
            f" {target.compute_capability}"
        ]
    else:
        lines = [
            f"checked and measured with ONNX Runtime {target.version} on {target.device}; Triton"
            " may have another version"
        ]
    lines.append(_batching(engine, batch))
    if target.backend == "onnxruntime" and engine.recipe.precision is Precision.INT8:
        lines.append(
            "Crucible turns off optimisers of ONNX Runtime that would turn some 8-bit nodes into"
            " float nodes; Triton cannot turn them off"
        )
    plugins = _plugins(engine)
    if plugins:
        lines.append(f"needs its plugins: LD_PRELOAD={':'.join(map(str, plugins))}")
    return lines


# -- the config --------------------------------------------------------------


@cache
def _message_class() -> type[Message]:
    """Return the class of Triton's ModelConfig, in a pool of its own.

    tritonclient adds the same name to protobuf's default pool, which takes each name once.
    """
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    kind: type[Message] = GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))
    return kind


def _text(config: Message) -> str:
    text: str = text_format.MessageToString(
        config, as_utf8=True, use_short_repeated_primitives=True
    )
    return text


def _config(engine: Engine, batch: BatchSpec, name: str) -> Message:
    most = rows_together(engine, batch)
    batched = most > 1
    fields: dict[str, Any] = {
        "name": name,
        "backend": engine.target.backend,
        "max_batch_size": most if batched else 0,
        "input": [_tensor("input", spec, batched) for spec in engine.inputs],
        "output": [_tensor("output", spec, batched) for spec in engine.outputs],
        "instance_group": [_instances(engine)],
    }
    if batched:
        symbol = str(engine.inputs[0].shape[0])
        tuned = {profile.dims[symbol].opt for profile in engine.profiles}
        sizes = sorted(size for size in tuned if size <= most)
        fields["dynamic_batching"] = {"preferred_batch_size": sizes}
    if engine.target.backend == "onnxruntime" and engine.threads:
        threads = {"string_value": str(engine.threads)}
        fields["parameters"] = {"intra_op_thread_count": threads}
    config: Message = json_format.ParseDict(fields, _message_class()())
    return config


def _check_others(home: Path, config: Message) -> None:
    """Raise PlanError if other versions of the model exist with a different config."""
    versions = sorted(path.name for path in home.glob("[1-9]*"))
    if versions and _read(home / "config.pbtxt") != config:
        message = (
            f"'{home}' holds version {', '.join(versions)}, whose inputs, batches or files differ"
            " from those of this engine"
        )
        raise PlanError(message, "give another name, or export into another folder")


def _read(path: Path) -> Message | None:
    """Read a config; None if the text is not one."""
    try:
        config: Message = text_format.Parse(path.read_text(encoding="utf-8"), _message_class()())
    except text_format.ParseError:
        return None
    return config


def _tensor(kind: str, spec: TensorSpec, batched: bool) -> dict[str, Any]:
    if spec.dtype not in TYPES:
        raise UnsupportedError(
            f"Triton has no type for {kind} '{spec.name}', which is {spec.dtype}",
            "cast it inside the model",
        )
    dims = [dim if isinstance(dim, int) else -1 for dim in spec.shape[1 if batched else 0 :]]
    fields: dict[str, Any] = {
        "name": spec.name,
        "data_type": f"TYPE_{TYPES[spec.dtype]}",
        "dims": dims or [1],
    }
    if not dims:  # Triton has no scalars: one element, reshaped to no dimensions
        fields["reshape"] = {}
    if spec.location == "host":
        fields["is_shape_tensor"] = True
    return fields


def _batching(engine: Engine, batch: BatchSpec) -> str:
    most = rows_together(engine, batch)
    if most > 1:
        return (
            f"up to {most} rows run together: proved on this engine, within"
            f" {batch.largest_error or 0:.2g} of an output's largest value"
        )
    if batch.proved:
        return (
            "every request runs alone: Triton's batches need rows along axis 0 of all inputs and"
            " outputs, and profiles that hold every number of them"
        )
    return f"every request runs alone: {batch.reason}"


def _instances(engine: Engine) -> dict[str, Any]:
    if engine.target.backend == "tensorrt":
        profiles = [str(number) for number in range(len(engine.profiles))]
        return {"count": 1, "kind": "KIND_GPU", "profile": profiles}
    return {"count": 1, "kind": "KIND_CPU"}


def _copy_files(engine: Engine, folder: Path) -> None:
    """Copy the model to `folder` under the name that Triton expects.

    A model in several files becomes a folder of that name, with a file of that name in it.
    """
    name = FILES[engine.target.backend]
    folder.mkdir()
    single = engine.target.backend == "tensorrt" or all(
        path.name in (engine.file, *OURS) for path in engine.root.iterdir()
    )
    if single:
        shutil.copyfile(engine.path, folder / name)
    else:
        shutil.copytree(engine.root, folder / name, ignore=shutil.ignore_patterns(*OURS))
        (folder / name / engine.file).rename(folder / name / name)


def _plugins(engine: Engine) -> list[Path]:
    return sorted((engine.root / "plugins").glob("*.so"))


def _reach(profiles: tuple[Profile, ...], symbol: str) -> int:
    """Return the largest n for which every batch of 1 to n rows is inside a profile; at least 1."""
    dims = [profile.dims[symbol] for profile in profiles if symbol in profile.dims]
    reach = 0
    for dim in sorted(dims, key=lambda dim: dim.min):
        if dim.min <= reach + 1:
            reach = max(reach, dim.max)
    return max(reach, 1)
