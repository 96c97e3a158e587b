"""The race: who is loaded, warmed up and measured when, and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.backends.base import run_session
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import (
    BLOCK_S,
    LONG_BLOCK_S,
    Contestant,
    MeasureGpuCost,
    NextShape,
    Race,
    RaceEntry,
    Take,
    race,
    take_block,
)
from pipeline.compiler.measure import BENCHMARK
from pipeline.core.artifacts import Engine, Target
from pipeline.core.progress import CandidateFigures
from pipeline.errors import ChildDied, ChildKilled
from pipeline.host.contention import CpuClock
from pipeline.measurement.clock import WarmUpOptions
from pipeline.plan.schema import BenchmarkConfig
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.results.gpu_cost import GpuCost
from pipeline.stages.benchmark import BusyHost, baseline_of, results
from tests.builders.interleaved import (
    QUIET_HOST,
    SHORT,
    WORKLOAD,
    Host,
    LocalPeer,
    TimedSession,
    engine_named,
    run_race,
)
from tests.builders.nvml import Device, Nvml, install_nvml


def entries(*engines: Engine) -> list[RaceEntry[Engine]]:
    """The first is the baseline."""
    return [
        RaceEntry(engine, Role.CANDIDATE if index else Role.BASELINE)
        for index, engine in enumerate(engines)
    ]


def test_the_same_candidate_twice_is_not_told_apart() -> None:
    """Although its processes differ; tests/pipeline/measurement/test_comparison.py has the same
    with more trials, this one goes through the race.
    """
    trials = 60
    hits = 0
    for seed in range(trials):
        _, (_, twin) = run_race(Host(seed), [0.001, 0.001], spread=0.015)
        hits += not twin.rows[0].ratio.excludes(1.0)
    assert hits / trials >= 0.9


def test_rows_hold_what_was_measured() -> None:
    _, (baseline, fast) = run_race(Host(), [0.002, 0.001], spread=0.002)
    row = fast.rows[0]
    assert row.ratio.low < 2.0 < row.ratio.high
    assert row.ratio.excludes(1.0)
    assert row.ratio_missing == ""
    assert baseline.rows[0].ratio is None
    assert row.end_to_end.median_s == pytest.approx(0.001, rel=0.1)
    assert row.compute.median_s == pytest.approx(0.0008, rel=0.1)
    assert row.upload.median_s == pytest.approx(0.0001, rel=0.1)
    assert row.download.median_s == pytest.approx(0.0001, rel=0.1)
    assert row.throughput_per_s == pytest.approx(2 / row.end_to_end.median_s)
    assert row.flops_per_s == pytest.approx(48 / row.end_to_end.median_s)
    assert row.bytes_per_s is None
    assert row.end_to_end.processes == row.compute.processes == (3,) * 6, (
        "six processes, three blocks each"
    )
    assert row.end_to_end.generations == tuple(range(6))
    assert row.end_to_end.waiting == (0.0,) * 6
    assert row.end_to_end.warmup_s
    assert row.end_to_end.clock == "host"
    assert row.latency.median_s == pytest.approx(
        row.upload.median_s + row.compute.median_s + row.download.median_s, rel=0.1
    )
    assert row.enqueue is None, "on a CPU execute returns when the work is done"
    assert row.totals.queries == len(row.end_to_end.values_s)
    assert row.totals.walltime_s == pytest.approx(sum(row.end_to_end.values_s))
    assert row.totals.timed_queries == len(row.compute.values_s)
    assert row.totals.compute_s == pytest.approx(sum(row.compute.values_s))


def test_latencies_are_reported_from_the_first_block_on() -> None:
    events: list[CandidateFigures | None] = []
    _, reports = run_race(
        Host(),
        [0.002, 0.001, 0.008],
        progress=lambda fraction, text, figures=None: events.append(figures),
    )
    labels = [report.label for report in reports]
    found = [figures for figures in events if figures is not None]
    assert {figures.label for figures in found[:3]} == set(labels), "each after its first block"
    assert not any(figures.latency.is_eliminated for figures in found[:3] if figures.latency)
    newest = {figures.label: figures.latency for figures in found}
    for report in reports:
        figures = newest[report.label]
        assert figures is not None
        assert figures.median_s == report.rows[0].end_to_end.median_s
        assert figures.low_s <= figures.median_s <= figures.high_s
        assert figures.shape == WORKLOAD.shape
        assert figures.is_eliminated == bool(report.stopped)
    assert [bool(report.stopped) for report in reports] == [False, False, True]
    processes = [len(report.rows[0].end_to_end.processes) for report in reports]
    assert [sum(each.label == label for each in found) for label in labels] == [
        1 + count for count in processes
    ], "after the first block, and after each process"


def test_an_engine_that_fails_before_its_first_block_has_no_figures() -> None:
    events: list[CandidateFigures | None] = []
    _, (_, lost) = run_race(
        Host(),
        [0.002, 0.001],
        dies_at=[1_000_000, 1],
        progress=lambda fraction, text, figures=None: events.append(figures),
    )
    assert isinstance(lost, BenchmarkFailure)
    labels = {figures.label for figures in events if figures is not None}
    assert labels == {engine_named("0").recipe.label}


def gpu_engine(name: str) -> Engine:
    target = Target(backend="tensorrt", version="10", device="gpu", compute_capability="9.0")
    return engine_named(name).model_copy(update={"target": target})


def test_on_a_gpu_enqueueing_is_timed_on_the_host() -> None:
    host = Host()
    device = gpu_engine("0")
    peer = LocalPeer("0", TimedSession(host, 0.001))
    (report,) = results(
        race(entries(device), [WORKLOAD.shape], SHORT, lambda engine: peer.start(0.0)),
        [WORKLOAD],
        QUIET_HOST,
    )
    assert isinstance(report, BenchmarkReport)
    row = report.rows[0]
    assert row.latency is not None
    assert row.enqueue is not None
    assert (row.compute.clock, row.latency.clock, row.enqueue.clock) == ("device", "device", "host")
    assert len(row.enqueue.values_s) == len(row.compute.values_s)
    assert type(row).model_validate_json(row.model_dump_json()) == row


def gpu_race(
    peers: Mapping[str, LocalPeer], *engines: Engine
) -> tuple[BenchmarkReport | BenchmarkFailure, ...]:
    contestants = race(
        entries(*engines),
        [WORKLOAD.shape],
        SHORT,
        lambda engine: peers[engine.digest].start(0.0),
        gpu="GPU-1",
    )
    return results(contestants, [WORKLOAD], QUIET_HOST)


def test_memory_and_energy_are_measured_once_for_each_engine_on_the_gpu() -> None:
    host = Host()
    cost = GpuCost(peak_bytes=900, peak_source="process", energy_per_1000_requests_j=3.5)
    peers = {name: LocalPeer(name, TimedSession(host, 0.001), gpu_cost=cost) for name in ("0", "1")}
    on_gpu, on_cpu = gpu_race(peers, gpu_engine("0"), engine_named("1"))
    assert isinstance(on_gpu, BenchmarkReport)
    assert isinstance(on_cpu, BenchmarkReport)
    assert (on_gpu.rows[0].gpu, on_cpu.rows[0].gpu) == (cost, None)
    messages = [peers[name].received.count(MeasureGpuCost("GPU-1")) for name in ("0", "1")]
    assert messages == [1, 0]
    assert peers["0"].starts > 1


def test_a_process_that_nvml_does_not_list_is_weighed_by_what_its_end_frees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = GpuCost(missing={"GPU memory": "not listed", "weights": "not told"})
    peer = LocalPeer("0", TimedSession(Host(), 0.001), gpu_cost=cost)

    class Weighing(Nvml):
        def nvmlDeviceGetMemoryInfo(self, device: Device) -> SimpleNamespace:  # noqa: N802
            used = 200 if peer.stopped else 1700
            return SimpleNamespace(total=5000, used=used, free=5000 - used)

    install_nvml(tmp_path, monkeypatch, Weighing(Device("H200", "GPU-1")))
    (report,) = gpu_race({"0": peer}, gpu_engine("0"))
    assert isinstance(report, BenchmarkReport)
    assert report.rows[0].gpu == GpuCost(
        peak_bytes=1500, peak_source="device", missing={"weights": "not told"}
    )
    assert len(report.rows[0].end_to_end.processes) > 1, "its next processes run as usual"


def test_each_round_is_in_an_order_of_its_own_and_gives_everyone_one_turn() -> None:
    host = Host()
    run_race(host, [0.001, 0.001, 0.001])
    rounds = [tuple(host.running[i : i + 3]) for i in range(0, len(host.running), 3)]
    assert len(rounds) == 6 * (1 + 1 + 3), "six processes: loaded, warmed up, three blocks"
    assert all(sorted(order) == ["0", "1", "2"] for order in rounds)
    assert len(set(rounds)) > 1


def test_the_slowest_to_load_starts_first_next_time_and_delays_nobody() -> None:
    contestants = [
        Contestant(engine_named(str(index)), Role.CANDIDATE, [[]], [[]], loading_s=index)
        for index in range(4)
    ]
    contestants[3].failure = "it died"
    peers = [
        LocalPeer(str(index), TimedSession(Host(), 0.001), silent_for=3 * (index == 2))
        for index in range(3)
    ]
    events: list[str] = []

    def start(engine: Engine) -> LocalPeer:
        events.append(f"start {engine.digest}")
        return peers[int(engine.digest)].start(0.0)

    with ExitStack() as stack:
        race = Race(
            contestants,
            [WORKLOAD.shape],
            SHORT,
            start,
            lambda fraction, text, figures=None: events.append(text),
            cores=2,
        )
        race.load(stack)
    load = "process 1, load: onnxruntime {} fp32".format
    assert events == ["start 2", "start 1", load(1), "start 0", load(0), load(2)]
    assert all(peer.stopped for peer in peers)


def test_the_times_of_the_plan_are_shared_by_the_usual_processes() -> None:
    peers, _ = run_race(Host(), [0.01, 0.01], options=BenchmarkConfig(duration_s=18.0))
    assert seconds_of(peers[0]) == [0.5] * 6 * 6, "six blocks in each of six processes"
    assert isinstance(peers[0].received[-1], NextShape)
    warmups = [message for message in peers[0].received if isinstance(message, WarmUpOptions)]
    assert warmups == [WarmUpOptions(min_runs=2, min_s=0.2 / 6, max_s=0.5)] * 6
    short, _ = run_race(Host(), [0.01, 0.01], options=BenchmarkConfig(duration_s=3.0))
    assert seconds_of(short[0]) == [3.0 / 18] * 18


def seconds_of(peer: LocalPeer) -> list[float]:
    """The lengths of all blocks that an engine was asked for."""
    return [message.seconds for message in peer.received if isinstance(message, Take)]


def test_blocks_are_short_unless_a_run_is_longer() -> None:
    options = BenchmarkConfig(duration_s=3.0)
    peers, _ = run_race(Host(), [0.001, 0.001], options=options, block_s=BLOCK_S)
    assert seconds_of(peers[0]) == [3.0 / (6 * 17)] * 6 * 17, "17 of some 30 ms in each process"
    peers, (_, slow) = run_race(Host(), [0.001, 0.09], options=options, block_s=BLOCK_S)
    assert set(seconds_of(peers[0])) == {3.0 / (6 * 6)}, "a run of the other one fills its block"
    assert set(slow.rows[0].end_to_end.processes) == {6}


def test_a_slow_run_is_a_block_and_phases_are_timed_in_the_first_rounds() -> None:
    options = BenchmarkConfig(duration_s=3.0)
    peers, (fast, slow) = run_race(Host(), [0.01, 0.11], options=options, block_s=BLOCK_S)
    takes = [message.with_phases for message in peers[0].received if isinstance(message, Take)]
    assert takes[:9] == [True] * 3 + [False] * 6, "the nine rounds of the first process"
    row = slow.rows[0]
    assert set(row.end_to_end.blocks) == {1}
    assert set(row.end_to_end.processes) == {9}
    assert set(row.compute.processes) == {3}
    assert row.compute.median_s == pytest.approx(0.088, rel=0.1)
    assert fast.rows[0].end_to_end.processes == row.end_to_end.processes


@pytest.mark.parametrize(("block_s", "narrow"), [(BLOCK_S, True), (LONG_BLOCK_S, False)])
def test_engines_that_take_short_turns_are_slowed_alike(block_s: float, narrow: bool) -> None:
    """In every other 0.6 s the host is half as fast."""
    options = BenchmarkConfig(duration_s=3.0)
    ratios = [
        run_race(Host(seed, spell_s=0.6), [0.002, 0.001], options=options, block_s=block_s)[1][1]
        .rows[0]
        .ratio
        for seed in range(4)
    ]
    assert all(ratio.high / ratio.low < 1.05 for ratio in ratios) == narrow
    assert all(ratio.low < 2.0 < ratio.high for ratio in ratios)


@pytest.mark.parametrize(
    ("enough_runs", "fewest", "most"),
    [(None, 300, 400), (300, 300, 300), (5, 90, 110), (2000, 300, 400)],
    ids=["whole", "enough", "at least a tenth", "never enough"],
)
def test_blocks_may_end_once_they_hold_enough_runs(
    enough_runs: int | None,
    fewest: int,
    most: int,
) -> None:
    """A block of half a second holds 350 runs of this engine; its median is the same."""
    options = SHORT.model_copy(update={"duration_s": 18.0})
    host = Host()
    runs_s = [0.0005, 0.0005]
    peers, (_, report) = run_race(host, runs_s, options=options, enough_runs=enough_runs)
    blocks = report.rows[0].end_to_end.blocks
    takes = [message for message in peers[0].received if isinstance(message, Take)]
    assert {(take.seconds, take.enough_runs) for take in takes} == {(0.5, enough_runs)}
    assert fewest <= min(blocks) <= max(blocks) <= most
    assert report.rows[0].end_to_end.median_s == pytest.approx(0.0005, rel=0.1)


# -- who gets how many processes ---------------------------------------------


def test_who_is_far_behind_stops_after_one_process_and_the_report_says_so() -> None:
    peers, (baseline, best, far) = run_race(Host(), [0.003, 0.001, 0.004])
    assert [peer.starts for peer in peers] == [6, 6, 1]
    assert re.fullmatch(
        r"stopped after 1 process: (3\.9|4\.0)\d times as slow as onnxruntime 1 fp32", far.stopped
    )
    assert far.rows[0].ratio is None
    assert far.rows[0].ratio_missing == far.stopped
    assert far.rows[0].end_to_end.median_s == pytest.approx(0.004, rel=0.1), (
        "what it showed is kept"
    )
    assert (baseline.stopped, best.stopped) == ("", "")


def test_who_cannot_win_is_shown_by_one_process() -> None:
    roles = [Role.BASELINE, Role.CANDIDATE, Role.SHOWN]
    peers, (_, _, shown) = run_race(Host(), [0.003, 0.001, 0.001], roles=roles)
    assert [peer.starts for peer in peers] == [6, 6, 1]
    assert shown.stopped == shown.rows[0].ratio_missing == "stopped after 1 process: it cannot win"


def test_of_several_baselines_the_fastest_is_the_one_that_counts() -> None:
    roles = [Role.BASELINE, Role.BASELINE, Role.CANDIDATE]
    peers, (eager, traced, best) = run_race(Host(), [0.004, 0.002, 0.001], roles=roles)
    assert [peer.starts for peer in peers] == [1, 6, 6]
    assert traced.rows[0].ratio is None
    assert traced.rows[0].ratio_missing == ""
    assert re.fullmatch(
        r"stopped after 1 process: (1\.9|2\.0)\d times as slow as onnxruntime 1 fp32",
        eager.rows[0].ratio_missing,
    )
    assert best.rows[0].ratio.value == pytest.approx(2.0, rel=0.05)


def test_processes_that_differ_much_are_followed_by_more() -> None:
    peers, (_, twin) = run_race(Host(), [0.001, 0.001], spread=0.05)
    assert 6 < peers[0].starts <= 16
    assert twin.rows[0].ratio.low < 1.0 < twin.rows[0].ratio.high


def test_a_stalled_process_is_repeated_and_does_not_count() -> None:
    peers, (_, fast) = run_race(Host(), [0.002, 0.001], stalled={0: {2: 340.0}})
    assert [peer.starts for peer in peers] == [7, 7]
    assert fast.rows[0].ratio.value == pytest.approx(2.0, rel=0.05)


def test_a_process_that_waits_for_a_cpu_and_is_slower_is_repeated() -> None:
    slower = {1: {2: 1.5, 4: 1.5}}
    peers, (_, fast) = run_race(
        Host(), [0.002, 0.001], stalled=slower, waits_in={1: frozenset({2, 4})}
    )
    assert [peer.starts for peer in peers] == [8, 8]
    assert fast.rows[0].ratio.value == pytest.approx(2.0, rel=0.05)


def test_a_process_that_waits_for_a_cpu_and_is_no_slower_counts() -> None:
    peers, (_, fast) = run_race(Host(), [0.002, 0.001], waits_in={1: frozenset({2, 4})})
    assert [peer.starts for peer in peers] == [6, 6]
    assert fast.rows[0].ratio is not None


def test_where_most_processes_wait_for_a_cpu_nothing_is_told() -> None:
    _, (_, fast) = run_race(
        Host(),
        [0.002, 0.001],
        waits_in={1: frozenset(range(1, 40, 3)), 0: frozenset(range(2, 40, 3))},
    )
    assert "processes had to wait for a CPU" in fast.rows[0].ratio_missing


def test_where_most_processes_are_disturbed_the_report_says_so_instead_of_a_number() -> None:
    stalled = {
        0: {number: 340.0 if number % 2 else 30.0 for number in range(1, 40, 1) if number % 3}
    }
    peers, (_, fast) = run_race(Host(), [0.002, 0.001], stalled=stalled)
    assert peers[0].starts == 32, "for as long as the budget allows, but not for ever"
    row = fast.rows[0]
    assert row.ratio is None
    assert row.ratio_missing.startswith("this host is too busy to tell: load 0.5 on 2 cores; ")
    assert "of 32 processes were disturbed, the slowest process took 3" in row.ratio_missing


@pytest.mark.parametrize(
    ("loading_s", "generations"), [(5.0, 4), (2.0, 6), (1.0, 6), (10.0, 2), (300.0, 1)]
)
def test_the_budget_ends_a_race_but_the_fewest_processes_may_take_twice_as_long(
    loading_s: float, generations: int
) -> None:
    """Two engines are loaded in each generation."""
    options = SHORT.model_copy(update={"budget_s": 25.0})
    peers, (_, fast) = run_race(Host(), [0.002, 0.001], options=options, loading_s=loading_s)
    assert peers[0].starts == generations
    assert (fast.rows[0].ratio is None) == (generations < 4)


def test_with_too_few_processes_the_report_says_so() -> None:
    options = SHORT.model_copy(update={"budget_s": 1.0})
    _, (_, fast) = run_race(Host(), [0.002, 0.001], options=options, loading_s=10.0)
    over = "the time for measuring (`benchmark.budget_s`) was over after 1 process of each engine"
    assert fast.rows[0].ratio_missing == f"{over}, expected at least 4"


def test_an_engine_alone_is_measured_in_its_usual_processes() -> None:
    peers, (alone,) = run_race(Host(), [0.001])
    assert peers[0].starts == 6
    assert alone.rows[0].ratio_missing == ""


# -- failures ----------------------------------------------------------------


def test_one_that_dies_in_the_middle_leaves_and_the_others_go_on() -> None:
    peers, (baseline, lost, other) = run_race(Host(), [0.002, 0.001, 0.001], dies_at=[99, 7, 99])
    assert lost == BenchmarkFailure(
        label="onnxruntime 1 fp32",
        reason="the child process for '1' was killed by signal 9 (SIGKILL)",
    )
    assert [peer.starts for peer in peers] == [
        6,
        2,
        6,
    ], "lost with its second process, it gets no third"
    assert isinstance(baseline, BenchmarkReport)
    assert len(other.rows[0].end_to_end.blocks) == 18
    assert other.rows[0].ratio.excludes(1.0)


@pytest.mark.parametrize(
    ("death", "lasts"),
    [
        (ChildDied("SIGSEGV"), True),
        (ChildKilled("out of memory"), False),
        (TimeoutError("no message"), False),
    ],
)
def test_a_death_that_may_pass_is_measured_again_by_the_next_run(
    death: Exception, lasts: bool
) -> None:
    def start(engine: Engine) -> LocalPeer:
        return LocalPeer(
            engine.digest,
            TimedSession(Host(), 0.001),
            dies_at=1 if engine.digest == "1" else 99,
            death=death,
        )

    contestants = race(
        entries(engine_named("0"), engine_named("1")), [WORKLOAD.shape], SHORT, start
    )
    benchmarks = Benchmarks(created="", results=results(contestants, [WORKLOAD], QUIET_HOST))
    assert isinstance(benchmarks.results[0], BenchmarkReport)
    assert isinstance(benchmarks.results[1], BenchmarkFailure)
    assert BENCHMARK.is_cacheable(benchmarks) is lasts


def test_without_its_baseline_there_is_no_ratio() -> None:
    _, (baseline, other) = run_race(Host(), [0.002, 0.001], dies_at=[0, 99])
    assert isinstance(baseline, BenchmarkFailure)
    assert other.rows[0].ratio is None


def test_a_race_that_nobody_survives_has_no_baseline() -> None:
    contestant = Contestant(engine_named("0"), Role.BASELINE, [[]], [[]], failure="it died")
    assert baseline_of([contestant]) is None
    assert isinstance(results([contestant], [WORKLOAD], BusyHost(9.0, 1))[0], BenchmarkFailure)


# -- one turn ----------------------------------------------------------------


def test_drift_and_thinning_are_said() -> None:
    host = Host()
    session = TimedSession(host, 1e-6)
    block = take_block(session, WORKLOAD.feeds, Take(0.01), host.clock)
    assert block.runs > 9000
    assert 200 <= len(block.end_to_end_s) <= 400
    assert block.run_s > 4 * sum(block.end_to_end_s), "the sum is of all runs"
    _, (fast,) = run_race(host, [1e-6])
    assert [note.text for note in fast.notes] == [
        "of a block with over 400 runs every k-th time is kept"
    ]
    peer = LocalPeer(
        "0", TimedSession(host, 0.001), stalled={number: 1.1**number for number in range(10)}
    )
    (moved,) = results(
        race(entries(engine_named("0")), [WORKLOAD.shape], SHORT, lambda engine: peer.start(0.0)),
        [WORKLOAD],
        QUIET_HOST,
    )
    assert isinstance(moved, BenchmarkReport)
    assert not moved.rows[0].end_to_end.stable
    assert "the median still moved between blocks" in moved.notes[0].text


def test_a_block_says_how_long_it_waited_for_a_cpu() -> None:
    host = Host()
    counts = iter([CpuClock(), CpuClock(ran_s=1.0, waited_s=1.0, interruptions=1_000)])
    block = take_block(
        TimedSession(host, 0.001), WORKLOAD.feeds, Take(0.1), host.clock, lambda: next(counts)
    )
    assert block.waiting == pytest.approx(0.5)


def test_one_run_goes_from_bind_to_fetch() -> None:
    session = TimedSession(Host(), 0.001)
    run_session(session, WORKLOAD.feeds)
    assert session.calls == ["bind", "upload", "execute", "download", "synchronize", "fetch"]
