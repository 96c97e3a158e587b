"""TensorRT-RTX: build an engine for a GPU generation on a host that needs no GPU.

Crucible cannot run such an engine yet. Networks are strongly typed: every precision is written in
the graph, and TF32 is switched off, so that fp32 means fp32. There is no timing cache: it would
need the GPU.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pipeline.backends.base import Loaded, no_layers
from pipeline.backends.feed_checks import installed_version
from pipeline.backends.tensorrt.build import add_profiles, serialize, warnings_of, with_locations
from pipeline.backends.tensorrt.messages import listening
from pipeline.backends.tensorrt.parser import Parsed, parse, refusals
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Refusal, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.host.gpu import Gpus, find_gpus

PRECISIONS = frozenset({Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8})
DISTRIBUTIONS: tuple[str, ...] = ("tensorrt-rtx",)
layers = no_layers
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
MINIMUM_DRIVER = 580  # the first for CUDA 13, which the PyPI package is built with
FILE = "engine.rtx"


def probe() -> Target:
    """Return this host as a target for builds. `compute_capability` is None without a GPU."""
    version = _version()
    gpus = find_gpus().devices
    if not gpus:
        return Target(backend="tensorrt_rtx", version=version, device="no GPU: builds for others")
    first = gpus[0]
    return Target(
        backend="tensorrt_rtx",
        version=version,
        device=first.name,
        compute_capability=first.compute_capability,
        driver=first.driver,
    )


def unsupported(
    model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
) -> tuple[Refusal, ...]:
    return refusals(_library(), model, plugins)


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Build for `recipe.compute_capability`, into one file under `out`.

    The graph must already be in the recipe's precision.
    """
    capability = _capability(recipe)
    _check_precision(model, recipe)
    trt = _library()
    progress(None, f"parsing for compute capability {capability}")
    parsed = parse(trt, model.path.read_bytes(), model.path)
    if parsed.faults:
        message = "; ".join(
            f"{fault.operator} '{fault.node}': {fault.reason}" for fault in parsed.faults
        )
        raise UnsupportedError(
            f"TensorRT-RTX cannot take this model: {message}",
            "list every node with `crucible inspect MODEL --backend tensorrt_rtx`",
        )
    config = _config(trt, parsed, capability)
    with listening(trt):
        add_profiles(parsed, config, model.inputs, options.profiles)
    progress(None, f"building for compute capability {capability}")
    data = serialize(
        trt,
        parsed,
        config,
        progress,
        f"TensorRT-RTX cannot build this model for compute capability {capability}",
    )
    (out / FILE).write_bytes(data)
    return Engine(
        root=out,
        file=FILE,
        digest=hashlib.sha256(data).hexdigest(),
        target=Target(
            backend="tensorrt_rtx",
            version=_version(),
            device=f"GPU of compute capability {capability}",
            compute_capability=capability,
        ),
        recipe=recipe,
        inputs=with_locations(model.inputs, parsed),
        outputs=model.outputs,
        profiles=options.profiles,
        threads=options.threads,
        size_bytes=len(data),
        notes=warnings_of(trt, model, "TensorRT-RTX"),
    )


def load(engine: Engine, device: str = "") -> Loaded:
    """Raise BackendUnavailable, with the requirements of the engine and the GPUs of this host."""
    raise BackendUnavailable(
        "this engine cannot run here:"
        f" {why_not_run(engine.target.compute_capability, find_gpus())}",
        "deploy the engine file to a host with such a GPU, or choose a candidate of onnxruntime or"
        " openvino here",
    )


def why_not_run(capability: str | None, gpus: Gpus) -> str:
    """Return the requirements of an engine for a compute capability, and the GPUs of this host.

    None means any compute capability that can be built for.
    """
    suitable = (capability,) if capability else CAPABILITIES
    needs = (
        f"it needs an NVIDIA GPU of compute capability {', '.join(suitable)} with driver"
        f" {MINIMUM_DRIVER} or later"
    )
    if not gpus.devices:
        return f"{needs}, this host has none: {gpus.reason}"
    has = ", ".join(
        f"{gpu.name} (compute capability {gpu.compute_capability}, driver {gpu.driver})"
        for gpu in gpus.devices
    )
    fits = any(
        gpu.compute_capability in suitable and int(gpu.driver.split(".")[0]) >= MINIMUM_DRIVER
        for gpu in gpus.devices
    )
    text = f"{needs}, this host has {has}"
    if fits:
        text += ", but this version of Crucible cannot run TensorRT-RTX engines yet"
    return text


def _version() -> str:
    return installed_version("tensorrt-rtx", install_command("rtx"))


def _library() -> Any:
    _version()
    try:
        import tensorrt_rtx
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            f"the library `tensorrt_rtx` cannot be loaded: {error}",
            "pip install --force-reinstall tensorrt-rtx",
        ) from error
    return tensorrt_rtx


def _capability(recipe: Recipe) -> str:
    choices = ", ".join(CAPABILITIES)
    named = recipe.compute_capability
    if named is None:
        raise UnsupportedError(
            "TensorRT-RTX builds for a GPU that need not be here, and the candidate names none",
            f"add `compute_capability:` to the candidate, one of {choices} (8.9 is an RTX 40 card)",
        )
    if named not in CAPABILITIES:
        why = "; sm_90 (H100, H200) is not an RTX GPU" if "90" in named.replace(".", "") else ""
        raise UnsupportedError(
            f"TensorRT-RTX does not build for compute capability '{named}'{why}; expected one of"
            f" {choices}",
            "name one of these, or use the backend tensorrt for data-centre GPUs",
        )
    return named


def check_recipe(recipe: Recipe, target: Target) -> None:
    """Raise UnsupportedError for a precision or GPU generation that TensorRT-RTX cannot target."""
    _capability(recipe)
    if recipe.precision not in PRECISIONS:
        choices = ", ".join(sorted(PRECISIONS))
        raise UnsupportedError(
            f"TensorRT-RTX is built here in {choices}, not in {recipe.precision}",
            f"choose one of {choices}",
        )


def _check_precision(model: OnnxModel, recipe: Recipe) -> None:
    check_recipe(recipe, probe())
    if model.precision != recipe.precision:
        raise UnsupportedError(
            f"TensorRT-RTX takes the precision from the graph: the recipe says {recipe.precision},"
            f" the graph is {model.precision}",
            f"convert the graph to {recipe.precision} first",
        )


def _config(trt: Any, parsed: Parsed, capability: str) -> Any:
    config = parsed.builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    config.num_compute_capabilities = 1
    config.set_compute_capability(
        getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), 0
    )
    return config
