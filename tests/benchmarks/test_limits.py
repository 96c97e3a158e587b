"""The benchmarks of what limits whole runs: parts and their results, rates, and the ways from host
to host, on the doubles of TensorRT or on the CPU.
"""

import contextlib
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import Row
from benchmarks.gpu.contest import Entrant, contest
from benchmarks.gpu.host import Watch
from benchmarks.limits import (
    attention_lengths,
    host_to_host,
    replicas,
    resnet_throughput,
    serving_ceiling,
    two_gpus,
)
from benchmarks.limits.beside_build import compile_command, rows_beside, visible
from benchmarks.limits.from_host import Overlapped, channels_last, opened_from_host
from benchmarks.limits.open_loop import run as ask_in_an_open_loop
from benchmarks.limits.part_results import LimitReached, ended_after, measure_parts
from benchmarks.serving.client import ask_once, http_request
from benchmarks.serving.crucible import plan_of
from benchmarks.serving.models import image, write_small
from benchmarks.serving.processes import Cpu, clean_environment, free_port, running, wait_until
from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.benchmark.interleaved import Workload
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import ModelError
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import plan_from_document
from pipeline.plan.schema import BenchmarkConfig
from service.devices.gpus import GpuKind
from service.registry.models import DeploymentOptions
from tests.pipeline.backends.tensorrt.builders import Bench, doubled, feeds

# -- parts -------------------------------------------------------------------


def rows_in(file: Path) -> list[dict[str, object]]:
    return list(json.loads(file.read_text(encoding="utf-8"))["rows"])


def test_parts_keep_their_results_when_others_fail_or_are_measured_later(tmp_path: Path) -> None:
    def fail() -> list[dict[str, float]]:
        raise RuntimeError("no such thing")

    layers: list[Row] = []
    measure = partial(measure_parts, "name", into=tmp_path, run={"seconds": 1.0})
    with pytest.raises(SystemExit) as ended:
        measure(
            parts={"a": lambda: [{"ms": 1.0}], "b": fail},
            targets_of=lambda rows: {"two rows": len(rows) == 2},
            limit_s=60.0,
            details={"layers": layers},
        )
    assert ended.value.code == 1
    first, second = rows_in(tmp_path / "name.json")
    assert first == {"part": "a", "ms": 1.0, "note": None}
    assert second == {"part": "b", "ms": None, "note": "failed: RuntimeError: no such thing"}
    with pytest.raises(SystemExit):  # a fails now, and keeps what it had
        measure(
            parts={"b": lambda: [{"ms": 2.0}], "a": fail}, targets_of=lambda rows: {}, limit_s=60.0
        )
    assert [(row["part"], row["ms"]) for row in rows_in(tmp_path / "name.json")] == [
        ("a", 1.0),
        ("b", 2.0),
    ]
    with pytest.raises(SystemExit):  # another run: none of the old rows belong to it
        measure_parts(
            "name", {"c": lambda: [{"ms": 3.0}]}, lambda rows: {}, tmp_path, 60.0, {"seconds": 2.0}
        )
    assert [row["part"] for row in rows_in(tmp_path / "name.json")] == ["c"]


def test_a_part_ends_at_the_limit_even_where_failures_are_caught() -> None:
    def caught() -> None:
        with contextlib.suppress(Exception):  # as where one engine of several may fail
            time.sleep(30)

    with pytest.raises(LimitReached), ended_after(0.05):
        caught()
    with pytest.raises(LimitReached), ended_after(0.0):
        caught()


# -- serving_ceiling ---------------------------------------------------------


def test_cores_and_connections_are_shared_out() -> None:
    server, clients = serving_ceiling.core_sets(range(16), 6)
    assert (server, clients) == (frozenset(range(10)), frozenset(range(10, 16)))
    assert serving_ceiling.core_sets({0, 1}, 6) == (frozenset({0, 1}), frozenset({0, 1}))
    assert serving_ceiling.shares_of(8, 6) == [2, 2, 1, 1, 1, 1]
    assert serving_ceiling.shares_of(2, 6) == [1, 1]


