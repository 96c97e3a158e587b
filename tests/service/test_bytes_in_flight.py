"""The budget of the bytes of all unfinished requests."""

import pytest

from service.bytes_in_flight import BytesInFlight
from service.errors import Unavailable, answer_to


def test_what_does_not_fit_is_refused_and_takes_nothing() -> None:
    refusals: list[None] = []
    budget = BytesInFlight(100, lambda: refusals.append(None))
    with budget.share() as first:
        first.grow(60)
        first.grow(0)
        with budget.share() as second:
            second.grow(40)
            with pytest.raises(Unavailable, match="more than 100 bytes together") as error:
                second.grow(1)
            assert (budget.held, second.count, len(refusals)) == (100, 40, 1)
        assert budget.held == 60
        first.grow(40)
    assert budget.held == 0
    answer = answer_to(error.value)
    assert (answer.status, answer.headers) == (503, {"Retry-After": "5"})
    assert "`max_bytes_in_flight`" in answer.body["next"]
