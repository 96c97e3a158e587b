"""Measure: latency of every engine, in several processes of its own one after another, block by block in turn.

    parent                                 one child per engine
    generation: start every child     -->  load, then sleep on the pipe
    per shape: warm up each in turn   -->  new session, run until the median settles
    per round, in random order: Take  -->  run for one block, then sleep on the pipe again; stop all, next generation

Only the child that has been asked runs; so no two engines share the cores, and what changes on the host meets all of them alike.
Two processes that run one file can differ for as long as they live (how memory lies, which core a thread got): hence the generations.
"""

from __future__ import annotations

import datetime as dt
import gc
import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from pipeline import backends
from pipeline.backends.base import Session, run_session
from pipeline.config import BenchmarkConfig
from pipeline.core import Engine, Note, OnnxModel, Point, Profile, Progress, Tensors, TensorSpec, silent
from pipeline.costs import node_costs, total
from pipeline.errors import CrucibleError, PlanError
from pipeline.graph import draw_feeds
from pipeline.measure import (
    Clock,
    Samples,
    WarmUpOptions,
    measure_block,
    monotonic,
    peak_memory_bytes,
    ratio_of_medians,
    samples_from_blocks,
    thinned,
    usable_cores,
    warm_up,
)
from pipeline.process import Channel, Child
from pipeline.report import BenchmarkFailure, BenchmarkReport, Benchmarks, LatencyRow

BLOCK_S = 0.5  # long enough that what the last child left in the caches no longer matters
LEAST_ROUNDS = 6  # of all processes together; with a short duration the blocks get shorter instead
PROCESSES = 6  # per engine: 5 % are told from 0 although processes differ by 1.5 % (docs/measurement.md)
LEAST_PROCESSES = 3  # with a short duration, or where loading takes long: two say too little about a third
LOADING_S = 60.0  # for loading the engines again, beyond the least number of processes
LONGEST_WARMUP_S = 10.0  # the longest that all processes of an engine together may warm up at one shape
REWARM_SHARE = 0.1  # of a block, before it: the caches hold the data of whoever ran last
PHASES_SHARE = 0.2  # of a block, after it: upload, compute and download apart
VALUES_PER_BLOCK = 2000  # of a fast model every k-th time is kept, so that a report stays readable
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
    rewarm_s: tuple[float, ...]
    end_to_end_s: tuple[float, ...]
    upload_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    download_s: tuple[float, ...]
    peak_memory_bytes: int


class Peer(Protocol):
    """The parent's end of a conversation with one child: process.Child, or a double."""

    def send(self, payload: object) -> None: ...
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
    processes: list[int] = field(default_factory=list)  # blocks that each child gave, at every workload


def benchmark(engines: Sequence[Engine], model: OnnxModel, options: BenchmarkConfig, progress: Progress = silent) -> Benchmarks:
    """Latency of every engine at every size, interleaved in one run; the first engine is the baseline of the ratios.

    `model` is the source graph: its FLOPs count for all. An engine that fails is a BenchmarkFailure in its place; the others go on.
    PlanError if a size lies outside the profiles.
    """
    workloads = workloads_from_plan(engines, model, options)

    def start(engine: Engine) -> Peer:
        return Child(contend, with_threads(engine, options.threads or usable_cores()), workloads, name=engine.recipe.label)

    found = results(race(engines, workloads, options, start, progress), workloads)
    return Benchmarks(created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), results=found)


def with_threads(engine: Engine, threads: int) -> Engine:
    """The engine to be loaded with this many threads: equal for all, whatever each was built with."""
    return engine.model_copy(update={"threads": threads})


# -- what to measure ---------------------------------------------------------------------------------------------------


def workloads_from_plan(engines: Sequence[Engine], model: OnnxModel, options: BenchmarkConfig) -> tuple[Workload, ...]:
    """The plan's sizes, or the usual size of every profile; checked against all engines before anything starts."""
    if not engines:
        raise PlanError("expected at least one engine to measure, got none", "name engines, or candidates in the plan")
    choices = options.sizes or tuple(profile.sizes("opt") for profile in engines[0].profiles) or ({},)
    for engine in engines:
        check_sizes(choices, model.inputs, engine.profiles)
    profiles = engines[0].profiles
    return tuple(_workload(sizes, values_at(sizes, profiles), model) for index, sizes in enumerate(choices) if sizes not in choices[:index])


