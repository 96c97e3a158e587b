"""The race: every engine in several processes of its own one after another, block by block in turn.

    parent                                 one child per engine
    generation: start every child     -->  load, then sleep on the pipe
    per shape: warm up each in turn   -->  new session, run until the median settles
    per round, in random order: Take  -->  run for one block, then sleep on the pipe again; stop all
    between generations: who is far behind stops, and the race ends once its intervals are narrow

Only the child that has been asked runs; so no two engines share the cores, and what changes on the
host meets all of them alike. Two processes that run one file can differ for as long as they live
(how memory lies, which core a thread got): hence the generations. Who stops, and when the race is
over, is decided in pipeline/benchmark/elimination.py.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline import backends
from pipeline.backends.base import Session, run_session
from pipeline.benchmark.elimination import MAX_PAIRS, Role, Runner, Stop, is_decided, stops
from pipeline.core import Engine, Progress, Tensors, silent
from pipeline.errors import CrucibleError
from pipeline.execution.child_process import Channel
from pipeline.host.contention import CpuClock, cpu_clock
from pipeline.host.environment import peak_memory_bytes, usable_cores
from pipeline.measurement.clock import (
    NANOSECOND_DIGITS,
    Clock,
    WarmUpOptions,
    measure_block,
    monotonic,
    thinned,
    warm_up,
)
from pipeline.measurement.comparison import MIN_PAIRS, Processes

if TYPE_CHECKING:  # a contestant's child needs no plan
    from pipeline.plan.schema import BenchmarkConfig

# the longest block: long enough that what the last child left in the caches no longer matters
BLOCK_S = 0.5
BLOCKS_PER_PROCESS = 3  # at least: so that one stalled block does not decide what a process showed
USUAL_PROCESSES = 6  # that share the time to measure and to warm up which the plan gives an engine
MAX_GENERATIONS = 2 * MAX_PAIRS  # disturbed ones are repeated, but not for ever
MAX_WARMUP_S = (
    3.0  # the longest that the usual processes of an engine together may warm up at one shape
)
REWARM_SHARE = 0.1  # of a block, before it: the caches hold the data of whoever ran last
PHASES_SHARE = 0.2  # of a block, after it: upload, compute and download apart
VALUES_PER_BLOCK = 2000  # of a fast model every k-th time is kept, so that a report stays readable
POLL_S = 0.02  # how long one that is loading is waited for before the next is
PATIENCE_S = 900.0  # for one answer; torch.compile takes minutes to load a large model


@dataclass(frozen=True, slots=True)
class Workload:
    """One shape to measure, with generated inputs, the same for all engines."""

    sizes: dict[str, int]
    feeds: Tensors
    rows: int  # samples per run
    flops: float | None  # of the source graph, whatever an engine makes of it
    moved_bytes: float | None  # by the source graph's nodes, as if nothing were fused


@dataclass(frozen=True, slots=True)
class Ready:
    """Child to parent: the engine is loaded."""


@dataclass(frozen=True, slots=True)
class Take:
    """Parent to child: run one block."""

    seconds: float
    enough_runs: int | None = None  # a block of very short runs may end earlier


@dataclass(frozen=True, slots=True)
class NextShape:
    """Parent to child: close this session; a warm-up at the next shape follows."""


@dataclass(frozen=True, slots=True)
class Block:
    """Child to parent: the times of one turn."""

    runs: int  # whole runs timed; `end_to_end_s` holds every k-th of them
    run_s: float  # that all of them took
    timed_runs: int  # whose phases were timed, likewise
    timed_compute_s: float
    rewarm_s: tuple[float, ...]
    end_to_end_s: tuple[float, ...]
    latency_s: tuple[
        float, ...
    ]  # from the start of the upload to the end of the download, on the session's timer
    upload_s: tuple[float, ...]
    enqueue_s: tuple[
        float, ...
    ]  # of `execute` on the host's clock: on a GPU it returns before the work is done
    compute_s: tuple[float, ...]
    download_s: tuple[float, ...]
    peak_memory_bytes: int
    # share of the whole runs' time in which the child was kept from a CPU, if the median can show
    # it
    waiting: float = 0.0


class Peer(Protocol):
    """The parent's end of a conversation with one child: process.Child, or a double."""

    def send(self, payload: object) -> None: ...
    def answered(
        self, timeout_s: float
    ) -> bool: ...  # whether `receive` would return, or raise, at once
    def receive(self, timeout_s: float | None = None) -> Any: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RaceEntry:
    """An engine that is to be measured, and why."""

    engine: Engine
    role: Role


