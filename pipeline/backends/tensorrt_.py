"""TensorRT on an NVIDIA GPU: for now, what this host lacks for it, in the order in which a user meets it: driver and GPU, then the library."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from pipeline.backends.base import Loaded
from pipeline.core import BuildOptions, Engine, LayerTable, OnnxModel, Precision, Progress, Recipe, Refusal, Target, Tensors, silent
from pipeline.errors import BackendUnavailable
from pipeline.gpu import Gpus, find_gpus

PRECISIONS = frozenset(Precision)
DISTRIBUTIONS: tuple[str, ...] = ("tensorrt",)


def probe() -> Target:
    raise unavailable(find_gpus(), _library_version())


def check_recipe(recipe: Recipe, target: Target) -> None:
    raise unavailable(find_gpus(), _library_version())


def unsupported(model: OnnxModel, target: Target) -> tuple[Refusal, ...]:
    raise unavailable(find_gpus(), _library_version())


def build(model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent) -> Engine:
    raise unavailable(find_gpus(), _library_version())


def layers(engine: Engine, feeds: Tensors) -> LayerTable | None:
    raise unavailable(find_gpus(), _library_version())


def load(engine: Engine, device: str = "") -> Loaded:
    raise unavailable(find_gpus(), _library_version())


def _library_version() -> str | None:
    """Version of the installed TensorRT, without importing it."""
    if importlib.util.find_spec("tensorrt") is None:
        return None
    try:
        return importlib.metadata.version("tensorrt")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"  # unpacked by hand


def unavailable(gpus: Gpus, version: str | None) -> BackendUnavailable:
    """Everything that is missing, in one message."""
    library = "" if version else "the library `tensorrt` is not installed"
    missing = [text for text in (gpus.reason, library) if text]
    if not missing:
        said = f"TensorRT {version} and {gpus.devices[0].name} are here, but this version of Crucible cannot drive them yet"
        return BackendUnavailable(said, "use onnxruntime or openvino, or build for tensorrt_rtx")
    install = "pip install 'crucible[tensorrt]'"
    where = " on a host with an NVIDIA GPU and its driver; here, use onnxruntime or openvino, or build for tensorrt_rtx"
    return BackendUnavailable(f"TensorRT cannot be used on this host: {'; '.join(missing)}", install + where * bool(gpus.reason))
