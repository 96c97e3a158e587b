"""What this host's CPU really reaches: the fastest matrix product per precision, and the fastest
copy. Measured once, kept under CRUCIBLE_HOME.

No data sheet knows the clock that a (virtual) CPU keeps with all cores busy. The ceiling is taken
with the libraries that engines run on: the best run of the best library at the best size. A peak
belongs to one CPU, its flags and a number of threads.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.benchmark.roofline import with_bounds
from pipeline.core import BuildOptions, Engine, Frozen, Precision, Progress, Recipe, Target, silent
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.host.environment import cpu_flags, cpu_name, usable_cores
from pipeline.host.gpu import Peaks, find_gpus, peaks, with_hardware
from pipeline.measurement.clock import measure_block
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.schema import home
from pipeline.results.layer_table import LayerTable
from pipeline.results.precision_audit import ran_in
from pipeline.results.report import BenchmarkFailure, BenchmarkReport, Benchmarks

LIBRARIES = ("onnxruntime", "openvino")
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)
SIZES = (512, 1024, 2048)  # of square products; which one is best depends on the caches
SECONDS = 0.5  # per product
COPY_BYTES = 256 * 2**20  # far more than any cache holds
MIN_RUNS = 5
BUSY_SHARE = (
    0.5  # of the cores: with more load from others before the start, what is measured is no peak
)


class Product(Frozen):
    """One square matrix product by one library."""

    backend: str
    precision: Precision
    size: int
    flops_per_s: float  # of the fastest run


def peaks_of(target: Target, threads: int) -> Peaks | None:
    """Of the device an engine runs on: a GPU's from the table of known rates, a CPU's if they were
    measured with so many threads (0: all).
    """
    if target.compute_capability is None:
        return load_peaks(threads)
    found = next(
        (gpu for gpu in with_hardware(find_gpus()).devices if gpu.name == target.device), None
    )
    known = peaks(found) if found else None
    return known if known and known.flops_per_s else None


def with_limits(
    found: Benchmarks,
    engines: Sequence[Engine],
    layers: Mapping[str, LayerTable | None],
    threads: int,
) -> Benchmarks:
    """The same figures with the peaks of their devices, and with what binds each row. `layers`
    tell, by label, what an engine really runs.

    No part of the stage that measures: figures of an earlier run are seen against peaks that were
    measured since.
    """
    peaks_by_device = {
        device: peaks_of(target, threads)
        for device, target in {each.target.device: each.target for each in engines}.items()
    }

    def bounded(
        result: BenchmarkReport | BenchmarkFailure, engine: Engine
    ) -> BenchmarkReport | BenchmarkFailure:
        if isinstance(result, BenchmarkFailure):
            return result
        called = engine.recipe.rest if engine.recipe.weight_only else engine.recipe.precision
        return with_bounds(
            result, ran_in(called, layers.get(result.label)), peaks_by_device[engine.target.device]
        )

    results = tuple(
        bounded(result, engine) for result, engine in zip(found.results, engines, strict=True)
    )
    return found.model_copy(
        update={
            "results": results,
            "peaks": tuple(each for each in peaks_by_device.values() if each),
        }
    )


# -- kept --------------------------------------------------------------------


def peaks_file(threads: int = 0) -> Path:
    """Where the peaks of this CPU with so many threads are kept."""
    about = json.dumps([cpu_name(), cpu_flags(), threads or usable_cores()])
    return home() / "peaks" / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"


def load_peaks(threads: int = 0) -> Peaks | None:
    """What was measured here before; None if nothing was, or the file is damaged."""
    try:
        return Peaks.model_validate_json(peaks_file(threads).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def keep_peaks(found: Peaks, threads: int = 0) -> Path:
    """Keep them for `load_peaks`, at once or not at all."""
    file = peaks_file(threads)
    file.parent.mkdir(parents=True, exist_ok=True)
    work = file.with_suffix(f".{os.getpid()}")
    work.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    work.replace(file)
    return file


# -- measured ----------------------------------------------------------------


def measure_peaks(threads: int = 0, progress: Progress = silent) -> Peaks:
    """The fastest products and copy of this CPU with so many threads (0: all). Takes about 15 s;
    run it on a quiet host.
    """
    threads, load = threads or usable_cores(), os.getloadavg()[0]
    best: dict[Precision, float] = {}
    for product in measure_products(threads, SECONDS, progress):
        best[product.precision] = max(best.get(product.precision, 0.0), product.flops_per_s)
    progress(None, "copying")
    return Peaks(
        device=f"{cpu_name()}, {threads} thread{'s' * (threads != 1)}",
        source=f"measured {dt.datetime.now(dt.UTC):%Y-%m-%d}{busy_text(load, usable_cores())}",
        flops_per_s=best,
        bytes_per_s=measure_copy(threads),
    )


def busy_text(load: float, cores: int) -> str:
    """What a reader of peaks must know of the host while they were measured: nothing if it was
    quiet.
    """
    return f" on a busy host, load {load:.1f}: too low" if load > BUSY_SHARE * cores else ""


def measure_products(
    threads: int, seconds: float = SECONDS, progress: Progress = silent
) -> Iterator[Product]:
    """Every library in every precision that it really runs here, at every size."""
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
            try:
                backends.backend(name).check_recipe(recipe, target)
            except UnsupportedError:
                continue
            for size in SIZES:
                progress(None, f"{name} {precision}, {size} x {size}")
                yield _product(recipe, size, threads, seconds)


def _product(recipe: Recipe, size: int, threads: int, seconds: float) -> Product:
    feeds = {"x": np.random.default_rng(0).normal(0, 1, (size, size)).astype(np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(recipe, size, threads, Path(folder))
        with closing(backends.load(engine)) as loaded, closing(loaded.session()) as session:
            run = partial(run_session, session, feeds)
            measure_block(run, min_s=seconds / 5)
            best_s = min(measure_block(run, min_s=seconds, min_runs=MIN_RUNS))
    return Product(
        backend=recipe.backend,
        precision=recipe.precision,
        size=size,
        flops_per_s=2 * size**3 / best_s,
    )


def _engine(recipe: Recipe, size: int, threads: int, folder: Path) -> Engine:
    """y = x @ w, [size, size] each; for int8 both sides go through Q/DQ, which every library fuses
    into the product.
    """
    weights = np.random.default_rng(1).normal(0, 1, (size, size)).astype(np.float32)
    quantised = recipe.precision is Precision.INT8
    nodes, constants = (
        _quantised(weights)
        if quantised
        else ([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weights})
    )
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in ("x", "y")
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        ends[:1],
        ends[1:],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        folder / "product.onnx",
    )
    model = onnx_model(folder, "product.onnx").model_copy(
        update={"precision": recipe.precision if quantised else Precision.FP32}
    )
    (folder / "engine").mkdir()
    return backends.backend(recipe.backend).build(
        model, recipe, BuildOptions(profiles=(), threads=threads), folder / "engine", silent
    )


def _quantised(
    weights: np.ndarray[tuple[int, int], np.dtype[np.float32]],
) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]:
    """u8 activations by s8 weights, as int8 engines of these libraries have it; 7 bits, so that no
    sum of two products can saturate anywhere.
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
    """Bytes read and written per second by a copy that all threads share, at its fastest."""
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
