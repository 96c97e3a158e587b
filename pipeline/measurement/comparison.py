"""Compare the speed of two engines: the ratio of their times with its interval.

Every engine runs in several processes, one after another. Process i of both engines ran in the same
generation, and block j of both processes in the same round, within some 0.1 s. Other work on the
host slows it in spells, which so slow both blocks of most rounds. The median over the rounds of the
logarithm of the ratio of both blocks' medians is one observation, and the result is Student's
interval over the observations of the generations.

One process that was stalled by something else on the host makes a mean worthless. So a *disturbed*
process is excluded, and another one runs instead. A process is disturbed if it was much slower than
the other processes of the same engine; the limit is lower if it waited for a CPU. This rule does
not depend on which engine is faster. `python -m benchmarks synthetic_clock` tests it on simulated
hosts; docs/explain/measuring.md explains it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from pipeline.measurement.clock import Floats, Samples
from pipeline.measurement.statistics import Interval, student_quantile

MIN_PAIRS = 4
"""Undisturbed pairs that an interval needs: two or three do not show the spread."""

MAX_WAITING = 0.1
"""Share of its time for which a process may wait for a CPU without being suspect."""

MAX_SLOWDOWN = 2.0
"""Maximum slowdown of an undisturbed process against the faster ones of its engine."""

MAX_SLOWDOWN_WAITING = 1.1
"""The same for a process that waited for a CPU."""

MAX_SPAN = 10.0
"""Maximum ratio of an interval's ends; a wider interval has no meaning."""

WIDENING = 1.06
"""Factor on Student's interval, because a measurement ends once the interval is narrow."""

FASTER_SHARE = 4
"""A process is compared with the slowest of the fastest quarter of its engine."""


class Obstacle(StrEnum):
    """Reason for a missing ratio."""

    OUT_OF_TIME = "out of time"
    DISTURBED = "disturbed"
    TOO_WIDE = "too wide"


class NotMeasurable(ValueError):
    """The ratio of two engines could not be measured. The text gives the evidence."""

    def __init__(self, obstacle: Obstacle, text: str) -> None:
        super().__init__(text)
        self.obstacle = obstacle
        self.text = text


@dataclass(frozen=True, slots=True)
class Processes:
    """Results of the processes of one engine at one shape, in the order of the processes."""

    generations: NDArray[np.int64]  # processes of one generation ran in turn
    medians_s: Floats
    waiting: Floats  # share of its time for which each process waited for a CPU, 0 to 1
    # Of each process, the median of each of its blocks. Empty: each process counts as one block.
    block_medians_s: tuple[Floats, ...] = ()

    @property
    def slowdowns(self) -> Floats:
        """Return how many times as slow as the engine's faster processes each process was."""
        if not self.medians_s.size:
            return self.medians_s
        rank = math.ceil(self.medians_s.size / FASTER_SHARE) - 1
        return np.asarray(self.medians_s / np.sort(self.medians_s)[rank])

    @property
    def disturbed(self) -> NDArray[np.bool_]:
        """Return True for processes that were disturbed, judged by this engine alone."""
        limits = np.where(self.waited, MAX_SLOWDOWN_WAITING, MAX_SLOWDOWN)
        return np.asarray(self.slowdowns > limits)

    @property
    def waited(self) -> NDArray[np.bool_]:
        """Return True for processes that waited for a CPU for long."""
        return np.asarray(self.waiting > MAX_WAITING)

    @property
    def level_s(self) -> float:
        """Return the median of the undisturbed processes, or of all if all were disturbed."""
        undisturbed = ~self.disturbed
        medians_s = self.medians_s[undisturbed] if undisturbed.any() else self.medians_s
        return float(np.median(medians_s))

    def taken(self, keep: NDArray[np.bool_]) -> Processes:
        """Return the processes that the mask selects."""
        blocks = compress(self.block_medians_s, keep) if self.block_medians_s else ()
        return Processes(
            self.generations[keep], self.medians_s[keep], self.waiting[keep], tuple(blocks)
        )

    def blocks_of(self, process: int) -> Floats:
        """Return the medians of the blocks of a process: [blocks]."""
        if not self.block_medians_s:
            return self.medians_s[process : process + 1]
        return self.block_medians_s[process]


def processes_from_samples(samples: Samples) -> Processes:
    """Return the processes of these samples.

    Reports of earlier versions have no waiting times, and processes in every generation.
    """
    medians_s = samples.process_medians_s()
    count = medians_s.size
    return Processes(
        np.asarray(samples.generations or range(count), dtype=np.int64),
        medians_s,
        np.asarray(samples.waiting or (0.0,) * count, dtype=np.float64),
        samples.block_medians_s(),
    )


