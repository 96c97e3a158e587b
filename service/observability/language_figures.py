"""Figures of one deployed language model over the last seconds, from its Prometheus metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from service.observability.histograms import Buckets, Percentiles, percentiles_between

ANSWERS = "crucible_language_answers_total"
PROMPT = "crucible_language_prompt_tokens_total"
GENERATED = "crucible_language_generated_tokens_total"
FIRST = "crucible_language_first_token_seconds_bucket"
NEXT = "crucible_language_next_token_seconds_bucket"
RUNNING = "crucible_language_running"
WAITING = "crucible_language_queue"
CACHE = "crucible_language_cache_ratio"
COMPLETE = ("stop", "length")
ERRORS = ("timed_out", "refused", "failed")


@dataclass(frozen=True, slots=True)
class LanguageCounts:
    """What the metrics of a language model show at one moment: all its versions together."""

    answers: Mapping[str, float] = field(default_factory=dict)  # by how they ended
    prompt_tokens: float = 0
    generated_tokens: float = 0
    first: Buckets = field(default_factory=dict)
    next: Buckets = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    cache_ratio: float = 0.0  # of the version whose cache is fullest


@dataclass(frozen=True, slots=True)
class LiveLanguageFigures:
    """Figures of the time between two LanguageCounts."""

    generated_per_s: float  # tokens of all answers
    prompt_per_s: float  # tokens
    answered_per_s: float
    errors_per_s: float
    running: int  # answers, now
    waiting: int  # requests, now
    cache_ratio: float  # now
    first_token: Percentiles  # from the request
    next_token: Percentiles


def language_counts_of(registry: CollectorRegistry, model: str) -> LanguageCounts | None:
    """Read the metrics of a language model; None if the model is none, or was never loaded."""
    names = (ANSWERS, PROMPT, GENERATED, FIRST, NEXT, RUNNING, WAITING, CACHE)
    totals: defaultdict[str, float] = defaultdict(float)
    answers: defaultdict[str, float] = defaultdict(float)
    seconds: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    cache_ratio = 0.0
    for family in registry.restricted_registry(names).collect():
        for sample in family.samples:
            if sample.labels["model"] != model:
                continue
            totals[sample.name] += sample.value
            if sample.name == ANSWERS:
                answers[sample.labels["state"]] += sample.value
            elif sample.name in (FIRST, NEXT):
                seconds[sample.name][float(sample.labels["le"])] += sample.value
            elif sample.name == CACHE:
                cache_ratio = max(cache_ratio, sample.value)
    if not totals:
        return None
    return LanguageCounts(
        answers,
        totals[PROMPT],
        totals[GENERATED],
        seconds[FIRST],
        seconds[NEXT],
        int(totals[RUNNING]),
        int(totals[WAITING]),
        cache_ratio,
    )


def language_figures_between(
    before: LanguageCounts | None, after: LanguageCounts | None, window_s: float
) -> LiveLanguageFigures | None:
    """Return the figures of the time between two LanguageCounts; None without the second one."""
    if after is None:
        return None
    earlier = before or LanguageCounts()

    def per_s(old: float, new: float) -> float:
        return (new - old) / window_s if window_s > 0 else 0.0

    def answers(*states: str) -> float:
        old, new = (
            sum(counts.answers.get(state, 0) for state in states) for counts in (earlier, after)
        )
        return per_s(old, new)

    return LiveLanguageFigures(
        per_s(earlier.generated_tokens, after.generated_tokens),
        per_s(earlier.prompt_tokens, after.prompt_tokens),
        answers(*COMPLETE),
        answers(*ERRORS),
        after.running,
        after.waiting,
        after.cache_ratio,
        percentiles_between(earlier.first, after.first),
        percentiles_between(earlier.next, after.next),
    )
