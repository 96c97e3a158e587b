"""Who stops in a race, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.benchmark import elimination
from pipeline.benchmark.elimination import MAX_PAIRS, Role, Runner, Stop, StopReason, is_decided
from pipeline.measurement.comparison import Processes


def runner(
    label: str,
    medians_s: Sequence[float],
    role: Role = Role.CANDIDATE,
    waiting: Sequence[float] = (),
) -> Runner:
    values = np.asarray(medians_s, dtype=float)
    shares = np.asarray(waiting or [0.0] * len(values))
    processes = Processes(np.arange(len(values)), values, shares)
    return Runner(label, role, processes)


def stops(runners: Sequence[Runner]) -> dict[str, Stop]:
    """Who stops, by label."""
    reasons = elimination.stops(runners)
    return {runner.label: reason for runner, reason in zip(runners, reasons, strict=True) if reason}


def test_after_one_process_only_who_is_far_behind_stops() -> None:
    losers = stops([runner("best", [1.0]), runner("near", [1.5]), runner("far", [2.0])])
    assert losers == {"far": Stop(StopReason.FAR_BEHIND, "best", 2.0)}


@pytest.mark.parametrize(("far", "stopped"), [(1.0, True), (0.8, False)])
def test_three_of_four_rounds_tell_who_is_far_behind(far: float, stopped: bool) -> None:
    """One of the four blocks of the other is stalled, and so favours it."""
    best = np.array([1.0, 1.0, 90.0, 1.0])
    both = [
        Runner(
            label,
            Role.CANDIDATE,
            Processes(np.arange(1), np.array([np.median(blocks)]), np.zeros(1), (blocks,)),
        )
        for label, blocks in (("best", best), ("far", np.full(4, 1.8 * far)))
    ]
    assert bool(stops(both)) == stopped


def test_a_process_that_waited_for_a_cpu_stops_nobody() -> None:
    assert stops([runner("best", [1.0]), runner("far", [9.0], waiting=[0.5])]) == {}
    assert stops([runner("best", [1.0], waiting=[0.5]), runner("far", [9.0])]) == {}


def test_after_two_processes_both_must_be_far_behind() -> None:
    assert "one" not in stops([runner("best", [1.0, 1.0]), runner("one", [9.0, 1.4])])
    assert "both" in stops([runner("best", [1.0, 1.0]), runner("both", [9.0, 1.6])])


def test_baselines_and_candidates_are_held_against_their_own_kind() -> None:
    """The baseline is usually far slower than the best candidate, and needed all the same."""
    losers = stops(
        [
            runner("eager", [9.0], Role.BASELINE),
            runner("traced", [20.0], Role.BASELINE),
            runner("best", [1.0]),
            runner("compared", [30.0], Role.COMPARED),
        ]
    )
    assert list(losers) == ["traced"]


def test_once_the_interval_tells_who_is_certainly_slower_stops() -> None:
    best = runner("best", [1.0, 1.02, 0.99, 1.01])
    slower = runner("slower", [1.2, 1.21, 1.19, 1.22])
    equal = runner("equal", [1.02, 1.01, 1.0, 1.02])
    losers = stops([best, slower, equal])
    assert list(losers) == ["slower"]
    assert losers["slower"].reason is StopReason.SLOWER
    assert losers["slower"].times_slower == pytest.approx(1.2, rel=0.02)


def test_who_cannot_win_is_shown_by_one_undisturbed_process() -> None:
    shown = runner("shown", [1.0], Role.SHOWN)
    waited = runner("waited", [1.0], Role.SHOWN, waiting=[0.4])
    twice = runner("twice", [1.0, 1.0], Role.SHOWN, waiting=[0.4, 0.4])
    assert set(stops([shown, waited, twice])) == {"shown", "twice"}


def noisy(
    label: str, level_s: float, spread: float, count: int, role: Role = Role.CANDIDATE
) -> Runner:
    random = np.random.default_rng(len(label))
    return runner(label, list(level_s * np.exp(random.normal(0, spread, count))), role)


def test_a_race_ends_once_its_intervals_are_narrow() -> None:
    baseline, best, rival = (noisy(name, level, 0.01, 6, role) for name, level, role in FIELD)
    assert is_decided([baseline, best, rival])
    assert not is_decided([noisy(name, level, 0.2, 6, role) for name, level, role in FIELD])


FIELD = (
    ("baseline", 9.0, Role.BASELINE),
    ("best", 1.0, Role.CANDIDATE),
    ("a rival", 1.02, Role.CANDIDATE),
)


def test_fewer_than_six_pairs_decide_nothing_and_sixteen_everything() -> None:
    assert not is_decided([noisy(name, level, 0.001, 5, role) for name, level, role in FIELD])
    assert is_decided([noisy(name, level, 0.15, MAX_PAIRS, role) for name, level, role in FIELD])


def test_a_ratio_far_from_one_need_not_be_as_narrow() -> None:
    far = [noisy("baseline", 9.0, 0.06, 6, Role.BASELINE), noisy("best", 1.0, 0.06, 6)]
    near = [noisy("baseline", 1.05, 0.06, 6, Role.BASELINE), noisy("best", 1.0, 0.06, 6)]
    assert is_decided(far)
    assert not is_decided(near)


def test_an_engine_alone_gets_its_usual_processes() -> None:
    assert not is_decided([noisy("alone", 1.0, 0.0, 5, Role.BASELINE)])
    assert is_decided([noisy("alone", 1.0, 0.0, 6, Role.BASELINE)])
    assert not is_decided([noisy("without a baseline", 1.0, 0.0, 1)])


def test_disturbed_pairs_are_repeated_before_a_race_ends() -> None:
    quiet = runner("best", [1.0] * 6)
    stalled = runner("baseline", [2.0, 2.0, 80.0, 2.0, 2.0, 2.0], Role.BASELINE)
    assert not is_decided([quiet, stalled])
    assert is_decided(
        [
            runner("best", [1.0] * 7),
            runner("baseline", [2.0, 2.0, 80.0, 2.0, 2.0, 2.0, 2.0], Role.BASELINE),
        ]
    )


@pytest.mark.parametrize(
    ("level_s", "spread", "decided"),
    [
        (0.9, 0.005, True),
        (0.9, 0.013, False),  # narrow enough for a verdict, too wide for a promise
        (0.5, 0.013, True),  # of a large gain the same error is a small share
        (2.0, 0.013, True),  # nothing is promised
    ],
)
def test_a_change_needs_an_interval_that_a_promise_can_rest_on(
    level_s: float, spread: float, decided: bool
) -> None:
    baseline = noisy("baseline", 1.0, spread, 6, Role.BASELINE)
    change = noisy("change", level_s, spread, 6, Role.CHANGE)
    assert is_decided([baseline, change]) == decided
    usual = noisy("change", level_s, spread, 6, Role.COMPARED)
    assert is_decided([baseline, usual])


def test_every_change_is_compared_with_the_baseline() -> None:
    baseline = noisy("baseline", 1.0, 0.005, 6, Role.BASELINE)
    narrow, wide = (
        noisy(name, 0.8, spread, 6, Role.CHANGE) for name, spread in (("a", 0.005), ("wide", 0.1))
    )
    assert is_decided([baseline, narrow])
    assert not is_decided([baseline, narrow, wide])
    assert not any(elimination.stops([baseline, narrow, wide])), "all run to the end"
