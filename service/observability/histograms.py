"""Percentiles of what a Prometheus histogram has counted between two moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Buckets = Mapping[float, float]
"""The number of values up to each bound in seconds."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds, as exact as the bounds of the metric; None without a value."""

    p50_s: float | None
    p99_s: float | None


def percentiles_between(before: Buckets, after: Buckets) -> Percentiles:
    """Return the percentiles of the values that were added."""
    added = {bound: count - before.get(bound, 0) for bound, count in after.items()}
    return Percentiles(_percentile(added, 0.5), _percentile(added, 0.99))


def _percentile(added: Buckets, share: float) -> float | None:
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
