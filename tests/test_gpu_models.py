"""The GPU table's benchmark: what is pure, and its sessions on the doubles of CUDA and TensorRT."""

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.backends.base import run_session
from pipeline.core import Engine, Precision, Recipe, Target, TensorSpec
from pipeline.job import open_job
from pipeline.layers import Layer, LayerTable
from pipeline.measure import WarmUpOptions, samples_from_blocks
from pipeline.process import Channel
from pipeline.report import BenchmarkReport, LatencyRow
from pipeline.runner import Runner
from pipeline.stages.benchmark import Block, NextShape, Take
from pipeline.store import Store
from tests.backends.fixtures_trt import Bench, doubled, feeds

ROOT = Path(__file__).parents[1]
H200 = Target(backend="tensorrt", version="10.6.0", device="NVIDIA H200", compute_capability="9.0", driver="580")
NAMES = ("bare", "contest", "facts", "host", "measure_row", "parts", "plans", "rows", "surgery", "torch_peers", "async_curve")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of benchmarks/gpu and gpu_models itself, imported as the script imports them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield {**{name: import_module(f"gpu.{name}") for name in NAMES}, "gpu_models": import_module("gpu_models")}
    for name in set(sys.modules) - before:
        if name in ("gpu", "gpu_models", "gpu_model_tables", "common") or name.startswith("gpu."):
            sys.modules.pop(name)


# -- rows and targets --------------------------------------------------------------------------------------------------


def test_every_row_is_a_plan_that_can_be_opened(gpu: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path))
    rows, plans = gpu["rows"], gpu["plans"]
    names = [row.name for row in rows.ROWS]
    assert len(set(names)) == len(names)
    for row in rows.ROWS:
        job = open_job(plans.plan_of(row), Runner(Store(tmp_path)))
        assert [spec.shape for spec in job.source.inputs] == list(row.inputs.values())
        assert job.data.calibration is not None
        assert set(row.ways) <= set(rows.WAYS)
        assert {name for goal in row.goals for name in (*goal.ours, *goal.theirs)} <= {*rows.WAYS, *row.peers}
        assert set(row.probe) <= set(row.ways)
        assert all(peer.split()[0] in gpu["torch_peers"].WAYS for peer in row.peers)


def entry(device_ms: float, wall_ms: float = 1.0) -> dict[str, Any]:
    return {"device_median_ms": device_ms, "wall_median_ms": wall_ms}


def test_targets_are_judged_by_the_medians_of_one_run(gpu: dict[str, ModuleType]) -> None:
    rows = gpu["rows"]
    row = rows.row_named("resnet50_b1")
    entries = {
        "ours fp16": entry(0.30, 0.40),
        "bare fp16": entry(0.30),
        "loop fp16": entry(0.30, 0.38),
        "ours int8": entry(0.26),
        "bare int8": entry(0.25),
        "torch compile fp16": entry(0.61),
        "ours fp32": {"failed": "no memory"},
    }
    found = {goal["text"]: goal for goal in rows.targets(row, entries, "NVIDIA H200")}
    assert found["fp16: GPU time over that of a bare build"]["reached"] is True
    assert found["int8: GPU time over that of a bare build"] | {"text": ""} == {
        "text": "", "value": pytest.approx(1.04), "direction": "at most", "limit": 1.03, "reached": False,
    }  # fmt: skip
    assert found["fp16: GPU time over the probe's 0.29 ms"]["value"] == pytest.approx(0.30 / 0.29)
    assert found["int8: GPU time over the probe's 0.235 ms"]["reached"] is False
    assert found["fp32: GPU time over that of a bare build"]["reached"] is None
    assert found["fp16: us more from bind to fetch than the bare loop"]["value"] == pytest.approx(20)
    assert found["torch compile fp16 over ours fp16"]["reached"] is True
    assert not any("probe" in text for text in {goal["text"]: goal for goal in rows.targets(row, entries, "NVIDIA H100")})


def test_long_runs_are_judged_by_ratio_and_the_fastest_of_ours_counts(gpu: dict[str, ModuleType]) -> None:
    rows = gpu["rows"]
    row = rows.row_named("resnet50_b64")
    entries = {
        "ours int8": entry(2.2, 5.0),
        "loop int8": entry(2.2, 4.0),
        "ours int8 modelopt": entry(1.28),
        "ours int8 implicit": entry(1.27),
    }
    found = {goal["text"]: goal for goal in rows.targets(row, entries, "NVIDIA H200")}
    assert found["int8: bind to fetch over that of the bare loop"]["reached"] is False
    explicit = found["ours int8 modelopt over ours int8 implicit"]
    assert explicit["value"] == pytest.approx(1.28 / 1.27)
    assert explicit["reached"] is True