def test_a_stretch_of_several_clients() -> None:
    answer = {"wall_s": 2.0, "cpu_s": 1.0, "latencies_s": [0.01] * 600, "first_faults": []}
    stages = {"stages_ms": {"queue": 1.0, "copy_in": 2.0, "compute": 3.0, "copy_out": 4.0}}
    row = serving_ceiling.row_of([answer | stages, answer], Cpu(3.0, 5.0), 64)
    assert row["images_per_s"] == 600 * 64
    assert row["GB_per_s"] == pytest.approx(600 * 64 * 224 * 224 * 3 / 1e9)
    assert [row["p50_ms"], row["p99_ms"]] == pytest.approx([10, 10])
    assert (row["api_cores"], row["rest_cores"], row["client_cores"]) == (1.5, 2.5, 1.0)
    assert (row["compute_ms"], row["note"]) == (3.0, None)
    with pytest.raises(RuntimeError, match="no right answer"):
        serving_ceiling.row_of([answer | {"latencies_s": []}], Cpu(0, 0), 64)


def test_the_server_is_held_against_what_binds() -> None:
    rows: list[Row] = [
        {"part": part, "requests_per_s": rate}
        for part, rate in (("idle", 900.0), ("direct", 500.0), ("engine", 390.0))
    ]
    ((text, met),) = serving_ceiling.targets_of(rows).items()
    assert "`direct`" in text
    assert not met
    assert serving_ceiling.targets_of(rows[:2]) == {}
    sink: Row = {"part": "sink", "requests_per_s": 1000.0}
    assert list(serving_ceiling.targets_of([sink, rows[0]]).values()) == [True]


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_the_plan_of_the_engine_is_one(backend: str, tmp_path: Path) -> None:
    words = ["--backend", backend, "--images", "8"]
    setting = serving_ceiling.setting_from(serving_ceiling.parse_arguments(words), tmp_path)
    document = {**serving_ceiling.engine_plan(setting), "model": {"path": "engine.onnx"}}
    plan = plan_from_document(document, tmp_path)
    assert plan.candidates[0].backend == backend
    assert plan.preprocess["x"].layout == "NCHW"
    assert plan.profiles[0].dims["batch"].max == 8


def test_a_sink_reads_bodies_of_any_length_and_an_open_loop_asks_it(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, str(serving_ceiling.HERE / "sink.py"), str(port), "12"]
    with running(command, log, clean_environment()) as process:
        wait_until(lambda: serving_ceiling.is_listening(port), process, log)
        for size in (1, 3 * 2**20):
            status, _, body = ask_once(port, http_request(port, "/", bytes(size)))
            assert (status, body) == (200, bytes(12))
        request = http_request(port, "/", bytes(100_000))
        found = ask_in_an_open_loop(port, request, rate=100.0, seconds=0.5, seed=0)
    assert found.latencies_s
    assert not found.faults
    assert found.under_way == 0


# -- two_gpus ----------------------------------------------------------------

H200, L4 = GpuKind("NVIDIA H200", "9.0"), GpuKind("NVIDIA L4", "8.9")


def test_the_first_two_gpus_of_one_kind_are_taken() -> None:
    kinds = {"gpu:0": L4, "gpu:1": H200, "gpu:2": H200, "gpu:3": H200, "gpu:4": L4}
    assert two_gpus.places_on(kinds) == {
        "first": ("gpu:1",),
        "second": ("gpu:2",),
        "both": ("gpu:1", "gpu:2"),
    }
    with pytest.raises(SystemExit, match=r"two GPUs of one kind; gpu:0 is NVIDIA L4.*; gpu:1 is"):
        two_gpus.places_on({"gpu:0": L4, "gpu:1": H200})
    with pytest.raises(SystemExit, match="two GPUs of one kind; there is none\n  next: run it on"):
        two_gpus.places_on({})


def test_both_gpus_are_held_against_each_alone_in_the_same_round() -> None:
    def taken(rate: float) -> dict[str, Any]:
        figures = dict.fromkeys(two_gpus.MEDIANS, 1.0)
        return {**figures, "images_per_s": rate, "p99_ms": None, "note": None, "second_share": 0.5}

    rounds = {
        "first": [taken(100.0), taken(200.0), taken(100.0)],
        "second": [taken(100.0), taken(200.0), taken(100.0)],
        "both": [taken(190.0), taken(400.0), taken(160.0)],
    }
    places = {"first": ("gpu:0",), "second": ("gpu:1",), "both": ("gpu:0", "gpu:1")}
    first, second, both = two_gpus.rows_of(rounds, "wire", 16, places)
    assert (first["rows_per_s"], first["highest"], first["p99_ms"]) == (100.0, 200.0, None)
    assert "of_one" not in second
    assert (both["devices"], both["of_one"], both["second_share"]) == ("gpu:0, gpu:1", 1.9, 0.5)
    assert (both["of_one_low"], both["of_one_high"]) == (1.6, 2.0)
    assert two_gpus.share_of("b", two_gpus.batches_since({"a": 1.0}, {"a": 4.0, "b": 1.0})) == 0.25


