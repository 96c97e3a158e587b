"""Calibrate implicit int8 on TensorRT 10 with its own calibrators, through Polygraphy's.

The result is a cache beside the fp32 graph. It is text: the library's version and the algorithm,
then a scale per tensor, by name only. It fits any network with these names, so it is never looked
up by itself: the artifact with the cache is keyed by network, samples and algorithm. TensorRT
calibrates in fp32 and accepts batches of one shape only: the shape of the calibration profile,
which has min = opt = max.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.backends import cuda, timing_cache
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt.build import configure, serialize, shape_tensors
from pipeline.backends.tensorrt.parser import Parsed, parse
from pipeline.core.artifacts import BuildOptions, Note, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, TensorSpec, sizes_from_shapes
from pipeline.data.batch import Batch
from pipeline.data.samples import CalibrationSet
from pipeline.errors import CrucibleError, DataError, UnsupportedError
from pipeline.host.environment import torch_hidden
from pipeline.onnx_graph.files import copy_model, onnx_model, read_proto
from pipeline.plan.schema import CalibrationConfig
from pipeline.quantization.insert_qdq import holds_qdq

CACHE = "calibration.cache"
BASES = {
    CalibrationMethod.ENTROPY: "IInt8EntropyCalibrator2",
    CalibrationMethod.MINMAX: "IInt8MinMaxCalibrator",
}
"""IInt8LegacyCalibrator (percentiles) and IInt8EntropyCalibrator are left out: they only continue
the algorithms of TensorRT 4.
"""

IN_GRAPH = "take int8 written into the graph (`precision_from: graph`)"
MIN_SAMPLES = 100

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every input of a batch."""


def base_class(trt: Any, method: CalibrationMethod | None) -> Any:
    """Return TensorRT's calibrator class for a method. UnsupportedError if there is none."""
    if method not in BASES:
        choices = " or ".join(BASES)
        raise UnsupportedError(
            f"TensorRT's own calibrators choose ranges by {choices}, not by {method}",
            f"take `method: {choices}`, or {IN_GRAPH}",
        )
    return getattr(trt, BASES[method])


def calibrator_from_cache(trt: Any, cache: bytes, method: CalibrationMethod | None) -> Any:
    """Return a calibrator that only reads its cache.

    A build with it calibrates nothing, and fails if the cache does not fit.
    """

    class FromCache(base_class(trt, method)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: list[str]) -> None:
            return None

        def read_calibration_cache(self) -> bytes:
            return cache

        def write_calibration_cache(self, cache: object) -> None:
            pass  # the same content as was read

    return FromCache()


