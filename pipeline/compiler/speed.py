"""How fast a candidate is, by what the plan's objective makes decisive."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.measurement.clock import Samples
from pipeline.measurement.comparison import NotMeasurable, compare, processes_from_samples
from pipeline.measurement.statistics import Interval
from pipeline.results.benchmarks import LoadCurve
from pipeline.results.candidates import Candidate

NO_BASELINE = "the baseline could not be measured"


@dataclass(frozen=True, slots=True)
class Speed:
    """What decides about speed: times of an engine, and their ratio to the baseline."""

    times: Samples | None  # of a run, or of a sample under load; None: not compared
    ratio: Interval | None
    ratio_missing: str


def curve_of(candidate: Candidate) -> LoadCurve | None:
    """Return the curve of a candidate; None if latency decides, or if it was not measured."""
    return candidate.benchmark.load if candidate.benchmark else None


def speed_of(candidate: Candidate) -> Speed | None:
    """Return the speed that decides, or None if it was not measured.

    It is the throughput at the candidate's best point under load, or else the latency at the first
    benchmarked shape.
    """
    if curve := curve_of(candidate):
        return Speed(curve.sample_time, curve.ratio, curve.ratio_missing)
    if candidate.benchmark is None or not candidate.benchmark.rows:
        return None
    row = candidate.benchmark.rows[0]
    return Speed(row.end_to_end, row.ratio, row.ratio_missing)


def ratio_of(candidate: Candidate) -> Interval | None:
    """Return baseline median / candidate median of the times that decide about speed."""
    speed = speed_of(candidate)
    return speed.ratio if speed else None


def ratio_missing(candidate: Candidate) -> str:
    """Return why a candidate has no ratio to the baseline; empty if it has one."""
    if ratio_of(candidate) is not None:
        return ""
    speed = speed_of(candidate)
    return (speed.ratio_missing if speed else "") or NO_BASELINE


def is_faster(candidate: Candidate) -> bool:
    """Return whether a candidate is measurably faster than the baseline."""
    ratio = ratio_of(candidate)
    return ratio is not None and ratio.low > 1.0


def is_slower_or_equal(candidate: Candidate) -> bool:
    """Return whether a candidate was compared with the baseline and is not measurably faster."""
    return ratio_of(candidate) is not None and not is_faster(candidate)


def level_s(candidate: Candidate) -> float:
    """Return the median time of a candidate's undisturbed processes: see `speed_of`.

    Infinite if the candidate was not measured.
    """
    speed = speed_of(candidate)
    return processes_from_samples(speed.times).level_s if speed and speed.times else math.inf


def speed_ratio(base: Candidate, other: Candidate) -> Interval | None:
    """Return median of `base` / median of `other`, of the times that decide about speed.

    None if it cannot be measured. Both ran in the same interleaved run, and the noise of the
    baseline is not included, so the interval is narrower than that of their ratios to the baseline.
    """
    speeds = speed_of(base), speed_of(other)
    is_alike = (curve_of(base) is None) == (curve_of(other) is None)
    if not is_alike or not speeds[0] or not speeds[1]:
        return None
    if speeds[0].times is None or speeds[1].times is None:
        return None
    try:
        return compare(speeds[0].times, speeds[1].times)
    except NotMeasurable:
        return None
