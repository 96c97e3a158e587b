"""Which engine answers fastest: an interleaved race, as for other models.

A run is a round: a number of requests at once, each a prompt of a given length, and a given number
of tokens after it. The processes of the baseline also read memory, so that the roofline is of the
same minutes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import (
    Block,
    Contestant,
    NextShape,
    Peer,
    R,
    RaceEntry,
    Ready,
    Take,
    race,
)
from pipeline.benchmark.memory_reads import Buffer, buffer_beyond_caches, part_of, read_rate
from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision
from pipeline.errors import ChildDied, ChildStopped, UserError
from pipeline.execution.child_process import Channel, Child, call_in_child
from pipeline.host.contention import cpu_clock
from pipeline.host.environment import peak_memory_bytes, usable_cores
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.libraries.registry import library_of
from pipeline.llm.plan import Goodput, LanguageBenchmark, LanguageObjective
from pipeline.llm.reference import Ids, Reference, documents_of
from pipeline.llm.served import Generation, Generator, Room, open_generator
from pipeline.llm.source import Source
from pipeline.llm.speed.roofline import roofline
from pipeline.llm.speed.times import AnswerBlock, AnswerTimes, answer_times
from pipeline.measurement.clock import monotonic
from pipeline.plan.schema import BenchmarkConfig
from pipeline.stages.benchmark import BusyHost, baseline_of

ANSWERS_S = 0.06
"""Measuring time of an engine: so little that each block is one round."""


READING = "reading memory"
"""The last workload of every process, in words."""

READ_S = 0.05
"""Time of reading one buffer, in each block."""


@dataclass(frozen=True, slots=True)
class ReadBlock(Block):
    """How fast memory was read."""

    rates: tuple[float, ...] = ()  # bytes per second; of the whole buffer, and of each size


@dataclass(frozen=True, slots=True)
class Reads:
    """Which buffers a process reads: one that no cache holds, and parts of it. Without sizes,
    none.
    """

    sizes: tuple[int, ...]  # bytes
    threads: int
    on_gpu: bool = False  # of its memory

    def opened(self) -> Callable[[], tuple[float, ...]]:
        """Make a buffer. Return what reads it, and gives bytes per second: of the whole buffer, and
        of each size.
        """
        if not self.sizes:
            return tuple
        if self.on_gpu:
            from pipeline.llm.torch_engine.memory import gpu_buffer, read_rates

            return partial(read_rates, gpu_buffer(), self.sizes)
        return partial(self._rates, buffer_beyond_caches())

    def _rates(self, buffer: Buffer) -> tuple[float, ...]:
        parts = [buffer, *(part_of(buffer, size) for size in self.sizes)]
        return tuple(read_rate(part, self.threads, READ_S) for part in parts)


@dataclass(frozen=True, slots=True)
class Title:
    """What results call an engine."""

    label: str
    precision: Precision


@dataclass(frozen=True, slots=True)
class Entrant:
    """An engine in the race."""

    engine: LanguageEngine
    name: str = ""  # in the results; empty: the engine's label
    is_on_gpu: bool = False

    @property
    def recipe(self) -> Title:
        return Title(self.name or self.engine.label, self.engine.precision)


class Race(Frozen):
    """One run."""

    prompt_tokens: int
    output_tokens: int
    rows: tuple[AnswerTimes, ...]  # the baseline first
    load_1min: float


def measure(
    engines: Mapping[str, LanguageEngine],
    source: Source,
    reference: Reference,
    options: LanguageBenchmark,
    objective: LanguageObjective,
    room: Room,
    progress: Progress = silent,
) -> Race:
    """Time answers of all engines in turn. The results have their names here. The first one is the
    baseline, whose processes also read memory.
    """
    prompts = prompts_from(reference, options.prompt_tokens)
    limits = objective if isinstance(objective, Goodput) else None
    reader = next(iter(engines))
    sizes = {
        name: library_of(engine.recipe.library).weight_bytes_read(engine)
        for name, engine in engines.items()
        if engine.recipe
    }

    def start(entrant: Entrant) -> Peer:
        reads = tuple(sizes.values()) if entrant.name == reader else ()
        arguments = (entrant.engine, source, room, prompts, options, reads)
        return Child(contend, *arguments, name=entrant.name)

    # a latency at the first level says nothing about goodput at another one: all run to the end
    role = Role.COMPARED if limits else Role.CANDIDATE
    entries = [
        RaceEntry(Entrant(engine, name), Role.BASELINE if name == reader else role)
        for name, engine in engines.items()
    ]
    lengths = f"{options.prompt_tokens} tokens in, {options.output_tokens} out"
    shapes = [f"{requests} x {lengths}" for requests in options.concurrency]
    times = race_times(options)
    contestants = race(entries, [*shapes, READING], times, start, progress)
    host = BusyHost(os.getloadavg()[0], usable_cores())
    baseline = baseline_of(contestants)
    rows = [
        answer_times(contestant, baseline, options.concurrency, limits, host)
        for contestant in contestants
    ]
    memory, resident = read_rates(contestants[0], tuple(sizes))
    found = list[AnswerTimes]()
    for (name, engine), row in zip(engines.items(), rows, strict=True):
        if row.levels and name in resident:
            row = with_parts(row, engine, room, prompts[0], options.output_tokens, progress)
            roof = roofline(
                sizes[name],
                row.cache_bytes_per_token,
                options,
                (memory, resident[name]),
                row.next_token_s,
            )
            row = row.model_copy(update={"roofline": roof})
        found.append(row)
    return Race(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        rows=tuple(found),
        load_1min=round(host.load_1min, 2),
    )


def race_times(options: LanguageBenchmark) -> BenchmarkConfig:
    """Return the times of a race whose blocks are one round each."""
    return BenchmarkConfig(
        duration_s=ANSWERS_S, budget_s=options.budget_s, warmup_runs=1, warmup_s=0
    )


def read_rates(reader: Contestant[R], labels: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Return the fastest rate of the whole buffer, and by engine that of one of its size.

    The second is empty if the reader failed.
    """
    blocks = [block.rates for block in reader.blocks[-1] if isinstance(block, ReadBlock)]
    blocks = [rates for rates in blocks if rates]
    if not blocks:
        return 0.0, {}
    memory, *resident = (max(each) for each in zip(*blocks, strict=True))
    return memory, dict(zip(labels, resident, strict=True))


