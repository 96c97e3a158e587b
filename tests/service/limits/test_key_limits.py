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


def test_a_request_takes_its_most_tokens_until_it_ends() -> None:
    async def story() -> None:
        clock = Clock()
        of_key = limits(clock, max_tokens_per_minute=100, max_tokens_per_day=150)
        minute, day = "max_tokens_per_minute", "max_tokens_per_day"
        async with of_key.tokens("a", 70, lambda: 30):
            assert (await of_key.usage("a")).tokens == {minute: 70, day: 70}
            with pytest.raises(TooMany, match=r"used 70 tokens .* minute, and .* 31 more") as error:
                await of_key.tokens("a", 31, lambda: 0).__aenter__()
            assert error.value.headers == {"Retry-After": "61"}
            assert "lower `max_tokens`" in error.value.next_step
            async with of_key.tokens("b", 100, lambda: 100):
                pass
        assert (await of_key.usage("a")).tokens == {minute: 30, day: 30}
        with pytest.raises(TooMany) as error:  # no wait helps
            await of_key.tokens("c", 101, lambda: 0).__aenter__()
        assert error.value.headers == {}

        async with of_key.tokens("a", 70, lambda: 70):
            await of_key.check_tokens("c")
        with pytest.raises(TooMany, match=r"expected at most 100 \(`max_tokens_per_minute`\)"):
            await of_key.check_tokens("a")
        clock.now_ns += 60 * SECOND_NS
        assert (await of_key.usage("a")).tokens == {minute: 0, day: 100}
        with pytest.raises(TooMany, match="in this day") as error:
            await of_key.tokens("a", 51, lambda: 0).__aenter__()
        assert error.value.headers == {"Retry-After": str(86400 - 60 + 1)}
        async with of_key.tokens("a", 50, lambda: 0):
            clock.now_ns += 60 * SECOND_NS
            async with of_key.tokens("d", 50, lambda: 50):
                pass
        assert (await of_key.usage("a")).tokens[day] == 100
        with pytest.raises(OSError, match="gone"):
            async with of_key.tokens("a", 50, lambda: 20):
                raise OSError("gone")
        assert (await of_key.usage("a")).tokens == {minute: 20, day: 120}

    asyncio.run(story())


def test_tokens_of_a_window_that_has_ended_are_not_given_back_to_the_next() -> None:
    async def story() -> None:
        clock = Clock()
        of_key = limits(clock, max_tokens_per_minute=100)
        async with of_key.tokens("a", 90, lambda: 10):
            clock.now_ns += 60 * SECOND_NS
            async with of_key.tokens("a", 50, lambda: 50):
                pass
        assert (await of_key.usage("a")).tokens == {"max_tokens_per_minute": 50}

    asyncio.run(story())


def test_one_of_several_servers_gives_a_share_of_the_tokens() -> None:
    of_key = limits(Clock(), max_tokens_per_minute=100)
    return_unused = of_key.take_share_of_tokens("a", 50, 2)
    with pytest.raises(TooMany, match="expected at most 50"):
        of_key.take_share_of_tokens("a", 1, 2)
    return_unused(20)
    of_key.take_share_of_tokens("a", 20, 2)
