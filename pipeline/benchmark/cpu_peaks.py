"""Measured peaks of this host's CPU: its fastest matrix product per precision, and its fastest
copy in memory and in each cache.

They are measured once, by the first compile on a quiet host or by `crucible doctor --measure`, and
stored under CRUCIBLE_HOME. No data sheet gives the clock that a
(virtual) CPU keeps with all cores busy. So the peak is measured with the libraries that engines run
on: the best run of the best library at the best size. It is valid for one CPU, its flags and a
number of threads.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.benchmark.roofline import with_bounds
from pipeline.core.artifacts import BuildOptions, Engine, Target
from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import BackendUnavailable, ChildDied, ChildStopped, UnsupportedError
from pipeline.execution.stage_runner import Runner, Stage
from pipeline.host.caches import Cache, data_caches
from pipeline.host.contention import cpu_clock
from pipeline.host.environment import cpu_flags, cpu_name, usable_cores
from pipeline.host.gpu import MemoryLevel, Peaks, find_gpus, peaks, with_hardware
from pipeline.measurement.clock import measure_block, monotonic
from pipeline.measurement.comparison import MAX_WAITING
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import home
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.results.layer_table import LayerTable
from pipeline.results.precision_audit import ran_in

LIBRARIES = ("onnxruntime", "openvino")
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)
SIZES = (1024, 2048, 512)  # of square products; which one is best depends on the caches
SECONDS = 0.5  # per product
UNASKED = Stage("peaks", 1, writes_files=False, needs_quiet_device=True)
UNASKED_S = 3.0  # at most, and after one product of each precision
UNASKED_SECONDS = 0.1  # per product
UNASKED_SHARE = 0.05  # of `benchmark.budget_s`
LEAST_S = 1.0  # less does not suffice for one product of each precision
COPY_BYTES = 256 * 2**20  # far more than any cache of a core holds
BLOCK_BYTES = 8 * 2**20  # copied per timed run in a cache, so that starting the threads is little
FORMAT = 2  # of stored peaks: older ones have no caches
MIN_RUNS = 5
BUSY_SHARE = 0.5  # of the cores; with more load before the start the result is below the peak


class Product(Frozen):
    """One square matrix product by one library."""

    backend: str
    precision: Precision
    size: int
    flops_per_s: float  # of the fastest run
    waiting: float  # share of its time for which it waited for a CPU


def peaks_of(target: Target, threads: int) -> Peaks | None:
    """Return the peaks of the device that an engine runs on, or None.

    Those of a GPU come from the table of known rates. Those of a CPU are there if they were
    measured with this number of threads (0: all).
    """
    if target.compute_capability is None:
        return load_peaks(threads)
    for gpu in with_hardware(find_gpus()).devices:
        if gpu.name == target.device:
            known = peaks(gpu)
            return known if known.flops_per_s else None
    return None


def with_limits(
    benchmarks: Benchmarks,
    engines: Sequence[Engine],
    layers: Mapping[str, LayerTable | None],
    threads: int,
) -> Benchmarks:
    """Add the peaks of the devices, and the bottleneck of each row.

    `layers` holds, by label, the layers that an engine really runs. This is not done in the
    benchmark stage, so that results of an earlier run are compared with peaks measured later.
    """
    targets = {engine.target.device: engine.target for engine in engines}
    peaks_by_device = {device: peaks_of(target, threads) for device, target in targets.items()}

    def bounded(
        result: BenchmarkReport | BenchmarkFailure, engine: Engine
    ) -> BenchmarkReport | BenchmarkFailure:
        if isinstance(result, BenchmarkFailure):
            return result
        recipe = engine.recipe
        precision = recipe.rest if recipe.weight_only else recipe.precision
        return with_bounds(
            result,
            ran_in(precision, layers.get(result.label)),
            peaks_by_device[engine.target.device],
        )

    results = tuple(
        bounded(result, engine) for result, engine in zip(benchmarks.results, engines, strict=True)
    )
    known = tuple(peaks for peaks in peaks_by_device.values() if peaks)
    return benchmarks.model_copy(update={"results": results, "peaks": known})


# -- stored ------------------------------------------------------------------


def peaks_file(threads: int = 0) -> Path:
    """Return the file for the peaks of this CPU with this number of threads."""
    identity = json.dumps([FORMAT, cpu_name(), cpu_flags(), threads or usable_cores()])
    return home() / "peaks" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def load_peaks(threads: int = 0) -> Peaks | None:
    """Return the stored peaks; None if there are none, or if the file is damaged."""
    try:
        return Peaks.model_validate_json(peaks_file(threads).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def save_peaks(measured: Peaks, threads: int = 0) -> Path:
    """Store peaks for `load_peaks`, atomically."""
    file = peaks_file(threads)
    file.parent.mkdir(parents=True, exist_ok=True)
    work = file.with_suffix(f".{os.getpid()}")
    work.write_text(measured.model_dump_json(indent=1) + "\n", encoding="utf-8")
    work.replace(file)
    return file


# -- measurement -------------------------------------------------------------


def measure_once(runner: Runner, engines: Iterable[Engine], threads: int, budget_s: float) -> None:
    """Measure and store the peaks of the CPU, if an engine runs on it and they are not stored.

    It takes UNASKED_S at most, a small share of `budget_s`: with too little of that, or on a busy
    host, the peaks stay unknown until the next compile.
    """
    limit_s = min(UNASKED_S, UNASKED_SHARE * budget_s)
    if limit_s < LEAST_S or all(engine.is_on_gpu for engine in engines) or load_peaks(threads):
        return
    try:
        found: Peaks | None = runner.anew(UNASKED, "", measure_if_quiet, threads, limit_s)
    except ChildDied as error:
        if isinstance(error, ChildStopped):
            raise
        return  # a compile does not depend on them
    if found is not None:
        save_peaks(found, threads)


def measure_if_quiet(threads: int, limit_s: float, progress: Progress = silent) -> Peaks | None:
    """Measure the peaks in little time. None if other processes had a part of the CPU meanwhile."""
    threads, end_s = threads or usable_cores(), monotonic() + limit_s
    products = list[Product]()
    for product in measure_products(threads, UNASKED_SECONDS, progress):
        if product.waiting > MAX_WAITING:
            progress(None, "the host is busy: the next compile tries again")
            return None
        products.append(product)
        if product.size != SIZES[0] and monotonic() > end_s:
            break
    return _peaks(products, threads, UNASKED_SECONDS, "")


def measure_peaks(threads: int = 0, progress: Progress = silent) -> Peaks:
    """Measure the fastest products and copy with this number of threads (0: all).

    It takes about 15 s. Run it on a quiet host.
    """
    threads, load = threads or usable_cores(), os.getloadavg()[0]
    products = list(measure_products(threads, SECONDS, progress))
    progress(None, "copying")
    return _peaks(products, threads, SECONDS, busy_text(load, usable_cores()))


def _peaks(products: Iterable[Product], threads: int, seconds: float, warning: str) -> Peaks:
    """Measure the copies too, `seconds` each, and return all peaks."""
    best: dict[Precision, float] = {}
    for product in products:
        best[product.precision] = max(best.get(product.precision, 0.0), product.flops_per_s)
    unit = "thread" if threads == 1 else "threads"
    return Peaks(
        device=f"{cpu_name()}, {threads} {unit}",
        source=f"measured {dt.datetime.now(dt.UTC):%Y-%m-%d}{warning}",
        flops_per_s=best,
        bytes_per_s=measure_copy(threads, seconds),
        caches=measure_caches(threads, data_caches(threads), seconds),
    )


def busy_text(load: float, cores: int) -> str:
    """Return a warning for peaks that were measured on a busy host; "" if it was quiet."""
    return f" on a busy host, load {load:.1f}: too low" if load > BUSY_SHARE * cores else ""


def measure_products(
    threads: int, seconds: float = SECONDS, progress: Progress = silent
) -> Iterator[Product]:
    """Measure every library in every precision that it really runs here, size by size."""
    recipes = list(_recipes())
    for size in SIZES:
        for recipe in recipes:
            progress(None, f"{recipe.backend} {recipe.precision}, {size} x {size}")
            yield _product(recipe, size, threads, seconds)


def _recipes() -> Iterator[Recipe]:
    """Yield each library with each precision that it really runs here."""
    for name in LIBRARIES:
        try:
            target = backends.backend(name).probe()
        except BackendUnavailable:
            continue
        for precision in PRECISIONS:
            recipe = Recipe(
                backend=name,
                precision=precision,
                realised_in="graph" if precision in (Precision.FP32, Precision.INT8) else "runtime",
            )
            with suppress(UnsupportedError):
                backends.backend(name).check_recipe(recipe, target)
                yield recipe


def _product(recipe: Recipe, size: int, threads: int, seconds: float) -> Product:
    feeds = {"x": np.random.default_rng(0).normal(0, 1, (size, size)).astype(np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(recipe, size, threads, Path(folder))
        with closing(backends.load(engine)) as loaded, closing(loaded.session()) as session:
            run = partial(run_session, session, feeds)
            measure_block(run, min_s=seconds / 5)
            before = cpu_clock()
            best_s = min(measure_block(run, min_s=seconds, min_runs=MIN_RUNS))
            waiting = cpu_clock().waiting_since(before)  # while its threads exist
    return Product(
        backend=recipe.backend,
        precision=recipe.precision,
        size=size,
        flops_per_s=2 * size**3 / best_s,
        waiting=waiting,
    )


def _engine(recipe: Recipe, size: int, threads: int, folder: Path) -> Engine:
    """Build an engine of y = x @ w, each [size, size].

    For int8 both sides go through Q/DQ, which every library fuses into the product.
    """
    weights = np.random.default_rng(1).normal(0, 1, (size, size)).astype(np.float32)
    is_int8 = recipe.precision is Precision.INT8
    if is_int8:
        nodes, constants = _quantised_product(weights)
    else:
        nodes, constants = [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weights}
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in ("x", "y")
    )
    graph = helper.make_graph(
        nodes,
        "product",
        [x],
        [y],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        folder / "product.onnx",
    )
    model = onnx_model(folder, "product.onnx").model_copy(
        update={"precision": recipe.precision if is_int8 else Precision.FP32}
    )
    (folder / "engine").mkdir()
    return backends.backend(recipe.backend).build(
        model, recipe, BuildOptions(profiles=(), threads=threads), folder / "engine", silent
    )


def _quantised_product(
    weights: np.ndarray[tuple[int, int], np.dtype[np.float32]],
) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]:
    """Return nodes and constants with u8 activations and s8 weights, as int8 engines have them.

    Weights have 7 bits, so that no sum of two products can saturate on any CPU.
    """
    scale = np.abs(weights).max(axis=0) / 63  # [size], per column
    constants = {
        "w": np.round(weights / scale).astype(np.int8),
        "w_scale": scale.astype(np.float32),
        "w_zero": np.zeros(weights.shape[1], np.int8),
        "x_scale": np.array(0.04, np.float32),
        "x_zero": np.array(128, np.uint8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_u8"]),
        helper.make_node("DequantizeLinear", ["x_u8", "x_scale", "x_zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["w_dq"], axis=1),
        helper.make_node("MatMul", ["x_dq", "w_dq"], ["y"]),
    ]
    return nodes, constants


def measure_copy(threads: int, seconds: float = SECONDS, size: int = COPY_BYTES) -> float:
    """Return the bytes read and written per second by the fastest copy that all threads share."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        best_s = min(
            measure_block(
                lambda: list(pool.map(lambda part: np.copyto(*part), parts)),
                min_s=seconds,
                min_runs=MIN_RUNS,
            )
        )
    return 2 * size / best_s


