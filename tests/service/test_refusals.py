"""Refusals: what is recorded of them, in bounded memory."""

from service import refusals
from service.auth import LOCAL, Caller, Source
from service.errors import Forbidden, NotFound, NotOwned, TooLarge
from service.refusals import (
    MAX_ENTRIES,
    MAX_ENTRIES_EACH,
    QUOTA_S,
    Quota,
    entry_of_refusal,
)

ME = Caller("me", ("infer",), "0123456789", Source("10.0.0.1", "r1"))


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
