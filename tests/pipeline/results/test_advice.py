"""What follows from a measured ratio, and from all attempts together."""

from __future__ import annotations

import math

import pytest

from pipeline.measurement.statistics import Interval
from pipeline.results.advice import Advice, Attempt, Outcome, judged, promise, sort_key

ATTEMPT = Attempt(rule="r", reason="found", how="key=value", outcome=Outcome.NOT_NEEDED)


def attempt(outcome: Outcome, **fields: object) -> Attempt:
    return ATTEMPT.model_copy(update={"outcome": outcome, **fields})


def advice(*attempts: Attempt) -> Advice:
    return Advice(label="e", sizes={}, latency_s=1e-3, attempts=attempts)


def test_a_promise_is_wider_than_the_interval_by_the_error_of_the_second_measurement() -> None:
    found = promise(Interval(value=1.2, low=1.2 / 1.01, high=1.2 * 1.01))
    assert found.value == 1.2
    assert math.log(found.high / 1.2) == pytest.approx(math.sqrt(2) * math.log(1.01))
    assert math.log(1.2 / found.low) == pytest.approx(math.sqrt(2) * math.log(1.01))


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (1.09, 1.11, Outcome.ADVISED),
        (1.021, 1.03, Outcome.TOO_SMALL),  # the promise begins below 2 %
        (1.0, 1.01, Outcome.TOO_SMALL),
        (0.8, 0.82, Outcome.TOO_SMALL),
        (0.08, 0.2, Outcome.TOO_SMALL),  # certainly slower, though nobody knows by how much
        (1.0, 1.2, Outcome.TOO_WIDE),
    ],
)
def test_only_a_certain_gain_is_advised(low: float, high: float, outcome: Outcome) -> None:
    found = judged(ATTEMPT, Interval(value=math.sqrt(low * high), low=low, high=high), "too short")
    assert found.outcome is outcome
    assert found.detail.endswith("too short") == (outcome is Outcome.TOO_WIDE)


def test_a_gain_is_a_share_of_the_latency() -> None:
    found = attempt(Outcome.ADVISED, ratio=Interval(value=2.0, low=1.25, high=4.0)).gain
    assert found is not None
    assert (found.value, found.high) == (0.5, 0.75)
    assert found.low == pytest.approx(0.2)
    assert ATTEMPT.gain is None


def test_the_conclusion_tells_no_gain_from_no_measurement() -> None:
    small, failed = attempt(Outcome.TOO_SMALL), attempt(Outcome.UNMEASURED)
    assert advice().conclusion == "No rule found anything to change."
    assert advice(small).conclusion == "Nothing above 2 %: 1 changes were tried."
    assert "1 of 2 could not be measured" in advice(small, failed).conclusion
    assert advice(small, attempt(Outcome.ADVISED)).conclusion == "1 of 2 changes are advised."


def test_the_largest_certain_gain_comes_first_and_what_was_not_measured_last() -> None:
    def ratio(low: float) -> Interval:
        return Interval(value=low, low=low, high=low)

    less, more = (attempt(Outcome.ADVISED, ratio=ratio(low)) for low in (1.1, 1.3))
    none, slower = attempt(Outcome.FAILED), attempt(Outcome.TOO_SMALL, ratio=ratio(0.9))
    assert sorted((none, less, slower, more), key=sort_key) == [more, less, slower, none]
