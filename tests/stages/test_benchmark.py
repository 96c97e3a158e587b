from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.compile import BENCHMARK
from pipeline.config import BenchmarkConfig
from pipeline.core import BuildOptions, DimRange, Engine, OnnxModel, Precision, Profile, Recipe, Target, Tensors, TensorSpec, silent
from pipeline.errors import ChildDied, ChildKilled, PlanError
from pipeline.graph import onnx_model
from pipeline.measure import WarmUpOptions, warm_up
from pipeline.race import Contestant, NextShape, Race, Ready, Take, Workload, processes_for, race, take_block
from pipeline.report import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.stages.benchmark import benchmark, results, rows_per_run, values_at, with_threads

X = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
Y = TensorSpec(name="y", dtype="float32", shape=("batch", 3))
PROFILE = Profile(dims={"batch": DimRange(min=1, opt=2, max=8)})
SHORT = BenchmarkConfig(duration_s=0.06, warmup_s=0.01, warmup_runs=2)
WORKLOAD = Workload(sizes={"batch": 2}, feeds={"x": np.zeros((2, 4), np.float32)}, rows=2, flops=48.0, moved_bytes=None)


# -- doubles: a host with a clock of its own, a session that takes time there, and a child that lives in this process -----------


@dataclass
class Host:
    """A synthetic clock; every run takes its time with some noise."""

    seed: int = 0
    now_s: float = 0.0
    running: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def clock(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds * float(np.exp(self.random.normal(0, 0.03)))


@dataclass
class HostTimer:
    host: Host
    started_s: float = 0.0
    stopped_s: float = 0.0

    def start(self) -> None:
        self.started_s = self.host.now_s

    def stop(self) -> None:
        self.stopped_s = self.host.now_s

    def elapsed_s(self) -> float:
        return self.stopped_s - self.started_s


@dataclass
class TimedSession:
    """Upload, execute and download take 1, 8 and 1 tenths of a run."""

    host: Host
    run_s: float
    inputs: tuple[TensorSpec, ...] = (X,)
    outputs: tuple[TensorSpec, ...] = (Y,)
    calls: list[str] = field(default_factory=list)

    def bind(self, feeds: Tensors) -> None:
        self.calls.append("bind")

    def upload(self) -> None:
        self.calls.append("upload")
        self.host.spend(self.run_s / 10)

    def execute(self) -> None:
        self.calls.append("execute")
        self.host.spend(self.run_s * 8 / 10)

    def download(self) -> None:
        self.calls.append("download")
        self.host.spend(self.run_s / 10)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def fetch(self) -> Tensors:
        self.calls.append("fetch")
        return {"y": np.zeros((2, 3), np.float32)}

    def timer(self) -> HostTimer:
        return HostTimer(self.host)

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class LocalPeer:
    """What the parent sees of the children of one engine, without a process; `dies_at` is the message at which one is lost."""

    name: str
    session: TimedSession
    dies_at: int = 1_000_000
    received: list[object] = field(default_factory=list)
    starts: int = 0
    stopped: bool = True
    death: Exception | None = None
    silent_for: int = 0  # how often it is asked in vain whether it has answered

    def start(self, spread: float) -> LocalPeer:
        """The next child, some share faster or slower than the last for as long as it lives."""
        assert self.stopped, "one process of an engine at a time"
        self.starts, self.stopped = self.starts + 1, False
        if spread:
            self.session.run_s *= float(np.exp(self.session.host.random.normal(0, spread)))
        return self

    def send(self, payload: object) -> None:
        self.received.append(payload)

    def answered(self, timeout_s: float) -> bool:
        self.silent_for -= 1
        return self.silent_for < 0

    def receive(self, timeout_s: float | None = None) -> Any:
        if len(self.received) >= self.dies_at:
            raise self.death or ChildDied(f"the child process for '{self.name}' was killed by signal 9 (SIGKILL)")
        message = self.received[-1] if self.received else None
        host = self.session.host
        host.running.append(self.name)
        if isinstance(message, WarmUpOptions):
            return warm_up(partial(run_session, self.session, WORKLOAD.feeds), message, host.clock)
        if isinstance(message, Take):
            return take_block(self.session, WORKLOAD.feeds, message.seconds, host.clock)
        return Ready()

    def stop(self) -> None:
        self.stopped = True


def engine_named(variant: str, root: Path = Path("unused")) -> Engine:
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32, variant=variant)
    target = Target(backend="onnxruntime", version="1", device="cpu")
    return Engine(
        root=root, file="x", digest=variant, target=target, recipe=recipe, inputs=(X,), outputs=(Y,), profiles=(PROFILE,), threads=1, size_bytes=0
    )


