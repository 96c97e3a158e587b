"""The interleaved run (the "race"): all engines measured in turn, block by block.

    parent                                 one child per engine
    generation: start every child     -->  load, then sleep on the pipe
    per shape: warm up each in turn   -->  new session, run until the median settles
    per round, in random order: Take  -->  run for one block, then sleep on the pipe again; stop all
    between generations: slow engines stop, and the race ends once its intervals are narrow

Only one child runs at a time, so no two engines share the cores. Blocks are short, because other
work on the host slows it in spells: a round that is shorter than a spell slows all engines alike,
and the ratios of engines are taken round by round. Two processes of the same engine can differ for
as long as they live (memory layout, cores of the threads). So every engine runs in several
processes, one in each generation. pipeline/benchmark/elimination.py decides which engines stop and
when the race ends.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from pipeline import backends
from pipeline.backends.base import Session, run_session
from pipeline.benchmark.elimination import MAX_PAIRS, Role, Runner, Stop, is_decided, stops
from pipeline.benchmark.gpu_cost import measure_gpu_cost
from pipeline.core.artifacts import Engine
from pipeline.core.progress import CandidateFigures, Progress, silent
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors, nearest_profile
from pipeline.errors import CrucibleError, InternalError
from pipeline.execution.child_process import Channel
from pipeline.host.contention import CpuClock, cpu_clock
from pipeline.host.environment import peak_memory_bytes, usable_cores
from pipeline.host.gpu import memory_in_use
from pipeline.measurement.clock import (
    NANOSECOND_DIGITS,
    Clock,
    Samples,
    WarmUpOptions,
    latency_figures,
    measure_block,
    monotonic,
    thinned,
    warm_up,
)
from pipeline.measurement.comparison import MIN_PAIRS, Processes
from pipeline.results.gpu_cost import GpuCost

if TYPE_CHECKING:  # a contestant's child needs no plan
    from pipeline.plan.schema import BenchmarkConfig

BLOCK_S = 0.03
"""Length of a block of short runs. `python -m benchmarks same_engine` shows what it is worth."""

LONG_BLOCK_S = 0.5
"""The same where a block has a beginning and an end: several sessions at once, whole answers."""

MIN_ROUNDS = 3
"""Minimum number of rounds, so that one stalled block does not decide a process's median."""

SLOW_RUN_S, SLOW_ROUNDS = 0.1, 9
"""A run that is so long fills a block alone, without a warm-up before it, so that the runs of a
round are near to each other; and the minimum of rounds then: the loading takes longer than they do.
"""

PHASES_ROUNDS = 3
"""Rounds of a process with timed phases."""

USUAL_PROCESSES = 6
"""Processes that share an engine's times for measuring and for warm-up in the plan."""

MAX_GENERATIONS = 2 * MAX_PAIRS
"""Limit on the repetition of disturbed generations."""

MAX_WARMUP_S = 3.0
"""Maximum warm-up of the usual processes of an engine together, at one shape."""

REWARM_S, REWARM_SHARE = 0.01, 0.1
"""Time, and share of a block, for a short warm-up before it: the caches hold the last child's data,
and its threads may still spin (PyTorch's for up to 9 ms).
"""

PHASES_SHARE = 0.2
"""Share of a block, after it, in which upload, compute and download are timed separately."""

VALUES_PER_BLOCK = 400
"""Maximum number of stored times: of more, every k-th is stored, to limit the report's size."""

REWARM_VALUES = 20
"""The same for the warm-up of a block."""

POLL_S = 0.02
"""Wait for one loading child before the next one is polled."""

PATIENCE_S = 900.0
"""Wait for one reply; torch.compile takes minutes to load a large model."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One shape to measure, with generated inputs, the same for all engines."""

    sizes: dict[str, int]
    feeds: Tensors
    rows: int  # samples per run
    # of the source graph, whatever an engine makes of it
    flops: float | None = None
    # by the source graph's nodes, as if nothing were fused
    moved_bytes: float | None = None

    @property
    def shape(self) -> str:
        """The shape in words, for progress."""
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items()) or "fixed shape"


@dataclass(frozen=True, slots=True)
class Ready:
    """Child to parent: the engine is loaded."""


@dataclass(frozen=True, slots=True)
class Take:
    """Parent to child: run one block."""

    seconds: float
    enough_runs: int | None = None  # a block of very short runs may end earlier
    with_phases: bool = True


