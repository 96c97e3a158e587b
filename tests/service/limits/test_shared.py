"""Limits of keys over several servers on one database."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline.errors import StoreError
from service.errors import TooMany
from service.jobs.nodes import Nodes
from service.limits.counts import BURST_S, HOUR_S, Counts
from service.limits.shared import LIFE_S, RETRY_S, SharedLimits
from service.settings import Settings
from service.storage.database import Database
from service.storage.tables import key_counts, nodes
from tests.service.builders.postgresql import refusing_connections

SILENT_S = 1000.0
Open = Callable[..., SharedLimits]


@pytest.fixture
def opened(postgresql: str) -> Iterator[list[Database]]:
    """Databases that are closed at the end."""
    databases = list[Database]()
    yield databases
    for database in databases:
        database.close()


@pytest.fixture
def server(postgresql: str, opened: list[Database]) -> Open:
    """Opens the limits of one more live server."""

    def open_server(clock: Callable[[], float] = time.monotonic, **limits: Any) -> SharedLimits:
        database = Database(postgresql)
        opened.append(database)
        name = f"server {len(opened)}"
        Nodes(database, name, "server").send_heartbeat({})
        settings = Settings(home=Path("/h"), **limits)
        return SharedLimits(settings, Counts(database, name, SILENT_S), clock)

    return open_server


def test_what_one_server_takes_the_others_lack(database: Database) -> None:
    one, two = (Counts(database, name, SILENT_S) for name in ("one", "two"))
    first = one.take_requests("a", 10, 8)
    assert (first.count, first.used) == (8, 0)
    assert 0 < two.take_requests("a", 10, 8).count < 8
    none = two.take_requests("a", 1, 8)
    assert (none.count, none.left_s > 0) == (0, True)
    assert two.take_requests("b", 10, 8).count == 8


def test_an_hour_of_uploads_begins_with_the_first(database: Database) -> None:
    counts = Counts(database, "one", SILENT_S)
    assert counts.take_bytes("a", 100, 0, 0).used == 0
    assert counts.take_bytes("a", 100, 60, 80).count == 80
    refused = counts.take_bytes("a", 100, 21, 30)
    assert (refused.count, refused.used, refused.left_s <= HOUR_S) == (0, 80, True)
    assert counts.take_bytes("a", 100, 20, 30).count == 20
    with database.write() as rows:
        rows.execute(sa.update(key_counts).values(hour_begin=key_counts.c.hour_begin - HOUR_S))
    assert counts.usage("a", None)[1] == 0
    assert counts.take_bytes("a", 100, 1, 100).count == 100


def test_requests_of_all_servers_stay_within_the_bound_and_none_starves(server: Open) -> None:
    rate = 50

    async def story() -> None:
        servers = [server(max_requests_per_s=rate) for _ in range(3)]
        passed, begin_s = [0] * len(servers), time.monotonic()

        async def send(index: int) -> None:
            while min(passed) < 20:
                try:
                    await servers[index].take_request("a")
                    passed[index] += 1
                except TooMany:
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(send(index) for index in range(len(servers)) for _ in range(4)))
        bound = rate * (time.monotonic() - begin_s + LIFE_S + BURST_S)
        assert sum(passed) <= bound
        for limits in servers:
            await limits.close()

    asyncio.run(story())


def test_the_database_is_not_asked_for_each_request(server: Open) -> None:
    asked = []

    class Recording(Counts):
        def take_requests(self, key: str, rate: int, most: int) -> Any:
            asked.append(most)
            return super().take_requests(key, rate, most)

    async def story() -> None:
        limits = server(lambda: 7.0, max_requests_per_s=10_000)  # no time passes
        limits._counts = Recording(*vars_of(limits._counts))
        for _ in range(1000):
            await limits.take_request("a")
        assert asked[:2] == [1, 100]
        assert len(asked) < 10
        await limits.close()

    asyncio.run(story())


def vars_of(counts: Counts) -> tuple[Database, str, float]:
    return counts._database, counts._server, counts._silent_s


def test_exactly_the_bytes_of_the_limit_arrive_at_all_servers_together(server: Open) -> None:
    async def story() -> None:
        settings = {"max_upload_bytes": 10_000, "max_upload_bytes_per_hour": 10_000}
        one, two = server(**settings), server(**settings)
        await one.check_upload("a", 10_000)
        for limits in (one, two):
            for _ in range(7):
                await limits.take_upload("a", 700)
        for limits in (one, two):
            with pytest.raises(TooMany, match="expected at most 10000"):
                await limits.check_upload("a", 700)
            with pytest.raises(TooMany, match="and 700 more come") as error:
                await limits.take_upload("a", 700)
            assert 0 < int(error.value.headers["Retry-After"]) <= HOUR_S + 1
        await two.take_upload("b", 700)
        assert 9800 <= (await one.usage("a")).uploaded_bytes <= 10_000
        await one.close()
        await two.close()

    asyncio.run(story())


def test_streams_of_all_servers_together_are_limited(server: Open, opened: list[Database]) -> None:
    async def story() -> None:
        one, two, gone = (server(max_streams=2) for _ in range(3))
        async with one.stream("a"), two.stream("a"):
            for limits in (one, two):
                with pytest.raises(TooMany, match="2 open streams, expected at most 2"):
                    await limits.stream("a").__aenter__()
                assert (await limits.usage("a")).streams == 2
        await until_open(one, 0)
        async with AsyncExitStack() as streams:
            for _ in range(2):
                await streams.enter_async_context(gone.stream("a"))
            with pytest.raises(TooMany):
                await one.stream("a").__aenter__()
            with opened[0].write() as rows:
                dead = sa.update(nodes).where(nodes.c.id == "server 3")
                rows.execute(dead.values(heartbeat_at=0.0))
            async with one.stream("a"):
                assert (await one.usage("a")).streams == 1
        for limits in (one, two, gone):
            await limits.close()

    asyncio.run(story())


async def until_open(limits: SharedLimits, count: int) -> None:
    """Wait: the end of a stream is stored after it."""
    while (await limits.usage("a")).streams != count:
        await asyncio.sleep(0.01)


def test_without_the_database_each_server_gives_its_share(server: Open, postgresql: str) -> None:
    now_s = 7.0

    async def passing(limits: SharedLimits) -> int:
        for count in range(100):
            try:
                await limits.take_request("a")
            except TooMany:
                return count
        raise AssertionError

    async def story() -> None:
        nonlocal now_s
        settings = {"max_requests_per_s": 10, "max_streams": 5, "max_tokens_per_day": 100}
        one, two = (server(lambda: now_s, **settings) for _ in range(2))
        for limits in (one, two):
            await limits.take_request("a")
        with refusing_connections(postgresql):
            for limits in (one, two):
                assert await passing(limits) == 5
            async with AsyncExitStack() as streams:
                for _ in range(2):
                    await streams.enter_async_context(one.stream("a"))
                with pytest.raises(TooMany):
                    await one.stream("a").__aenter__()
            async with one.tokens("a", 50, lambda: 0):
                with pytest.raises(TooMany, match="expected at most 50"):
                    await one.check_tokens("a")
            with pytest.raises(StoreError):
                await one.take_upload("a", 1)
        now_s += RETRY_S
        await one.take_request("a")  # asks again, beside this request
        while one._retry_s is not None:
            await asyncio.sleep(0.01)
        assert (await one.usage("a")).requests >= 1
        for limits in (one, two):
            await limits.close()

    asyncio.run(story())


def test_tokens_of_all_servers_together_are_limited(server: Open) -> None:
    async def story() -> None:
        settings = {"max_tokens_per_minute": 100, "max_tokens_per_day": 1000}
        one, two = server(**settings), server(**settings)
        async with one.tokens("a", 70, lambda: 30), two.tokens("a", 30, lambda: 30):
            for limits in (one, two):
                with pytest.raises(TooMany, match=r"100 tokens .* in this minute") as error:
                    await limits.check_tokens("a")
                assert 0 < int(error.value.headers["Retry-After"]) <= 61
            await two.check_tokens("b")
            shown = (await two.usage("a")).tokens
            assert shown == {"max_tokens_per_minute": 100, "max_tokens_per_day": 100}
        for limits in (one, two):  # what was not used is given back after the request
            while (await limits.usage("a")).tokens["max_tokens_per_day"] != 60:
                await asyncio.sleep(0.01)
        async with two.tokens("a", 40, lambda: 0):
            with pytest.raises(TooMany):
                await one.tokens("a", 1, lambda: 0).__aenter__()
        await one.close()
        await two.close()

    asyncio.run(story())


def test_without_limits_tokens_ask_no_database(server: Open, postgresql: str) -> None:
    async def story() -> None:
        limits = server()
        with refusing_connections(postgresql):
            await limits.check_tokens("a")
            async with limits.tokens("a", 10**9, lambda: 10**9):
                pass
            assert limits._retry_s is None
        await limits.close()

    asyncio.run(story())
