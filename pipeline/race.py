"""The race: every engine in several processes of its own one after another, block by block in turn.

    parent                                 one child per engine
    generation: start every child     -->  load, then sleep on the pipe
    per shape: warm up each in turn   -->  new session, run until the median settles
    per round, in random order: Take  -->  run for one block, then sleep on the pipe again; stop all, next generation

Only the child that has been asked runs; so no two engines share the cores, and what changes on the host meets all of them alike.
Two processes that run one file can differ for as long as they live (how memory lies, which core a thread got): hence the generations.
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

from pipeline import backends
from pipeline.backends.base import Session, run_session
from pipeline.core import Engine, Progress, Tensors, silent
from pipeline.errors import CrucibleError
from pipeline.measure import (
    NANOSECOND_DIGITS,
    Clock,
    WarmUpOptions,
    measure_block,
    monotonic,
    peak_memory_bytes,
    thinned,
    usable_cores,
    warm_up,
)
from pipeline.process import Channel

if TYPE_CHECKING:  # a contestant's child needs no plan
    from pipeline.config import BenchmarkConfig

BLOCK_S = 0.5  # long enough that what the last child left in the caches no longer matters
LEAST_ROUNDS = 6  # of all processes together; with a short duration the blocks get shorter instead
PROCESSES = 6  # per engine: 5 % are told from 0 although processes differ by 1.5 % (docs/measurement.md)
LEAST_PROCESSES = 3  # with a short duration, or where loading takes long: two say too little about a third
LOADING_S = 60.0  # for loading the engines again, beyond the least number of processes
LONGEST_WARMUP_S = 10.0  # the longest that all processes of an engine together may warm up at one shape
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
    latency_s: tuple[float, ...]  # from the start of the upload to the end of the download, on the session's timer
    upload_s: tuple[float, ...]
    enqueue_s: tuple[float, ...]  # of `execute` on the host's clock: on a GPU it returns before the work is done
    compute_s: tuple[float, ...]
    download_s: tuple[float, ...]
    peak_memory_bytes: int


class Peer(Protocol):
    """The parent's end of a conversation with one child: process.Child, or a double."""

    def send(self, payload: object) -> None: ...
    def answered(self, timeout_s: float) -> bool: ...  # whether `receive` would return, or raise, at once
    def receive(self, timeout_s: float | None = None) -> Any: ...
    def stop(self) -> None: ...


@dataclass(slots=True)
class Contestant:
    """One engine in the race: its child of now, and what its children have shown so far."""

    engine: Engine
    warmups: list[list[float]]  # per workload
    blocks: list[list[Block]]  # per workload, one per round
    peer: Peer | None = None
    failure: str = ""
    may_pass: bool = False  # of the failure
    started_s: float = 0.0  # when its last child was started, and how long that took to load
    loading_s: float = 0.0
    processes: list[int] = field(default_factory=list)  # blocks that each child gave, at every workload


# -- the race, in the parent -------------------------------------------------------------------------------------------


def race(
    engines: Sequence[Engine], workloads: Sequence[Workload], options: BenchmarkConfig, start: Callable[[Engine], Peer], progress: Progress = silent
) -> list[Contestant]:
    """Generation after generation, start a child per contestant and give turns. One that fails leaves the race; its place in the list stays."""
    contestants = [Contestant(engine, [[] for _ in workloads], [[] for _ in workloads]) for engine in engines]
    run = Race(contestants, workloads, options, start, progress, processes_for(options.duration_s))
    while run.generation < run.processes:
        with ExitStack() as stack:
            begin = monotonic()
            run.load(stack)
            if run.generation == 0:
                run.processes = processes_for(options.duration_s, monotonic() - begin)
            run.measure()
        run.generation += 1
    return contestants


def processes_for(duration_s: float, loading_s: float = 0.0) -> int:
    """How many processes share the measuring time of an engine: one for each usual block, fewer if loading all engines once takes long."""
    affordable = 1 + int(LOADING_S / loading_s) if loading_s > 0 else PROCESSES
    return max(LEAST_PROCESSES, min(PROCESSES, affordable, round(duration_s / BLOCK_S)))


