"""Memory and energy of a TensorRT engine whose weights are known, as the benchmark finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from pipeline import backends
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.core.artifacts import BuildOptions, OnnxModel
from pipeline.core.progress import silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile
from pipeline.host.gpu import find_gpus
from pipeline.plan.schema import BenchmarkConfig
from pipeline.results.benchmarks import BenchmarkReport
from pipeline.stages.benchmark import benchmark
from tests.gpu.fixtures.gpu import MIB, check_cost
from tests.pipeline.conformance.models import Case, model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WIDTH = 4096
LAYERS = 2
WEIGHTS_BYTES = LAYERS * WIDTH * WIDTH * 4


def products(folder: Path) -> tuple[OnnxModel, Profile]:
    """Two MatMuls in fp32, with a Relu between them, of 64 MiB each."""
    random = np.random.default_rng(0)
    weights = {f"w{layer}": random.normal(0, 0.02, (WIDTH, WIDTH)) for layer in range(LAYERS)}
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w1"], ["y"]),
    ]
    x, y = ("x", "float32", ("n", WIDTH)), ("y", "float32", ("n", WIDTH))
    constants = {name: array.astype(np.float32) for name, array in weights.items()}
    profile = Profile(dims={"n": DimRange(min=1, opt=64, max=256)})
    proto = model(nodes, [x], [y], constants)
    feeds = ({"x": np.ones((1, WIDTH), np.float32)},)
    return Case("products", proto, (profile,), feeds).write(folder), profile


def test_figures_of_an_engine_are_plausible(tmp_path: Path) -> None:
    source, profile = products(tmp_path / "source")
    (tmp_path / "out").mkdir()
    recipe = Recipe(backend="tensorrt", precision=Precision.FP32)
    build = backends.backend("tensorrt").build
    engine = build(source, recipe, BuildOptions(profiles=(profile,)), tmp_path / "out", silent)
    options = BenchmarkConfig(duration_s=0.3, sizes=({"n": 64},))
    (result,) = benchmark([RaceEntry(engine, Role.BASELINE)], source, options).results
    assert isinstance(result, BenchmarkReport), result
    (row,) = result.rows
    assert row.gpu is not None
    check_cost(row.gpu)
    assert row.gpu.weights_bytes == pytest.approx(WEIGHTS_BYTES, rel=0.5, abs=2 * MIB)
    (gpu, *_) = find_gpus().devices
    assert (row.gpu.peak_bytes or 0) < gpu.memory_bytes
