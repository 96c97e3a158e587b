"""What the ratio of two engines is worth on hosts of every kind, on a synthetic clock: quiet,
drifting, loaded, stalled.

Nothing is timed: each figure follows from its seed, and comes out alike on every machine with these
versions. A cell is one kind of disturbance, one spread of the processes and one number of
processes, and has four numbers:

    not measurable   share of the races that say so instead of a ratio
    coverage         of the intervals reported: share that holds the truth
    moved            how far disturbances moved the centre, in standard errors of the undisturbed
                     estimator: the largest of 99 % of the races reported, of those in which fewer
                     than half of the pairs were disturbed
    width            median of the intervals reported, as the ratio of their ends less one

As in a race, a disturbed process is repeated; there are at most twice as many as are wanted.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Row, publish, takes_no_arguments
from pipeline.benchmark.elimination import MAX_PAIRS, Role, Runner, is_decided
from pipeline.benchmark.interleaved import BLOCK_S, USUAL_PROCESSES
from pipeline.measurement.comparison import NotMeasurable, Processes, compare_processes, pairs_of
from pipeline.measurement.statistics import Interval, student_quantile
from pipeline.plan.schema import BenchmarkConfig

Floats = NDArray[np.float64]

TRIALS = 2000
SPREADS = (0.005, 0.015, 0.05, 0.15)  # std of what distinguishes processes that run one file
PROCESSES = (4, 6, 8, 12, 16)
BLOCK, GENERATION = (
    0.004,
    0.01,
)  # std of the noise of a process, and of a level that both engines share
QUIET_WAITING = 0.03  # the largest share of its time that an undisturbed process waits for a CPU
ROUNDS = round(BenchmarkConfig().duration_s / USUAL_PROCESSES / BLOCK_S)  # of a generation
SEEN = 0.5  # share of the stalls that the kernel's counts show; the hypervisor hides the others
RATIOS = (1.0, 1.05, 1.2, 9.0)


@dataclass(frozen=True)
class Host:
    """What a race of so many generations meets. All [2 engines, generations]."""

    quiet: Floats  # logarithm of what each process would take, undisturbed
    slowed: Floats  # what disturbances add to it
    waiting: Floats
    blocks: Floats | None  # [2 engines, generations, rounds]: what they add to single blocks

    def processes(self, engine: int, generations: int) -> Processes:
        """What the first so many processes of one engine show."""
        level = self.quiet[engine, :generations] + self.slowed[engine, :generations]
        waiting = self.waiting[engine, :generations]
        if self.blocks is None:
            return Processes(np.arange(generations), np.exp(level), waiting)
        blocks = np.exp(level[:, None] + self.blocks[engine, :generations])
        return Processes(np.arange(generations), np.median(blocks, axis=1), waiting, tuple(blocks))


@dataclass(frozen=True)
class Disturbed:
    """What disturbances add: to the logarithm of the time of each process, [2 engines,
    generations]; to its waiting; and to single blocks, [2 engines, generations, rounds].
    """

    slowed: Floats
    waiting: Floats
    blocks: Floats | None = None


Disturb = Callable[[np.random.Generator, int, int], Disturbed]
"""Random numbers, generations wanted and generations at most."""


def nothing(random: np.random.Generator, wanted: int, most: int) -> Disturbed:
    return Disturbed(np.zeros((2, most)), np.zeros((2, most)))


def drift(random: np.random.Generator, wanted: int, most: int) -> Disturbed:
    """The host becomes half as slow again; the blocks of a generation take turns, three of each
    engine.
    """
    step = math.log(1.5) / most
    lag = random.uniform(-0.5, 0.5, (2, most)) / 3
    return Disturbed((np.arange(most) + lag) * step, np.zeros((2, most)))


def stalls(share: float | None, engines: Sequence[int], factor: float) -> Disturb:
    """Some processes take `factor` times as long; `share` None: exactly one of those wanted."""

    def disturb(random: np.random.Generator, wanted: int, most: int) -> Disturbed:
        hit = (
            np.arange(most) == random.integers(wanted)
            if share is None
            else random.random(most) < share
        )
        slowed, waiting = np.zeros((2, most)), np.zeros((2, most))
        seen = hit & (random.random(most) < SEEN)
        for engine in engines:
            slowed[engine] = np.where(hit, math.log(factor), 0.0)
            waiting[engine] = np.where(seen, 1 - 1 / factor, 0.0)
        return Disturbed(slowed, waiting)

    return disturb


def neighbour(share: float) -> Disturb:
    """Another machine on the same hardware slows whole generations two to four times, both engines
    nearly alike. No count shows it.
    """

    def disturb(random: np.random.Generator, wanted: int, most: int) -> Disturbed:
        slow = np.where(random.random(most) < share, np.log(random.uniform(2, 4, most)), 0.0)
        slowed = slow + random.normal(0, 0.03, (2, most)) * (slow > 0)
        return Disturbed(slowed, np.zeros((2, most)))

    return disturb


def load(per_core: float) -> Disturb:
    """So many other processes on each core want it all the time."""

    def disturb(random: np.random.Generator, wanted: int, most: int) -> Disturbed:
        others = per_core * random.uniform(0.5, 1, (2, most))
        return Disturbed(np.log1p(others), others / (1 + others))

    return disturb


def slow_blocks(share: float) -> Disturb:
    """Each of the three blocks of a process takes ten times as long with this probability.

    Blocks are equally long, so a slow one has a tenth of the runs: the median of all runs is that
    of an undisturbed block as long as there is one.
    """

    def disturb(random: np.random.Generator, wanted: int, most: int) -> Disturbed:
        all_slow = (random.random((2, most, 3)) < share).all(axis=2)
        return Disturbed(np.where(all_slow, math.log(10), 0.0), np.zeros((2, most)))

    return disturb


def spells(random: np.random.Generator, wanted: int, most: int) -> Disturbed:
    """Another machine on the same hardware slows half of the rounds by half, both engines alike; of
    one round in five only one engine, because a spell begins or ends there.
    """
    shape = (2, most, ROUNDS)
    alike = np.broadcast_to(random.random(shape[1:]) < 0.5, shape)
    apart = np.broadcast_to(random.random(shape[1:]) < 0.2, shape)
    slow = np.where(apart, random.random(shape) < 0.5, alike)
    return Disturbed(np.zeros((2, most)), np.zeros((2, most)), slow * math.log(1.5))


def kinds() -> dict[str, Disturb]:
    """Every kind of host, by name."""
    found: dict[str, Disturb] = {"undisturbed": nothing, "drift by half": drift}
    for share, name in ((None, "one process"), (1 / 3, "a third of the processes")):
        for engines, whose in (((0,), "of one engine"), ((0, 1), "of both engines")):
            for factor in (3, 30, 340):
                found[f"{name} {whose} stalled {factor} times"] = stalls(share, engines, factor)
    for share, name in ((1 / 6, "a sixth"), (1 / 3, "a third")):
        found[f"{name} of the blocks slowed tenfold"] = slow_blocks(share)
    found["a third of the generations slowed alike"] = neighbour(1 / 3)
    found["half of the time slowed by half, in spells"] = spells
    for per_core in (1, 2, 4):
        found[f"load {per_core} per core"] = load(per_core)
    return found


UNDISTURBED = ("undisturbed",)


@dataclass(frozen=True)
class Cell:
    """Four numbers about one kind of host, one spread and one number of processes."""

    kind: str
    spread: float
    processes: int
    not_measurable: float
    coverage: float | None  # None: nothing was reported
    moved: float | None
    width: float | None

    def row(self) -> Row:
        return {
            "host": self.kind,
            "processes differ by (std)": self.spread,
            "processes": self.processes,
            "not measurable": self.not_measurable,
            "coverage": self.coverage,
            "moved": self.moved,
            "width": self.width,
        }


def generator(*key: object) -> np.random.Generator:
    """Random numbers that depend on this key only."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def draw(
    random: np.random.Generator, disturb: Disturb, spread: float, wanted: int, most: int
) -> Host:
    shared = random.normal(0, GENERATION, most)
    quiet = shared + random.normal(0, spread, (2, most)) + random.normal(0, BLOCK, (2, most))
    met = disturb(random, wanted, most)
    waiting = np.minimum(random.uniform(0, QUIET_WAITING, (2, most)) + met.waiting, 1.0)
    return Host(quiet, met.slowed, waiting, met.blocks)


