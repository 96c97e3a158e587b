"""Who stays in a race after a generation, and when the race is over. Pure: what the processes
showed in, a decision out.

Every contestant gets one process. Whoever is far behind the best of its kind stops there. The
others get more processes, until the intervals that the verdict rests on are narrow. An interval is
judged by its width, never by whether it holds 1: a race that ended as soon as it does not would
find differences between equal engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.measurement.comparison import (
    MAX_WAITING,
    MIN_PAIRS,
    NotMeasurable,
    Processes,
    compare_processes,
    pairs_of,
)
from pipeline.measurement.statistics import Interval

FAR_BEHIND = 1.5  # times as slow as the best: one process is enough to stop there
NEAR = 1.05  # an engine that is certainly slower by more than this cannot win
MIN_NARROW_PAIRS = 6  # before an interval may end a race: the width of one over fewer is luck
MAX_PAIRS = 16  # of an engine; more hardly narrow an interval
NARROW = math.log(
    1.05
)  # half the width, in logarithms, of an interval that is narrow for any ratio
NARROW_FAR = math.log(1.15)  # and the widest that is narrow, where the ratio is far from 1
SHARE_OF_DISTANCE = 1 / 3  # between the two: half the width against the distance from 1


class Role(StrEnum):
    """Why an engine is in the race."""

    BASELINE = "baseline"  # what the user has today
    CANDIDATE = "candidate"  # may win
    COMPARED = "compared"  # another row of the report needs its ratio: it stays to the end
    SHOWN = "shown"  # cannot win: one process shows where it would be


ELIMINATED = (Role.BASELINE, Role.CANDIDATE)
"""Engines of these roles are held against the best of their own."""


class StopReason(StrEnum):
    """Why an engine got no further processes."""

    FAR_BEHIND = "far behind"
    SLOWER = "slower"
    SHOWN = "shown"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an engine got no further processes, and next to which other one."""

    reason: StopReason
    best: str = ""  # label of the engine that was faster
    times_slower: float = 0.0


@dataclass(frozen=True, slots=True)
class Runner:
    """A contestant that is still in the race, with what its processes showed at the shape that
    decides.
    """

    label: str
    role: Role
    processes: Processes
    fastest_block_s: float  # the fastest and the slowest of the block medians of all its processes
    slowest_block_s: float

    @property
    def level_s(self) -> float:
        return self.processes.level_s


def stops(runners: Sequence[Runner]) -> list[Stop | None]:
    """Why each of them gets no further process; None for who goes on."""
    best = {role: _best(each for each in runners if each.role is role) for role in ELIMINATED}
    return [_stop(best.get(each.role), each) for each in runners]


def _stop(best: Runner | None, runner: Runner) -> Stop | None:
    """Why a contestant need not run any more. `best`: of those it is held against, if there are
    any.
    """
    if runner.role is Role.SHOWN:
        return Stop(StopReason.SHOWN) if _has_been_shown(runner) else None
    return None if best is None or best is runner else _stop_behind(best, runner)


def _has_been_shown(runner: Runner) -> bool:
    """One process is enough to show where an engine lies; a second one where the first waited for a
    CPU.
    """
    waiting = runner.processes.waiting
    return waiting.size > 1 or bool((waiting <= MAX_WAITING).all())


def _stop_behind(best: Runner, other: Runner) -> Stop | None:
    """Why `other` need not run any more beside `best`, if that is so."""
    pairs = pairs_of(other.processes, best.processes)
    if pairs.undisturbed >= MIN_PAIRS:
        slower = _interval(other, best)
        if slower is not None and slower.low > NEAR:
            return Stop(StopReason.SLOWER, best.label, slower.value)
        return None
    if not pairs.has_waited.all() and _fastest_s(other) > FAR_BEHIND * _typical_s(best):
        return Stop(StopReason.FAR_BEHIND, best.label, other.level_s / best.level_s)
    return None


def _fastest_s(runner: Runner) -> float:
    """The best that an engine has shown: its fastest process, or of a single process its fastest
    block.
    """
    several = runner.processes.medians_s.size > 1
    return float(runner.processes.medians_s.min()) if several else runner.fastest_block_s


def _typical_s(runner: Runner) -> float:
    """What an engine usually shows: the middle of its processes, or of a single process its slowest
    block.
    """
    return runner.level_s if runner.processes.medians_s.size > 1 else runner.slowest_block_s


def is_decided(runners: Sequence[Runner]) -> bool:
    """Whether more processes would not narrow anything that the verdict rests on.

    That is the ratio of the best candidate to the best baseline, and to every other engine that is
    still in the race.
    """
    rivals = [each for each in runners if each.role in (Role.CANDIDATE, Role.COMPARED)]
    best = _best(each for each in rivals if each.role is Role.CANDIDATE) or _best(rivals)
    baseline = _best(each for each in runners if each.role is Role.BASELINE)
    if best is None or (baseline is None and len(rivals) == 1):  # there is nothing to compare
        return all(each.processes.medians_s.size >= MIN_NARROW_PAIRS for each in runners)
    others = [each for each in (*rivals, baseline) if each is not None and each is not best]
    return all(_is_narrow(each, best) for each in others)


def _is_narrow(one: Runner, other: Runner) -> bool:
    pairs = pairs_of(one.processes, other.processes)
    if pairs.undisturbed < MIN_NARROW_PAIRS:
        return False
    ratio = _interval(one, other)
    if ratio is None:
        return False
    half = math.log(ratio.high / ratio.low) / 2
    distance = abs(math.log(ratio.value)) * SHARE_OF_DISTANCE
    return half <= min(max(distance, NARROW), NARROW_FAR) or pairs.undisturbed >= MAX_PAIRS


def _interval(one: Runner, other: Runner) -> Interval | None:
    """How many times as slow `one` is as `other`; None where that cannot be told yet."""
    try:
        return compare_processes(one.processes, other.processes)
    except NotMeasurable:
        return None


def _best(runners: Iterable[Runner]) -> Runner | None:
    return min(runners, key=lambda each: each.level_s, default=None)