def run_race(
    host: Host, runs_s: Sequence[float], dies_at: Sequence[int] = (), options: BenchmarkConfig = SHORT, spread: float = 0.0
) -> tuple[list[LocalPeer], Any]:
    engines = [engine_named(str(index)) for index in range(len(runs_s))]
    lives = dict(enumerate(dies_at))
    peers = [LocalPeer(str(index), TimedSession(host, run_s), lives.get(index, 1_000_000)) for index, run_s in enumerate(runs_s)]
    contestants = race(engines, [WORKLOAD], options, lambda engine: peers[int(engine.digest)].start(spread))
    assert all(peer.stopped for peer in peers)
    return peers, results(contestants, [WORKLOAD])


# -- the race ----------------------------------------------------------------------------------------------------------


def test_the_same_candidate_twice_is_not_told_apart() -> None:
    """Although its processes differ; tests/test_measure.py has the same with 1,000 trials, this one goes through the race."""
    trials = 60
    hits = 0
    for seed in range(trials):
        _, (_, twin) = run_race(Host(seed), [0.001, 0.001], spread=0.015)
        hits += not twin.rows[0].ratio.excludes(1.0)
    assert hits / trials >= 0.85


def test_rows_hold_what_was_measured() -> None:
    _, (baseline, fast) = run_race(Host(), [0.002, 0.001])
    row = fast.rows[0]
    assert row.ratio.low < 2.0 < row.ratio.high
    assert row.ratio.excludes(1.0)
    assert baseline.rows[0].ratio is None
    assert row.end_to_end.median_s == pytest.approx(0.001, rel=0.1)
    assert row.compute.median_s == pytest.approx(0.0008, rel=0.1)
    assert row.upload.median_s == pytest.approx(0.0001, rel=0.1)
    assert row.download.median_s == pytest.approx(0.0001, rel=0.1)
    assert row.throughput_per_s == pytest.approx(2 / row.end_to_end.median_s)
    assert row.flops_per_s == pytest.approx(48 / row.end_to_end.median_s)
    assert row.bytes_per_s is None
    assert len(row.end_to_end.blocks) == 6, "a short duration shortens the blocks, not their number"
    assert row.end_to_end.warmup_s
    assert row.end_to_end.clock == "host"
    assert row.latency.median_s == pytest.approx(row.upload.median_s + row.compute.median_s + row.download.median_s, rel=0.1)
    assert row.enqueue is None, "on a CPU execute returns when the work is done"
    assert row.totals.queries == len(row.end_to_end.values_s)
    assert row.totals.walltime_s == pytest.approx(sum(row.end_to_end.values_s))
    assert row.totals.timed_queries == len(row.compute.values_s)
    assert row.totals.compute_s == pytest.approx(sum(row.compute.values_s))


def test_on_a_gpu_enqueueing_is_timed_on_the_host() -> None:
    host = Host()
    device = engine_named("0").model_copy(update={"target": Target(backend="tensorrt", version="10", device="gpu", compute_capability="9.0")})
    peer = LocalPeer("0", TimedSession(host, 0.001))
    (found,) = results(race([device], [WORKLOAD], SHORT, lambda engine: peer.start(0.0)), [WORKLOAD])
    assert isinstance(found, BenchmarkReport)
    row = found.rows[0]
    assert row.latency is not None
    assert row.enqueue is not None
    assert (row.compute.clock, row.latency.clock, row.enqueue.clock) == ("device", "device", "host")
    assert len(row.enqueue.values_s) == len(row.compute.values_s)
    assert type(row).model_validate_json(row.model_dump_json()) == row


def test_each_round_is_in_an_order_of_its_own_and_gives_everyone_one_turn() -> None:
    host = Host()
    run_race(host, [0.001, 0.001, 0.001])
    rounds = [tuple(host.running[i : i + 3]) for i in range(0, len(host.running), 3)]
    assert len(rounds) == 3 * (1 + 1 + 2), "three processes: loaded, warmed up, two blocks"
    assert all(sorted(order) == ["0", "1", "2"] for order in rounds)
    assert len(set(rounds)) > 1


def test_who_took_longest_to_load_is_started_first_the_next_time_and_holds_nobody_up() -> None:
    contestants = [Contestant(engine_named(str(index)), [[]], [[]], loading_s=index) for index in range(4)]
    contestants[3].failure = "it died"
    peers = [LocalPeer(str(index), TimedSession(Host(), 0.001), silent_for=3 * (index == 2)) for index in range(3)]
    events: list[str] = []

    def start(engine: Engine) -> LocalPeer:
        events.append(f"start {engine.digest}")
        return peers[int(engine.digest)].start(0.0)

    with ExitStack() as stack:
        race = Race(contestants, [WORKLOAD], SHORT, start, lambda fraction, text: events.append(text), processes=3, cores=2)
        race.load(stack)
    load = "load: onnxruntime {} fp32".format
    assert events == ["start 2", load(3), "start 1", load(1), "start 0", load(0), load(2)]
    assert all(peer.stopped for peer in peers)