@dataclass(frozen=True, slots=True)
class MeasureGpuCost:
    """Parent to child: measure memory and energy on the GPU of this UUID."""

    gpu: str


@dataclass(frozen=True, slots=True)
class NextShape:
    """Parent to child: close this session; a warm-up at the next shape follows."""


@dataclass(frozen=True, slots=True)
class Block:
    """Child to parent: the times of one turn."""

    runs: int  # number of complete runs; `end_to_end_s` holds every k-th of their times
    run_s: float  # sum of their times
    timed_runs: int  # number of runs with timed phases
    timed_compute_s: float  # sum of their compute times
    rewarm_s: tuple[float, ...]
    end_to_end_s: tuple[float, ...]
    # From the start of the upload to the end of the download, on the session's timer.
    latency_s: tuple[float, ...]
    upload_s: tuple[float, ...]
    # `execute` on the host's clock: on a GPU it returns before the work is done.
    enqueue_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    download_s: tuple[float, ...]
    peak_memory_bytes: int
    # Share of the complete runs' time for which the child waited for a CPU; 0 if that cannot have
    # moved the median.
    waiting: float = 0.0


class Peer(Protocol):
    """The parent's end of the connection to one child: Child of child_process.py, or a double.

    `answered` returns True if `receive` would return, or raise, immediately.
    """

    def send(self, payload: object) -> None: ...
    def answered(self, timeout_s: float) -> bool: ...
    def receive(self, timeout_s: float | None = None) -> Any: ...
    def stop(self) -> None: ...


class Named(Protocol):
    """What tells engines apart."""

    @property
    def label(self) -> str: ...
    @property
    def precision(self) -> Precision: ...


class Racer(Protocol):
    """What the race knows of an engine. Only its child knows how to run it."""

    @property
    def recipe(self) -> Named: ...
    @property
    def is_on_gpu(self) -> bool: ...


R = TypeVar("R", bound=Racer)


@dataclass(frozen=True, slots=True)
class RaceEntry(Generic[R]):
    """An engine to measure, and its role."""

    engine: R
    role: Role


@dataclass(slots=True)
class Contestant(Generic[R]):
    """One engine in the race: its current child, and the results of its children so far."""

    engine: R
    role: Role
    warmups: list[list[float]]  # per workload
    blocks: list[list[Block]]  # per workload, in the order in which they ran
    gpu_costs: list[GpuCost] = field(default_factory=list)  # per workload; empty on a CPU
    peer: Peer | None = None
    failure: str = ""
    may_pass: bool = False  # True if the failure may not occur again
    started_s: float = 0.0  # start of its last child
    loading_s: float = 0.0  # time that its last child took to load
    # Per workload: number of blocks of each child.
    processes: list[list[int]] = field(init=False)
    generations: list[int] = field(default_factory=list)  # generation of each child
    stop: Stop | None = None  # why it gets no further child

    def __post_init__(self) -> None:
        self.processes = [[] for _ in self.blocks]

    @property
    def is_racing(self) -> bool:
        return not self.failure and self.stop is None

    @property
    def is_first_block(self) -> bool:
        """True once it has one block, at the first workload."""
        return sum(map(len, self.blocks)) == 1

    def waiting(self, workload: int) -> list[float]:
        """Return each child's share of time spent waiting for a CPU: the median of its blocks."""
        return [
            float(np.median([block.waiting for block in blocks]))
            for blocks in self.by_process(workload)
        ]

    def by_process(self, workload: int) -> list[list[Block]]:
        """Return the blocks of each child at a workload."""
        blocks = iter(self.blocks[workload])
        return [list(islice(blocks, count)) for count in self.processes[workload]]

    def figures(self, shape: str) -> CandidateFigures:
        """Return its latency so far at the first workload, whose `shape` is given in words."""
        recipe = self.engine.recipe
        times = tuple(time for block in self.blocks[0] for time in block.end_to_end_s)
        latency = None
        if times and not self.failure:
            latency = latency_figures(Samples(values_s=times), shape, self.stop is not None)
        return CandidateFigures(recipe.label, recipe.precision, latency=latency)

    def runner(self) -> Runner:
        """Return the results at the first workload, which decide whether it continues."""
        times = [[block.end_to_end_s for block in blocks] for blocks in self.by_process(0)]
        processes = Processes(
            np.asarray(self.generations),
            np.array([np.median(np.concatenate(blocks)) for blocks in times]),
            np.asarray(self.waiting(0)),
            tuple(np.array([np.median(block) for block in blocks]) for blocks in times),
        )
        return Runner(self.engine.recipe.label, self.role, processes)