def test_a_gain_between_two_peers_is_a_target_too(gpu: dict[str, ModuleType]) -> None:
    rows = gpu["rows"]
    entries = {"torch eager fp32": entry(1.85), "torch graph fp32": entry(0.366)}
    (found,) = [goal for goal in rows.targets(rows.row_named("mobilenet_128"), entries, "") if goal["text"].startswith("torch eager")]
    assert found["reached"] is True
    assert found["limit"] == pytest.approx(2.928)


# -- what the models are fed -------------------------------------------------------------------------------------------


def test_texts_are_padded_and_alike_for_all(gpu: dict[str, ModuleType]) -> None:
    plans = gpu["plans"]
    fed = plans.text_feeds({"input_ids": (4, 128), "attention_mask": (4, 128)}, seed=0)
    lengths = fed["attention_mask"].sum(axis=1)
    assert lengths[0] == 128
    assert (lengths >= 32).all()
    assert len(set(lengths)) > 1
    assert (fed["input_ids"][fed["attention_mask"] == 0] == 0).all()
    assert plans.text_feeds({"input_ids": (1, 512), "attention_mask": (1, 512)}, seed=0)["attention_mask"].sum() == 384
    assert set(plans.text_feeds({"input_ids": (1, 8)}, seed=0)) == {"input_ids"}