def test_what_two_gpus_miss_is_a_goal_that_is_not_met() -> None:
    both = {"part": "bert", "way": "wire", "deployment": "both", "connections": 16}
    rows: list[Row] = [
        {**both, "of_one": 1.95, "second_share": 0.53},
        {**both, "connections": 32, "of_one": 1.5, "second_share": 0.5},
        {"part": "bert", "way": "open", "deployment": "first", "p99_ms": 5.0},
        {"part": "bert", "way": "open", "deployment": "second", "p99_ms": 6.0},
        {"part": "bert", "way": "open", "deployment": "both", "p99_ms": 5.5},
        {"part": "beside", "way": "alone", "of_alone": 1.0},
        {"part": "beside", "way": "beside", "of_alone": 1.03},
    ]
    targets = two_gpus.targets_of(rows)
    assert list(targets.values()) == [True, False, True, False]
    assert "got 1.95" in next(iter(targets))
    assert two_gpus.targets_of([{"part": "copies", "note": "failed: it did"}]) == {}


def test_one_engine_is_asked_in_three_deployments(tmp_path: Path) -> None:
    """A whole part, with the CPU for each of the GPUs."""
    words = ["--seconds", "0.5", "--connections", "2", "--client-cores", "1", "--images", "2"]
    arguments = two_gpus.parse_arguments([*words, "--http-processes", "1"])
    arguments.backend = "onnxruntime"
    setting = serving_ceiling.setting_from(arguments, tmp_path)
    load = two_gpus.Load(
        plan_of("small", 4),
        partial(write_small, seed=0),
        image(16).repeat(2, axis=0),
        DeploymentOptions(max_batch=4),
    )
    places = dict.fromkeys(("first", "second", "both"), ("cpu",))
    rows = two_gpus.measured("small", load, setting, 2, places)
    assert [(row["way"], row["deployment"]) for row in rows] == [
        (way, place) for way in ("wire", "open", "in process") for place in places
    ]
    assert all(float(row["rows_per_s"] or 0) > 0 and row["note"] is None for row in rows)
    assert [row.get("second_share") for row in rows[2::3]] == [1.0, None, 1.0]

    engine = Path(serving_ceiling.delivered(setting.home("small")))
    array, log = load.array, tmp_path / "log"
    other = [sys.executable, "-c", "import time; time.sleep(1)"]
    alone, beside = rows_beside(engine, array, 0.05, other, log, "gpu:0")
    assert (alone["way"], alone["of_alone"], beside["way"]) == ("alone", 1.0, "beside")
    assert int(beside["stretches"] or 0) > 1
    failing = [sys.executable, "-m", "nothing_here"]
    with pytest.raises(Exception, match=r"other compile failed:[^$]*nothing_here"):
        rows_beside(engine, array, 0.05, failing, log, "gpu:0")
    assert visible("gpu:1", {"CUDA_VISIBLE_DEVICES": "3,5"}) == "5"
    assert visible("gpu:1", {}) == "1"


def test_the_compile_beside_an_engine_is_a_compile(tmp_path: Path) -> None:
    """It goes as far as its model, which is missing."""
    command = compile_command(tmp_path / "missing.onnx", tmp_path)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode
    assert "missing.onnx" in ended.stderr
    assert (tmp_path / "home").is_dir()


@pytest.mark.parametrize("part", two_gpus.LOADS)
def test_the_plans_of_both_parts_are_plans(part: str, tmp_path: Path) -> None:
    setting = serving_ceiling.setting_from(two_gpus.parse_arguments([]), tmp_path)
    document = {**two_gpus.LOADS[part](setting).plan, "model": {"path": "m.onnx"}}
    assert plan_from_document(document, tmp_path).candidates[0].backend == "tensorrt"


# -- resnet_throughput -------------------------------------------------------


