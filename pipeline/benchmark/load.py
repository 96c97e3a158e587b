"""Throughput under load: which batch size and how many sessions serve an engine best.

    parent                                  one child per engine and number of sessions
    start a child                       --> load the engine, once or for each session
    per batch, ascending: warm up, Take --> every session runs one request after another
    until the time is over, or requests are over the limit

A session is what an instance is in serving: on a GPU a session of one engine, on a CPU an engine of
its own with its share of the cores, but in a thread of one process. A race then compares the
engines, each at its best point.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import (
    PATIENCE_S,
    REWARM_SHARE,
    USUAL_PROCESSES,
    VALUES_PER_BLOCK,
    Block,
    NextShape,
    Peer,
    RaceEntry,
    Ready,
    Take,
    Workload,
    profile_for,
    warm_up_of_process,
)
from pipeline.core.artifacts import Engine
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import CrucibleError, PlanError
from pipeline.execution.child_process import Channel
from pipeline.host.contention import CpuClock, cpu_clock
from pipeline.host.environment import peak_memory_bytes
from pipeline.measurement.clock import (
    TAIL_VALUES,
    Clock,
    WarmUpOptions,
    measure_block,
    monotonic,
    thinned,
    values_needed,
    warm_up,
)
from pipeline.plan.schema import BenchmarkConfig
from pipeline.results.benchmarks import LoadPoint

SESSIONS = (1, 2, 4)
"""Numbers of sessions to try."""

TAIL = 99
"""The percentile of a request that a limit applies to."""

SEARCH_SHARE = 0.5
"""Share of the benchmark's budget for the search."""

TIME_OVER = "the time for the search was over (half of `benchmark.budget_s`)"
NO_BATCH_AXIS = "other batches: the model has no batch axis, so only the sessions vary"
MAX_GAIN = 2.0
"""An engine that is behind by more is not tried with more sessions: twice the sessions hardly give
more than twice the throughput.
"""

SLACK = 1.1  # measuring time against the time that the missing requests need at the mean rate


# -- what to try -------------------------------------------------------------


def batch_symbol_of_all(inputs: Sequence[TensorSpec]) -> str | None:
    """Return the symbol that is the first dimension of every input, or None."""
    first_dims = {spec.shape[0] if spec.shape else None for spec in inputs}
    symbol = first_dims.pop() if len(first_dims) == 1 else None
    return symbol if isinstance(symbol, str) else None


def load_sizes(
    symbol: str | None, profiles: Sequence[Profile], first: dict[str, int]
) -> tuple[dict[str, int], ...]:
    """Return the sizes to try, by ascending batch: powers of two, and each profile's min and max.

    `first` holds the sizes of the other symbols. Sizes outside all profiles are left out.
    """
    if symbol is None:
        return (first,)
    ranges = [profile.dims[symbol] for profile in profiles]
    largest = max(dim.max for dim in ranges)
    batches = {2**power for power in range(largest.bit_length())}
    for dim in ranges:
        batches |= {max(1, dim.min), dim.max}
    choices = [{**first, symbol: batch} for batch in sorted(batches)]
    return tuple(sizes for sizes in choices if any(profile.holds(sizes) for profile in profiles))


def session_counts(threads: int, cores: int, on_gpu: bool) -> tuple[int, ...]:
    """Return the numbers of sessions to try; on a CPU no more than there are cores for.

    `threads` of a session; 0: the sessions share the cores.
    """
    most = SESSIONS[-1] if on_gpu else cores // max(1, threads)
    return tuple(count for count in SESSIONS if count == 1 or count <= most)


