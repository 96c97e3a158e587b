"""The search for the best batch and number of sessions, with children that live here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import Block, NextShape, RaceEntry, Ready, Take, Workload
from pipeline.benchmark.load import (
    TIME_OVER,
    Search,
    Searched,
    batch_symbol_of_all,
    load_block,
    load_sizes,
    session_counts,
    session_threads,
)
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.errors import ChildDied, PlanError
from pipeline.host.contention import CpuClock
from pipeline.measurement.clock import WarmUpOptions
from pipeline.plan.schema import BenchmarkConfig
from tests.builders.interleaved import X, engine_named

WORKLOADS = tuple(Workload(sizes={"batch": rows}, feeds={}, rows=rows) for rows in (1, 2, 4))
OPTIONS = BenchmarkConfig(duration_s=3.0)

REQUEST_S = {1: 0.001, 2: 0.0015, 4: 0.0025}
"""Time of a request by its rows: larger batches have the higher throughput."""


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class LoadPeer:
    """A child whose requests take a fixed time; with more sessions, so much longer."""

    clock: Clock
    sessions: int
    slowdown: float
    dies: bool = False
    batches: list[int] = field(default_factory=lambda: [workload.rows for workload in WORKLOADS])
    message: object = None
    stopped: bool = False

    def send(self, payload: object) -> None:
        self.message = payload
        if isinstance(payload, NextShape):
            self.batches.pop(0)

    def answered(self, timeout_s: float) -> bool:
        return True

    def receive(self, timeout_s: float | None = None) -> Any:
        if self.dies:
            raise ChildDied("the child was killed")
        if self.message is None:
            return Ready()
        if isinstance(self.message, WarmUpOptions):
            return ()
        assert isinstance(self.message, Take)
        self.clock.now_s += self.message.seconds
        request_s = REQUEST_S[self.batches[0]] * self.slowdown
        runs = max(1, round(self.message.seconds / request_s)) * self.sessions
        return block(request_s, runs, self.batches[0], self.sessions)

    def stop(self) -> None:
        self.stopped = True


def block(request_s: float, runs: int, rows: int, sessions: int) -> Block:
    return Block(
        runs=runs,
        run_s=runs * request_s,
        timed_runs=0,
        timed_compute_s=0.0,
        rewarm_s=(),
        end_to_end_s=(request_s / rows / sessions,),
        latency_s=(request_s,) * runs,
        upload_s=(),
        enqueue_s=(),
        compute_s=(),
        download_s=(),
        peak_memory_bytes=1,
    )


def searched(
    slowdowns: Mapping[str, float],
    limit_s: float | None = None,
    sessions: tuple[int, ...] = (1, 2),
    budget_s: float = 1000.0,
    options: BenchmarkConfig = OPTIONS,
    dies: tuple[tuple[str, int], ...] = (),
) -> list[Searched]:
    """Engines that are slower than `REQUEST_S` by a factor; two sessions take 1.5 times as long."""
    clock = Clock()
    peers: list[LoadPeer] = []

    def start(engine: Engine, count: int) -> LoadPeer:
        slowdown = slowdowns[engine.digest] * (1 + (count - 1) / 2)
        peers.append(LoadPeer(clock, count, slowdown, (engine.digest, count) in dies))
        return peers[-1]

    entries = [RaceEntry(engine_named(name), Role.CANDIDATE) for name in slowdowns]
    try:
        return Search(
            entries, WORKLOADS, sessions, limit_s, options, budget_s, start, clock=clock
        ).run()
    finally:
        assert all(peer.stopped for peer in peers)


def tried(one: Searched) -> list[tuple[int | None, int]]:
    return [(point.batch, point.sessions) for point in one.points]


def test_without_a_limit_the_best_point_has_the_highest_throughput() -> None:
    (one,) = searched({"a": 1.0})
    assert tried(one) == [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
    best = one.best(None)
    assert best is not None
    assert (best.batch, best.sessions) == (4, 2)
    assert best.samples_per_s == pytest.approx(4 * 2 / (0.0025 * 1.5))
    assert one.untried == []


def test_with_a_limit_the_best_point_has_its_p99_within_it() -> None:
    limit_s = 0.0018
    (one,) = searched({"a": 1.0}, limit_s)
    best = one.best(limit_s)
    assert best is not None
    assert (best.batch, best.sessions) == (2, 1)  # as fast as batch 1 with 2 sessions
    assert best.p99_s == pytest.approx(0.0015)
    assert best.requests >= 1000
    assert tried(one) == [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
    assert one.untried == ["batch 4 with 2 sessions: batch 2 with 2 sessions is over 1.8 ms"]


def test_no_more_sessions_are_tried_once_no_point_is_within_the_limit() -> None:
    (one,) = searched({"a": 1.0}, limit_s=0.0005)
    assert tried(one) == [(1, 1)]
    assert one.best(0.0005) is None
    assert one.untried == [
        "batches 2 to 4 with 1 session: batch 1 with 1 session is over 0.5 ms",
        "2 sessions: no point with fewer sessions is within 0.5 ms",
    ]


def test_too_few_requests_for_a_p99_name_the_duration_that_gives_enough() -> None:
    with pytest.raises(PlanError) as caught:
        searched({"a": 10.0}, limit_s=0.02, sessions=(1,))
    assert caught.value.message == (
        "expected 1,000 requests for the p99 of onnxruntime a fp32 at batch 1 with 1 session, got"
        " 300 in 3 s"
    )
    assert caught.value.next_step == (
        "set `benchmark.duration_s` to 20, and `benchmark.budget_s` to 80 to try every point"
    )
    enough = OPTIONS.model_copy(update={"duration_s": 20.0})
    (one,) = searched({"a": 10.0}, limit_s=0.02, sessions=(1,), options=enough)
    assert one.best(0.02) is not None


@pytest.mark.parametrize(("late", "is_measured_on"), [(10, True), (11, False)])
def test_a_point_ends_once_it_is_certainly_over_the_limit(late: int, is_measured_on: bool) -> None:
    """A p99 of 1,000 requests has ten beyond it."""
    clock, takes = Clock(), []

    class Late(LoadPeer):
        def receive(self, timeout_s: float | None = None) -> Any:
            if not isinstance(self.message, Take):
                return super().receive(timeout_s)
            takes.append(self.message.seconds)
            return replace(
                block(0.001, 500, 1, 1), latency_s=(0.001,) * (500 - late) + (9.0,) * late
            )

    (one,) = Search(
        [RaceEntry(engine_named("a"), Role.CANDIDATE)],
        WORKLOADS[:1],
        (1,),
        0.002,
        OPTIONS,
        1000.0,
        lambda engine, count: Late(clock, count, 1.0),
        clock=clock,
    ).run()
    assert (len(takes) > 1) == is_measured_on
    assert one.best(0.002) is None


def test_what_the_budget_leaves_no_time_for_is_listed() -> None:
    for one in searched({"a": 1.0, "b": 1.0}, budget_s=1.4):
        assert tried(one) == [(1, 1)]
        assert one.untried == [
            f"batches 2 to 4 with 1 session: {TIME_OVER}",
            f"2 sessions: {TIME_OVER}",
        ]


def test_each_engine_has_a_point_however_small_the_budget_is() -> None:
    assert [tried(one) for one in searched({"a": 1.0, "b": 1.0}, budget_s=0.0)] == [[(1, 1)]] * 2


def test_an_engine_far_behind_is_not_tried_with_more_sessions() -> None:
    fast, near, slow = searched({"fast": 1.0, "near": 1.9, "slow": 2.5})
    assert [len(one.points) for one in (fast, near, slow)] == [6, 6, 3]
    reason = "2 sessions: with fewer, another engine has 2.50 times the throughput"
    assert slow.untried == [reason]


def test_an_engine_that_fails_with_two_sessions_keeps_its_points() -> None:
    (one,) = searched({"a": 1.0}, dies=(("a", 2),))
    assert len(one.points) == 3
    assert one.failure == ""
    assert one.untried == ["the rest with 2 sessions: the child was killed"]


def test_an_engine_that_cannot_run_at_all_has_failed() -> None:
    lost, other = searched({"a": 1.0, "b": 1.0}, dies=(("a", 1),))
    assert (lost.failure, lost.points) == ("the child was killed", [])
    assert len(other.points) == 6


# -- what to try -------------------------------------------------------------


def test_sizes_are_powers_of_two_and_the_ends_of_each_profile() -> None:
    profiles = [
        Profile(dims={"n": DimRange(min=1, opt=2, max=6), "t": DimRange(min=8, opt=16, max=16)}),
        Profile(dims={"n": DimRange(min=12, opt=12, max=20), "t": DimRange(min=1, opt=2, max=4)}),
    ]
    sizes = load_sizes("n", profiles, {"n": 2, "t": 16})
    assert [size["n"] for size in sizes] == [1, 2, 4, 6]
    assert {size["t"] for size in sizes} == {16}
    assert [size["n"] for size in load_sizes("n", profiles, {"n": 12, "t": 2})] == [12, 16, 20]
    assert load_sizes(None, profiles, {"t": 16}) == ({"t": 16},)


def test_the_batch_is_the_first_dimension_of_all_inputs() -> None:
    other = TensorSpec(name="o", dtype="float32", shape=("time", 2))
    assert batch_symbol_of_all([X, X]) == "batch"
    assert batch_symbol_of_all([X, other]) is None
    assert batch_symbol_of_all([]) is None


def test_sessions_on_a_cpu_share_its_cores() -> None:
    assert session_counts(0, 1, on_gpu=False) == (1,)
    assert session_counts(0, 2, on_gpu=False) == (1, 2)
    assert session_counts(0, 8, on_gpu=False) == (1, 2, 4)
    assert session_counts(4, 8, on_gpu=False) == (1, 2)
    assert session_counts(0, 2, on_gpu=True) == (1, 2, 4)
    assert [session_threads(0, 8, count, on_gpu=False) for count in (1, 2, 4)] == [8, 4, 2]
    assert session_threads(3, 8, 2, on_gpu=False) == 3
    assert session_threads(0, 8, 2, on_gpu=True) == 8


# -- a block, in the child ---------------------------------------------------


def test_a_block_gives_the_time_of_a_sample_and_the_times_of_requests() -> None:
    clock = Clock()
    counters = iter([CpuClock(), CpuClock(ran_s=3.0, waited_s=1.0)])

    def run() -> None:
        clock.now_s += 0.25

    measured = load_block(map, [run], 8, 1.0, clock, lambda: next(counters))
    (sample_s,) = measured.end_to_end_s
    assert sample_s == pytest.approx(0.25 / 8)
    assert measured.latency_s == (0.25,) * 4
    assert measured.runs == 4
    assert measured.run_s == pytest.approx(1.0)
    assert measured.waiting == pytest.approx(0.25)