def quantised(folder: Path, takers: int = 1) -> Path:
    """x -> QuantizeLinear -> DequantizeLinear -> Relu, with further Relus of x."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("Relu", ["d"], ["y"]),
        *(helper.make_node("Relu", ["x"], [f"z{index}"]) for index in range(1, takers)),
    ]
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [
            numpy_helper.from_array(np.float32(0.5), "scale"),
            numpy_helper.from_array(np.int8(0), "zero"),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(proto, folder / "model.onnx")
    return folder


def test_the_input_becomes_int8_without_its_quantizelinear(tmp_path: Path) -> None:
    import onnxruntime

    model = onnx_model(quantised(tmp_path), "model.onnx", Precision.INT8)
    changed = resnet_throughput.with_int8_input(model, tmp_path / "int8")
    assert (changed.inputs[0].dtype, changed.inputs[0].shape) == ("int8", ("batch", 4))
    assert changed.precision is Precision.INT8
    session = onnxruntime.InferenceSession(str(changed.path))
    (found,) = session.run(None, {"x": np.array([[-4, 0, 2, 127]], np.int8)})
    np.testing.assert_array_equal(found, np.array([[0, 0, 1, 63.5]], np.float32))
    onnx_model(quantised(tmp_path, takers=2), "model.onnx")
    with pytest.raises(ModelError, match="expected one QuantizeLinear behind 'x'"):
        resnet_throughput.with_int8_input(
            onnx_model(tmp_path, "model.onnx", Precision.INT8), tmp_path / "int8"
        )


def relu(folder: Path) -> Engine:
    """y = relu(x) of [batch, 4], in ONNX Runtime."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(proto, folder / "relu.onnx")
    (folder / "out").mkdir()
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
    options = BuildOptions(profiles=(), threads=1)
    model = onnx_model(folder, "relu.onnx")
    return onnxruntime_.build(model, recipe, options, folder / "out", lambda *_: None)


def test_every_number_of_streams_has_a_rate_of_each_round(tmp_path: Path) -> None:
    rates, _ = resnet_throughput.flow_rates(relu(tmp_path), 2, (1, 2), 0.05)
    assert set(rates) == {1, 2}
    assert all(len(each) == resnet_throughput.ROUNDS and min(each) > 0 for each in rates.values())


def test_only_what_a_plan_can_ask_for_counts_for_the_goal() -> None:
    rows: list[Row] = [
        {"part": part, "streams": 2, "images_per_s": rate}
        for part, rate in (("int8_b256", 81_000.0), ("int8_input_b256", 99_000.0))
    ]
    met = resnet_throughput.targets_of([*rows, {"part": "int8_b64", "note": "failed"}])
    assert list(met.values()) == [True, False]
    assert all("int8_b256, 2 streams" in text for text in met)


# -- host_to_host ------------------------------------------------------------


def test_overlapping_runs_give_the_engines_answers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    loaded = bench.load(bench.engine())
    runner = Overlapped([loaded.session(), loaded.session()], feeds(4))
    np.testing.assert_array_equal(runner.run()["y"], doubled(dict(feeds(4)))["y"])
    runner.depth, launched = 3, bench.cuda.launches
    runner.run()
    assert bench.cuda.launches - launched == 6
    assert len(runner.take(0.01).end_to_end_s) > 0
    loaded.close()


def test_a_race_from_host_to_host_of_engines_in_children(tmp_path: Path) -> None:
    """On the CPU: the same children and figures as on a GPU, but for PyTorch, which has none."""
    engine = relu(tmp_path)
    entrants = [
        *host_to_host.entrants_of(Entrant("ours fp32", engine), overlap=True),
        Entrant(host_to_host.PEER, engine, "torch"),
    ]
    fed = {"x": np.full((2, 4), -1, np.float32)}
    options = BenchmarkConfig(duration_s=0.05, warmup_s=0.01)
    outcomes = contest(
        entrants, Workload({}, fed, 2, None, None), options, Watch(), opened_from_host
    )
    *ours, torch_row = host_to_host.rows_of(outcomes, 2)
    assert "note" in torch_row
    assert [(row["memory"], row["overlapping"]) for row in ours] == [
        ("ordinary", 1),
        ("page-locked", 1),
        ("ordinary", host_to_host.OVERLAPPING),
        ("page-locked", host_to_host.OVERLAPPING),
    ]
    assert all(float(str(row["wall_ms"])) > 0 for row in ours)
    assert all(row["ratio"] is None and row["binds"] in ("bus", "GPU") for row in ours)


