"""Decide which contestants stop after a generation, and when a race ends. Pure functions.

Every contestant gets one process. One that is far behind the best of its kind stops there. The
others get more processes, until the intervals that decide the verdict are narrow. The width of an
interval decides, never whether it contains 1: otherwise the race would find differences between
equal engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipeline.measurement.comparison import (
    MAX_WAITING,
    MIN_PAIRS,
    NotMeasurable,
    Pairs,
    Processes,
    compare_processes,
    pairs_of,
)
from pipeline.measurement.statistics import Interval

FAR_BEHIND = 1.5  # times as slow as the best: an engine stops after one process
NEAR = 1.05  # an engine that is certainly slower by more than this factor cannot win
MIN_NARROW_PAIRS = 6  # pairs that an interval needs to end a race: with fewer, its width is luck
MAX_PAIRS = 16  # of an engine; more hardly narrow an interval

NARROW = math.log(1.05)
"""Half the width, in logarithms, of an interval that is narrow enough for any ratio."""

NARROW_FAR = math.log(1.15)
"""Half the width of the widest interval that is narrow enough for a ratio far from 1."""

NARROW_PROMISE = math.log(1.02)
"""Half the width for a change that may be advised. A new measurement has the same error, so that a
promise is wider by sqrt(2): then a gain of 5 % is certainly above 2 %.
"""

SHARE_OF_DISTANCE = 1 / 3
"""Between the two: largest half width as a share of the ratio's distance from 1."""


class Role(StrEnum):
    """The role of an engine in the race."""

    BASELINE = "baseline"  # the user's current engine
    CANDIDATE = "candidate"  # may win
    COMPARED = "compared"  # runs to the end, because the report needs its ratio
    CHANGE = "change"  # the baseline with one change, whose gain is promised
    SHOWN = "shown"  # cannot win: one process shows its speed


ELIMINATED = (Role.BASELINE, Role.CANDIDATE)
"""Engines of these roles are compared with the best engine of the same role."""


class StopReason(StrEnum):
    """Reason for the stop of an engine."""

    FAR_BEHIND = "far behind"
    SLOWER = "slower"
    SHOWN = "shown"


@dataclass(frozen=True, slots=True)
class Stop:
    """The stop of an engine: it gets no further processes."""

    reason: StopReason
    best: str = ""  # label of the engine that was faster
    times_slower: float = 0.0


@dataclass(frozen=True, slots=True)
class Runner:
    """A contestant in the race, with its processes' results at the first shape."""

    label: str
    role: Role
    processes: Processes

    @property
    def level_s(self) -> float:
        return self.processes.level_s


def stops(runners: Sequence[Runner]) -> list[Stop | None]:
    """Return the stop of each runner, or None for a runner that continues."""
    best = {role: _best_of_role(runners, role) for role in ELIMINATED}
    return [_stop(best.get(runner.role), runner) for runner in runners]


def _stop(best: Runner | None, runner: Runner) -> Stop | None:
    """Return the stop of a contestant, or None. `best` is the best of its role, if any."""
    if runner.role is Role.SHOWN:
        return Stop(StopReason.SHOWN) if _has_been_shown(runner) else None
    return None if best is None or best is runner else _stop_behind(best, runner)


def _has_been_shown(runner: Runner) -> bool:
    """Return True after one process, or after two if the first one waited for a CPU."""
    waiting = runner.processes.waiting
    return waiting.size > 1 or bool((waiting <= MAX_WAITING).all())


def _stop_behind(best: Runner, other: Runner) -> Stop | None:
    """Return the stop of `other` if it is too slow beside `best`, or None."""
    pairs = pairs_of(other.processes, best.processes)
    if pairs.undisturbed >= MIN_PAIRS:
        slower = _interval(other, best)
        if slower is not None and slower.low > NEAR:
            return Stop(StopReason.SLOWER, best.label, slower.value)
        return None
    if not pairs.has_waited.all() and _surely_behind(pairs) > math.log(FAR_BEHIND):
        return Stop(StopReason.FAR_BEHIND, best.label, other.level_s / best.level_s)
    return None


def _surely_behind(pairs: Pairs) -> float:
    """Return by how much one engine was at least slower in three of four rounds, in logarithms.

    Of several pairs, the one that favours it most decides.
    """
    return min(float(np.sort(rounds)[rounds.size // 4]) for rounds in pairs.logs_of_rounds)


def is_decided(runners: Sequence[Runner]) -> bool:
    """Return True if the intervals that decide the verdict are narrow.

    These are the ratios of the best candidate to the best baseline, and to every other engine that
    is still in the race. Where changes of the baseline race, they are those of each change to it.
    """
    baseline = _best_of_role(runners, Role.BASELINE)
    changes = [runner for runner in runners if runner.role is Role.CHANGE]
    if baseline is not None and changes:
        return all(_is_narrow(baseline, change) for change in changes)
    rivals = [runner for runner in runners if runner.role in (Role.CANDIDATE, Role.COMPARED)]
    best = _best_of_role(rivals, Role.CANDIDATE) or _best(rivals)
    if best is None or (baseline is None and len(rivals) == 1):  # there is nothing to compare
        return all(runner.processes.medians_s.size >= MIN_NARROW_PAIRS for runner in runners)
    opponents = [rival for rival in rivals if rival is not best]
    if baseline is not None:
        opponents.append(baseline)
    return all(_is_narrow(opponent, best) for opponent in opponents)


def _is_narrow(one: Runner, other: Runner) -> bool:
    pairs = pairs_of(one.processes, other.processes)
    if pairs.undisturbed < MIN_NARROW_PAIRS:
        return False
    ratio = _interval(one, other)
    if ratio is None:
        return False
    half = math.log(ratio.high / ratio.low) / 2
    return half <= _widest(ratio.value, other.role) or pairs.undisturbed >= MAX_PAIRS


def _widest(ratio: float, role: Role) -> float:
    """Return half the width, in logarithms, of the widest interval that is narrow enough."""
    if role is Role.CHANGE and ratio >= 1:
        return NARROW_PROMISE * ratio  # a gain is a share of the baseline's time
    narrow = NARROW_PROMISE if role is Role.CHANGE else NARROW
    return min(max(abs(math.log(ratio)) * SHARE_OF_DISTANCE, narrow), NARROW_FAR)


def _interval(one: Runner, other: Runner) -> Interval | None:
    """Return how many times as slow as `other` `one` is, or None if not measurable yet."""
    try:
        return compare_processes(one.processes, other.processes)
    except NotMeasurable:
        return None


def _best_of_role(runners: Iterable[Runner], role: Role) -> Runner | None:
    return _best(runner for runner in runners if runner.role is role)


def _best(runners: Iterable[Runner]) -> Runner | None:
    return min(runners, key=lambda runner: runner.level_s, default=None)