@dataclass(slots=True)
class Contestant:
    """One engine in the race: its child of now, and what its children have shown so far."""

    engine: Engine
    role: Role
    warmups: list[list[float]]  # per workload
    blocks: list[list[Block]]  # per workload, in the order in which they ran
    peer: Peer | None = None
    failure: str = ""
    may_pass: bool = False  # of the failure
    started_s: float = 0.0  # when its last child was started, and how long that took to load
    loading_s: float = 0.0
    processes: list[int] = field(
        default_factory=list
    )  # blocks that each child gave, at every workload
    generations: list[int] = field(default_factory=list)  # in which each child ran
    stop: Stop | None = None  # why it gets no further child

    @property
    def is_racing(self) -> bool:
        return not self.failure and self.stop is None

    def waiting(self, workload: int) -> list[float]:
        """Per child, the share of its time that it waited for a CPU: the median of its blocks."""
        shares = np.array([block.waiting for block in self.blocks[workload]])
        ends = np.cumsum(self.processes)
        starts = ends - self.processes
        return [float(np.median(shares[a:b])) for a, b in zip(starts, ends, strict=True)]

    def runner(self) -> Runner:
        """What decides whether it goes on: what its children showed at the first workload."""
        blocks = [np.asarray(block.end_to_end_s) for block in self.blocks[0]]
        block_medians_s = [float(np.median(block)) for block in blocks]
        ends = np.cumsum(self.processes)
        starts = ends - self.processes
        medians_s = [
            float(np.median(np.concatenate(blocks[a:b]))) for a, b in zip(starts, ends, strict=True)
        ]
        processes = Processes(
            np.asarray(self.generations), np.asarray(medians_s), np.asarray(self.waiting(0))
        )
        label = self.engine.recipe.label
        return Runner(label, self.role, processes, min(block_medians_s), max(block_medians_s))


# -- the race, in the parent -------------------------------------------------


def race(
    entries: Sequence[RaceEntry],
    workloads: Sequence[Workload],
    options: BenchmarkConfig,
    start: Callable[[Engine], Peer],
    progress: Progress = silent,
    clock: Clock = monotonic,
    enough_runs: int | None = None,
) -> list[Contestant]:
    """Run generation after generation until the race is decided, or its time is over.

    A contestant that fails leaves the race; its place in the list stays. Each generation has a
    child for every contestant that is still in the race.
    """
    contestants = [
        Contestant(entry.engine, entry.role, [[] for _ in workloads], [[] for _ in workloads])
        for entry in entries
    ]
    run = Race(contestants, workloads, options, start, progress, clock, enough_runs)
    while run.goes_on():
        with ExitStack() as stack:
            run.load(stack)
            run.measure()
        run.end_generation()
    return contestants


