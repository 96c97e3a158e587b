"""TensorRT on an NVIDIA GPU, 10.x and 11.x: refuses before the build what this version or this GPU
lacks, builds, and loads.

Networks are strongly typed: every precision is written in the graph. On 10.x a recipe may instead
leave the choice to TensorRT (`realised_in: flags`; int8 is then implicit, with ranges from a
calibration cache beside the model).
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
from pipeline.core import (
    BuildOptions,
    CalibrationMethod,
    Engine,
    Note,
    OnnxModel,
    Precision,
    Progress,
    Recipe,
    Refusal,
    Target,
    Tensors,
    TensorSpec,
    silent,
)
from pipeline.errors import ModelError, UnsupportedError
from pipeline.host.gpu import Gpu
from pipeline.results.layer_table import LayerTable

PRECISIONS = frozenset(Precision) - {
    Precision.INT4
}  # of weights alone, which is not made for it here
DISTRIBUTIONS: tuple[str, ...] = ("tensorrt", *trt_library.BINDINGS)
FILE = "engine.plan"
PLUGINS = "plugins"  # folder of the engine with the plugin libraries it needs
AMPERE_AND_LATER = "8.0+"


def probe() -> Target:
    """The GPU and the installed version; the library is imported in a process of its own only, to
    see that it can be.
    """
    host = trt_library.host()
    trt_library.check_import()
    return _target(*host)


def _target(gpu: Gpu, version: str) -> Target:
    number = ".".join(
        map(str, trt_library.numbers(version))
    )  # without "post1": the library is the same
    return Target(
        backend="tensorrt",
        version=number,
        device=gpu.name,
        compute_capability=gpu.compute_capability,
        driver=gpu.driver,
    )


def engine_target(host: Target, recipe: Recipe) -> Target:
    """Where an engine of this recipe, built on `host`, may run; "8.0+" stands for this or later."""
    updates = {"compute_capability": AMPERE_AND_LATER} if recipe.hardware_compatible else {}
    return host.model_copy(
        update=updates | ({"version": f"{host.version}+"} if recipe.version_compatible else {})
    )


def check_recipe(recipe: Recipe, target: Target) -> None:
    """UnsupportedError that names what this version of TensorRT or this GPU lacks."""
    trt_library.check_recipe(target.version, target.compute_capability or "", recipe)


def unsupported(
    model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
) -> tuple[Refusal, ...]:
    return refusals(trt_library.library(), model, plugins, renames=False)


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Build on the GPU that is here, holding it against other builds of ours. Leaves engine.plan
    and, if there are any, plugins/ under `out`.
    """
    gpu, version = trt_library.host()
    target = _target(gpu, version)
    check_recipe(recipe, target)
    _check_graph(model, recipe)
    place = Place(gpu.uuid, target)
    with timing_cache.gpu_lock(gpu.uuid, progress):
        built = _build(place, model, recipe, options, progress)
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
    """Every layer that the engine runs in this profile, its precision and its time on these
    feeds.
    """
    loaded = _load(engine, "")
    try:
        return layer_table(trt_library.import_library(), loaded, feeds, profile)
    finally:
        loaded.close()


def load(engine: Engine, device: str = "") -> Loaded:
    """Weights into the GPU's memory, once; BackendUnavailable where this host cannot run the
    engine.
    """
    return _load(engine, device)


def _load(engine: Engine, device: str) -> TrtLoaded:
    refuse_foreign(engine, _target(*trt_library.host()))
    trt = trt_library.import_library()
    return load_engine(trt, engine, logger_of(trt), device)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a build happens."""

    gpu: str  # UUID
    target: Target


@dataclass(frozen=True, slots=True)
class Built:
    """What a build leaves; builder, network and parser are gone by then, with their memory."""

    plan: bytes
    inputs: tuple[TensorSpec, ...]
    notes: tuple[Note, ...]


def _build(
    place: Place, model: OnnxModel, recipe: Recipe, options: BuildOptions, progress: Progress
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
    scope = timing_cache.CacheScope(place.target, options.tensorrt.timing_iterations)
    with listening(trt):
        attached = timing_cache.attach(config, scope, place.gpu)
    plan = serialize(trt, parsed, config, progress)
    with listening(trt):
        said_of_cache = timing_cache.keep(config, scope, attached, place.gpu)
    inputs = with_locations(model.inputs, parsed)
    del (
        attached,
        config,
        calibrator,
        parsed,
    )  # users before what they use; their memory is back when the GPU is given back
    return Built(
        plan,
        inputs,
        (
            *warnings_of(trt, model),
            *(Note(stage="build", text=text, level="info") for text in said_of_cache),
        ),
    )


def _give_calibrator(trt: Any, config: Any, model: OnnxModel, recipe: Recipe) -> Any:
    """For implicit int8: the ranges that were calibrated before, so that nothing is
    calibrated now.
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
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # calibrators end with TensorRT 11, where such a recipe is refused
        config.int8_calibrator = calibrator
    return calibrator


def _check_graph(model: OnnxModel, recipe: Recipe) -> None:
    """UnsupportedError unless the graph holds what the recipe says; where builder flags choose, it
    is fp32 (labelled int8 beside a cache).
    """
    implicit = recipe.realised_in == "flags" and recipe.precision is Precision.INT8
    in_graph = recipe.realised_in == "graph" and recipe.precision is not Precision.TF32
    expected = recipe.precision if in_graph or implicit else Precision.FP32
    if model.precision is not expected:
        message = f"'{recipe.label}' takes a graph in {expected}, this one is {model.precision}"
        raise UnsupportedError(message, f"convert the graph to {expected} first")


def _copy_plugins(plugins: tuple[Path, ...], folder: Path) -> None:
    """The libraries that the engine needs wherever it runs, in order; NVIDIA's own comes with
    TensorRT.
    """
    for number, plugin in enumerate(plugin for plugin in plugins if not is_own(plugin)):
        folder.mkdir(exist_ok=True)
        shutil.copyfile(plugin, folder / f"{number:02}-{plugin.name.partition('.so')[0]}.so")