def ends_after(host: Host, wanted: int) -> int:
    """Generations of a race that repeats what was disturbed until it has as many pairs as
    wanted.
    """
    most = host.quiet.shape[1]
    generations = wanted
    while generations < most:
        pairs = pairs_of(host.processes(0, generations), host.processes(1, generations))
        if pairs.undisturbed >= wanted:
            break
        generations = min(most, generations + wanted - pairs.undisturbed)
    return generations


def cell(kind: str, spread: float, processes: int, trials: int = TRIALS) -> Cell:
    """Races between equal engines."""
    random = generator(kind, spread, processes)
    disturb = kinds()[kind]
    error = math.sqrt(2 * (spread**2 + BLOCK**2) / processes)  # of the undisturbed estimator
    intervals: list[Interval] = []
    moves: list[float] = []
    for _ in range(trials):
        host = draw(random, disturb, spread, processes, 2 * processes)
        generations = ends_after(host, processes)
        ours, theirs = host.processes(0, generations), host.processes(1, generations)
        try:
            intervals.append(found := compare_processes(ours, theirs))
        except NotMeasurable:
            continue
        hit = np.any(host.slowed[:, :generations] > BLOCK, axis=0)
        if 2 * hit.sum() < generations:
            used = ~pairs_of(ours, theirs).unusable
            undisturbed = host.quiet[0, :generations][used] - host.quiet[1, :generations][used]
            moves.append(abs(math.log(found.value) - float(undisturbed.mean())) / error)
    held = sum(not interval.excludes(1.0) for interval in intervals)
    return Cell(
        kind,
        spread,
        processes,
        not_measurable=1 - len(intervals) / trials,
        coverage=held / len(intervals) if intervals else None,
        moved=float(np.quantile(moves, 0.99)) if moves else None,
        width=(
            float(np.median([each.high / each.low - 1 for each in intervals]))
            if intervals
            else None
        ),
    )


