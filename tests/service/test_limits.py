"""Limits of keys: what is counted, what is refused, and what a refusal says."""

from pathlib import Path

import pytest

from service.errors import TooMany
from service.limits import HOUR_NS, SECOND_NS, KeyLimits
from service.settings import Settings


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5 * HOUR_NS

    def __call__(self) -> int:
        return self.now_ns


def limits(clock: Clock, **settings: int) -> KeyLimits:
    return KeyLimits(Settings(home=Path("/h"), **settings), clock)  # type: ignore[arg-type]


def test_a_second_of_requests_may_come_at_once_and_then_one_in_each_interval() -> None:
    clock = Clock()
    of_key = limits(clock, max_requests_per_s=4)
    for _ in range(4):
        of_key.take_request("a")
    with pytest.raises(TooMany, match=r"expected at most 4 \(`max_requests_per_s`\)") as error:
        of_key.take_request("a")
    assert error.value.headers == {"Retry-After": "1"}
    assert (of_key.requests("a"), of_key.requests("b")) == (4, 0)
    of_key.take_request("b")
    clock.now_ns += SECOND_NS // 4
    of_key.take_request("a")
    with pytest.raises(TooMany):
        of_key.take_request("a")
    clock.now_ns += SECOND_NS
    assert of_key.requests("a") == 0


def test_without_a_rate_requests_are_not_counted() -> None:
    of_key = limits(Clock())
    for _ in range(10_000):
        of_key.take_request("a")
    assert of_key.requests("a") == 0


def test_uploads_count_for_an_hour_that_begins_with_the_first() -> None:
    clock = Clock()
    of_key = limits(clock, max_upload_bytes=100, max_upload_bytes_per_hour=100)
    of_key.take_upload("a", 60)
    clock.now_ns += HOUR_NS // 2
    of_key.take_upload("a", 40)
    of_key.check_upload("b", 100)
    with pytest.raises(TooMany, match="100 bytes in this hour, and 1 more come; expected") as error:
        of_key.take_upload("a", 1)
    assert error.value.headers == {"Retry-After": "1801"}
    assert "`max_upload_bytes_per_hour`" in error.value.next_step
    assert of_key.uploaded_bytes("a") == 100
    clock.now_ns += HOUR_NS // 2
    assert of_key.uploaded_bytes("a") == 0
    of_key.take_upload("a", 100)


def test_a_stream_counts_until_it_ends() -> None:
    of_key = limits(Clock(), max_streams=1)
    with of_key.stream("a"):
        with pytest.raises(TooMany, match="1 open streams, expected at most 1") as error:
            of_key.stream("a").__enter__()
        assert "Retry-After" not in error.value.headers  # time alone does not help
        with of_key.stream("b"):
            assert (of_key.streams("a"), of_key.streams("b")) == (1, 1)
    assert of_key.streams("a") == 0
    with pytest.raises(OSError, match="gone"), of_key.stream("a"):
        raise OSError("gone")
    assert of_key.streams("a") == 0