@dataclass(frozen=True, slots=True)
class Pairs:
    """Processes of two engines that ran in the same generations."""

    baseline: Processes
    candidate: Processes

    @property
    def disturbed(self) -> NDArray[np.bool_]:
        """Return True for pairs with a disturbed process on one side or both."""
        return np.asarray(self.baseline.disturbed | self.candidate.disturbed)

    @property
    def undisturbed(self) -> int:
        """Return the number of undisturbed pairs."""
        return int((~self.disturbed).sum())

    @property
    def unusable(self) -> NDArray[np.bool_]:
        """Return True for pairs to exclude: the disturbed ones, if enough others remain.

        Otherwise, disturbed pairs are used if both sides slowed down alike: that hardly changes
        their ratio.
        """
        disturbed = self.disturbed
        if _enough(disturbed):
            return disturbed
        slowdowns = self.baseline.slowdowns / self.candidate.slowdowns
        alike = np.abs(np.log(slowdowns)) <= math.log(MAX_SLOWDOWN)
        return np.asarray(disturbed & ~alike)

    @property
    def logs(self) -> Floats:
        """Return the logarithm of each pair's ratio, baseline to candidate: [pairs].

        It is the median over the rounds, or the ratio of the processes' medians for processes that
        did not run equally many blocks.
        """
        return np.array([float(np.median(rounds)) for rounds in self.logs_of_rounds])

    @property
    def logs_of_rounds(self) -> tuple[Floats, ...]:
        """Return the logarithm of the ratio of each round, for each pair."""
        found = []
        for index in range(self.baseline.medians_s.size):
            one, other = self.baseline.blocks_of(index), self.candidate.blocks_of(index)
            if one.size != other.size:
                one, other = (
                    side.medians_s[index : index + 1] for side in (self.baseline, self.candidate)
                )
            found.append(np.asarray(np.log(one / other)))
        return tuple(found)

    @property
    def has_waited(self) -> NDArray[np.bool_]:
        """Return True for pairs with a side that waited for a CPU for long."""
        return np.asarray(self.baseline.waited | self.candidate.waited)

    @property
    def is_loaded(self) -> bool:
        """Return True if most pairs waited for a CPU: then no process shows its own time."""
        return 2 * int(self.has_waited.sum()) > self.has_waited.size

    def slowest_over_fastest(self) -> float:
        """Return the largest ratio of two processes of one engine."""
        sides = (self.baseline.medians_s, self.candidate.medians_s)
        return max(float(side.max() / side.min()) for side in sides)


def pairs_of(baseline: Processes, candidate: Processes) -> Pairs:
    """Return the processes of the generations in which both engines ran."""
    shared = np.intersect1d(baseline.generations, candidate.generations)
    return Pairs(
        baseline.taken(np.isin(baseline.generations, shared)),
        candidate.taken(np.isin(candidate.generations, shared)),
    )


def compare(baseline: Samples, candidate: Samples) -> Interval:
    """Return median(baseline) / median(candidate): above 1 if the candidate is faster.

    Raises NotMeasurable.
    """
    return compare_processes(processes_from_samples(baseline), processes_from_samples(candidate))


def compare_processes(baseline: Processes, candidate: Processes) -> Interval:
    """Return the geometric mean of the undisturbed pairs' ratios, with a 95 % interval.

    Raises NotMeasurable.
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
        raise NotMeasurable(Obstacle.OUT_OF_TIME, text)
    keep = ~unusable
    logs = pairs.logs[keep]
    centre = float(logs.mean())
    error = float(logs.std(ddof=1)) / math.sqrt(used)
    half = WIDENING * student_quantile(used - 1) * error
    if 2 * half > math.log(MAX_SPAN):
        raise NotMeasurable(Obstacle.TOO_WIDE, _disturbance(pairs))
    return Interval(
        value=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half)
    )


def compare_apart(first: Samples, second: Samples) -> Interval:
    """Return median(first) / median(second) of two engines that did not run in turns.

    Welch's 95 % interval over the logarithms of the undisturbed processes' medians. It holds what
    differs between processes, and not what the host did otherwise in either run. Raises
    NotMeasurable.
    """
    logs = []
    for samples in (first, second):
        processes = processes_from_samples(samples)
        if not _enough(processes.disturbed):
            used = int((~processes.disturbed).sum())
            text = f"{used} undisturbed processes of one engine, expected at least {MIN_PAIRS}"
            raise NotMeasurable(Obstacle.OUT_OF_TIME, text)
        if 2 * int(processes.waited.sum()) > processes.waited.size:
            text = "most processes of one engine had to wait for a CPU"
            raise NotMeasurable(Obstacle.DISTURBED, text)
        logs.append(np.log(processes.medians_s[~processes.disturbed]))
    errors = [float(each.var(ddof=1)) / each.size for each in logs]  # of each mean, squared
    total = sum(errors)
    parts = sum(error**2 / (each.size - 1) for error, each in zip(errors, logs, strict=True))
    degrees = int(total**2 / parts) if parts else sum(each.size - 1 for each in logs)
    centre = float(logs[0].mean() - logs[1].mean())
    half = WIDENING * student_quantile(max(degrees, 1)) * math.sqrt(total)
    return Interval(
        value=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half)
    )


def _enough(disturbed: NDArray[np.bool_]) -> bool:
    """Return True if at least MIN_PAIRS pairs and more than half of all are undisturbed."""
    undisturbed = int((~disturbed).sum())
    return undisturbed >= MIN_PAIRS and 2 * undisturbed > disturbed.size


def _disturbance(pairs: Pairs) -> str:
    """Describe how the processes of two engines were disturbed."""
    slowest = (
        f"the slowest process took {pairs.slowest_over_fastest():.3g} times as long as the fastest"
    )
    total, disturbed = pairs.disturbed.size, int(pairs.disturbed.sum())
    if pairs.is_loaded:
        waited = int(pairs.has_waited.sum())
        return f"{waited} of {total} processes had to wait for a CPU, {slowest}"
    return f"{disturbed} of {total} processes were disturbed, {slowest}" if disturbed else slowest
