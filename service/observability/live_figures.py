"""Figures of one deployed model over the last seconds, from its Prometheus metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from service.observability.histograms import Buckets, Percentiles, percentiles_between
from service.observability.language_figures import (
    LanguageCounts,
    LiveLanguageFigures,
    language_counts_of,
    language_figures_between,
)

REQUESTS = "crucible_inference_requests_total"
SECONDS = "crucible_inference_stage_seconds_bucket"
WAITING = "crucible_inference_queue"
ERRORS = ("timed_out", "refused", "failed")


@dataclass(frozen=True, slots=True)
class Counts:
    """What the metrics of a model show at one moment: all its versions together."""

    at_s: float  # of a monotonic clock
    requests: Mapping[str, float] = field(default_factory=dict)  # by their result
    # by stage: the number of values up to each bound in seconds
    seconds: Mapping[str, Buckets] = field(default_factory=dict)
    waiting: int = 0
    language: LanguageCounts | None = None  # None: it is no language model


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """Figures of the time between two Counts."""

    window_s: float
    answered_per_s: float
    errors_per_s: float
    waiting: int  # now
    queue: Percentiles  # of requests
    compute: Percentiles  # of batches
    language: LiveLanguageFigures | None = None  # of a language model, in place of the others


def counts_of(registry: CollectorRegistry, model: str, now_s: float) -> Counts:
    """Read the metrics of a model."""
    requests: defaultdict[str, float] = defaultdict(float)
    seconds: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    waiting = 0
    for family in registry.restricted_registry((REQUESTS, SECONDS, WAITING)).collect():
        for sample in family.samples:
            if sample.labels["model"] != model:
                continue
            if sample.name == REQUESTS:
                requests[sample.labels["state"]] += sample.value
            elif sample.name == SECONDS:
                seconds[sample.labels["stage"]][float(sample.labels["le"])] += sample.value
            else:
                waiting += int(sample.value)
    return Counts(now_s, requests, seconds, waiting, language_counts_of(registry, model))


def figures_between(before: Counts, after: Counts) -> LiveFigures:
    """Return the figures of the time between two Counts."""
    window_s = after.at_s - before.at_s

    def per_s(*results: str) -> float:
        added = sum(after.requests.get(each, 0) - before.requests.get(each, 0) for each in results)
        return added / window_s if window_s > 0 else 0.0

    def times(stage: str) -> Percentiles:
        return percentiles_between(before.seconds.get(stage, {}), after.seconds.get(stage, {}))

    return LiveFigures(
        window_s,
        per_s("executed"),
        per_s(*ERRORS),
        after.waiting,
        times("queue"),
        times("compute"),
        language_figures_between(before.language, after.language, window_s),
    )
