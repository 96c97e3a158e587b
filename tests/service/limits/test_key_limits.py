"""Limits of keys: what is counted, what is refused, and what a refusal says."""

import asyncio
from pathlib import Path

import pytest

from service.errors import TooMany
from service.limits.key_limits import HOUR_NS, SECOND_NS, KeyLimits, Usage
from service.settings import Settings


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5 * HOUR_NS

    def __call__(self) -> int:
        return self.now_ns


def limits(clock: Clock, **settings: int) -> KeyLimits:
    return KeyLimits(Settings(home=Path("/h"), **settings), clock)  # type: ignore[arg-type]


def test_a_second_of_requests_may_come_at_once_and_then_one_in_each_interval() -> None:
    async def story() -> None:
        clock = Clock()
        of_key = limits(clock, max_requests_per_s=4)
        for _ in range(4):
            await of_key.take_request("a")
        with pytest.raises(TooMany, match=r"expected at most 4 \(`max_requests_per_s`\)") as error:
            await of_key.take_request("a")
        assert error.value.headers == {"Retry-After": "1"}
        assert await of_key.usage("a") == Usage(4, 0, 0)
        assert await of_key.usage("b") == Usage(0, 0, 0)
        await of_key.take_request("b")
        clock.now_ns += SECOND_NS // 4
        await of_key.take_request("a")
        with pytest.raises(TooMany):
            await of_key.take_request("a")
        clock.now_ns += SECOND_NS
        assert (await of_key.usage("a")).requests == 0

    asyncio.run(story())


def test_one_of_several_servers_gives_a_share_of_the_requests() -> None:
    clock = Clock()
    of_key = limits(clock, max_requests_per_s=4)
    for servers, most in ((1, 4), (2, 2), (3, 1), (100, 1)):
        for _ in range(most):
            of_key.take_share_of_requests(f"{servers}", servers)
        with pytest.raises(TooMany):
            of_key.take_share_of_requests(f"{servers}", servers)


def test_without_a_rate_requests_are_not_counted() -> None:
    async def story() -> None:
        of_key = limits(Clock())
        for _ in range(10_000):
            await of_key.take_request("a")
        assert (await of_key.usage("a")).requests == 0

    asyncio.run(story())


def test_uploads_count_for_an_hour_that_begins_with_the_first() -> None:
    async def story() -> None:
        clock = Clock()
        of_key = limits(clock, max_upload_bytes=100, max_upload_bytes_per_hour=100)
        await of_key.take_upload("a", 60)
        clock.now_ns += HOUR_NS // 2
        await of_key.take_upload("a", 40)
        await of_key.check_upload("b", 100)
        expected = "100 bytes in this hour, and 1 more come; expected"
        with pytest.raises(TooMany, match=expected) as error:
            await of_key.take_upload("a", 1)
        assert error.value.headers == {"Retry-After": "1801"}
        assert "`max_upload_bytes_per_hour`" in error.value.next_step
        assert (await of_key.usage("a")).uploaded_bytes == 100
        clock.now_ns += HOUR_NS // 2
        assert (await of_key.usage("a")).uploaded_bytes == 0
        await of_key.take_upload("a", 100)

    asyncio.run(story())


def test_a_stream_counts_until_it_ends() -> None:
    async def story() -> None:
        of_key = limits(Clock(), max_streams=1)
        async with of_key.stream("a"):
            with pytest.raises(TooMany, match="1 open streams, expected at most 1") as error:
                await of_key.stream("a").__aenter__()
            assert "Retry-After" not in error.value.headers  # time alone does not help
            async with of_key.stream("b"):
                assert [(await of_key.usage(key)).streams for key in ("a", "b")] == [1, 1]
        assert (await of_key.usage("a")).streams == 0
        with pytest.raises(OSError, match="gone"):
            async with of_key.stream("a"):
                raise OSError("gone")
        assert (await of_key.usage("a")).streams == 0

    asyncio.run(story())