# -- the race, in the parent -------------------------------------------------


def race(
    entries: Sequence[RaceEntry[R]],
    shapes: Sequence[str],
    options: BenchmarkConfig,
    start: Callable[[R], Peer],
    progress: Progress = silent,
    clock: Clock = monotonic,
    enough_runs: int | None = None,
    gpu: str = "",
    block_s: float = LONG_BLOCK_S,
) -> list[Contestant[R]]:
    """Run generations until the race is decided or its time is over.

    `gpu` is the UUID of the GPU that its engines use, or "". `block_s` is the length of a block.

    Each generation has one child for every contestant that is still in the race. A contestant that
    fails leaves the race and keeps its position in the list. `shapes` names each workload of a
    child in words, for progress.
    """
    contestants = [
        Contestant(entry.engine, entry.role, [[] for _ in shapes], [[] for _ in shapes])
        for entry in entries
    ]
    run = Race(contestants, shapes, options, start, progress, clock, enough_runs, gpu, block_s)
    while run.goes_on():
        with ExitStack() as stack:
            run.load(stack)
            run.measure()
        run.end_generation()
    return contestants


@dataclass(slots=True)
class Race(Generic[R]):
    """The schedule of a race."""

    contestants: list[Contestant[R]]
    shapes: Sequence[str]
    options: BenchmarkConfig
    start: Callable[[R], Peer]
    progress: Progress
    clock: Clock = monotonic
    enough_runs: int | None = None  # of a block
    gpu: str = ""  # UUID
    block_s: float = LONG_BLOCK_S
    generation: int = 0
    cores: int = field(default_factory=usable_cores)
    order: random.Random = field(default_factory=lambda: random.Random(0))
    began_s: float = field(init=False)
    generation_s: float = field(init=False, default=0.0)  # duration of the last generation
    generation_began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.generation_began_s = self.clock()

    def goes_on(self) -> bool:
        """Return True if there is another generation.

        The MIN_PAIRS generations that an interval needs may take twice the budget: without them,
        a race has no result.
        """
        if not self.racing() or self.generation >= MAX_GENERATIONS:
            return False
        if self.generation == 0:
            return True
        budget_s = self.options.budget_s * (2 if self.generation < MIN_PAIRS else 1)
        ends_s = self.clock() + self.generation_s - self.began_s
        return ends_s <= budget_s and not self._is_decided()

    def _is_decided(self) -> bool:
        return is_decided([contestant.runner() for contestant in self.racing()])

    def racing(self) -> list[Contestant[R]]:
        """Return the contestants that are still in the race."""
        return [contestant for contestant in self.contestants if contestant.is_racing]

    def end_generation(self) -> None:
        """Record the contestants that stop, and the duration of the generation."""
        racing = self.racing()
        reasons = stops([contestant.runner() for contestant in racing])
        for contestant, reason in zip(racing, reasons, strict=True):
            contestant.stop = reason
            self._report(contestant)
        now_s = self.clock()
        self.generation_s, self.generation_began_s = now_s - self.generation_began_s, now_s
        self.generation += 1

    def rounds(self, slowest_s: float) -> int:
        """Return the number of rounds in a generation, if the slowest engine's run takes so long.

        The usual processes of an engine share its time for measuring in the plan. Where blocks are
        longer than a slow run, as of whole answers, it needs no more of them.
        """
        share_s = self.options.duration_s / USUAL_PROCESSES
        is_slow = slowest_s >= SLOW_RUN_S > self.block_s
        least = SLOW_ROUNDS if is_slow else MIN_ROUNDS
        return max(least, round(share_s / max(self.block_s, slowest_s)))

    def load(self, stack: ExitStack) -> None:
        """Start a child for each contestant in the race, and wait until all are loaded.

        `stack` stops the children. At most as many load at once as there are cores, because
        loading takes CPU time and memory. The slowest to load last time starts first.
        """
        waiting = sorted(self._in_random_order(), key=lambda contestant: contestant.loading_s)
        loading: list[Contestant[R]] = []
        while waiting or loading:
            while waiting and len(loading) < self.cores:
                contestant = waiting.pop()
                loading.append(contestant)
                contestant.peer, contestant.started_s = self.start(contestant.engine), monotonic()
                stack.callback(contestant.peer.stop)
            first = _first_to_answer(loading)
            self._turn(first, "load", None)
            first.loading_s = monotonic() - first.started_s
            loading.remove(first)

    def measure(self) -> None:
        """Measure every shape: all contestants warm up, then run their rounds."""
        racing = self.racing()
        for index, shape in enumerate(self.shapes):
            rounds = self.rounds(self._warm_up(index))
            seconds = self.options.duration_s / (USUAL_PROCESSES * rounds)
            for contestant in racing:
                contestant.processes[index].append(rounds)
            for number in range(rounds):
                take = Take(seconds, self.enough_runs, number < PHASES_ROUNDS)
                for contestant in self._in_random_order():
                    self._take(contestant, index, take)
            if self.gpu and self.generation == 0:
                self._measure_gpu_costs(shape, is_last=index == len(self.shapes) - 1)
            for contestant in self.racing():
                if contestant.peer:
                    contestant.peer.send(NextShape())
        for contestant in racing:
            contestant.generations.append(self.generation)

    def _warm_up(self, index: int) -> float:
        """Warm up all contestants at a shape; return how long the slowest one's run takes then."""
        warm, slowest_s = warm_up_of_process(self.options), 0.0
        for contestant in self._in_random_order():
            times = self._turn(contestant, f"warm up, {self.shapes[index]}", warm)
            if times:
                contestant.warmups[index] += times
                slowest_s = max(slowest_s, settled_s(times))
        return slowest_s

    def _take(self, contestant: Contestant[R], index: int, take: Take) -> None:
        """Run one block of a contestant at a shape, and report the first one of all."""
        block = self._turn(contestant, self.shapes[index], take)
        if block is not None:
            contestant.blocks[index].append(block)
            if contestant.is_first_block:
                self._report(contestant)

    def _measure_gpu_costs(self, shape: str, is_last: bool) -> None:
        """Measure memory and energy of the engines on the GPU.

        After the last shape, the children whose memory NVML does not list are stopped.
        """
        text = f"GPU memory and energy, {shape}"
        for contestant in self._in_random_order():
            if contestant.engine.is_on_gpu:
                cost = self._turn(contestant, text, MeasureGpuCost(self.gpu))
                if cost is not None:
                    contestant.gpu_costs.append(cost)
        if is_last:
            self._weigh_unlisted()

    def _weigh_unlisted(self) -> None:
        """Stop the children whose memory NVML does not list, and record what each end frees."""
        for contestant in self.racing():
            peer, costs = contestant.peer, contestant.gpu_costs
            if peer and any(cost.peak_bytes is None for cost in costs):
                before = memory_in_use(self.gpu)
                peer.stop()
                contestant.peer = None
                after = memory_in_use(self.gpu)
                if before and after and before > after:
                    contestant.gpu_costs = [cost.with_freed(before - after) for cost in costs]

    def _in_random_order(self) -> list[Contestant[R]]:
        racing = self.racing()
        return self.order.sample(racing, len(racing))

    def _turn(self, contestant: Contestant[R], text: str, message: object | None) -> Any:
        """Let a contestant run, and return its reply; None if it has left the race."""
        self._tell(contestant, text)
        return _answer(contestant, message)

    def _report(self, contestant: Contestant[R]) -> None:
        """Report the latency of a contestant so far."""
        shape = self.shapes[0]
        self._tell(contestant, shape, contestant.figures(shape))

    def _tell(
        self, contestant: Contestant[R], text: str, figures: CandidateFigures | None = None
    ) -> None:
        spent = (self.clock() - self.began_s) / self.options.budget_s
        process = f"process {self.generation + 1}, {text}: {contestant.engine.recipe.label}"
        self.progress(min(spent, 1.0), process, figures)


