"""Which engine answers fastest: an interleaved race, as for other models.

A run is one answer: a prompt of a given length, and a given number of tokens after it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import (
    Block,
    Contestant,
    NextShape,
    Peer,
    RaceEntry,
    Ready,
    Take,
    race,
)
from pipeline.core import Frozen, Progress, silent
from pipeline.errors import PlanError
from pipeline.execution.child_process import Channel, Child
from pipeline.host.contention import cpu_clock
from pipeline.host.environment import peak_memory_bytes, usable_cores
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.plan import LanguageBenchmark
from pipeline.llm.reference import Ids, Reference, documents_of
from pipeline.llm.served import Generation, Room, open_generator
from pipeline.llm.source import Source
from pipeline.measurement.clock import Samples, monotonic
from pipeline.measurement.statistics import Interval
from pipeline.plan.schema import BenchmarkConfig
from pipeline.stages.benchmark import (
    BusyHost,
    baseline_of,
    end_to_end_samples,
    ratio_to,
    stop_text,
)

ANSWERS_S = 0.06
"""Measuring time of an engine: so little that each block is one answer."""


@dataclass(frozen=True, slots=True)
class AnswerBlock(Block):
    """A block of answers, with the times of their tokens."""

    first_token_s: tuple[float, ...] = ()
    next_tokens_s: tuple[float, ...] = ()  # between tokens


@dataclass(frozen=True, slots=True)
class Entrant:
    """An engine in the race, which also says what it is."""

    recipe: LanguageEngine
    is_on_gpu: bool = False


class AnswerTimes(Frozen):
    """How fast one engine answers. Times in seconds."""

    label: str
    failure: str = ""  # then there are no figures
    answer: Samples | None = None
    first_token_s: float = 0.0  # median
    next_token_s: float = 0.0  # median
    next_token_p99_s: float | None = None  # None: too few tokens
    memory_bytes: int = 0  # the largest of its processes
    # how many times as fast as the baseline; None: it is the baseline, or unknown
    ratio: Interval | None = None
    ratio_missing: str = ""
    stopped: str = ""

    @property
    def median_s(self) -> float:
        return self.answer.median_s if self.answer else float("inf")


class Race(Frozen):
    """One run."""

    prompt_tokens: int
    output_tokens: int
    rows: tuple[AnswerTimes, ...]  # the baseline first
    load_1min: float


def measure(
    engines: Sequence[LanguageEngine],
    source: Source,
    reference: Reference,
    options: LanguageBenchmark,
    room: Room,
    progress: Progress = silent,
) -> Race:
    """Time answers of all engines in turn. The first one is the baseline."""
    prompts = prompts_from(reference, options.prompt_tokens)

    def start(entrant: Entrant) -> Peer:
        return Child(
            contend,
            entrant.recipe,
            source,
            room,
            prompts,
            options.output_tokens,
            name=entrant.recipe.label,
        )

    entries = [
        RaceEntry(Entrant(engine), Role.CANDIDATE if number else Role.BASELINE)
        for number, engine in enumerate(engines)
    ]
    shape = f"{options.prompt_tokens} tokens in, {options.output_tokens} out"
    times = BenchmarkConfig(
        duration_s=ANSWERS_S, budget_s=options.budget_s, warmup_runs=1, warmup_s=0
    )
    contestants = race(entries, [shape], times, start, progress)
    host = BusyHost(os.getloadavg()[0], usable_cores())
    baseline = baseline_of(contestants)
    return Race(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        rows=tuple(_row(contestant, baseline, host) for contestant in contestants),
        load_1min=round(host.load_1min, 2),
    )


def prompts_from(reference: Reference, tokens: int) -> tuple[Ids, ...]:
    """Return the first tokens of the texts that are long enough. PlanError if none is."""
    documents = list(documents_of(reference))
    prompts = tuple(one.ids[:tokens] for one in documents if one.ids.size >= tokens)
    if not prompts:
        longest = max(one.ids.size for one in documents)
        raise PlanError(
            f"benchmark.prompt_tokens: {tokens}, but the longest text of the selection set has"
            f" {longest} tokens",
            "lower it, raise `texts.max_tokens`, or add a longer text",
        )
    return prompts


def contend(
    channel: Channel,
    engine: LanguageEngine,
    source: Source,
    room: Room,
    prompts: Sequence[Ids],
    output_tokens: int,
) -> None:
    """Open an engine, and answer prompts at each request of the parent."""
    generator = open_generator(engine, source, room)
    gc.collect()
    gc.disable()
    following = cycle(prompts)

    def answer() -> Generation:
        return generator.generate(next(following), output_tokens)

    channel.send(Ready())
    channel.receive()  # how long to warm up: one answer is enough for all buffers
    channel.send((answer().times_s[-1],))
    while not isinstance(message := channel.receive(), NextShape):
        assert isinstance(message, Take)
        before, begin_s, answers = cpu_clock(), monotonic(), list[Generation]()
        while not answers or monotonic() - begin_s < message.seconds:
            answers.append(answer())
        channel.send(_block(answers, cpu_clock().held_up_since(before, len(answers))))


def _block(answers: Sequence[Generation], waiting: float) -> AnswerBlock:
    times_s = tuple(one.times_s[-1] for one in answers)
    return AnswerBlock(
        runs=len(answers),
        run_s=sum(times_s),
        timed_runs=0,
        timed_compute_s=0.0,
        rewarm_s=(),
        end_to_end_s=times_s,
        latency_s=(),
        upload_s=(),
        enqueue_s=(),
        compute_s=(),
        download_s=(),
        peak_memory_bytes=peak_memory_bytes(),
        waiting=waiting,
        first_token_s=tuple(one.times_s[0] for one in answers),
        next_tokens_s=tuple(float(step) for one in answers for step in np.diff(one.times_s)),
    )


def _row(
    contestant: Contestant[Entrant], baseline: Contestant[Entrant] | None, host: BusyHost
) -> AnswerTimes:
    label = contestant.engine.recipe.label
    if contestant.failure:
        return AnswerTimes(label=label, failure=contestant.failure)
    blocks = [block for block in contestant.blocks[0] if isinstance(block, AnswerBlock)]
    first = [each for block in blocks for each in block.first_token_s]
    following = [each for block in blocks for each in block.next_tokens_s]
    compared = None if contestant is baseline else baseline
    ratio, ratio_missing = ratio_to(contestant, compared, 0, host)
    return AnswerTimes(
        label=label,
        answer=end_to_end_samples(contestant, 0),
        first_token_s=float(np.median(first)),
        next_token_s=float(np.median(following)),
        next_token_p99_s=Samples(values_s=tuple(following)).percentile_or_absent(99),
        memory_bytes=max(block.peak_memory_bytes for block in blocks),
        ratio=ratio,
        ratio_missing=ratio_missing,
        stopped=stop_text(contestant),
    )