def calibrate_with_tensorrt(
    model: OnnxModel,
    samples: CalibrationSet,
    recipe: Recipe,
    options: CalibrationConfig,
    allowed: BuildOptions,
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """Write the same fp32 graph to `out`, labelled int8, with TensorRT's calibration cache.

    Needs the GPU. UnsupportedError for a model or a version of TensorRT that cannot be calibrated,
    BackendUnavailable without TensorRT or a GPU, DataError for an empty set.
    """
    gpu, version = trt_library.host()
    trt_library.check_recipe(version, gpu.compute_capability, recipe)
    if holds_qdq(read_proto(model.path, weights=False).graph):
        raise UnsupportedError(
            "the model holds Q/DQ pairs, which TensorRT does not mix with calibrated ranges",
            IN_GRAPH,
        )
    progress(0.0, "counting the shapes of the samples")
    chosen = choose(samples, options)
    with (
        torch_hidden(),
        timing_cache.gpu_lock(gpu.uuid, progress),
        closing(Feeder(cuda.runtime(), samples, chosen, progress)) as feeder,
    ):
        cache = calibration_cache(trt_library.import_library(), model, recipe, allowed, feeder)
    copy_model(model.path, out / model.file)
    (out / CACHE).write_bytes(cache)
    note = note_on(chosen, samples.samples, recipe.method)
    calibrated = onnx_model(out, model.file, Precision.INT8, (note,))
    digest = hashlib.sha256(calibrated.digest.encode() + cache).hexdigest()
    return calibrated.model_copy(update={"digest": digest})


# -- samples -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CalibrationBatches:
    """The batches for a calibration, all of one shape."""

    shapes: Shapes
    rows: int  # samples of a batch
    batch: int  # batch size for reading the set
    batches: int
    requested: int  # samples, by the plan

    @property
    def samples(self) -> int:
        return self.rows * self.batches


def choose(samples: CalibrationSet, options: CalibrationConfig) -> CalibrationBatches:
    """Choose the most frequent shape, and enough batches of it for the samples of the plan.

    DataError for an empty set.
    """
    requested = min(options.samples or samples.samples, samples.samples)
    size = min(options.batch, max(requested, 1))
    rows: Counter[Shapes] = Counter()
    sizes: dict[Shapes, int] = {}
    for batch in samples.batches(size):
        shapes = shapes_of(batch)
        rows[shapes] += batch.samples
        sizes[shapes] = batch.samples
    if not rows:
        raise DataError("the calibration set holds no samples", "give about 500 real samples")
    best, available = rows.most_common(1)[0]
    batches = math.ceil(min(requested, available) / sizes[best])
    return CalibrationBatches(best, sizes[best], size, batches, requested)


def shapes_of(batch: Batch) -> Shapes:
    return tuple((name, array.shape) for name, array in batch.feeds.items())


def profiles_of(inputs: tuple[TensorSpec, ...], shapes: Shapes) -> tuple[Profile, ...]:
    """Return the calibration profile, of which TensorRT feeds the opt shapes.

    Empty if nothing is dynamic. DataError if the shapes do not fit the inputs.
    """
    sizes = sizes_from_shapes(inputs, dict(shapes))
    if isinstance(sizes, str):
        raise DataError(sizes, "bring every sample to the shape of the model's inputs")
    if not sizes:
        return ()
    dims = {name: DimRange(min=size, opt=size, max=size) for name, size in sizes.items()}
    return (Profile(dims=dims),)


def note_on(chosen: CalibrationBatches, total: int, method: CalibrationMethod | None) -> Note:
    """Return a note on the number and the shape of the samples that were used.

    It is a warning if they are few, or less than half of the requested ones.
    """
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in chosen.shapes)
    text = (
        f"TensorRT's {method} calibrator took {chosen.samples} of {total} samples, {chosen.batches}"
        f" batches of the calibration profile {shapes}"
    )
    unused = chosen.requested - chosen.samples
    if unused >= chosen.rows:
        text += (
            "; it takes batches of one shape only: pad all samples to one length to use them all"
        )
    elif unused > 0:
        text += f"; the other {unused} fill no batch of this shape"
    few = chosen.samples < MIN_SAMPLES or 2 * chosen.samples < chosen.requested
    return Note(stage="calibrate", text=text, level="warning" if few else "info")