def warm_up_of_process(options: BenchmarkConfig) -> WarmUpOptions:
    """Return one process's share of the warm-up in the plan."""
    return WarmUpOptions(
        math.ceil(options.warmup_runs / USUAL_PROCESSES),
        options.warmup_s / USUAL_PROCESSES,
        MAX_WARMUP_S / USUAL_PROCESSES,
    )


def _first_to_answer(contestants: Sequence[Contestant[R]]) -> Contestant[R]:
    """Wait for a loading contestant that has loaded or has left the race, and return it.

    After PATIENCE_S, return the next one that is polled.
    """
    end_s = monotonic() + PATIENCE_S
    for contestant in cycle(contestants):
        peer = contestant.peer
        if contestant.failure or peer is None or peer.answered(POLL_S) or monotonic() > end_s:
            return contestant
    raise InternalError("expected at least one contestant that is loading, got none")


def _answer(contestant: Contestant[R], message: object | None) -> Any:
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
    """Load an engine, and run a block at each request of the parent."""
    with closing(backends.load(engine)) as loaded:
        gc.collect()
        gc.disable()  # a collection would add its time to some run of a block
        channel.send(Ready())
        for workload in workloads:
            options: WarmUpOptions = channel.receive()
            with closing(loaded.session(profile_for(engine, workload))) as session:
                times = warm_up(partial(run_session, session, workload.feeds), options)
                channel.send(thinned(times, VALUES_PER_BLOCK))
                is_slow = settled_s(times) >= SLOW_RUN_S
                while not isinstance(message := channel.receive(), NextShape):
                    channel.send(_reply(message, session, workload, is_slow))