def values_at(sizes: dict[str, int], profiles: Sequence[Profile]) -> dict[str, tuple[int, ...]]:
    """Values of the inputs that decide shapes: those of the profile's point with these sizes, else the usual ones."""
    holding = [profile for profile in profiles if profile.holds(sizes)]
    points: tuple[Point, ...] = ("opt", "min", "max")
    exact = [profile.values_at(point) for profile in holding for point in points if profile.sizes(point) == sizes]
    return next(iter((*exact, *(profile.values_at("opt") for profile in holding))), {})


def check_sizes(choices: Iterable[dict[str, int]], inputs: Sequence[TensorSpec], profiles: Sequence[Profile]) -> None:
    """PlanError unless every choice gives a size to each symbol of the inputs, and no other, inside a profile."""
    symbols = {symbol for spec in inputs for symbol in spec.symbols}
    for sizes in choices:
        if set(sizes) != symbols:
            raise PlanError(
                f"benchmark.sizes: expected a size for each of {', '.join(sorted(symbols)) or 'no symbols'}, got {sizes}",
                "name every symbolic dimension of the inputs, and no other",
            )
        if profiles and not any(profile.holds(sizes) for profile in profiles):
            allowed = "; ".join(", ".join(f"{name} {dim.min} to {dim.max}" for name, dim in profile.dims.items()) for profile in profiles)
            raise PlanError(f"benchmark.sizes: expected {allowed}, got {sizes}", "measure inside the profiles, or widen a profile and compile again")


def _workload(sizes: dict[str, int], values: dict[str, tuple[int, ...]], model: OnnxModel) -> Workload:
    costs = node_costs(model.path, sizes)
    return Workload(
        sizes=sizes,
        feeds=draw_feeds(model.inputs, sizes, 0, values),
        rows=rows_per_run(model.inputs, sizes),
        flops=total(cost.flops for cost in costs),
        moved_bytes=total(amount for cost in costs for amount in (cost.bytes_read, cost.bytes_written)),
    )


def rows_per_run(inputs: Sequence[TensorSpec], sizes: dict[str, int]) -> int:
    """The batch: the size of the symbol that is the first dimension of every input; 1 where there is none."""
    first = {spec.shape[0] if spec.shape else None for spec in inputs}
    symbol = first.pop() if len(first) == 1 else None
    return sizes[symbol] if isinstance(symbol, str) else 1


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
    order: random.Random = field(default_factory=lambda: random.Random(0))

    def rounds(self) -> int:  # of one generation
        return max(math.ceil(LEAST_ROUNDS / self.processes), round(self.options.duration_s / BLOCK_S / self.processes))

    def load(self, stack: ExitStack) -> None:
        """Start a child for each that is still in the race, and wait until all are loaded; `stack` stops them."""
        waiting = self._in_random_order()
        started = 0
        for number, contestant in enumerate(waiting):  # as many at once as there are cores: loading is work too, and memory peaks while it lasts
            for other in waiting[started : number + usable_cores()]:
                started += 1
                if not other.failure:
                    other.peer = self.start(other.engine)
                    stack.callback(other.peer.stop)
            self._turn(contestant, "load", None)

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


def _answer(contestant: Contestant, message: object | None) -> Any:
    if contestant.failure or contestant.peer is None:
        return None
    try:
        if message is not None:
            contestant.peer.send(message)
        return contestant.peer.receive(PATIENCE_S)
    except (CrucibleError, TimeoutError) as error:
        contestant.failure = error.message if isinstance(error, CrucibleError) else str(error)
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
    upload, compute, download = _phases(session, feeds, seconds * PHASES_SHARE, clock)
    return Block(
        runs=len(end_to_end),
        rewarm_s=thinned(rewarm, VALUES_PER_BLOCK),
        end_to_end_s=thinned(end_to_end, VALUES_PER_BLOCK),
        upload_s=thinned(upload, VALUES_PER_BLOCK),
        compute_s=thinned(compute, VALUES_PER_BLOCK),
        download_s=thinned(download, VALUES_PER_BLOCK),
        peak_memory_bytes=peak_memory_bytes(),
    )