def session_threads(threads: int, cores: int, sessions: int, on_gpu: bool) -> int:
    """Return the threads of one session. On a CPU the sessions share the cores."""
    return threads or (cores if on_gpu else max(1, cores // sessions))


# -- the search, in the parent -----------------------------------------------


@dataclass(slots=True)
class Searched:
    """One engine in the search, with its points so far."""

    engine: Engine
    role: Role
    points: list[LoadPoint] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    failure: str = ""
    may_pass: bool = False  # True if the failure may not occur again

    def best(self, limit_s: float | None) -> LoadPoint | None:
        """Return the point of the highest throughput within the limit."""
        return max(
            (point for point in self.points if is_within(point, limit_s)),
            key=lambda point: point.samples_per_s,
            default=None,
        )


def is_within(point: LoadPoint, limit_s: float | None) -> bool:
    """Return True if the p99 of a point is within the limit, or if there is no limit."""
    return limit_s is None or (point.p99_s is not None and point.p99_s <= limit_s)


@dataclass(slots=True)
class Search:
    """The search of all engines, one after another, with few sessions first."""

    entries: Sequence[RaceEntry[Engine]]
    workloads: Sequence[Workload]  # by ascending batch
    sessions: Sequence[int]
    limit_s: float | None
    options: BenchmarkConfig
    end_s: float  # on the clock: no further point begins
    start: Callable[[Engine, int], Peer]
    progress: Progress = silent
    clock: Clock = monotonic
    searched: list[Searched] = field(init=False)
    turn_end_s: float = field(init=False, default=0.0)  # of the engine that is measured
    last_s: float = field(init=False, default=0.0)  # duration of the last point

    def __post_init__(self) -> None:
        self.searched = [Searched(entry.engine, entry.role) for entry in self.entries]

    def run(self) -> list[Searched]:
        """Measure the points. PlanError if a point has too few requests for its p99.

        Each engine has at least one point, unless it failed.
        """
        for sessions in self.sessions:
            highest = {role: self._highest(role) for role in Role}
            for index, one in enumerate(self.searched):
                if reason := self._why_not(one, highest[one.role]):
                    one.untried.append(f"{_of_sessions(sessions)}: {reason}")
                elif not one.failure:
                    left_s = self.end_s - self.clock()
                    self.turn_end_s = self.clock() + left_s / (len(self.searched) - index)
                    self._measure(one, sessions)
        return self.searched

    def _highest(self, role: Role) -> float:
        """Return the highest throughput of a role so far; 0 without a point."""
        best = (one.best(self.limit_s) for one in self.searched if one.role is role)
        return max((point.samples_per_s for point in best if point), default=0.0)

    def _why_not(self, one: Searched, highest: float) -> str:
        """Return why an engine is not tried with more sessions; empty if it is.

        `highest` is the throughput of the best engine of its role with fewer sessions.
        """
        if not one.points:
            return ""
        if self.clock() + self.last_s > self.end_s:
            return TIME_OVER
        best = one.best(self.limit_s)
        if best is None:
            return f"no point with fewer sessions is within {limit_text(self.limit_s)}"
        behind = highest / best.samples_per_s
        if behind > MAX_GAIN:
            return f"with fewer, another engine has {behind:.2f} times the throughput"
        return ""

    def _measure(self, one: Searched, sessions: int) -> None:
        """Measure an engine at all batches with so many sessions."""
        peer = self.start(one.engine, sessions)
        try:
            peer.receive(PATIENCE_S)  # Ready
            for index, workload in enumerate(self.workloads):
                point = self._point(peer, one, workload, sessions)
                one.points.append(point)
                rest = self.workloads[index + 1 :]
                if rest and (reason := self._why_stop(point)):
                    one.untried.append(f"{_batches(rest)} with {_of_sessions(sessions)}: {reason}")
                    break
                peer.send(NextShape())
        except PlanError:
            raise
        except (CrucibleError, TimeoutError) as error:
            text = error.message if isinstance(error, CrucibleError) else str(error)
            if one.points:  # it may run with fewer sessions, or smaller batches
                one.untried.append(f"the rest with {_of_sessions(sessions)}: {text}")
            else:
                one.failure = text
                one.may_pass = isinstance(error, TimeoutError) or error.may_pass
        finally:
            peer.stop()

    def _why_stop(self, point: LoadPoint) -> str:
        """Return why no larger batch is tried after this point; empty if one is."""
        if self.limit_s is not None and point.p50_s > self.limit_s:
            return f"{point.where} is over {limit_text(self.limit_s)}"
        # of a large model the next point takes twice as long
        return TIME_OVER if self.clock() + 2 * self.last_s > self.turn_end_s else ""

    def _point(self, peer: Peer, one: Searched, workload: Workload, sessions: int) -> LoadPoint:
        label = one.engine.recipe.label
        self.progress(None, f"search, {workload.shape}, {_of_sessions(sessions)}: {label}")
        began_s = self.clock()
        peer.send(warm_up_of_process(self.options))
        peer.receive(PATIENCE_S)
        blocks: list[Block] = []
        wanted_s = self.options.duration_s / USUAL_PROCESSES
        while wanted_s > 0:
            peer.send(Take(wanted_s))
            blocks.append(peer.receive(PATIENCE_S))
            wanted_s = self._missing_s(blocks, sessions)
        self.last_s = self.clock() - began_s
        has_batch = batch_symbol_of_all(one.engine.inputs) is not None
        batch = workload.rows if has_batch else None
        point = point_from_blocks(blocks, workload.sizes, batch, sessions)
        self._check_enough(point, blocks, label)
        return point

    def _missing_s(self, blocks: Sequence[Block], sessions: int) -> float:
        """Return the time that a point still needs for its p99; 0 if it needs none.

        A point that is over the limit needs none.
        """
        if self.limit_s is None or _is_over(blocks, self.limit_s):
            return 0.0
        spent_s = sum(block.run_s for block in blocks) / sessions
        requests = sum(block.runs for block in blocks)
        missing_s = (values_needed(TAIL) - requests) * spent_s / requests * SLACK
        return max(0.0, min(missing_s, self.options.duration_s - spent_s))

    def _check_enough(self, point: LoadPoint, blocks: Sequence[Block], label: str) -> None:
        """PlanError if it is open whether a point is within the limit."""
        limit_s = self.limit_s
        if limit_s is None or point.p99_s is not None or _is_over(blocks, limit_s):
            return
        spent_s = sum(block.run_s for block in blocks) / point.sessions
        # a session that is within the limit needs no longer than this
        within_s = values_needed(TAIL) * max(limit_s, SLACK * spent_s / point.requests)
        duration_s = math.ceil(within_s)
        # batches double, so the longest point takes half of the time of an engine
        search_s = 2 * duration_s * len(self.entries) * len(self.sessions)
        budget_s = max(math.ceil(search_s / SEARCH_SHARE), math.ceil(self.options.budget_s))
        raise PlanError(
            f"expected {values_needed(TAIL):,} requests for the p99 of {label} at"
            f" {point.where}, got {point.requests} in {spent_s:.3g} s",
            f"set `benchmark.duration_s` to {duration_s}, and `benchmark.budget_s` to {budget_s} to"
            " try every point",
        )


def limit_text(limit_s: float | None) -> str:
    """`15 ms`; empty without a limit."""
    return "" if limit_s is None else f"{limit_s * 1e3:g} ms"


def _of_sessions(count: int) -> str:
    return f"{count} session{'s' if count > 1 else ''}"


def _batches(workloads: Sequence[Workload]) -> str:
    rows = [workload.rows for workload in workloads]
    return f"batch {rows[0]}" if len(rows) == 1 else f"batches {rows[0]} to {rows[-1]}"


def _percentile_s(blocks: Iterable[Block], percent: float) -> float:
    values = [value for block in blocks for value in block.latency_s]
    return float(np.percentile(values, percent))


def _is_over(blocks: Sequence[Block], limit_s: float) -> bool:
    """Return True if the p99 is over the limit, even with too few requests for a p99.

    That is so if the median is, or if more requests are than a p99 may have beyond it.
    """
    late = sum(value > limit_s for block in blocks for value in block.latency_s)
    has_tail = tail_s(blocks) is not None
    return _percentile_s(blocks, 50) > limit_s or (late > TAIL_VALUES and not has_tail)


def point_from_blocks(
    blocks: Sequence[Block], sizes: dict[str, int], batch: int | None, sessions: int
) -> LoadPoint:
    """Return the point that these blocks measured."""
    requests = sum(block.runs for block in blocks)
    durations = np.array([block.run_s for block in blocks])
    sample_s = np.array([block.end_to_end_s[0] for block in blocks])
    return LoadPoint(
        sizes=sizes,
        batch=batch,
        sessions=sessions,
        requests=requests,
        samples_per_s=float((durations / sample_s).sum() / durations.sum()),
        p50_s=_percentile_s(blocks, 50),
        p99_s=tail_s(blocks),
        waiting=float(np.median([block.waiting for block in blocks])),
    )


def tail_s(blocks: Sequence[Block]) -> float | None:
    """Return the p99 of the requests in these blocks, or None if there are too few."""
    if sum(block.runs for block in blocks) < values_needed(TAIL):
        return None
    return _percentile_s(blocks, TAIL)


# -- one engine with some sessions, in its child -----------------------------


def contend_under_load(
    channel: Channel, engine: Engine, sessions: int, workloads: Sequence[Workload]
) -> None:
    """Load an engine as serving does, and run a block at each request of the parent.

    The messages are those of `contend`.
    """
    with ExitStack() as stack:
        copies = 1 if engine.shares_weights else sessions
        loaded = [stack.enter_context(closing(backends.load(engine))) for _ in range(copies)]
        loaded *= sessions // copies
        # one session runs in this thread, which loaded it: CUDA graphs may need that
        together = map if sessions == 1 else stack.enter_context(ThreadPoolExecutor(sessions)).map
        gc.collect()
        gc.disable()  # a collection would add its time to some request
        channel.send(Ready())
        for workload in workloads:
            options: WarmUpOptions = channel.receive()
            profile = profile_for(engine, workload)
            with ExitStack() as opened:
                runs = []
                for each in loaded:
                    session = opened.enter_context(closing(each.session(profile)))
                    runs.append(partial(run_session, session, workload.feeds))
                times = together(partial(warm_up, options=options), runs)
                channel.send(thinned([s for part in times for s in part], VALUES_PER_BLOCK))
                while isinstance(message := channel.receive(), Take):
                    channel.send(load_block(together, runs, workload.rows, message.seconds))


def load_block(
    together: Callable[..., Iterable[Any]],
    runs: Sequence[Callable[[], object]],
    rows: int,
    seconds: float,
    clock: Clock = monotonic,
    cpu: Callable[[], CpuClock] = cpu_clock,
) -> Block:
    """Run all sessions at the same time, and return the times of one block.

    `together` maps a function over the sessions, each in a thread. The block's only `end_to_end_s`
    is the time per sample of all sessions: a mean, which any waiting for a CPU moves. `latency_s`
    are the times of requests.
    """

    def loop(min_s: float) -> list[tuple[float, ...]]:
        return list(together(partial(measure_block, clock=clock, min_s=min_s), runs))

    rewarm = loop(seconds * REWARM_SHARE)
    before = cpu()
    times = loop(seconds)
    requests = [value for part in times for value in part]
    waiting = cpu().waiting_since(before)
    rate = rows * sum(len(part) / sum(part) for part in times)
    return Block(
        runs=len(requests),
        run_s=sum(requests),
        timed_runs=0,
        timed_compute_s=0.0,
        rewarm_s=thinned([value for part in rewarm for value in part], VALUES_PER_BLOCK),
        end_to_end_s=(1 / rate,),
        latency_s=thinned(requests, VALUES_PER_BLOCK),
        upload_s=(),
        enqueue_s=(),
        compute_s=(),
        download_s=(),
        peak_memory_bytes=peak_memory_bytes(),
        waiting=waiting,
    )