def test_every_engine_is_loaded_several_times_one_process_after_another() -> None:
    peers, (baseline, fast) = run_race(Host(), [0.02, 0.01], options=BenchmarkConfig(duration_s=3.0))
    assert [peer.starts for peer in peers] == [6, 6]
    for row in (baseline.rows[0], fast.rows[0]):
        assert row.end_to_end.processes == row.compute.processes == (1,) * 6
    warmups = [message for message in peers[0].received if isinstance(message, WarmUpOptions)]
    assert warmups == [WarmUpOptions(min_runs=2, min_s=0.2 / 6, max_s=10 / 6)] * 6, "shared as the measuring time is"


@pytest.mark.parametrize(
    ("duration_s", "loading_s", "processes"), [(0.06, 0, 3), (0.5, 5, 3), (2, 5, 4), (3, 5, 6), (60, 12, 6), (60, 13, 5), (60, 300, 3)]
)
def test_a_short_duration_or_slow_loading_has_fewer_processes(duration_s: float, loading_s: float, processes: int) -> None:
    assert processes_for(duration_s, loading_s) == processes


def test_a_block_lasts_its_time_and_a_long_duration_has_more_blocks() -> None:
    peers, _ = run_race(Host(), [0.01], options=BenchmarkConfig(duration_s=6.0))
    takes = [message for message in peers[0].received if isinstance(message, Take)]
    assert takes == [Take(0.5)] * 12
    assert isinstance(peers[0].received[-1], NextShape)


def test_one_that_dies_in_the_middle_leaves_and_the_others_go_on() -> None:
    peers, (baseline, lost, other) = run_race(Host(), [0.002, 0.001, 0.001], dies_at=[99, 4, 99])
    assert lost == BenchmarkFailure(label="onnxruntime 1 fp32", reason="the child process for '1' was killed by signal 9 (SIGKILL)")
    assert [peer.starts for peer in peers] == [3, 2, 3], "lost with its second process, it gets no third"
    assert isinstance(baseline, BenchmarkReport)
    assert len(other.rows[0].end_to_end.blocks) == 6
    assert other.rows[0].ratio.excludes(1.0)


@pytest.mark.parametrize(
    ("death", "lasts"), [(ChildDied("SIGSEGV"), True), (ChildKilled("out of memory"), False), (TimeoutError("no message"), False)]
)
def test_a_death_that_may_pass_is_measured_again_by_the_next_run(death: Exception, lasts: bool) -> None:
    def start(engine: Engine) -> LocalPeer:
        return LocalPeer(engine.digest, TimedSession(Host(), 0.001), dies_at=1 if engine.digest == "1" else 99, death=death)

    engines = [engine_named("0"), engine_named("1")]
    found = Benchmarks(created="", results=results(race(engines, [WORKLOAD], SHORT, start), [WORKLOAD]))
    assert isinstance(found.results[0], BenchmarkReport)
    assert isinstance(found.results[1], BenchmarkFailure)
    assert BENCHMARK.lasts(found) is lasts


def test_without_its_baseline_there_is_no_ratio() -> None:
    _, (baseline, other) = run_race(Host(), [0.002, 0.001], dies_at=[0, 99])
    assert isinstance(baseline, BenchmarkFailure)
    assert other.rows[0].ratio is None


def test_drift_and_thinning_are_said() -> None:
    host = Host()
    session = TimedSession(host, 1e-6)
    block = take_block(session, WORKLOAD.feeds, 0.01, host.clock)
    assert block.runs > 9000
    assert 1000 <= len(block.end_to_end_s) <= 2000
    assert block.run_s > 4 * sum(block.end_to_end_s), "the sum is of all runs"
    _, (fast,) = run_race(host, [1e-6])
    assert [note.text for note in fast.notes] == ["of a block with over 2,000 runs every k-th time is kept"]
    peer = LocalPeer("0", TimedSession(host, 0.001))

    def slower(fraction: float | None, text: str) -> None:
        peer.session.run_s *= 1.1

    (moved,) = results(race([engine_named("0")], [WORKLOAD], SHORT, lambda engine: peer.start(0.0), slower), [WORKLOAD])
    assert isinstance(moved, BenchmarkReport)
    assert not moved.rows[0].end_to_end.stable
    assert "the median still moved between blocks" in moved.notes[0].text


def test_one_run_goes_from_bind_to_fetch() -> None:
    session = TimedSession(Host(), 0.001)
    run_session(session, WORKLOAD.feeds)
    assert session.calls == ["bind", "upload", "execute", "download", "synchronize", "fetch"]


