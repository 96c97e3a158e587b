"""TensorRT 10.x and 11.x on an NVIDIA GPU: check a recipe, build an engine, load it.

Networks are strongly typed: every precision is written in the graph. On 10.x a recipe may instead
leave the choice to TensorRT (`precision_from: flags`). Then int8 is implicit, with ranges from a
calibration cache beside the model.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.backends import timing_cache
from pipeline.backends.base import Loaded
from pipeline.backends.feed_checks import refuse_foreign
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt.build import (
    configure,
    flags_of,
    serialize,
    warnings_of,
    with_locations,
)
from pipeline.backends.tensorrt.layers import layer_table
from pipeline.backends.tensorrt.messages import listening, logger_of
from pipeline.backends.tensorrt.parser import is_own, parse, refusals
from pipeline.backends.tensorrt.session import TrtLoaded, load_engine
from pipeline.core.artifacts import BuildOptions, Engine, Note, OnnxModel, Refusal, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.errors import ModelError, UnsupportedError
from pipeline.host.gpu import Gpu
from pipeline.results.layer_table import LayerTable

# Without int4: it is for weights only, and Crucible does not convert it for TensorRT.
PRECISIONS = frozenset(Precision) - {Precision.INT4}
DISTRIBUTIONS: tuple[str, ...] = ("tensorrt", *trt_library.BINDINGS)
FILE = "engine.plan"
PLUGINS = "plugins"  # folder of the engine with the plugin libraries it needs
AMPERE_AND_LATER = "8.0+"


def probe() -> Target:
    """Return the GPU and the installed version as a target.

    The library is imported only in a process of its own, to check that the import works.
    """
    host = trt_library.host()
    trt_library.check_import()
    return _target(*host)


def _target(gpu: Gpu, version: str) -> Target:
    # without "post1": the library is the same
    number = ".".join(map(str, trt_library.numbers(version)))
    return Target(
        backend="tensorrt",
        version=number,
        device=gpu.name,
        compute_capability=gpu.compute_capability,
        driver=gpu.driver,
    )


def engine_target(host: Target, recipe: Recipe) -> Target:
    """Return the target on which an engine of this recipe, built on `host`, may run.

    "8.0+" means 8.0 or later.
    """
    updates: dict[str, str] = {}
    if recipe.hardware_compatible:
        updates["compute_capability"] = AMPERE_AND_LATER
    if recipe.version_compatible:
        updates["version"] = f"{host.version}+"
    return host.model_copy(update=updates)


def check_recipe(recipe: Recipe, target: Target) -> None:
    """Raise UnsupportedError for a feature that this version of TensorRT or this GPU lacks."""
    trt_library.check_recipe(target.version, target.compute_capability or "", recipe)


def unsupported(
    model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
) -> tuple[Refusal, ...]:
    return refusals(trt_library.library(), model, plugins, renames=False)


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Build on the first GPU of this host, under the lock that keeps our other builds off it.

    Writes engine.plan and, if there are plugin libraries, plugins/ under `out`.
    """
    gpu, version = trt_library.host()
    target = _target(gpu, version)
    check_recipe(recipe, target)
    _check_graph(model, recipe)
    device = BuildDevice(gpu.uuid, target)
    with timing_cache.gpu_lock(gpu.uuid, progress):
        built = _build(device, model, recipe, options, progress)
    (out / FILE).write_bytes(built.plan)
    _copy_plugins(options.tensorrt.plugins, out / PLUGINS)
    return Engine(
        root=out,
        file=FILE,
        digest=hashlib.sha256(built.plan).hexdigest(),
        target=engine_target(target, recipe),
        recipe=recipe,
        inputs=built.inputs,
        outputs=model.outputs,
        profiles=options.profiles,
        threads=options.threads,
        size_bytes=sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        notes=built.notes,
    )


def layers(engine: Engine, feeds: Tensors, profile: int = 0) -> LayerTable | None:
    """Return every layer that the engine runs in this profile, with precision and time."""
    loaded = load_here(engine)
    try:
        return layer_table(trt_library.import_library(), loaded, feeds, profile)
    finally:
        loaded.close()


def load(engine: Engine, device: str = "") -> Loaded:
    """Load the weights into the GPU's memory.

    BackendUnavailable if this host cannot run the engine.
    """
    return load_here(engine, device)