def _phases(session: Session, feeds: Tensors, seconds: float, clock: Clock) -> tuple[list[float], list[float], list[float]]:
    """Times of upload, compute and download in runs of their own: on a GPU, telling them apart costs time that whole runs do not take."""
    timers = [session.timer() for _ in range(3)]
    times: tuple[list[float], list[float], list[float]] = ([], [], [])

    def run() -> None:
        session.bind(feeds)
        for timer, phase in zip(timers, (session.upload, session.execute, session.download), strict=True):
            timer.start()
            phase()
            timer.stop()
        session.synchronize()
        session.fetch()
        for timer, values in zip(timers, times, strict=True):
            values.append(timer.elapsed_s())

    measure_block(run, clock, seconds)
    return times


# -- what it says ------------------------------------------------------------------------------------------------------


def results(contestants: Sequence[Contestant], workloads: Sequence[Workload]) -> tuple[BenchmarkReport | BenchmarkFailure, ...]:
    """A report or a failure per contestant, in order; ratios are to the first, and absent if that failed."""
    baseline = contestants[0]
    reports: list[BenchmarkReport | BenchmarkFailure] = []
    for contestant in contestants:
        label = contestant.engine.recipe.label
        if contestant.failure:
            reports.append(BenchmarkFailure(label=label, reason=contestant.failure))
            continue
        compared = None if contestant is baseline or baseline.failure else baseline
        rows = tuple(_row(contestant, compared, index, workload) for index, workload in enumerate(workloads))
        reports.append(BenchmarkReport(label=label, rows=rows, notes=_notes(contestant, rows)))
    return tuple(reports)


def _row(contestant: Contestant, baseline: Contestant | None, index: int, workload: Workload) -> LatencyRow:
    blocks = contestant.blocks[index]
    clock: Literal["host", "device"] = "device" if contestant.engine.target.compute_capability else "host"
    end_to_end = _end_to_end(contestant, index)
    median_s = end_to_end.median_s
    return LatencyRow(
        sizes=workload.sizes,
        end_to_end=end_to_end,
        upload=samples_from_blocks([block.upload_s for block in blocks], (), clock, contestant.processes),
        compute=samples_from_blocks([block.compute_s for block in blocks], (), clock, contestant.processes),
        download=samples_from_blocks([block.download_s for block in blocks], (), clock, contestant.processes),
        throughput_per_s=workload.rows / median_s,
        flops_per_s=None if workload.flops is None else workload.flops / median_s,
        bytes_per_s=None if workload.moved_bytes is None else workload.moved_bytes / median_s,
        ratio=ratio_of_medians(_end_to_end(baseline, index), end_to_end) if baseline else None,
        peak_memory_bytes=max(block.peak_memory_bytes for block in blocks),
    )


def _end_to_end(contestant: Contestant, index: int) -> Samples:
    blocks = contestant.blocks[index]
    warmup = [*contestant.warmups[index], *(time for block in blocks for time in block.rewarm_s)]
    return samples_from_blocks([block.end_to_end_s for block in blocks], warmup, processes=contestant.processes)


def _notes(contestant: Contestant, rows: Sequence[LatencyRow]) -> tuple[Note, ...]:
    notes = []
    if any(not row.end_to_end.stable for row in rows):
        text = "the median still moved between blocks: something else may use this host; measure again when it is quiet"
        notes.append(Note(stage="benchmark", text=text))
    if any(block.runs > VALUES_PER_BLOCK for blocks in contestant.blocks for block in blocks):
        text = f"of a block with over {VALUES_PER_BLOCK:,} runs every k-th time is kept"
        notes.append(Note(stage="benchmark", text=text, level="info"))
    return tuple(notes)