def with_parts(
    row: AnswerTimes,
    engine: LanguageEngine,
    room: Room,
    prompt: Ids,
    tokens: int,
    progress: Progress,
) -> AnswerTimes:
    """Add where the time between tokens goes, or why that is not known."""
    arguments = (engine, room, prompt, tokens)
    assert engine.recipe
    measure_parts = library_of(engine.recipe.library).measure_parts
    try:
        parts = call_in_child(measure_parts, *arguments, name=engine.label, progress=progress)
    except ChildStopped:
        raise
    except (UserError, ChildDied) as error:
        return row.model_copy(update={"parts_missing": error.message})
    return row.model_copy(update={"parts": parts})


def prompts_from(reference: Reference, tokens: int) -> tuple[Ids, ...]:
    """Return the first tokens of the texts that are long enough. There is one: `check_prompts`."""
    return tuple(one.ids[:tokens] for one in documents_of(reference) if one.ids.size >= tokens)


def contend(
    channel: Channel,
    engine: LanguageEngine,
    source: Source,
    room: Room,
    prompts: Sequence[Ids],
    options: LanguageBenchmark,
    reads: tuple[int, ...],
) -> None:
    """Open an engine, and answer prompts at each request of the parent."""
    threads = room.threads or usable_cores()
    answer_prompts(
        channel,
        open_generator(engine, source, room),
        prompts,
        options,
        Reads(reads, threads, engine.is_on_gpu),
    )


def answer_prompts(
    channel: Channel,
    generator: Generator,
    prompts: Sequence[Ids],
    options: LanguageBenchmark,
    reads: Reads,
) -> None:
    """Answer prompts at each request of the parent, then read memory."""
    gc.collect()
    gc.disable()
    following = cycle(prompts)
    channel.send(Ready())
    for requests in options.concurrency:

        def answer(requests: int = requests) -> tuple[Generation, ...]:
            given = list(islice(following, requests))
            return generator.generate_together(given, options.output_tokens)

        channel.receive()  # how long to warm up: one round is enough for all buffers
        channel.send((_seconds(answer()),))
        while not isinstance(message := channel.receive(), NextShape):
            assert isinstance(message, Take)
            before, begin_s, rounds = cpu_clock(), monotonic(), list[tuple[Generation, ...]]()
            while not rounds or monotonic() - begin_s < message.seconds:
                rounds.append(answer())
            waiting = cpu_clock().held_up_since(before, len(rounds))
            channel.send(_block(rounds, waiting, generator.cache_bytes_per_token()))
    channel.receive()
    read = reads.opened()
    channel.send(())
    while not isinstance(channel.receive(), NextShape):
        channel.send(ReadBlock(**usual_fields((), 0.0), rates=read()))


def _seconds(answers: Sequence[Generation]) -> float:
    return max(one.times_s[-1] for one in answers)


def _block(
    rounds: Sequence[tuple[Generation, ...]], waiting: float, cache_bytes_per_token: float
) -> AnswerBlock:
    return AnswerBlock(
        **usual_fields(tuple(map(_seconds, rounds)), waiting),
        answers=tuple(one.times_s for answers in rounds for one in answers),
        cache_bytes_per_token=cache_bytes_per_token,
    )


def usual_fields(times_s: tuple[float, ...], waiting: float) -> dict[str, Any]:
    """Return the fields of every block."""
    return {
        "runs": len(times_s),
        "run_s": sum(times_s),
        "timed_runs": 0,
        "timed_compute_s": 0.0,
        "rewarm_s": (),
        "end_to_end_s": times_s,
        "latency_s": (),
        "upload_s": (),
        "enqueue_s": (),
        "compute_s": (),
        "download_s": (),
        "peak_memory_bytes": peak_memory_bytes(),
        "waiting": waiting,
    }