def test_calibration_texts_are_whole_batches(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    row = gpu["rows"].row_named("encoder_b32")
    with np.load(gpu["plans"].calibration_file(row, tmp_path, {})) as file:
        assert {name: file[name].shape for name in file} == {"input_ids": (64, 128), "attention_mask": (64, 128)}


# -- sessions on doubles -----------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_bare_loop_gives_the_engines_answers_and_gives_all_memory_back(gpu: dict[str, ModuleType], bench: Bench) -> None:
    engine = bench.engine()
    session = gpu["bare"].BareSession(bench.trt, bench.cuda, engine.path.read_bytes(), feeds(4))
    for start in (0, 7):
        np.testing.assert_array_equal(run_session(session, feeds(4, start))["y"], doubled(dict(feeds(4, start)))["y"])
    assert bench.cuda.launches == 2
    session.close()
    assert not bench.cuda.pinned
    assert not bench.cuda.graphs
    assert not bench.cuda.streams


def test_blocks_of_a_session_and_of_a_flow(gpu: dict[str, ModuleType], bench: Bench) -> None:
    contest = gpu["contest"]
    loaded = bench.load(bench.engine())
    single = contest.Single(loaded.session(), feeds(4))
    np.testing.assert_array_equal(single.run()["y"], doubled(dict(feeds(4)))["y"])
    block = single.take(0.01)
    assert block.runs == len(block.end_to_end_s) > 0
    assert len(block.compute_s) > 0
    assert min(block.compute_s) > 0
    flow = contest.Flow([loaded.session(), loaded.session()], feeds(4), upload=True, depth=3)
    np.testing.assert_array_equal(flow.run()["y"], doubled(dict(feeds(4)))["y"])
    launched = bench.cuda.launches
    flow.run()
    assert bench.cuda.launches - launched == 6
    taken = flow.take(0.01)
    assert taken.end_to_end_s == taken.compute_s
    samples_from_blocks([taken.upload_s, taken.upload_s], ())  # has a ratio
    loaded.close()


class Talk(Channel):
    """The parent's words in order; what the child says is kept."""

    def __init__(self, words: list[object]) -> None:
        self.words, self.said = words, list[Any]()

    def send(self, payload: object) -> None:
        self.said.append(payload)

    def receive(self) -> object:
        return self.words.pop(0)


def test_a_child_gives_a_block_for_each_turn(gpu: dict[str, ModuleType], bench: Bench) -> None:
    loaded = bench.load(bench.engine())
    channel = Talk([WarmUpOptions(min_runs=3, min_s=0.0, max_s=0.0), Take(0.01), Take(0.01), NextShape()])
    gpu["contest"].take_turns(channel, gpu["contest"].Single(loaded.session(), feeds(4)))
    warmup, *blocks = channel.said
    assert len(warmup) >= 3
    assert [isinstance(block, Block) for block in blocks] == [True, True]
    assert not channel.words
    loaded.close()


def test_what_a_child_says_first_is_kept_and_handed_on(gpu: dict[str, ModuleType]) -> None:
    contest = gpu["contest"]
    told: list[object] = []

    class Peer:
        def receive(self, timeout_s: float | None = None) -> object:
            return words.pop(0)

    first = contest.Loaded(1.0, {}, {})
    words = [first, (0.1,)]
    listening = contest.Listening(Peer(), told.append)
    assert listening.receive() is first
    assert listening.receive() == (0.1,)
    assert told == [first]


def test_cosines_of_wrong_and_missing_answers(gpu: dict[str, ModuleType]) -> None:
    cosine = gpu["contest"].cosine
    good = {"y": np.array([1.0, 2.0])}
    assert cosine({"y": np.array([2.0, 4.0])}, good) == pytest.approx(1)
    assert cosine({"y": np.array([-1.0, -2.0])}, good) == pytest.approx(-1)
    for wrong in ({}, {"y": np.array([np.nan, 1])}, {"y": np.zeros(2)}, {"y": np.ones(3)}):
        assert cosine(wrong, good) is None


# -- what is written down ----------------------------------------------------------------------------------------------


def report(label: str, device_s: float, blocks: int = 6) -> BenchmarkReport:
    samples = samples_from_blocks([(device_s, device_s * 1.01)] * blocks, (), processes=(2,) * (blocks // 2))
    row = LatencyRow(
        sizes={}, end_to_end=samples, upload=samples, compute=samples, download=samples, throughput_per_s=1 / device_s,
        flops_per_s=None, bytes_per_s=None, ratio=None, peak_memory_bytes=1,
    )  # fmt: skip
    return BenchmarkReport(label=label, rows=(row,), notes=())


def engine(tmp_path: Path, variant: str = "") -> Engine:
    return Engine(
        root=tmp_path, file="engine.plan", digest="d", target=H200, recipe=Recipe(backend="tensorrt", precision=Precision.FP16, variant=variant),
        inputs=(), outputs=(), profiles=(), threads=0, size_bytes=1,
    )  # fmt: skip


def test_figures_and_ratios_of_a_race(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    contest, facts = gpu["contest"], gpu["facts"]
    loaded = contest.Loaded(2.0, {"y": np.array([1.0, 2.0])}, {"mode": "reduce-overhead"})
    outcomes = [
        contest.Outcome(contest.Entrant(name, engine(tmp_path)), report(name, device_s), loaded)
        for name, device_s in (("ours fp16", 0.3e-3), ("bare fp16", 0.29e-3), ("loop fp16", 0.3e-3), ("torch eager fp16", 2.7e-3))
    ]
    entries = {outcome.entrant.name: facts.entry_of(outcome) for outcome in outcomes}
    assert entries["ours fp16"]["device_median_ms"] == pytest.approx(0.3015)
    assert entries["ours fp16"]["device_p99_ms"] is None  # of 12 values
    assert len(entries["ours fp16"]["device_of_processes_ms"]) == 3
    assert entries["ours fp16"]["mode"] == "reduce-overhead"
    facts.add_answers(entries, outcomes)
    assert entries["ours fp16"]["cosine"] == pytest.approx(1)
    assert "cosine" not in entries["torch eager fp16"]
    found = {(ratio["over"], ratio["under"]): ratio["device"] for ratio in facts.ratios(outcomes, ["fp16", "int8"])}
    assert set(found) == {("ours fp16", "bare fp16"), ("ours fp16", "loop fp16"), ("torch eager fp16", "ours fp16")}
    assert found["ours fp16", "bare fp16"][0] == pytest.approx(0.3 / 0.29, abs=1e-4)
    assert found["torch eager fp16", "ours fp16"][0] == pytest.approx(9, abs=1e-4)


def test_the_layer_table_in_short(gpu: dict[str, ModuleType]) -> None:
    softmax = Layer(
        name="mha", kind="kgen", precision=Precision.FP16, evidence="types", heavy=True, nodes=("a", "s", "b"),
        operators=("MatMul", "Softmax", "MatMul"), seconds=3e-6,
    )  # fmt: skip
    moving = Layer(name="r", kind="Reformat", precision="none", evidence="none", seconds=1e-6)
    table = LayerTable(sizes={}, runs=1, layers=(softmax, moving))
    found = gpu["facts"].layer_facts(table, Recipe(backend="tensorrt", precision=Precision.FP16))
    assert found["time_share"] == {"fp16": 0.75, "none": 0.25}
    assert found["moving_layers"] == 1
    assert found["mislabelled"] == ""
    assert found["fusions"] == ["attention (MatMul, Softmax, MatMul) in one kernel: 1 of 1"]
    assert [layer["ms"] for layer in found["slowest"]] == pytest.approx([0.003, 0.001])


def test_kernels_that_a_peer_ran(gpu: dict[str, ModuleType]) -> None:
    events = [("aten::_scaled_dot_product_flash_attention", 0.0, 12), ("flash_fwd_kernel<half>", 40.0, 12), ("gemm", 400.0, 48), ("aten::mm", 9.0, 1)]
    found = gpu["torch_peers"].kernels(events)
    assert found["sdpa_operators"] == ["aten::_scaled_dot_product_flash_attention"]
    assert found["attention_kernels"] == ["12 x flash_fwd_kernel<half>"]
    assert found["slowest_kernels"][0] == "400 us in 48 x gemm"
    assert len(found["slowest_kernels"]) == 2


def test_a_row_that_runs_again_takes_its_own_place_and_no_other(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    script, file = gpu["gpu_models"], tmp_path / "gpu_models.json"
    goal = {"text": "fast", "value": 1.0, "direction": "at least", "limit": 2.0, "reached": False}
    script.add_row(file, "vit_b1", {"created": "1", "targets": [goal], "entries": {}}, H200)
    script.add_row(file, "async_curve", {"created": "2", "failed": "no GPU"}, H200)
    script.add_row(file, "resnet50_b1", {"created": "3", "targets": [{**goal, "reached": True}], "entries": {"ours fp16": entry(0.3)}}, H200)
    document = json.loads(file.read_text())
    assert list(document["rows"]) == ["resnet50_b1", "vit_b1", "async_curve"]
    assert document["targets"] == {"vit_b1: fast": False, "resnet50_b1: fast": True}
    assert document["environment"]["python"]
    for name, row in document["rows"].items():
        assert script.table(name, row).row_count == len(row.get("entries", ())) + len(row.get("targets", ()))


def test_the_page_shows_every_engine_with_its_figures(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    script, tables, file = gpu["gpu_models"], import_module("gpu_model_tables"), tmp_path / "gpu_models.json"
    assert tables.models_section(tables.document(tmp_path)) == []
    goal = {"text": "fast", "value": 2.5, "direction": "at least", "limit": 2.0, "reached": True}
    layers = {
        "time_share": {"fp16": 1.0}, "count": 9, "moving_layers": 2, "moving_share": 0.1, "mislabelled": "", "fusions": ["attention in one: 1 of 1"],
        "slowest": [{"nodes": "conv|1", "precision": "fp16", "share": 0.5}],
    }  # fmt: skip
    compiled = {"mode": "reduce-overhead", "mode_before": "too long", "compile_s": 60.0, "recompilations": 0}
    entries = {
        "ours fp16": {**entry(0.29, 0.4), "device_p99_ms": 0.31, "stable": True, "throughput_per_s": 2500.0, "build_s": 61.0, "layers": layers},
        "torch compile fp16": {**entry(0.62), "stable": False, "sdpa_operators": ["aten::flash"], "attention_kernels": ["12 x flash"], **compiled},
        "bare fp16": {"failed": "no memory"},
    }  # fmt: skip
    ratio = {"over": "ours fp16", "under": "bare fp16", "device": [1.01, 1.0, 1.02], "wall": None}
    row = {"created": "2026-11-21T20:00", "seconds": 100.0, "entries": entries, "targets": [goal, {**goal, "value": None, "reached": None}]}
    script.add_row(file, "vit_b1", {**row, "ratios": [ratio], "gpu": {"power_w": {"median": 500.0}}, "overrides": ["a=b"]}, H200)
    script.add_row(file, "vit_b32", {"created": "2026-11-21T20:00", "failed": "no GPU"}, H200)
    curve = {"curve": [{"calls": 1, "unsynchronised_ms": 1.3, "synchronised_ms": 3.0}], "per_call_ms_ending_with": {".cpu()": 3.1}}
    about = {"created": "1", "model": "resnet18", "shape": [1], "events_ms": 3.0}
    script.add_row(file, "async_curve", {**about, "entries": curve, "targets": []}, H200)
    text = "\n".join(tables.models_section(tables.document(tmp_path)))
    assert "| ours fp16 | 0.290 (0.310) | 0.400 | 2,500 | 1.010 (1.000 to 1.020) | - | 61.0 | fp16 100% |" in text
    assert "| torch compile fp16 | 0.620 ~ | 1.000 | - | - | - | 60.0 | reduce-overhead |" in text
    assert "- reached: fast: 2.500, at least 2" in text
    assert "- **not measured**: fast: -, at least 2" in text
    assert "attention in one: 1 of 1; 2 of 9 layers only move data (10% of the time); slowest: conv\\|1 fp16 50%" in text
    assert "reduce-overhead (too long in max-autotune), 60 s, 0 recompilations" in text
    assert "| 1 | 1.300 | 3.000 |" in text
    assert "**failed**: no GPU" in text
    tabled = [line for line in text.splitlines() if line.startswith("| ") and "fp16 |" in line]
    assert {line.replace("\\|", "").count("|") for line in tabled} == {9}


def test_a_part_that_fails_says_so(gpu: dict[str, ModuleType]) -> None:
    def broken(options: object) -> dict[str, Any]:
        raise ValueError("no such shape")

    found = gpu["gpu_models"].guarded(broken, gpu["measure_row"].Options())
    assert found["failed"] == "ValueError: no such shape"
    assert gpu["gpu_models"].summary(found) == {"failed": "ValueError: no such shape"}


def test_words_of_the_command_line(gpu: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    parse = gpu["gpu_models"].parse_arguments
    found = parse(["vit_b1", "overlap", "--ways", "fp16,int8 modelopt", "--seconds", "2", "--no-peers", "--set", "a=b"])
    assert (found.rows, found.ways, found.seconds, found.peers, found.bare) == (["vit_b1", "overlap"], ("fp16", "int8 modelopt"), 2.0, False, True)
    for wrong in (["vit"], ["vit_b1", "--ways", "fp4"]):
        with pytest.raises(SystemExit):
            parse(wrong)
    assert "expected fp32" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError, match="--list"):
        gpu["gpu_models"]._row("vit")


# -- parts -------------------------------------------------------------------------------------------------------------


def test_variants_meet_where_they_take_the_same_shapes(gpu: dict[str, ModuleType]) -> None:
    parts = gpu["parts"]

    class Model:
        def __init__(self, variant: Any) -> None:
            self.inputs = tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in variant.inputs.items())

    for variants in parts.FLEXIBILITY.values():
        found = parts.by_shapes([(variant, Model(variant)) for variant in variants])
        fixed = [index for index, variant in enumerate(variants) if not variant.profile]
        alone = [entered for entered in found.values() if not {index for index, _ in entered} & set(fixed)]
        assert all({index for index, _ in entered} >= {0} for shapes, entered in found.items() if shapes == next(iter(found)))
        assert sum(map(len, found.values())) == sum(len(variant.points) for variant in variants)
        assert len(alone) < len(found)


def test_the_best_throughput_leaves_out_what_failed(gpu: dict[str, ModuleType]) -> None:
    entries = {"a": {"throughput_per_s": 2.0}, "b": {"failed": "x"}, "c": {"throughput_per_s": 3.0}, "d": {"build_s": 1.0}}
    assert gpu["parts"].best_throughput(entries) == ("c", 3.0)
    assert gpu["parts"].best_throughput({}) == (None, None)


def test_a_point_of_the_curve_is_per_call(gpu: dict[str, ModuleType]) -> None:
    calls: list[int] = []
    found = gpu["async_curve"].point(lambda: calls.append(1), lambda: None, 7)
    assert len(calls) == 7 * gpu["async_curve"].REPEATS
    assert 0 < found["unsynchronised_ms"] <= found["synchronised_ms"]


# -- the host ----------------------------------------------------------------------------------------------------------


def test_states_of_the_gpu(gpu: dict[str, ModuleType]) -> None:
    host = gpu["host"]
    state = host.state_from_line("1980, 3201, 512.33, 54, 97")
    assert state == {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "power_w": 512.33, "temperature_c": 54, "busy_percent": 97}
    assert host.state_from_line("1980, 3201, [N/A], 54, 97") == {name: value for name, value in state.items() if name != "power_w"}
    assert host.state_from_line("no devices were found") == {}
    assert host.gpu_state("no-such-command") == {}
    assert host.summary_of([{"power_w": 100.0}, {"power_w": 500.0}, {}])["power_w"] == {"min": 100.0, "median": 300.0, "max": 500.0}


def test_caches_go_from_one_home_to_another(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    host = gpu["host"]
    (tmp_path / "home" / "timing" / "key").mkdir(parents=True)
    (tmp_path / "home" / "timing" / "key" / "cache.bin").write_bytes(b"times")
    kept = host.store(tmp_path / "home", tmp_path / "kept")
    assert set(kept) == {"timing"}
    (tmp_path / "other").mkdir()
    assert host.restore(tmp_path / "other", tmp_path / "kept") == ["timing"]
    assert (tmp_path / "other" / "timing" / "key" / "cache.bin").read_bytes() == b"times"
    assert host.restore(tmp_path / "other", tmp_path / "kept") == []
    assert "too large" in host.store(tmp_path / "home", tmp_path / "none", most_bytes=1)["timing"]
    assert not (tmp_path / "none" / "timing.tar.gz").exists()


# -- surgery -----------------------------------------------------------------------------------------------------------


def attention() -> onnx.ModelProto:
    """scaled_dot_product_attention as torch.export writes it: b 2, t 4, h 3, d 5."""
    node, scale = helper.make_node, np.float32(5**-0.25)
    nodes = [
        node("Transpose", ["q"], ["qt"], perm=[0, 2, 1, 3]),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1, 3]),
        node("Transpose", ["v"], ["vt"], perm=[0, 2, 1, 3]),
        node("Reshape", ["kt", "three"], ["k3"]),
        node("Transpose", ["k3"], ["k3t"], perm=[0, 2, 1]),
        node("Reshape", ["k3t", "four"], ["k4"]),
        node("Mul", ["qt", "scale"], ["qs"]),
        node("Mul", ["k4", "scale"], ["ks"]),
        node("MatMul", ["qs", "ks"], ["scores"]),
        node("Add", ["scores", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["weights"], axis=-1),
        node("IsNaN", ["weights"], ["lost"]),
        node("Where", ["lost", "zero", "weights"], ["whole"]),
        node("MatMul", ["whole", "vt"], ["y"]),
    ]
    constants = {"three": np.array([-1, 4, 5]), "four": np.array([2, 3, 5, 4]), "scale": scale, "zero": np.float32(0)}
    shapes = {"q": [2, 4, 3, 5], "k": [2, 4, 3, 5], "v": [2, 4, 3, 5], "mask": [2, 1, 1, 4]}
    graph = helper.make_graph(
        nodes, "attention", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 4, 5])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_attention_after_surgery_is_plain_and_gives_the_same(gpu: dict[str, ModuleType]) -> None:
    import onnxruntime

    random = np.random.default_rng(0)
    fed = {name: random.standard_normal((2, 4, 3, 5)).astype(np.float32) for name in "qkv"}
    fed["mask"] = np.where(random.random((2, 1, 1, 4)) < 0.5, np.finfo(np.float32).min, 0).astype(np.float32)
    fed["mask"][..., 0] = 0
    before = attention()
    after = gpu["surgery"].plain_attention(onnx.ModelProto.FromString(before.SerializeToString()))
    answers = [
        onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, fed)[0] for each in (before, after)
    ]
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-5, atol=1e-6)
    assert sorted(node.op_type for node in after.graph.node) == ["Add", "MatMul", "MatMul", "Mul", "Softmax", "Transpose", "Transpose", "Transpose"]


def test_surgery_leaves_alone_what_it_does_not_know(gpu: dict[str, ModuleType]) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Softmax", ["r"], ["y"])], "plain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
    )  # fmt: skip
    after = gpu["surgery"].plain_attention(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    assert [node.op_type for node in after.graph.node] == ["Relu", "Softmax"]


# -- PyTorch, as far as it goes without a GPU --------------------------------------------------------------------------


def test_peers_in_fp16_take_and_return_fp32(gpu: dict[str, ModuleType]) -> None:
    import torch

    peers = gpu["torch_peers"]
    torch.manual_seed(0)
    inner = torch.nn.Linear(4, 2).eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        expected = inner(x)
        module = peers.cast_module(inner, Precision.FP16)
        found = module(x)
    assert found.dtype is torch.float32
    assert inner.weight.dtype is torch.float16
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert peers.cast_module(inner, Precision.FP32) is inner


def test_a_peers_engine_names_its_source(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    from pipeline.core import ModelSource, OnnxModel

    source = ModelSource(entrypoint="nets:resnet18", python_path=ROOT / "benchmarks" / "gpu", digest="d")
    model = OnnxModel(root=tmp_path, file="m.onnx", digest="m", opset=20, inputs=(), outputs=())
    made = gpu["torch_peers"].peer_engine(source, model, "compile fp16", H200, tmp_path)
    assert made.recipe.label == "pytorch compile fp16"
    assert ModelSource.model_validate_json(made.path.read_text()) == source
