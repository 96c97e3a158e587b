"""TensorRT without Crucible: a build and a loop as NVIDIA's own samples write them, to compare ours
with.

The build takes the graph and the flags that ours takes, and reads (never fills) the same timing
cache. The loop goes from numpy arrays to numpy arrays as a session does: page-locked memory, one
stream, one captured graph, nothing checked.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.backends import timing_cache
from pipeline.backends.cuda import EventTimer, Stream, check
from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt.calibrator import CACHE, calibrator_from_cache
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.errors import UnsupportedError

FILE = "engine.plan"
LOOP, BUILD = "bare loop", "bare"


def build_bare(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """The engine of a converted graph by the plain API. A stage of its own, with what ours gets."""
    gpu, _ = trt_library.host()
    trt, timed = (
        trt_library.library(),
        timing_cache.CacheScope(tensorrt_.probe(), options.tensorrt.timing_iterations),
    )
    with timing_cache.gpu_lock(gpu.uuid, progress):
        plan = serialized(trt, model, recipe, options, timing_cache.read(timed))
    return written(plan, model, recipe.model_copy(update={"variant": BUILD}), options, out)


def written(
    plan: bytes, model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path
) -> Engine:
    """A serialized engine as the artifact of a stage."""
    (out / FILE).write_bytes(plan)
    return Engine(
        root=out,
        file=FILE,
        digest=hashlib.sha256(plan).hexdigest(),
        target=tensorrt_.probe(),
        recipe=recipe,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=options.profiles,
        threads=0,
        size_bytes=len(plan),
    )


def serialized(
    trt: Any,
    model: OnnxModel,
    recipe: Recipe,
    options: BuildOptions,
    cache: bytes,
    change: Callable[[Any], None] = lambda config: None,
    logger: Any = None,
) -> bytes:
    """parse, configure, change the config, build. UnsupportedError in TensorRT's words."""
    logger = logger or trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    weak = recipe.realised_in == "flags"
    network = builder.create_network(
        0 if weak else 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    )
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model.path)):
        message = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise UnsupportedError(
            f"TensorRT cannot parse '{model.path}': {message}", "see what our own build says"
        )
    config = _configured(trt, builder, model, recipe, options)
    _add_profiles(builder, config, model, recipe, options)
    config.set_timing_cache(config.create_timing_cache(cache), False)
    change(config)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UnsupportedError(
            "TensorRT built nothing, and its own log says why", "see what our own build says"
        )
    return bytes(plan)


def _configured(
    trt: Any, builder: Any, model: OnnxModel, recipe: Recipe, options: BuildOptions
) -> Any:
    """A builder's config with the precision of the recipe."""
    weak = recipe.realised_in == "flags"
    config = builder.create_builder_config()
    config.builder_optimization_level = options.tensorrt.optimization_level
    config.avg_timing_iterations = options.tensorrt.timing_iterations
    if options.tensorrt.workspace_mib is not None:
        workspace = options.tensorrt.workspace_mib * 2**20
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    config.clear_flag(trt.BuilderFlag.TF32)
    if recipe.precision is Precision.TF32:
        config.set_flag(trt.BuilderFlag.TF32)
    if weak:
        config.set_flag(trt.BuilderFlag.FP16)
    if weak and recipe.precision is Precision.INT8:
        config.set_flag(trt.BuilderFlag.INT8)
        calibrator = calibrator_from_cache(
            trt, (model.root / CACHE).read_bytes(), recipe.method or CalibrationMethod.ENTROPY
        )
        config.int8_calibrator = calibrator
    return config


def _add_profiles(
    builder: Any, config: Any, model: OnnxModel, recipe: Recipe, options: BuildOptions
) -> None:
    """The plan's profiles, each with the ranges of the inputs that are dynamic."""
    weak = recipe.realised_in == "flags"
    for ours in options.profiles if any(spec.symbols for spec in model.inputs) else ():
        profile = builder.create_optimization_profile()
        for spec in model.inputs:
            if spec.symbols:
                profile.set_shape(
                    spec.name, *(spec.resolve(ours.sizes(point)) for point in ("min", "opt", "max"))
                )
        config.add_optimization_profile(profile)
        if weak and recipe.precision is Precision.INT8:
            config.set_calibration_profile(profile)


