"""Engines are traced for real: the file holds what the engine ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from pipeline import backends
from pipeline.backends.tensorrt.tracing import sees_kernels
from pipeline.benchmark.interleaved import Workload
from pipeline.benchmark.trace import MIN_RUNS, RUNS, run_numbers, trace_engine
from pipeline.benchmark.trace_events import HOST, write_trace
from pipeline.cli.trace import longest_layer
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile
from pipeline.execution.child_process import call_in_child
from pipeline.host.nvtx import PackageRanges, find_ranges
from pipeline.results.layer_table import LayerTable
from pipeline.results.timeline import LAYERS, EngineTrace
from tests.builders.halves import Halves
from tests.pipeline.benchmark.timeline import micros_of_row, names_of_row, read_trace
from tests.pipeline.conformance.models import Case, model
from tests.pipeline.host.test_nvtx import nvtx_package

WIDE, ROWS = 2048, 256  # milliseconds: a stall of a busy host is shorter
CALLS = ["bind", "copy in", "execute", "copy out", "wait", "fetch"]


def dominated(wide: int = WIDE, rows: int = ROWS) -> Case:
    """A product between two operators that take a thousandth of its FLOPs: 2.1 GFLOP if it is not
    said otherwise.
    """
    weights = np.random.default_rng(0).standard_normal((wide, wide), np.float32)
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="before"),
        helper.make_node("MatMul", ["a", "w"], ["b"], name="dominant"),
        helper.make_node("Softmax", ["b"], ["y"], name="behind"),
    ]
    interface = [("x", "float32", ("batch", wide))], [("y", "float32", ("batch", wide))]
    proto = model(nodes, *interface, {"w": weights})
    feeds = {"x": np.ones((rows, wide), np.float32)}
    return Case(
        "dominated",
        proto,
        (Profile.model_validate({"dims": {"batch": [1, rows, rows + 16]}}),),
        (feeds,),
    )


def built(backend: str, folder: Path, case: Case) -> Engine:
    (folder / "engine").mkdir()
    recipe = Recipe(backend=backend, precision=Precision.FP32)
    options = BuildOptions(profiles=case.profiles, threads=1)
    source = case.write(folder / "source")
    return backends.backend(backend).build(source, recipe, options, folder / "engine", silent)


def workload_of(case: Case) -> Workload:
    (feeds,) = case.feeds
    rows = len(feeds["x"])
    return Workload(sizes={"batch": rows}, feeds=feeds, rows=rows)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_the_file_holds_the_layers_of_the_engine_and_the_dominant_one_is_the_longest(
    tmp_path: Path, backend: str
) -> None:
    case = dominated()
    engine = built(backend, tmp_path, case)
    trace = trace_engine(engine, workload_of(case))
    write_trace([trace], "crucible bench DIR --trace trace.json", tmp_path / "trace.json")
    document = read_trace(tmp_path / "trace.json")
    assert names_of_row(document, HOST) == [
        name for run in range(1, RUNS + 1) for name in (f"run {run}", *CALLS)
    ]
    table = backends.backend(backend).layers(engine, case.feeds[0])
    assert table is not None
    assert set(names_of_row(document, LAYERS)) == {layer.name for layer in table.layers}
    micros = micros_of_row(document, LAYERS)
    longest = max(micros, key=micros.__getitem__)
    (heavy,) = (layer.name for layer in table.layers if layer.heavy)
    assert longest == heavy
    found = longest_layer(trace)
    assert found is not None
    assert found[0] == heavy
    (metadata,) = document["otherData"]["engines"]
    assert metadata["engine"] == engine.recipe.label
    assert metadata["shape"] == {"batch": ROWS}
    assert metadata["traced_over_untraced"] == pytest.approx(
        metadata["traced_ms"] / metadata["untraced_ms"]
    )
    assert metadata["starts_of_layers"] == ("measured" if backend == "onnxruntime" else "in order")


def test_a_loop_holds_the_layers_of_its_body(tmp_path: Path) -> None:
    one = helper.make_node("Constant", [], ["one"], value_float=1.0, name="one")
    body = helper.make_graph(
        [one, helper.make_node("Add", ["s", "one"], ["t"], name="inner")],
        "body",
        [
            helper.make_tensor_value_info("i", 7, []),
            helper.make_tensor_value_info("go", 9, []),
            helper.make_tensor_value_info("s", 1, None),
        ],
        [helper.make_tensor_value_info("go", 9, []), helper.make_tensor_value_info("t", 1, None)],
    )
    proto = model(
        [helper.make_node("Loop", ["count", "", "x"], ["y"], body=body, name="outer")],
        [("x", "float32", ("batch", 4))],
        [("y", "float32", ("batch", 4))],
        {"count": np.array(3, np.int64)},
    )
    feeds = {"x": np.ones((2, 4), np.float32)}
    profile = Profile.model_validate({"dims": {"batch": [1, 2, 3]}})
    case = Case("loop", proto, (profile,), (feeds,))
    trace = trace_engine(
        built("onnxruntime", tmp_path, case), Workload(sizes={"batch": 2}, feeds=feeds, rows=2)
    )
    write_trace([trace], "", tmp_path / "trace.json")
    names = names_of_row(read_trace(tmp_path / "trace.json"), LAYERS)
    assert names.count("outer") == RUNS
    assert names.count("inner") == 3 * RUNS
    assert names[:2] == ["outer", "inner"]


def test_a_backend_that_records_nothing_has_the_calls_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends.BACKENDS, "halves", Halves())
    case = dominated()
    trace = trace_engine(built("halves", tmp_path, case), workload_of(case))
    assert trace.activity.spans == ()
    assert longest_layer(trace) is None
    assert trace.activity.notes == ("this backend does not tell what happens inside `execute`",)
    write_trace([trace], "", tmp_path / "trace.json")
    assert names_of_row(read_trace(tmp_path / "trace.json"), HOST)[:2] == ["run 1", "bind"]


def test_with_nvtx_each_run_and_call_is_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = nvtx_package(tmp_path / "nvtx", monkeypatch)
    case = dominated()
    engine = built("onnxruntime", tmp_path, case)
    trace = trace_engine(engine, workload_of(case))
    assert trace.nvtx
    steps = ["bind", "upload", "execute", "download", "synchronize", "fetch"]
    run = [part for step in steps for part in (step, "pop")]
    assert pushed() == [
        line
        for number in range(1, RUNS + 1)
        for line in (f"{engine.recipe.label}, run {number}", *run, "pop")
    ]
    PackageRanges().push("left open")
    assert pushed()[-1] == "left open"


def test_a_slow_engine_runs_less_often() -> None:
    now = iter(range(0, 1000, 11))  # each look at the clock is 11 s later
    assert len(list(run_numbers(lambda: float(next(now))))) == MIN_RUNS
    assert len(list(run_numbers(lambda: 0.0))) == RUNS


def traced_on_gpu(folder: Path, progress: Progress) -> tuple[EngineTrace, LayerTable | None]:
    case = dominated(4096, 512)
    engine = built("tensorrt", folder, case)
    trace = trace_engine(engine, workload_of(case))
    return trace, backends.backend("tensorrt").layers(engine, case.feeds[0])


@pytest.mark.gpu
def test_on_a_gpu_there_are_layers_and_with_pytorch_kernels_and_copies(tmp_path: Path) -> None:
    trace, table = call_in_child(traced_on_gpu, tmp_path, name="trace")
    write_trace([trace], "", tmp_path / "trace.json")
    document = read_trace(tmp_path / "trace.json")
    assert table is not None
    names = names_of_row(document, LAYERS)
    assert set(names) == {layer.name for layer in table.layers if layer.seconds is not None}
    micros = micros_of_row(document, LAYERS)
    assert max(micros, key=micros.__getitem__) in {
        layer.name for layer in table.layers if layer.heavy
    }
    assert "enqueue" in names_of_row(document, HOST)
    rows = {event["cat"].partition(",")[0] for event in document["traceEvents"] if "cat" in event}
    assert rows == {HOST, LAYERS} | ({"kernels", "copies"} if sees_kernels() else set())
    assert trace.nvtx == (find_ranges(on_gpu=True) is not None)
