"""The race: who is loaded, warmed up and measured when, and what is said of it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pipeline.backends.base import run_session
from pipeline.compile import BENCHMARK
from pipeline.config import BenchmarkConfig
from pipeline.core import Engine, Target
from pipeline.errors import ChildDied, ChildKilled
from pipeline.measure import WarmUpOptions
from pipeline.race import Contestant, NextShape, Race, Take, processes_for, race, take_block
from pipeline.report import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.stages.benchmark import results
from tests.fixtures_race import SHORT, WORKLOAD, Host, LocalPeer, TimedSession, engine_named, run_race


def test_the_same_candidate_twice_is_not_told_apart() -> None:
    """Although its processes differ; tests/test_measure.py has the same with 1,000 trials, this one goes through the race."""
    trials = 60
    hits = 0
    for seed in range(trials):
        _, (_, twin) = run_race(Host(seed), [0.001, 0.001], spread=0.015)
        hits += not twin.rows[0].ratio.excludes(1.0)
    assert hits / trials >= 0.9


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