def measure_caches(
    threads: int, caches: Sequence[Cache], seconds: float = SECONDS
) -> tuple[MemoryLevel, ...]:
    """Return the speed of each cache, at a size between this cache and the one before.

    That is the geometric mean of both, because other hosts of a machine may use parts of a large
    cache. The first one is measured at half of its size.
    """
    levels, before = list[MemoryLevel](), 0
    for cache in caches:
        size = math.isqrt(before * cache.size_bytes) if before else cache.size_bytes // 2
        rate = measure_cached_copy(threads, size, seconds)
        levels.append(MemoryLevel(name=cache.name, size_bytes=cache.size_bytes, bytes_per_s=rate))
        before = cache.size_bytes
    return tuple(levels)


def measure_cached_copy(threads: int, size: int, seconds: float = SECONDS) -> float:
    """Return the bytes read and written per second while all threads copy `size` bytes in all.

    Each thread copies its own part again and again, so that it stays in its cache.
    """
    each = max(1, size // (2 * threads))
    repeats = max(1, BLOCK_BYTES // each)
    parts = [(np.zeros(each, np.uint8), np.ones(each, np.uint8)) for _ in range(threads)]

    def copy(part: tuple[np.ndarray, np.ndarray]) -> None:
        for _ in range(repeats):
            np.copyto(*part)

    with ThreadPoolExecutor(threads) as pool:
        best_s = min(
            measure_block(lambda: list(pool.map(copy, parts)), min_s=seconds, min_runs=MIN_RUNS)
        )
    return 2 * each * repeats * threads / best_s
