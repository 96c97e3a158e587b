"""An engine as a model of Triton Inference Server: DIR/NAME/config.pbtxt and
DIR/NAME/VERSION/model.plan or model.onnx.

    batch = call_in_child(prove_batch, engine, (), name="batch proof")      Triton pads nothing
    export_triton(engine, batch, parse_name("resnet50/3"), Path("models"))

Written as a message of Triton's model_config.proto; not run under Triton.
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

from pipeline.core import CODE_BACKENDS, Engine, Precision, Profile, TensorSpec
from pipeline.errors import PlanError, UnsupportedError
from pipeline.report.bundle import check_if_sealed
from pipeline.serving_inputs import BatchSpec

FILES = {
    "tensorrt": "model.plan",
    "onnxruntime": "model.onnx",
}  # the name that Triton's backend expects
TYPES = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "bool": "BOOL",
} | {
    f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
DESCRIPTORS = Path(__file__).with_name("model_config.binpb")  # of Triton's proto: `make protos`
OURS = ("engine.json", "artifact.json")  # what else may lie beside the engine
NAME = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)/([1-9][0-9]*)"
)  # Triton takes numbers without a leading 0 as versions


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model, as Triton's folders name it."""

    name: str
    version: int


def parse_name(text: str) -> ModelVersion:
    """`resnet50/3`; PlanError for anything else."""
    match = NAME.fullmatch(text)
    if match is None:
        raise PlanError(
            f"expected NAME/VERSION, a name and a number from 1 on, got '{text}'",
            "for example --triton resnet50/1",
        )
    return ModelVersion(match[1], int(match[2]))


def rows_together(engine: Engine, batch: BatchSpec) -> int:
    """The most rows that Triton may run together, by what was proved; 1 if every request is to run
    alone.

    Triton's batches lie along axis 0 of every input and output, and have any number of rows from 1
    up.
    """
    if not batch.proved or set(batch.axes.values()) != {0}:
        return 1
    return min(batch.maximum, _reach(engine.profiles, str(engine.inputs[0].shape[0])))


def config_text(engine: Engine, batch: BatchSpec, name: str) -> str:
    """config.pbtxt. Where rows may run together the batch's axis is left out of shapes, as Triton
    wants; else they are given in full.
    """
    return _text(_config(engine, batch, name))


def check_place(engine: Engine, model: ModelVersion, folder: Path) -> Path:
    """The version's folder; UnsupportedError for an engine that Triton is not given here, PlanError
    if this version is there already.
    """
    if engine.target.backend in CODE_BACKENDS:
        message = "a PyTorch program needs a PyTorch backend of Triton's that takes .pt2 packages"
        raise UnsupportedError(
            f"{message}, which nobody has tried here",
            "serve it by `crucible promote` and `load`, or compile with candidates of tensorrt",
        )
    if engine.target.backend not in FILES:
        message = (
            f"Triton gets engines of {' and '.join(FILES)}, this is one of {engine.target.backend}"
        )
        raise UnsupportedError(message, "compile with such a candidate")
    place = folder / model.name / str(model.version)
    if place.exists():
        raise PlanError(f"'{place}' is there already", "give another version, or remove that one")
    return place


def export_triton(engine: Engine, batch: BatchSpec, model: ModelVersion, folder: Path) -> Path:
    """Write the model below `folder`, a repository that may hold others and other versions; returns
    the model's folder.

    Raises what `check_place` does, and PlanError if other versions are there whose config would
    have to be another: Triton has one for all versions of a model.
    """
    home, place = folder / model.name, check_place(engine, model, folder)
    config = _config(engine, batch, model.name)
    _check_others(home, config)
    home.mkdir(parents=True, exist_ok=True)
    work = home / f".{model.version}.{os.getpid()}"
    try:
        _copy_files(engine, work)
        check_if_sealed(engine)  # what was copied is what was proved
        work.joinpath("config.pbtxt").write_text(_text(config), encoding="utf-8")
        work.joinpath("config.pbtxt").replace(home / "config.pbtxt")
        work.rename(place)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return home


def remarks(engine: Engine, batch: BatchSpec) -> list[str]:
    """What whoever starts Triton must know of this engine."""
    target = engine.target
    if target.backend == "tensorrt":
        found = [
            f"Triton must have TensorRT {target.version}, and a GPU of compute capability"
            f" {target.compute_capability}"
        ]
    else:
        found = [
            f"checked and measured with ONNX Runtime {target.version} on {target.device}; Triton's"
            " own may be another"
        ]
    found.append(_batching(engine, batch))
    if target.backend == "onnxruntime" and engine.recipe.precision is Precision.INT8:
        found.append(
            "Crucible turns off optimisers of ONNX Runtime that would make some 8-bit nodes float"
            " again; Triton cannot"
        )
    if any(_plugins(engine)):
        found.append(
            f"needs its plugins: LD_PRELOAD={':'.join(str(path) for path in _plugins(engine))}"
        )
    return found


# -- what is written ---------------------------------------------------------


@cache
def _message_class() -> type[Message]:
    """Triton's ModelConfig, in a pool of its own: tritonclient enters the same name into protobuf's
    default pool, which takes each name once.
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
    """PlanError if other versions of the model are there, with another config."""
    versions = sorted(path.name for path in home.glob("[1-9]*"))
    if versions and _read(home / "config.pbtxt") != config:
        message = (
            f"'{home}' holds version {', '.join(versions)} with other inputs, batches or files than"
            " this engine's"
        )
        raise PlanError(message, "give another name, or export into another folder")


def _read(path: Path) -> Message | None:
    """A config; None for a text that is none."""
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
    if not dims:  # Triton has no scalars: one element, reshaped to none
        fields["reshape"] = {}
    if spec.location == "host":
        fields["is_shape_tensor"] = True
    return fields


def _batching(engine: Engine, batch: BatchSpec) -> str:
    most = rows_together(engine, batch)
    if most > 1:
        return (
            f"up to {most} rows run together: proved here on this engine, within"
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


def _copy_files(engine: Engine, place: Path) -> None:
    """The model under the name that Triton expects; a model in several files is a folder of that
    name, with a file of that name in it.
    """
    name = FILES[engine.target.backend]
    place.mkdir()
    single = engine.target.backend == "tensorrt" or all(
        path.name in (engine.file, *OURS) for path in engine.root.iterdir()
    )
    if single:
        shutil.copyfile(engine.path, place / name)
    else:
        shutil.copytree(engine.root, place / name, ignore=shutil.ignore_patterns(*OURS))
        (place / name / engine.file).rename(place / name / name)


def _plugins(engine: Engine) -> list[Path]:
    return sorted((engine.root / "plugins").glob("*.so"))


def _reach(profiles: tuple[Profile, ...], symbol: str) -> int:
    """The most rows up to which every number of rows lies in some profile; 1 if a single row lies
    in none.
    """
    reach = 0
    for dim in sorted(
        (profile.dims[symbol] for profile in profiles if symbol in profile.dims),
        key=lambda dim: dim.min,
    ):
        reach = max(reach, dim.max) if dim.min <= reach + 1 else reach
    return max(reach, 1)