class BareSession:
    """A loop on the API, with the names that the benchmark calls. `feeds` are those it will run, at
    their one shape.
    """

    def __init__(self, trt: Any, rt: Any, engine: Engine, feeds: Tensors) -> None:
        self.inputs, self.outputs = engine.inputs, engine.outputs
        self._rt = rt
        logger = trt.Logger(trt.Logger.ERROR)
        trt.init_libnvinfer_plugins(logger, "")
        self._runtime = trt.Runtime(logger)
        self._engine = self._runtime.deserialize_cuda_engine(engine.path.read_bytes())
        self._context = self._engine.create_execution_context()
        self._stream = Stream(rt)
        self._raw = self._stream.raw
        names = [
            self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)
        ]
        taken = [name for name in names if self._engine.get_tensor_mode(name).name == "INPUT"]
        for name in taken:
            self._context.set_input_shape(name, feeds[name].shape)
        self._device: dict[str, int] = {}
        self._host: dict[str, np.ndarray[Any, Any]] = {}
        self._pinned: list[int] = []
        if missing := self._context.infer_shapes():
            raise UnsupportedError(
                f"the engine wants shapes of {', '.join(missing)}",
                "a bare loop has none but those of the feeds",
            )
        for name in names:
            shape = (
                feeds[name].shape if name in taken else tuple(self._context.get_tensor_shape(name))
            )
            self._place(name, shape, np.dtype(trt.nptype(self._engine.get_tensor_dtype(name))))
        self._feeds = {name: self._host[name] for name in taken}
        self._results = {name: self._host[name] for name in names if name not in taken}
        kind = rt.cudaMemcpyKind
        self._up = [
            (self._device[name], array.ctypes.data, array.nbytes, kind.cudaMemcpyHostToDevice)
            for name, array in self._feeds.items()
        ]
        self._down = [
            (array.ctypes.data, self._device[name], array.nbytes, kind.cudaMemcpyDeviceToHost)
            for name, array in self._results.items()
        ]
        self._graph = self._captured()

    def _place(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        pinned, self._device[name] = (
            check(self._rt, self._rt.cudaMallocHost(size)),
            check(self._rt, self._rt.cudaMalloc(size)),
        )
        self._pinned.append(pinned)
        self._host[name] = (
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pinned))
            .view(dtype)
            .reshape(shape)
        )
        self._context.set_tensor_address(name, self._device[name])

    def _captured(self) -> Any:
        rt, raw = self._rt, self._raw
        if not self._context.execute_async_v3(self._stream.pointer):
            raise UnsupportedError(
                "TensorRT cannot run the engine in a bare loop, and its own log says why",
                "see what our own session says",
            )
        check(rt, rt.cudaStreamSynchronize(raw))
        check(
            rt,
            rt.cudaStreamBeginCapture(
                raw, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
            ),
        )
        self._context.execute_async_v3(self._stream.pointer)
        return check(rt, rt.cudaGraphInstantiate(check(rt, rt.cudaStreamEndCapture(raw)), 0))

    def bind(self, feeds: Tensors) -> None:
        for name, array in self._feeds.items():
            np.copyto(array, feeds[name])

    def upload(self) -> None:
        for to, source, size, kind in self._up:
            self._rt.cudaMemcpyAsync(to, source, size, kind, self._raw)

    def execute(self) -> None:
        self._rt.cudaGraphLaunch(self._graph, self._raw)

    def download(self) -> None:
        for to, source, size, kind in self._down:
            self._rt.cudaMemcpyAsync(to, source, size, kind, self._raw)

    def synchronize(self) -> None:
        check(self._rt, self._rt.cudaStreamSynchronize(self._raw))

    def fetch(self) -> Tensors:
        return {name: array.copy() for name, array in self._results.items()}

    def timer(self) -> EventTimer:
        return EventTimer(self._stream)

    def close(self) -> None:
        self._rt.cudaGraphExecDestroy(self._graph)
        del self._context, self._engine, self._runtime
        self._stream.close()
        for pointer in self._device.values():
            self._rt.cudaFree(pointer)
        self._feeds, self._results, self._host = {}, {}, {}
        for pointer in self._pinned:
            self._rt.cudaFreeHost(pointer)
