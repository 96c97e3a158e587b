"""Figures of one deployed model over the last seconds, from its Prometheus metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

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
    seconds: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds, as exact as the bounds of the metric; None without a value."""

    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """Figures of the time between two Counts."""

    window_s: float
    answered_per_s: float
    errors_per_s: float
    waiting: int  # now
    queue: Percentiles  # of requests
    compute: Percentiles  # of batches


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
    return Counts(now_s, requests, seconds, waiting)


def figures_between(before: Counts, after: Counts) -> LiveFigures:
    """Return the figures of the time between two Counts."""
    window_s = after.at_s - before.at_s

    def per_s(*results: str) -> float:
        added = sum(after.requests.get(each, 0) - before.requests.get(each, 0) for each in results)
        return added / window_s if window_s > 0 else 0.0

    return LiveFigures(
        window_s,
        per_s("executed"),
        per_s(*ERRORS),
        after.waiting,
        _percentiles(before, after, "queue"),
        _percentiles(before, after, "compute"),
    )


def _percentiles(before: Counts, after: Counts, stage: str) -> Percentiles:
    older = before.seconds.get(stage, {})
    added = {
        bound: count - older.get(bound, 0) for bound, count in after.seconds.get(stage, {}).items()
    }
    return Percentiles(_percentile(added, 0.5), _percentile(added, 0.99))


def _percentile(added: Mapping[float, float], share: float) -> float | None:
    """Interpolate between the bounds of a histogram, as Prometheus' `histogram_quantile` does."""
    bounds = sorted(added)
    if not bounds or not added[bounds[-1]]:
        return None
    rank = share * added[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds:
        count = added[bound]
        if count >= rank and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError("unreachable: the last bound holds all values")
