"""How fast an engine answers, from the raw times of the race.

A round is a number of requests that are sent at once. Its time ends with the last token of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipeline.benchmark.interleaved import Block, Contestant, R
from pipeline.core.frozen import Frozen
from pipeline.llm.plan import Goodput
from pipeline.llm.speed.roofline import Roofline, StepParts
from pipeline.measurement.clock import Samples
from pipeline.measurement.comparison import (
    NotMeasurable,
    Obstacle,
    Processes,
    compare_processes,
)
from pipeline.measurement.statistics import Interval
from pipeline.stages.benchmark import (
    OUT_OF_TIME,
    BusyHost,
    end_to_end_samples,
    ratio_to,
    stop_text,
)

TokenTimes = tuple[float, ...]  # from the request to each token of one answer


@dataclass(frozen=True, slots=True)
class AnswerBlock(Block):
    """A block of rounds, with the times of all tokens."""

    answers: tuple[TokenTimes, ...] = ()
    cache_bytes_per_token: float = 0.0


class LevelTimes(Frozen):
    """The answers of one engine at one number of requests at once. Times in seconds."""

    concurrency: int = Field(description="Requests at once.")
    round: Samples = Field(description="Times until the last token of all of them.")
    first_token_s: float = Field(description="Median over answers.")
    next_token_s: float = Field(description="Median over tokens.")
    next_token_p95_s: float | None = Field(
        default=None, description="95th percentile. null: too few tokens."
    )
    next_token_p99_s: float | None = Field(
        default=None, description="99th percentile. null: too few tokens."
    )
    tokens_per_s: float = Field(description="Of all requests together.")
    user_tokens_per_s: float = Field(description="Of one answer, its first token included; median.")
    good_share: float | None = Field(
        default=None, description="Share of the answers within the limits. null: there are none."
    )
    goodput_per_s: float | None = Field(default=None, description="Answers within the limits.")
    ratio: Interval | None = Field(
        default=None, description="How many times as fast as the baseline a round is."
    )
    ratio_missing: str = Field(default="", description="Why there is no ratio.")


class AnswerTimes(Frozen):
    """How fast one engine answers. Times in seconds."""

    label: str = Field(description="Label of the candidate.")
    failure: str = Field(default="", description="Why there are no figures.")
    levels: tuple[LevelTimes, ...] = Field(
        default=(), description="By the number of requests at once, in the order of the plan."
    )
    memory_bytes: int = Field(default=0, description="The largest of its processes.")
    cache_bytes_per_token: float = Field(
        default=0.0, description="Of keys and values, with scales. 0: not known."
    )
    ratio: Interval | None = Field(
        default=None,
        description=(
            "How many times as good as the baseline, by the objective. null: it is the baseline, or"
            " unknown."
        ),
    )
    ratio_missing: str = Field(default="", description="Why there is no ratio.")
    stopped: str = Field(default="", description="Why it was measured no further.")
    roofline: Roofline | None = Field(
        default=None, description="How near a token comes to reading its weights once."
    )
    parts: StepParts | None = Field(default=None, description="Where the time of a token goes.")
    parts_missing: str = Field(default="", description="Why that is not known.")

    @property
    def answer(self) -> Samples | None:
        """Return the times of rounds at the first level, which are those of answers if it is 1."""
        return self.levels[0].round if self.levels else None

    @property
    def median_s(self) -> float:
        return self.answer.median_s if self.answer else float("inf")

    @property
    def first_token_s(self) -> float:
        return self.levels[0].first_token_s if self.levels else float("inf")

    @property
    def next_token_s(self) -> float:
        return self.levels[0].next_token_s if self.levels else float("inf")

    @property
    def goodput_per_s(self) -> float:
        """Return the goodput at the best level, 0 if there is none."""
        return max((level.goodput_per_s or 0.0 for level in self.levels), default=0.0)


def is_good(times_s: TokenTimes, limits: Goodput) -> bool:
    """Return True for an answer whose first token and mean time between tokens are within."""
    first_s, last_s = times_s[0], times_s[-1]
    next_s = (last_s - first_s) / max(len(times_s) - 1, 1)
    return first_s <= limits.max_first_token_s and next_s <= limits.max_next_token_s


def answer_times(
    contestant: Contestant[R],
    baseline: Contestant[R] | None,
    concurrency: Sequence[int],
    limits: Goodput | None,
    host: BusyHost,
) -> AnswerTimes:
    """Return the figures of one contestant at each level; ratios are to the baseline."""
    label = contestant.engine.recipe.label
    if contestant.failure:
        return AnswerTimes(label=label, failure=contestant.failure)
    compared = None if contestant is baseline else baseline
    levels = tuple(
        _level(contestant, compared, index, requests, limits, host)
        for index, requests in enumerate(concurrency)
    )
    ratio, missing = levels[0].ratio, levels[0].ratio_missing
    if limits is not None and compared is not None:
        ratio, missing = goodput_ratio(compared, contestant, len(concurrency), limits, host)
    first = _answers(contestant.blocks[0])
    return AnswerTimes(
        label=label,
        levels=levels,
        memory_bytes=max(
            block.peak_memory_bytes
            for index in range(len(concurrency))
            for block in _answers(contestant.blocks[index])
        ),
        cache_bytes_per_token=max(block.cache_bytes_per_token for block in first),
        ratio=ratio,
        ratio_missing=missing,
        stopped=stop_text(contestant),
    )


def _answers(blocks: Iterable[Block]) -> list[AnswerBlock]:
    return [block for block in blocks if isinstance(block, AnswerBlock)]


def _level(
    contestant: Contestant[R],
    baseline: Contestant[R] | None,
    index: int,
    requests: int,
    limits: Goodput | None,
    host: BusyHost,
) -> LevelTimes:
    blocks = _answers(contestant.blocks[index])
    answers = [answer for block in blocks for answer in block.answers]
    gaps = np.concatenate([np.diff(answer) for answer in answers])
    between = Samples(values_s=tuple(float(gap) for gap in gaps))
    total_s = sum(block.run_s for block in blocks)
    ratio, missing = ratio_to(contestant, baseline, index, host)
    good = None if limits is None else sum(is_good(answer, limits) for answer in answers)
    return LevelTimes(
        concurrency=requests,
        round=end_to_end_samples(contestant, index),
        first_token_s=float(np.median([answer[0] for answer in answers])),
        next_token_s=between.median_s,
        next_token_p95_s=between.percentile_or_absent(95),
        next_token_p99_s=between.percentile_or_absent(99),
        tokens_per_s=sum(map(len, answers)) / total_s,
        user_tokens_per_s=float(np.median([len(answer) / answer[-1] for answer in answers])),
        good_share=None if good is None else good / len(answers),
        goodput_per_s=None if good is None else good / total_s,
        ratio=ratio,
        ratio_missing=missing,
    )


# -- goodput -----------------------------------------------------------------


def seconds_per_good_answer(
    contestant: Contestant[R], index: int, limits: Goodput
) -> NDArray[np.float64]:
    """Return the time of each process per answer within the limits: [processes], inf for none."""
    found = []
    for blocks in contestant.by_process(index):
        answers = [each for block in _answers(blocks) for each in block.answers]
        good = sum(is_good(answer, limits) for answer in answers)
        found.append(sum(block.run_s for block in blocks) / good if good else np.inf)
    return np.asarray(found, dtype=np.float64)


def goodput_ratio(
    baseline: Contestant[R],
    candidate: Contestant[R],
    levels: int,
    limits: Goodput,
    host: BusyHost,
) -> tuple[Interval | None, str]:
    """Return how many times the goodput of the baseline, each at its best level, or why not."""
    sides = []
    for contestant in (baseline, candidate):
        label = contestant.engine.recipe.label
        times = [seconds_per_good_answer(contestant, index, limits) for index in range(levels)]
        best = min(range(levels), key=lambda index: float(np.median(times[index])))
        if not np.isfinite(times[best]).any():
            return None, f"no answer of {label} is within the limits"
        if not np.isfinite(times[best]).all():
            return None, f"in some process, no answer of {label} is within the limits"
        generations = np.asarray(contestant.generations, dtype=np.int64)
        sides.append(Processes(generations, times[best], np.asarray(contestant.waiting(best))))
    try:
        return compare_processes(*sides), ""
    except NotMeasurable as error:
        if error.obstacle is not Obstacle.OUT_OF_TIME:
            return None, host.too_busy(error.text)
        return None, stop_text(candidate) or OUT_OF_TIME.format(processes=error.text)
