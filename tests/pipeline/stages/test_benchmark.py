"""The stage: what is measured, and real engines in real children."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

from pipeline import backends
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.benchmark.load import NO_BATCH_AXIS
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel
from pipeline.core.progress import silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import PlanError
from pipeline.measurement.comparison import MIN_PAIRS
from pipeline.onnx_graph.files import onnx_model
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, LoadCurve
from pipeline.stages.benchmark import (
    benchmark,
    benchmark_load,
    rows_per_run,
    values_at,
    with_threads,
)
from tests.builders.interleaved import PROFILE, SHORT, X, engine_named


def test_all_are_loaded_with_the_same_threads() -> None:
    assert {
        with_threads(engine_named("a").model_copy(update={"threads": built}), 2).threads
        for built in (0, 1, 4)
    } == {2}


def test_rows_per_run() -> None:
    scalar = TensorSpec(name="s", dtype="float32", shape=())
    fixed = TensorSpec(name="f", dtype="float32", shape=(5, 2))
    assert rows_per_run([X], {"batch": 7}) == 7
    assert rows_per_run([X, scalar], {"batch": 7}) == 1
    assert rows_per_run([fixed], {}) == 1
    assert rows_per_run([], {}) == 1


# -- real engines in real children -------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    """y = x @ w."""
    folder = tmp_path_factory.mktemp("model")
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 3], np.ones(12, np.float32))
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])]
    graph = helper.make_graph([node], "g", inputs, outputs, [weight])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        folder / "model.onnx",
    )
    return onnx_model(folder, "model.onnx")


def test_values_that_decide_a_shape_go_with_the_sizes_of_their_point() -> None:
    short, long = (
        Profile.model_validate({"dims": {"n": n}, "values": {"k": k}})
        for n, k in (([1, 2, 4], [1, 3, 8]), ([8, 16, 32], [1, 10, 20]))
    )
    picked = {size: values_at({"n": size}, (short, long)) for size in (1, 2, 3, 4, 16, 99)}
    assert picked == {
        1: {"k": (1,)},
        2: {"k": (3,)},
        3: {"k": (3,)},
        4: {"k": (8,)},
        16: {"k": (10,)},
        99: {},
    }
    fixed = Profile.model_validate({"values": {"k": [1, 3, 8]}})
    assert values_at({}, (fixed,)) == {"k": (3,)}


@pytest.fixture(scope="module")
def engine(model: OnnxModel, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
    options = BuildOptions(profiles=(PROFILE,), threads=1)
    built = backends.backend("onnxruntime").build(
        model, recipe, options, tmp_path_factory.mktemp("engine"), silent
    )
    assert isinstance(built, Engine)
    return built


def twins(engine: Engine) -> list[RaceEntry[Engine]]:
    """The same engine twice: neither stops before the other."""
    return [RaceEntry(engine, Role.BASELINE), RaceEntry(engine, Role.COMPARED)]


def test_two_real_engines_in_children(model: OnnxModel, engine: Engine) -> None:
    fractions: list[float] = []

    def progress(fraction: float | None, text: str, figures: object = None) -> None:
        assert fraction is not None
        fractions.append(fraction)

    options = SHORT.model_copy(update={"sizes": ({"batch": 1}, {"batch": 8}), "threads": 1})
    benchmarks = benchmark(twins(engine), model, options, None, progress)
    assert fractions == sorted(fractions)
    assert len(benchmarks.results) == 2
    for result in benchmarks.results:
        assert isinstance(result, BenchmarkReport)
        assert [row.sizes for row in result.rows] == [{"batch": 1}, {"batch": 8}]
        assert all(value > 0 for row in result.rows for value in row.end_to_end.values_s)
        assert result.rows[1].flops_per_s == pytest.approx(
            2 * 8 * 4 * 3 / result.rows[1].end_to_end.median_s
        )
        assert 10_000_000 < result.rows[0].peak_memory_bytes < 2_000_000_000
    assert isinstance(benchmarks.results[1], BenchmarkReport)
    assert benchmarks.baseline == engine.recipe.label
    row = benchmarks.results[1].rows[0]
    assert (row.ratio is None) == bool(row.ratio_missing), (
        "a busy host may not tell, and then says so"
    )
    assert type(benchmarks).model_validate_json(benchmarks.model_dump_json()) == benchmarks


def test_a_killed_child_and_one_that_cannot_load_do_not_stop_the_others(
    model: OnnxModel, engine: Engine
) -> None:
    missing = engine.model_copy(update={"file": "gone.onnx"})
    victims: list[psutil.Process] = []
    before = psutil.Process().children()  # the fork server of earlier tests

    def kill_one(fraction: float | None, text: str, figures: object = None) -> None:
        if text.startswith("process 2, batch") and not victims:
            victims.extend(
                [each for each in psutil.Process().children() if each not in before][-1:]
            )
            victims[0].kill()

    benchmarks = benchmark(
        [*twins(engine), RaceEntry(missing, Role.COMPARED)], model, SHORT, None, kill_one
    )
    *loaded, unloadable = benchmarks.results
    (killed,) = (result for result in loaded if isinstance(result, BenchmarkFailure))
    assert "SIGKILL" in killed.reason
    (lasting,) = (result for result in loaded if isinstance(result, BenchmarkReport))
    assert set(lasting.rows[0].end_to_end.processes) == {3}
    assert len(lasting.rows[0].end_to_end.processes) >= MIN_PAIRS
    assert isinstance(unloadable, BenchmarkFailure)
    assert "gone.onnx" in unloadable.reason
    assert not [
        child
        for child in psutil.Process().children()
        if child not in before and child.status() != psutil.STATUS_ZOMBIE
    ], "no child is left behind"


def test_real_engines_under_load(model: OnnxModel, engine: Engine) -> None:
    options = SHORT.model_copy(update={"budget_s": 2.0})
    events: list[object] = []
    run = benchmark_load(
        twins(engine),
        model.inputs,
        options,
        None,
        lambda fraction, text, figures=None: events.append(figures),
    )
    assert events
    assert set(events) == {None}, "times under load are not those of the plot"
    assert run.baseline == engine.recipe.label
    for curve in run.curves:
        assert isinstance(curve, LoadCurve)
        assert {point.sizes["batch"] for point in curve.points} <= {1, 2, 4, 8}
        assert curve.best == max(curve.points, key=lambda point: point.samples_per_s)
        assert curve.sample_time is not None
        assert len(curve.sample_time.values_s) == sum(curve.sample_time.processes)


def test_a_model_without_a_batch_axis_varies_its_sessions_only(
    tmp_path: Path, engine: Engine
) -> None:
    sizes = {"x": ["time", 4], "mask": [4]}
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "mask"], ["y"])],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in sizes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["time", 4])],
    )
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    model = onnx_model(tmp_path, "m.onnx")
    profile = Profile.model_validate({"dims": {"time": [1, 3, 6]}})
    recipe, built_for = engine.recipe, BuildOptions(profiles=(profile,), threads=1)
    out = tmp_path / "engine"
    out.mkdir()
    timed = backends.backend("onnxruntime").build(model, recipe, built_for, out, silent)
    entry = RaceEntry(timed, Role.BASELINE)
    (curve,) = benchmark_load([entry], model.inputs, SHORT, None).curves
    assert isinstance(curve, LoadCurve)
    assert {(point.batch, point.sizes["time"]) for point in curve.points} == {(None, 3)}
    assert curve.untried[0] == NO_BATCH_AXIS


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 9}, "expected batch 1 to 8, got {'batch': 9}"),
        ({}, r"expected a size for each of batch, got {}"),
        ({"batch": 2, "length": 3}, r"expected a size for each of batch, got"),
    ],
)
def test_sizes_that_cannot_be_measured(
    model: OnnxModel, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        benchmark(
            [RaceEntry(engine_named("a"), Role.BASELINE)],
            model,
            SHORT.model_copy(update={"sizes": (sizes,)}),
        )


def test_measuring_nothing_is_an_error(model: OnnxModel) -> None:
    with pytest.raises(PlanError, match="expected at least one engine to measure, got none"):
        benchmark([], model, SHORT)