def settled_s(times: Sequence[float]) -> float:
    """Return how long a run takes at the end of a warm-up."""
    return float(np.median(times[len(times) // 2 :]))


def _reply(
    message: Take | MeasureGpuCost, session: Session, workload: Workload, is_slow: bool
) -> Block | GpuCost:
    if isinstance(message, Take):
        return take_block(session, workload.feeds, message, is_slow=is_slow)
    return measure_gpu_cost(session, partial(run_session, session, workload.feeds), message.gpu)


def profile_for(engine: Engine, workload: Workload) -> int:
    """Return the index of the engine's profile for a workload; 0 if none holds it."""
    return nearest_profile(engine.profiles, workload.sizes) or 0


def take_block(
    session: Session,
    feeds: Tensors,
    take: Take,
    clock: Clock = monotonic,
    cpu: Callable[[], CpuClock] = cpu_clock,
    is_slow: bool = False,
) -> Block:
    """Run one block and return its times.

    It consists of a short warm-up, complete runs on the host's clock, and further runs with phases
    on the session's own timer. A slow engine only waits until the last child's threads sleep.
    """
    run = partial(run_session, session, feeds)
    rewarm: tuple[float, ...] = ()
    if is_slow:
        time.sleep(REWARM_S)
    else:
        rewarm = measure_block(run, clock, max(REWARM_S, take.seconds * REWARM_SHARE))
    before = cpu()
    end_to_end = measure_block(run, clock, take.seconds, enough_runs=take.enough_runs)
    waiting = cpu().held_up_since(before, len(end_to_end))
    phases = _Phases()
    if take.with_phases:
        phases = _phases(session, feeds, min(take.seconds, sum(end_to_end)) * PHASES_SHARE, clock)
    return Block(
        runs=len(end_to_end),
        run_s=sum(end_to_end),
        timed_runs=len(phases.compute_s),
        timed_compute_s=sum(phases.compute_s),
        rewarm_s=thinned(rewarm, REWARM_VALUES),
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
    """Time upload, compute and download, in separate runs.

    On a GPU, timing the phases takes extra time, which must not be part of the complete runs.
    """
    times = _Phases()
    total = session.timer()
    timers = [session.timer() for _ in range(3)]

    def execute() -> None:
        begin = clock()
        session.execute()
        times.enqueue_s.append(round(clock() - begin, NANOSECOND_DIGITS))

    def run() -> None:
        session.bind(feeds)
        total.start()
        for timer, phase in zip(timers, (session.upload, execute, session.download), strict=True):
            timer.start()
            phase()
            timer.stop()
        total.stop()
        session.synchronize()
        session.fetch()
        for timer, values in zip(
            (total, *timers),
            (times.latency_s, times.upload_s, times.compute_s, times.download_s),
            strict=True,
        ):
            values.append(timer.elapsed_s())

    measure_block(run, clock, seconds)
    return times