@dataclass(slots=True)
class Race:
    """Who runs, and when."""

    contestants: list[Contestant]
    workloads: Sequence[Workload]
    options: BenchmarkConfig
    start: Callable[[Engine], Peer]
    progress: Progress
    clock: Clock = monotonic
    enough_runs: int | None = None  # of a block
    generation: int = 0
    cores: int = field(default_factory=usable_cores)
    order: random.Random = field(default_factory=lambda: random.Random(0))
    began_s: float = field(init=False)
    generation_s: float = field(init=False, default=0.0)  # what the last generation took
    generation_began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.generation_began_s = self.clock()

    def goes_on(self) -> bool:
        """Whether there is another generation.

        The fewest that an interval needs may take twice the budget: a race without them says
        nothing.
        """
        if not self.racing() or self.generation >= MAX_GENERATIONS:
            return False
        if self.generation == 0:
            return True
        budget_s = self.options.budget_s * (2 if self.generation < MIN_PAIRS else 1)
        ends_s = self.clock() + self.generation_s - self.began_s
        return ends_s <= budget_s and not self._is_decided()

    def _is_decided(self) -> bool:
        return is_decided([each.runner() for each in self.racing()])

    def racing(self) -> list[Contestant]:
        """The contestants that are still in the race."""
        return [contestant for contestant in self.contestants if contestant.is_racing]

    def end_generation(self) -> None:
        """Note who stops here, and what the generation took."""
        racing = self.racing()
        reasons = stops([each.runner() for each in racing])
        for contestant, reason in zip(racing, reasons, strict=True):
            contestant.stop = reason
        now_s = self.clock()
        self.generation_s, self.generation_began_s = now_s - self.generation_began_s, now_s
        self.generation += 1

    def rounds(self) -> int:  # of one generation
        return max(BLOCKS_PER_PROCESS, round(self.options.duration_s / USUAL_PROCESSES / BLOCK_S))

    def load(self, stack: ExitStack) -> None:
        """Start a child for each that is still in the race, and wait until all are loaded; `stack`
        stops them.

        As many at once as there are cores: loading is work too, and memory peaks while it lasts.
        Who took longest the last time begins.
        """
        waiting = sorted(self._in_random_order(), key=lambda contestant: contestant.loading_s)
        loading: list[Contestant] = []
        while waiting or loading:
            while waiting and len(loading) < self.cores:
                loading.append(contestant := waiting.pop())
                contestant.peer, contestant.started_s = self.start(contestant.engine), monotonic()
                stack.callback(contestant.peer.stop)
            first = _first_to_answer(loading)
            self._turn(first, "load", None)
            first.loading_s = monotonic() - first.started_s
            loading.remove(first)

    def measure(self) -> None:
        """Every shape: all warm up, then run their rounds.

        The times that the plan gives an engine to warm up and to measure are shared by its usual
        processes.
        """
        rounds, options = self.rounds(), self.options
        warm = WarmUpOptions(
            math.ceil(options.warmup_runs / USUAL_PROCESSES),
            options.warmup_s / USUAL_PROCESSES,
            MAX_WARMUP_S / USUAL_PROCESSES,
        )
        take = Take(options.duration_s / (USUAL_PROCESSES * rounds), self.enough_runs)
        racing = self.racing()
        for index, workload in enumerate(self.workloads):
            shape = (
                ", ".join(f"{name} {size}" for name, size in workload.sizes.items())
                or "fixed shape"
            )
            for contestant in self._in_random_order():
                contestant.warmups[index] += self._turn(contestant, f"warm up, {shape}", warm) or ()
            for _ in range(rounds):
                for contestant in self._in_random_order():
                    block = self._turn(contestant, shape, take)
                    contestant.blocks[index] += [block] if block is not None else []
            for contestant in self.racing():
                if contestant.peer:
                    contestant.peer.send(NextShape())
        for contestant in racing:
            contestant.processes.append(rounds)
            contestant.generations.append(self.generation)

    def _in_random_order(self) -> list[Contestant]:
        racing = self.racing()
        return self.order.sample(racing, len(racing))

    def _turn(self, contestant: Contestant, text: str, message: object | None) -> Any:
        """Hand the token over and wait for the answer; None from one that has left the race."""
        spent = (self.clock() - self.began_s) / self.options.budget_s
        process = f"process {self.generation + 1}, {text}: {contestant.engine.recipe.label}"
        self.progress(min(spent, 1.0), process)
        return _answer(contestant, message)


def _first_to_answer(contestants: Sequence[Contestant]) -> Contestant:
    """Of those that are loading, one that has loaded or has left the race; the first if none does
    within PATIENCE_S.
    """
    end = monotonic() + PATIENCE_S
    asked = (
        each
        for each in cycle(contestants)
        if each.failure or each.peer is None or each.peer.answered(POLL_S) or monotonic() > end
    )
    return next(asked)