class Feeder:
    """A data loader for Polygraphy's Calibrator: copies batch after batch to the GPU.

    It yields their addresses. TensorRT calls it from C++ and interprets any exception as the end of
    the data; so the exception is stored for `check`.
    """

    def __init__(
        self, rt: Any, samples: CalibrationSet, chosen: CalibrationBatches, progress: Progress
    ) -> None:
        self.samples, self.chosen, self.progress = samples, chosen, progress
        self.delivered = 0  # batches
        self.failure: CrucibleError | OSError | None = None
        self._stream = cuda.Stream(rt)
        self._pinned = cuda.PinnedBuffer(rt)
        self._buffers = {name: cuda.DeviceBuffer(rt) for name, _ in chosen.shapes}

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.delivered = 0
        try:
            for batch in self.samples.batches(self.chosen.batch):
                if self.delivered == self.chosen.batches:
                    return
                if shapes_of(batch) == self.chosen.shapes:
                    self.progress(
                        0.9 * self.delivered / self.chosen.batches,
                        f"calibrating: batch {self.delivered + 1} of {self.chosen.batches}",
                    )
                    addresses = {
                        name: self._upload(name, array) for name, array in batch.feeds.items()
                    }
                    self.delivered += 1
                    yield addresses
        except (CrucibleError, OSError) as error:
            self.failure = error

    def _upload(self, name: str, array: np.ndarray[Any, Any]) -> int:
        # TensorRT calibrates in fp32
        values = array.astype(np.float32) if array.dtype == np.float16 else array
        self._pinned.reserve(values.nbytes)
        self._pinned.array(values.shape, values.dtype)[...] = values
        self._buffers[name].reserve(values.nbytes)
        if values.nbytes:
            target, source = self._buffers[name].pointer, self._pinned.pointer
            self._stream.copy([(target, source, values.nbytes, self._stream.to_device)])
        self._stream.synchronize()
        return self._buffers[name].pointer

    def check(self) -> None:
        """Raise the error that occurred while TensorRT read batches, if any."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self._stream.close()
        for buffer in (self._pinned, *self._buffers.values()):
            buffer.close()


# -- TensorRT ----------------------------------------------------------------


def calibration_cache(
    trt: Any, model: OnnxModel, recipe: Recipe, allowed: BuildOptions, feeder: Feeder
) -> bytes:
    """Build once at the lowest optimisation level, and return the calibration cache.

    Raises UnsupportedError, HostError, or the error of the feeder.
    """
    from polygraphy.backend.trt import Calibrator
    from polygraphy.logger import G_LOGGER

    parsed = parse(
        trt,
        model.path.read_bytes(),
        model.path,
        strongly_typed=False,
        plugins=allowed.tensorrt.plugins,
    )
    _check_network(parsed)
    # The ranges come from an fp32 run and do not depend on the engine that is built afterwards.
    quick = allowed.tensorrt.model_copy(update={"optimization_level": 0, "timing_iterations": 1})
    options = allowed.model_copy(
        update={"profiles": profiles_of(model.inputs, feeder.chosen.shapes), "tensorrt": quick}
    )
    plain = recipe.model_copy(update={"hardware_compatible": False, "version_compatible": False})
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):  # else it prints whole arrays
        calibrator = Calibrator(feeder, BaseClass=base_class(trt, recipe.method))
        # sets the calibration profile
        config = configure(trt, parsed, plain, options, model.inputs)
        with warnings.catch_warnings():
            # TensorRT 11 has no calibrators, and there such a recipe is refused
            warnings.simplefilter("ignore", DeprecationWarning)
            config.int8_calibrator = calibrator
        try:
            serialize(trt, parsed, config, silent)
        finally:
            feeder.check()
    if feeder.delivered < feeder.chosen.batches or not calibrator.cache_contents:
        message = (
            f"TensorRT took {feeder.delivered} of {feeder.chosen.batches} calibration batches and"
            " wrote no ranges for this model"
        )
        raise UnsupportedError(message, IN_GRAPH)
    return bytes(calibrator.cache_contents)


def _check_network(parsed: Parsed) -> None:
    """Raise UnsupportedError for a network that TensorRT cannot parse or calibrate."""
    if parsed.faults:
        message = "; ".join(
            f"{fault.operator} '{fault.node}': {fault.reason}" for fault in parsed.faults
        )
        raise UnsupportedError(
            f"TensorRT cannot take this model: {message}",
            "list every node with `crucible inspect MODEL --backend tensorrt`",
        )
    names = shape_tensors(parsed.network)
    if names:
        message = (
            f"the values of input '{names[0]}' decide a shape, and TensorRT's calibrators feed"
            " sizes of one profile only"
        )
        raise UnsupportedError(message, IN_GRAPH)