def load_here(engine: Engine, device: str = "") -> TrtLoaded:
    """Load the engine, as `load` does, with what TensorRT's own tools need."""
    refuse_foreign(engine, _target(*trt_library.host()))
    trt = trt_library.import_library()
    return load_engine(trt, engine, logger_of(trt), device)


@dataclass(frozen=True, slots=True)
class BuildDevice:
    """The GPU of a build."""

    gpu: str  # UUID
    target: Target


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a build. Builder, network and parser are freed by then, with their memory."""

    plan: bytes
    inputs: tuple[TensorSpec, ...]
    notes: tuple[Note, ...]


def _build(
    device: BuildDevice, model: OnnxModel, recipe: Recipe, options: BuildOptions, progress: Progress
) -> Built:
    trt = trt_library.library()
    progress(None, "parsing")
    parsed = parse(
        trt,
        model.path.read_bytes(),
        model.path,
        recipe.realised_in != "flags",
        options.tensorrt.plugins,
    )
    if parsed.faults:
        message = "; ".join(
            f"{fault.operator} '{fault.node}': {fault.reason}" for fault in parsed.faults
        )
        raise UnsupportedError(
            f"TensorRT cannot take this model: {message}",
            "list every node with `crucible inspect MODEL --backend tensorrt`",
        )
    config = configure(trt, parsed, recipe, options, model.inputs)
    calibrator = _give_calibrator(trt, config, model, recipe)
    scope = timing_cache.CacheScope(device.target, options.tensorrt.timing_iterations)
    with listening(trt):
        attached = timing_cache.attach(config, scope, device.gpu)
    plan = serialize(trt, parsed, config, progress)
    with listening(trt):
        cache_notes = timing_cache.keep(config, scope, attached, device.gpu)
    inputs = with_locations(model.inputs, parsed)
    # Users go before the objects that they use. Their memory is free before the GPU's lock is.
    del attached, config, calibrator, parsed
    return Built(plan, inputs, (*warnings_of(trt, model), *cache_notes))


def _give_calibrator(trt: Any, config: Any, model: OnnxModel, recipe: Recipe) -> Any:
    """For implicit int8: set a calibrator that only reads the ranges of the calibration cache.

    Return the calibrator, which must stay alive during the build; None for other recipes.
    """
    if "INT8" not in flags_of(recipe):
        return None
    from pipeline.backends.tensorrt.calibrator import CACHE, calibrator_from_cache

    file = model.root / CACHE
    if not file.is_file():
        message = (
            f"implicit int8 needs the calibration cache '{CACHE}' beside the model, '{model.root}'"
            " has none"
        )
        raise ModelError(
            message, "calibrate first: `crucible compile` does, with data.calibration in the plan"
        )
    calibrator = calibrator_from_cache(
        trt, file.read_bytes(), recipe.method or CalibrationMethod.ENTROPY
    )
    with warnings.catch_warnings():
        # TensorRT 11 has no calibrators, and there such a recipe is refused
        warnings.simplefilter("ignore", DeprecationWarning)
        config.int8_calibrator = calibrator
    return calibrator


def _check_graph(model: OnnxModel, recipe: Recipe) -> None:
    """Raise UnsupportedError unless the graph has the precision that the recipe expects.

    With builder flags that is fp32; beside a calibration cache an fp32 graph is labelled int8.
    """
    implicit = recipe.realised_in == "flags" and recipe.precision is Precision.INT8
    in_graph = recipe.realised_in == "graph" and recipe.precision is not Precision.TF32
    expected = recipe.precision if in_graph or implicit else Precision.FP32
    if model.precision is not expected:
        message = f"'{recipe.label}' takes a graph in {expected}, this one is {model.precision}"
        raise UnsupportedError(message, f"convert the graph to {expected} first")


def _copy_plugins(plugins: tuple[Path, ...], folder: Path) -> None:
    """Copy the plugin libraries that the engine needs on every host, in order.

    NVIDIA's own plugin library is a part of TensorRT and is not copied.
    """
    for number, plugin in enumerate(plugin for plugin in plugins if not is_own(plugin)):
        folder.mkdir(exist_ok=True)
        shutil.copyfile(plugin, folder / f"{number:02}-{plugin.name.partition('.so')[0]}.so")