def test_the_best_of_ours_is_held_against_pytorch_in_every_case() -> None:
    common: Row = {"part": "resnet50_b1", "memory": "ordinary", "overlapping": 1}
    rows: list[Row] = [
        {**common, "engine": "ours fp16", "ratio": 0.9, "ratio_low": 0.8},
        {**common, "engine": "ours int8", "ratio": 1.2, "ratio_low": 1.1},
        {**common, "engine": "ours int8", "overlapping": 3, "ratio": 1.1, "ratio_low": 0.99},
        {**common, "engine": host_to_host.PEER, "ratio": None},
    ]
    assert host_to_host.targets_of(rows) == {
        "resnet50_b1, ordinary memory, one after another: ahead of PyTorch"
        " (got 1.20 with ours int8)": True,
        "resnet50_b1, ordinary memory, overlapping: ahead of PyTorch (got 1.10 with ours int8)": (
            False
        ),
    }


def test_channels_last_changes_no_answer() -> None:
    torch.manual_seed(0)
    module = torch.nn.Conv2d(3, 4, 3).eval()
    image = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        expected = module(image)
        found = channels_last(module)(image)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.contiguous(), expected)


# -- attention by the number of tokens ---------------------------------------


def test_attention_in_one_kernel_is_measured_beside_three_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_lengths, "free_bytes", lambda device: 40 << 20)
    monkeypatch.setattr(attention_lengths, "ROUNDS", 2)
    words = ["--device", "cpu", "--tokens", "64,512", "--into", str(tmp_path)]
    attention_lengths.main(words)
    rows = rows_in(tmp_path / "attention_lengths.json")
    assert [(row["tokens"], row["attention"]) for row in rows] == [
        (64, "plain"),
        (64, "one kernel"),
        (512, "plain"),
        (512, "one kernel"),
    ]
    assert [row["ms"] is not None for row in rows] == [True, True, False, True]
    assert "more than half of the free memory" in str(rows[2]["note"])
    with pytest.raises(SystemExit):
        attention_lengths.main(["--tokens", "512,many"])


def test_both_forms_of_attention_give_the_same() -> None:
    given = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    first, second = (attend(*given) for attend in attention_lengths.WAYS.values())
    torch.testing.assert_close(first, second)


def test_memory_that_grows_with_the_square_misses_its_target() -> None:
    def rows(*memory_mb: float) -> list[Row]:
        pairs = zip((512, 1024, 2048), memory_mb, strict=True)
        return [{"tokens": at, "attention": "one kernel", "memory_mb": mb} for at, mb in pairs]

    assert list(attention_lengths.targets_of(rows(1.0, 2.0, 4.0)).values()) == [True]
    assert list(attention_lengths.targets_of(rows(1.0, 4.0, 16.0)).values()) == [False]


# -- servers behind a proxy ----------------------------------------------------


def test_servers_proxy_and_clients_have_cores_of_their_own() -> None:
    cores = replicas.Cores.of(frozenset(range(16)), clients=4, proxy=2)
    assert [sorted(each) for each in cores.servers] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert (sorted(cores.proxy), sorted(cores.clients)) == ([10, 11], [12, 13, 14, 15])
    assert cores.are_apart
    few = replicas.Cores.of(frozenset(range(2)), clients=4, proxy=2)
    assert not few.are_apart
    assert few.servers == (frozenset((0, 1)),)
    (row,) = replicas.growth_part(Any, few, (1, 2, 4))  # type: ignore[arg-type]  # not looked at
    assert row == {"note": "needs 12 cores: on fewer, servers, proxy and clients share them"}


def test_growth_and_added_latency_have_targets() -> None:
    def rows(added: float, times: float) -> list[Row]:
        return [
            {"part": "latency", "way": "straight", "added_ms": None},
            {"part": "latency", "way": "proxy", "added_ms": added},
            {"part": "growth", "servers": 0, "times_one": None},
            {"part": "growth", "servers": 1, "times_one": 1.0},
            {"part": "growth", "servers": 4, "times_one": times},
        ]

    assert list(replicas.targets_of(rows(0.3, 3.7)).values()) == [True, True]
    assert list(replicas.targets_of(rows(1.1, 3.5)).values()) == [False, False]
    assert replicas.targets_of([{"note": "failed"}]) == {}