@dataclass(slots=True)
class Race:
    """Who runs, and when."""

    contestants: list[Contestant]
    workloads: Sequence[Workload]
    options: BenchmarkConfig
    start: Callable[[Engine], Peer]
    progress: Progress
    processes: int  # of every engine: generations
    generation: int = 0
    done: int = 0  # turns
    cores: int = field(default_factory=usable_cores)
    order: random.Random = field(default_factory=lambda: random.Random(0))

    def rounds(self) -> int:  # of one generation
        return max(math.ceil(LEAST_ROUNDS / self.processes), round(self.options.duration_s / BLOCK_S / self.processes))

    def load(self, stack: ExitStack) -> None:
        """Start a child for each that is still in the race, and wait until all are loaded; `stack` stops them.

        As many at once as there are cores: loading is work too, and memory peaks while it lasts. Who took longest the last time begins.
        """
        waiting = sorted(self._in_random_order(), key=lambda contestant: contestant.loading_s)
        loading: list[Contestant] = []
        while waiting or loading:
            while waiting and len(loading) < self.cores:
                loading.append(contestant := waiting.pop())
                if not contestant.failure:
                    contestant.peer, contestant.started_s = self.start(contestant.engine), monotonic()
                    stack.callback(contestant.peer.stop)
            first = _first_to_answer(loading)
            self._turn(first, "load", None)
            first.loading_s = monotonic() - first.started_s
            loading.remove(first)

    def measure(self) -> None:
        """Every shape: all warm up, then run their rounds. Time and runs of warming up are shared by the processes, as the measuring time is."""
        rounds, options = self.rounds(), self.options
        warm = WarmUpOptions(math.ceil(options.warmup_runs / self.processes), options.warmup_s / self.processes, LONGEST_WARMUP_S / self.processes)
        for index, workload in enumerate(self.workloads):
            shape = ", ".join(f"{name} {size}" for name, size in workload.sizes.items()) or "fixed shape"
            for contestant in self._in_random_order():
                contestant.warmups[index] += self._turn(contestant, f"warm up, {shape}", warm) or ()
            for number in range(rounds):
                for contestant in self._in_random_order():
                    take = Take(options.duration_s / (self.processes * rounds))
                    block = self._turn(contestant, f"{shape}, round {self.generation * rounds + number + 1} of {self.processes * rounds}", take)
                    contestant.blocks[index] += [block] if block is not None else []
            for contestant in self.contestants:
                if contestant.peer and not contestant.failure:
                    contestant.peer.send(NextShape())
        for contestant in self.contestants:
            contestant.processes.append(rounds)

    def _in_random_order(self) -> list[Contestant]:
        return self.order.sample(self.contestants, len(self.contestants))

    def _turn(self, contestant: Contestant, text: str, message: object | None) -> Any:
        """Hand the token over and wait for the answer; None from one that has left the race."""
        turns = len(self.contestants) * self.processes * (1 + len(self.workloads) * (1 + self.rounds()))
        self.progress(self.done / turns, f"{text}: {contestant.engine.recipe.label}")
        self.done += 1
        return _answer(contestant, message)


def _first_to_answer(contestants: Sequence[Contestant]) -> Contestant:
    """Of those that are loading, one that has loaded or has left the race; the first if none does within PATIENCE_S."""
    end = monotonic() + PATIENCE_S
    asked = (each for each in cycle(contestants) if each.failure or each.peer is None or each.peer.answered(POLL_S) or monotonic() > end)
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


# -- one contestant, in its child --------------------------------------------------------------------------------------


def contend(channel: Channel, engine: Engine, workloads: Sequence[Workload]) -> None:
    """Load an engine and run a block whenever the parent asks."""
    with closing(backends.load(engine)) as loaded:
        gc.collect()
        gc.disable()  # a collection inside a block would be counted against whichever run it hits
        channel.send(Ready())
        for workload in workloads:
            options: WarmUpOptions = channel.receive()
            profile = next((index for index, profile in enumerate(engine.profiles) if profile.holds(workload.sizes)), 0)
            with closing(loaded.session(profile)) as session:
                times = warm_up(partial(run_session, session, workload.feeds), options)
                channel.send(thinned(times, VALUES_PER_BLOCK))
                while isinstance(message := channel.receive(), Take):
                    channel.send(take_block(session, workload.feeds, message.seconds))


def take_block(session: Session, feeds: Tensors, seconds: float, clock: Clock = monotonic) -> Block:
    """One turn: a short warm-up, whole runs on the host's clock, then the phases of further runs on the session's own timer."""
    run = partial(run_session, session, feeds)
    rewarm = measure_block(run, clock, seconds * REWARM_SHARE)
    end_to_end = measure_block(run, clock, seconds)
    phases = _phases(session, feeds, seconds * PHASES_SHARE, clock)
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
    )


@dataclass(frozen=True, slots=True)
class _Phases:
    latency_s: list[float] = field(default_factory=list)
    upload_s: list[float] = field(default_factory=list)
    enqueue_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    download_s: list[float] = field(default_factory=list)


def _phases(session: Session, feeds: Tensors, seconds: float, clock: Clock) -> _Phases:
    """Times of upload, compute and download in runs of their own: on a GPU, telling them apart costs time that whole runs do not take."""
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
        for timer, values in zip((whole, *timers), (times.latency_s, times.upload_s, times.compute_s, times.download_s), strict=True):
            values.append(timer.elapsed_s())

    measure_block(run, clock, seconds)
    return times