@dataclass(frozen=True)
class Ended:
    """Races that end by themselves, once their interval is narrow."""

    coverage: float
    processes: float  # mean
    told_apart: float  # share of the intervals that do not hold 1


def ended(ratio: float, spread: float, trials: int = TRIALS) -> Ended:
    """Races on an undisturbed host that end as real ones do."""
    random = generator("race", ratio, spread)
    held, told, counts = 0, 0, []
    for _ in range(trials):
        host = draw(random, nothing, spread, MAX_PAIRS, MAX_PAIRS)
        host.quiet[0] += math.log(ratio)
        generations = next(count for count in range(1, MAX_PAIRS + 1) if is_over(host, count))
        found = compare_processes(host.processes(0, generations), host.processes(1, generations))
        held += not found.excludes(ratio)
        told += found.excludes(1.0)
        counts.append(generations)
    return Ended(held / trials, float(np.mean(counts)), told / trials)


def is_over(host: Host, generations: int) -> bool:
    """Whether a race between a baseline and a candidate is decided after so many generations."""
    ours, theirs = host.processes(0, generations), host.processes(1, generations)
    runners = [Runner("0", Role.BASELINE, ours), Runner("1", Role.CANDIDATE, theirs)]
    return generations == MAX_PAIRS or is_decided(runners)


# -- the page ----------------------------------------------------------------


def summary(kind: str, cells: Sequence[Cell]) -> Row:
    """The range of each number over all spreads and numbers of processes."""
    return {
        "host": kind,
        "not measurable": spanned([each.not_measurable for each in cells], "{:.1%}"),
        "coverage": spanned([each.coverage for each in cells], "{:.1%}"),
        "moved by at most": spanned([each.moved for each in cells], "{:.2f}"),
        "width, 8 processes that differ by 5 %": width_of(cells),
    }


def spanned(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = form.format(min(known)), form.format(max(known))
    return low if low == high else f"{low} to {high}"


def width_of(cells: Sequence[Cell]) -> str:
    found = next((each.width for each in cells if (each.spread, each.processes) == (0.05, 8)), None)
    return "-" if found is None else f"{found:.1%}"


def demands(cells: Sequence[Cell], races: Mapping[tuple[float, float], Ended]) -> dict[str, bool]:
    """What is demanded of every cell, and whether it holds."""
    reported = [each for each in cells if each.coverage is not None and each.not_measurable < 0.9]
    quiet = [each for each in cells if each.kind in UNDISTURBED]
    wide = [each.width / student_width(each.spread, each.processes) for each in quiet if each.width]
    return {
        "reported intervals cover 93 to 99 % in every cell": all(
            0.93 <= (each.coverage or 0) <= 0.99 for each in reported
        ),
        "undisturbed hosts: a ratio in 99 % of the races of at least 6 processes": all(
            each.not_measurable <= 0.01 for each in quiet if each.processes >= 6
        ),
        "undisturbed hosts: intervals cover 93 to 97 %": all(
            0.93 <= (each.coverage or 0) <= 0.97 for each in quiet
        ),
        "undisturbed hosts: intervals are at most 1.3 times as wide as Student's": max(wide) <= 1.3,
        (
            "with fewer than half of the pairs disturbed, the centre moves by at most 2 standard"
            " errors in 99 % of the races reported"
        ): all((each.moved or 0) <= 2 for each in reported),
        "races that end by themselves: intervals cover 93 to 97 %": all(
            0.93 <= each.coverage <= 0.97 for each in races.values()
        ),
    }


def student_width(spread: float, processes: int) -> float:
    """The ends' ratio, less one, of Student's interval over undisturbed pairs, at the usual
    standard deviation of so few.
    """
    usual = math.sqrt(2 * (spread**2 + BLOCK**2)) * median_of_std(processes)
    return math.exp(2 * student_quantile(processes - 1) * usual / math.sqrt(processes)) - 1


def median_of_std(count: int) -> float:
    """The median standard deviation of so many standard normal values."""
    random = generator("std", count)
    return float(np.median(random.normal(size=(20_000, count)).std(axis=1, ddof=1)))


def main(words: Sequence[str]) -> None:
    takes_no_arguments("synthetic_clock", __doc__, words)
    cells = [
        cell(kind, spread, count) for kind in kinds() for spread in SPREADS for count in PROCESSES
    ]
    races = {(ratio, spread): ended(ratio, spread) for ratio in RATIOS for spread in SPREADS}
    rows = [summary(kind, [each for each in cells if each.kind == kind]) for kind in kinds()]
    details: dict[str, Sequence[Row]] = {
        "cells": [each.row() for each in cells],
        "races": [
            {
                "true ratio": ratio,
                "processes differ by (std)": f"{spread:.1%}",
                "coverage": f"{found.coverage:.1%}",
                "processes": f"{found.processes:.1f}",
                "told from 1": f"{found.told_apart:.1%}",
            }
            for (ratio, spread), found in races.items()
        ],
    }
    publish("synthetic_clock", rows, demands(cells, races), details=details)