def test_all_are_loaded_with_the_same_threads() -> None:
    assert {with_threads(engine_named("a").model_copy(update={"threads": built}), 2).threads for built in (0, 1, 4)} == {2}


def test_rows_per_run() -> None:
    scalar = TensorSpec(name="s", dtype="float32", shape=())
    fixed = TensorSpec(name="f", dtype="float32", shape=(5, 2))
    assert rows_per_run([X], {"batch": 7}) == 7
    assert rows_per_run([X, scalar], {"batch": 7}) == 1
    assert rows_per_run([fixed], {}) == 1
    assert rows_per_run([], {}) == 1


# -- real engines in real children ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    """y = x @ w."""
    folder = tmp_path_factory.mktemp("model")
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 3], np.ones(12, np.float32))
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])]
    graph = helper.make_graph([node], "g", inputs, outputs, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "model.onnx")
    return onnx_model(folder, "model.onnx")


def test_values_that_decide_a_shape_go_with_the_sizes_of_their_point() -> None:
    short, long = (Profile.model_validate({"dims": {"n": n}, "values": {"k": k}}) for n, k in (([1, 2, 4], [1, 3, 8]), ([8, 16, 32], [1, 10, 20])))
    picked = {size: values_at({"n": size}, (short, long)) for size in (1, 2, 3, 4, 16, 99)}
    assert picked == {1: {"k": (1,)}, 2: {"k": (3,)}, 3: {"k": (3,)}, 4: {"k": (8,)}, 16: {"k": (10,)}, 99: {}}
    fixed = Profile.model_validate({"values": {"k": [1, 3, 8]}})
    assert values_at({}, (fixed,)) == {"k": (3,)}


@pytest.fixture(scope="module")
def engine(model: OnnxModel, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
    options = BuildOptions(profiles=(PROFILE,), threads=1)
    built = backends.backend("onnxruntime").build(model, recipe, options, tmp_path_factory.mktemp("engine"), silent)
    assert isinstance(built, Engine)
    return built


def test_two_real_engines_in_children(model: OnnxModel, engine: Engine) -> None:
    seen: list[float] = []

    def progress(fraction: float | None, text: str) -> None:
        assert fraction is not None
        seen.append(fraction)

    options = SHORT.model_copy(update={"sizes": ({"batch": 1}, {"batch": 8}), "threads": 1})
    found = benchmark([engine, engine], model, options, progress)
    assert seen == sorted(seen)
    assert len(found.results) == 2
    for result in found.results:
        assert isinstance(result, BenchmarkReport)
        assert [row.sizes for row in result.rows] == [{"batch": 1}, {"batch": 8}]
        assert all(value > 0 for row in result.rows for value in row.end_to_end.values_s)
        assert result.rows[1].flops_per_s == pytest.approx(2 * 8 * 4 * 3 / result.rows[1].end_to_end.median_s)
        assert 10_000_000 < result.rows[0].peak_memory_bytes < 2_000_000_000
    assert isinstance(found.results[1], BenchmarkReport)
    assert found.results[1].rows[0].ratio is not None
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_a_killed_child_and_one_that_cannot_load_do_not_stop_the_others(model: OnnxModel, engine: Engine) -> None:
    missing = engine.model_copy(update={"file": "gone.onnx"})
    victims: list[psutil.Process] = []

    def kill_one(fraction: float | None, text: str) -> None:
        if "round 4 of" in text and not victims:
            victims.extend(psutil.Process().children()[-1:])
            victims[0].kill()

    found = benchmark([engine, engine, missing], model, SHORT, kill_one)
    *twins, unloadable = found.results
    (killed,) = (result for result in twins if isinstance(result, BenchmarkFailure))
    assert "SIGKILL" in killed.reason
    (lasting,) = (result for result in twins if isinstance(result, BenchmarkReport))
    assert lasting.rows[0].end_to_end.processes == (2, 2, 2)
    assert isinstance(unloadable, BenchmarkFailure)
    assert "gone.onnx" in unloadable.reason
    assert not [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE], "no child is left behind"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"batch": 9}, "expected batch 1 to 8, got {'batch': 9}"),
        ({}, r"expected a size for each of batch, got {}"),
        ({"batch": 2, "length": 3}, r"expected a size for each of batch, got"),
    ],
)
def test_sizes_that_cannot_be_measured(model: OnnxModel, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        benchmark([engine_named("a")], model, SHORT.model_copy(update={"sizes": (sizes,)}))


def test_measuring_nothing_is_an_error(model: OnnxModel) -> None:
    with pytest.raises(PlanError, match="expected at least one engine to measure, got none"):
        benchmark([], model, SHORT)
