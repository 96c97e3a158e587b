"""How the speed of two engines compares: the ratio of their times with its interval, or why this
host cannot tell.

Every engine runs in several processes, one after another; process i of two engines ran in the same
generation, so what slowed that generation slowed both. The logarithm of the ratio of their medians
is one observation, and Student's interval over these observations is the answer.

Student's interval is only as good as its observations. One process that something else on the host
stalled makes a mean worthless, so a *disturbed* process is not used, and another one is run
instead. What counts as disturbed is judged by how slow it was against the other processes of the
same engine, more strictly if it waited for a CPU: that does not know which engine is faster.
`python -m benchmarks synthetic_clock` shows what this is worth on hosts of every kind;
docs/measurement.md explains it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pipeline.measurement.clock import Floats, Samples
from pipeline.measurement.statistics import Interval, student_quantile

MIN_PAIRS = (
    4  # undisturbed pairs that an interval needs: the spread of two or three says too little
)
MAX_WAITING = 0.1  # share of its time that a process may wait for a CPU before that is evidence
MAX_SLOWDOWN = 2.0  # of an undisturbed process against the faster ones of its engine
MAX_SLOWDOWN_WAITING = 1.1  # the same, of a process that waited for a CPU
MAX_SPAN = 10.0  # an interval whose ends differ by more says nothing
WIDENING = 1.06  # of Student's interval, since a race ends once the interval is narrow
FASTER_SHARE = 4  # a process is compared with the slowest of the fastest quarter of its engine


class Obstacle(StrEnum):
    """Why there is no ratio."""

    OUT_OF_TIME = "out of time"
    TOO_FEW = "too few"
    DISTURBED = "disturbed"
    TOO_WIDE = "too wide"


class NotMeasurable(ValueError):
    """This host, or this run, cannot tell how two engines compare. The text says what was seen."""

    def __init__(self, obstacle: Obstacle, text: str) -> None:
        super().__init__(text)
        self.obstacle = obstacle
        self.text = text


@dataclass(frozen=True, slots=True)
class Processes:
    """What the processes of one engine showed at one shape, one value each, in the order in which
    they ran.
    """

    generations: NDArray[np.int64]  # of the race; processes of one generation ran side by side
    medians_s: Floats
    waiting: Floats  # share of its time that each waited for a CPU, 0 to 1

    @property
    def slowdowns(self) -> Floats:
        """How many times as slow each process was as the faster ones of this engine."""
        if not self.medians_s.size:
            return self.medians_s
        place = math.ceil(self.medians_s.size / FASTER_SHARE) - 1
        return np.asarray(self.medians_s / np.sort(self.medians_s)[place])

    @property
    def disturbed(self) -> NDArray[np.bool_]:
        """Which processes something else on the host slowed, as far as this engine alone can
        tell.
        """
        limits = np.where(self.waited, MAX_SLOWDOWN_WAITING, MAX_SLOWDOWN)
        return np.asarray(self.slowdowns > limits)

    @property
    def waited(self) -> NDArray[np.bool_]:
        """Which processes were kept from a CPU for long."""
        return np.asarray(self.waiting > MAX_WAITING)

    @property
    def level_s(self) -> float:
        """The median of the undisturbed processes, or of all where there are no others."""
        undisturbed = ~self.disturbed
        return float(
            np.median(self.medians_s[undisturbed] if undisturbed.any() else self.medians_s)
        )

    def taken(self, keep: NDArray[np.bool_]) -> Processes:
        """Some of the processes."""
        return Processes(self.generations[keep], self.medians_s[keep], self.waiting[keep])


def processes_from_samples(samples: Samples) -> Processes:
    """The processes that took these samples. Reports of earlier versions have every generation, and
    no waiting times.
    """
    medians_s = samples.process_medians_s()
    count = medians_s.size
    return Processes(
        np.asarray(samples.generations or range(count), dtype=np.int64),
        medians_s,
        np.asarray(samples.waiting or (0.0,) * count, dtype=np.float64),
    )


@dataclass(frozen=True, slots=True)
class Pairs:
    """Processes of two engines that ran in the same generations."""

    baseline: Processes
    candidate: Processes

    @property
    def disturbed(self) -> NDArray[np.bool_]:
        """Pairs of which something else on the host slowed one side, or both."""
        return np.asarray(self.baseline.disturbed | self.candidate.disturbed)

    @property
    def undisturbed(self) -> int:
        """How many pairs are undisturbed."""
        return int((~self.disturbed).sum())

    @property
    def unusable(self) -> NDArray[np.bool_]:
        """Pairs that do not count in the end: the disturbed ones, if there are enough others.

        A host that slowed both sides alike has hardly changed their ratio. Such pairs count where
        there would be too few without them.
        """
        disturbed = self.disturbed
        if _enough(disturbed):
            return disturbed
        slowdowns = self.baseline.slowdowns / self.candidate.slowdowns
        alike = np.abs(np.log(slowdowns)) <= math.log(MAX_SLOWDOWN)
        return np.asarray(disturbed & ~alike)

    @property
    def has_waited(self) -> NDArray[np.bool_]:
        """Pairs of which either side was kept from a CPU for long."""
        return np.asarray(self.baseline.waited | self.candidate.waited)

    @property
    def is_loaded(self) -> bool:
        """Whether most pairs waited for a CPU: then no process shows what an engine takes
        without.
        """
        return 2 * int(self.has_waited.sum()) > self.has_waited.size

    def slowest_over_fastest(self) -> float:
        """The largest ratio of two processes of one engine."""
        sides = (self.baseline.medians_s, self.candidate.medians_s)
        return max(float(side.max() / side.min()) for side in sides)


def pairs_of(baseline: Processes, candidate: Processes) -> Pairs:
    """The generations that both engines ran in."""
    shared = np.intersect1d(baseline.generations, candidate.generations)
    return Pairs(
        baseline.taken(np.isin(baseline.generations, shared)),
        candidate.taken(np.isin(candidate.generations, shared)),
    )


def compare(baseline: Samples, candidate: Samples) -> Interval:
    """Baseline median over candidate median, above 1 where the candidate is faster. Raises
    NotMeasurable.
    """
    return compare_processes(processes_from_samples(baseline), processes_from_samples(candidate))


def compare_processes(baseline: Processes, candidate: Processes) -> Interval:
    """The geometric mean of the undisturbed pairs' ratios, with a 95 % interval. Raises
    NotMeasurable.
    """
    pairs = pairs_of(baseline, candidate)
    unusable = pairs.unusable
    used = int((~unusable).sum())
    if unusable.size < MIN_PAIRS:
        processes = "1 process" if unusable.size == 1 else f"{unusable.size} processes"
        text = f"{processes} of each engine, expected at least {MIN_PAIRS}"
        raise NotMeasurable(Obstacle.OUT_OF_TIME, text)
    if pairs.is_loaded:
        raise NotMeasurable(Obstacle.DISTURBED, _disturbance(pairs))
    if not _enough(unusable):
        if 2 * used <= unusable.size:
            raise NotMeasurable(Obstacle.DISTURBED, _disturbance(pairs))
        processes = "1 undisturbed process" if used == 1 else f"{used} undisturbed processes"
        text = f"{processes} of each engine, expected at least {MIN_PAIRS}"
        raise NotMeasurable(Obstacle.TOO_FEW, text)
    keep = ~unusable
    logs = np.log(pairs.baseline.medians_s[keep] / pairs.candidate.medians_s[keep])  # [pairs]
    centre = float(logs.mean())
    error = float(logs.std(ddof=1)) / math.sqrt(used)
    half = WIDENING * student_quantile(used - 1) * error
    if 2 * half > math.log(MAX_SPAN):
        raise NotMeasurable(Obstacle.TOO_WIDE, _disturbance(pairs))
    return Interval(
        value=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half)
    )


def _enough(disturbed: NDArray[np.bool_]) -> bool:
    """Whether enough pairs are undisturbed, and more of them than not."""
    undisturbed = int((~disturbed).sum())
    return undisturbed >= MIN_PAIRS and 2 * undisturbed > disturbed.size


def _disturbance(pairs: Pairs) -> str:
    """What the processes of two engines suffered, in words."""
    slowest = (
        f"the slowest process took {pairs.slowest_over_fastest():.3g} times as long as the fastest"
    )
    total, disturbed = pairs.disturbed.size, int(pairs.disturbed.sum())
    if pairs.is_loaded:
        waited = int(pairs.has_waited.sum())
        return f"{waited} of {total} processes had to wait for a CPU, {slowest}"
    return f"{disturbed} of {total} processes were disturbed, {slowest}" if disturbed else slowest