def _answer(contestant: Contestant, message: object | None) -> Any:
    if contestant.failure or contestant.peer is None:
        return None
    try:
        if message is not None:
            contestant.peer.send(message)
        return contestant.peer.receive(PATIENCE_S)
    except (CrucibleError, TimeoutError) as error:
        contestant.failure = error.message if isinstance(error, CrucibleError) else str(error)
        contestant.may_pass = isinstance(error, TimeoutError) or error.may_pass
    contestant.peer.stop()
    return None


# -- one contestant, in its child --------------------------------------------


def contend(channel: Channel, engine: Engine, workloads: Sequence[Workload]) -> None:
    """Load an engine and run a block whenever the parent asks."""
    with closing(backends.load(engine)) as loaded:
        gc.collect()
        gc.disable()  # a collection inside a block would be counted against whichever run it hits
        channel.send(Ready())
        for workload in workloads:
            options: WarmUpOptions = channel.receive()
            profile = next(
                (
                    index
                    for index, profile in enumerate(engine.profiles)
                    if profile.holds(workload.sizes)
                ),
                0,
            )
            with closing(loaded.session(profile)) as session:
                times = warm_up(partial(run_session, session, workload.feeds), options)
                channel.send(thinned(times, VALUES_PER_BLOCK))
                while isinstance(message := channel.receive(), Take):
                    block = take_block(
                        session, workload.feeds, message.seconds, enough_runs=message.enough_runs
                    )
                    channel.send(block)


def take_block(
    session: Session,
    feeds: Tensors,
    seconds: float,
    clock: Clock = monotonic,
    cpu: Callable[[], CpuClock] = cpu_clock,
    enough_runs: int | None = None,
) -> Block:
    """One turn: a short warm-up, whole runs on the host's clock, then the phases of further runs on
    the session's own timer.
    """
    run = partial(run_session, session, feeds)
    rewarm = measure_block(run, clock, seconds * REWARM_SHARE, enough_runs=enough_runs)
    before = cpu()
    end_to_end = measure_block(run, clock, seconds, enough_runs=enough_runs)
    waiting = cpu().held_up_since(before, len(end_to_end))
    phases = _phases(session, feeds, min(seconds, sum(end_to_end)) * PHASES_SHARE, clock)
    return Block(
        runs=len(end_to_end),
        run_s=sum(end_to_end),
        timed_runs=len(phases.compute_s),
        timed_compute_s=sum(phases.compute_s),
        rewarm_s=thinned(rewarm, VALUES_PER_BLOCK),
        end_to_end_s=thinned(end_to_end, VALUES_PER_BLOCK),
        latency_s=thinned(phases.latency_s, VALUES_PER_BLOCK),
        upload_s=thinned(phases.upload_s, VALUES_PER_BLOCK),
        enqueue_s=thinned(phases.enqueue_s, VALUES_PER_BLOCK),
        compute_s=thinned(phases.compute_s, VALUES_PER_BLOCK),
        download_s=thinned(phases.download_s, VALUES_PER_BLOCK),
        peak_memory_bytes=peak_memory_bytes(),
        waiting=waiting,
    )


@dataclass(frozen=True, slots=True)
class _Phases:
    latency_s: list[float] = field(default_factory=list)
    upload_s: list[float] = field(default_factory=list)
    enqueue_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    download_s: list[float] = field(default_factory=list)


def _phases(session: Session, feeds: Tensors, seconds: float, clock: Clock) -> _Phases:
    """Times of upload, compute and download in runs of their own: on a GPU, telling them apart
    costs time that whole runs do not take.
    """
    times = _Phases()
    whole, *timers = (session.timer() for _ in range(4))

    def execute() -> None:
        begin = clock()
        session.execute()
        times.enqueue_s.append(round(clock() - begin, NANOSECOND_DIGITS))

    def run() -> None:
        session.bind(feeds)
        whole.start()
        for timer, phase in zip(timers, (session.upload, execute, session.download), strict=True):
            timer.start()
            phase()
            timer.stop()
        whole.stop()
        session.synchronize()
        session.fetch()
        for timer, values in zip(
            (whole, *timers),
            (times.latency_s, times.upload_s, times.compute_s, times.download_s),
            strict=True,
        ):
            values.append(timer.elapsed_s())

    measure_block(run, clock, seconds)
    return times
