"""Refusals: who must wait, and what is recorded of them; both in bounded memory."""

import pytest

from service import refusals
from service.auth import LOCAL, Caller, Source
from service.errors import Forbidden, NotFound, NotOwned, TooLarge
from service.refusals import (
    MAX_ADDRESSES,
    MAX_ENTRIES,
    MAX_ENTRIES_EACH,
    MAX_FAILURES,
    QUOTA_S,
    WINDOW_S,
    FailedAttempts,
    Quota,
    entry_of_refusal,
)

ME = Caller("me", ("infer",), "0123456789", Source("10.0.0.1", "r1"))


def test_an_address_waits_after_too_many_failures_and_no_other_does() -> None:
    attempts = FailedAttempts()
    assert [attempts.add("10.0.0.1", 5.0) for _ in range(MAX_FAILURES)] == [0.0] * MAX_FAILURES
    assert attempts.add("10.0.0.1", 6.0) == WINDOW_S - 1
    assert attempts.add("10.0.0.2", 6.0) == 0.0
    assert attempts.add("10.0.0.1", 5.0 + WINDOW_S) == 0.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("", "10.0.0.1", False),
    ],
)
def test_the_addresses_of_one_client_count_together(one: str, other: str, same: bool) -> None:
    attempts = FailedAttempts()
    for _ in range(MAX_FAILURES):
        attempts.add(one, 0.0)
    assert (attempts.add(other, 0.0) > 0) is same


def test_few_addresses_are_remembered() -> None:
    attempts = FailedAttempts()
    for number in range(2 * MAX_ADDRESSES):
        attempts.add(f"address {number}", 0.0)
    assert len(attempts) == MAX_ADDRESSES


def test_few_refusals_are_recorded_and_the_next_tells_how_many_were_not() -> None:
    quota = Quota()
    taken = [quota.take("a", 0.0) for _ in range(MAX_ENTRIES_EACH + 5)]
    assert taken == [0] * MAX_ENTRIES_EACH + [None] * 5
    assert quota.take("b", 0.0) == 5
    others = [quota.take(str(number), 1.0) for number in range(MAX_ENTRIES)]
    assert len(others) - others.count(None) == MAX_ENTRIES - MAX_ENTRIES_EACH - 1
    assert quota.take("a", QUOTA_S) == others.count(None)


def test_what_is_recorded_of_refused_requests() -> None:
    def action(caller: Caller, request: str, status: int, error: Exception | None) -> str | None:
        entry = entry_of_refusal(caller, request, status, error)
        return entry.action if entry else None

    path = "GET /jobs/1"
    assert action(ME, path, 403, Forbidden("no")) == "access.refused"
    assert action(ME, path, 404, NotOwned("no")) == "access.refused"
    assert action(ME, path, 404, NotFound("no")) is None
    assert action(ME, refusals.UPLOAD, 413, TooLarge("no")) == "upload.refused"
    assert action(ME, refusals.UPLOAD, 413, None) == "upload.refused"
    assert action(Caller("", ()), refusals.UPLOAD, 401, None) is None
    entry = entry_of_refusal(LOCAL, "GET /" + 1000 * "x", 403, Forbidden("no scope"))
    assert entry is not None
    assert (len(entry.object), entry.details) == (200, {"status": 403, "reason": "no scope"})
