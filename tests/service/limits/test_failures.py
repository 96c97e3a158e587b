"""Failed authentications: who must wait, at one server and over all of a database."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest
import sqlalchemy as sa

from pipeline.errors import StoreError
from service.limits.failures import (
    MAX_ADDRESSES,
    MAX_FAILURES,
    RETRY_S,
    WINDOW_S,
    FailedAttempts,
    Failures,
    SharedAttempts,
)
from service.storage.database import Database
from service.storage.tables import failed_sign_ins as table


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


def at_two_servers(url: str, story: Callable[[Failures, Failures], Awaitable[None]]) -> None:
    async def run() -> None:
        with closing(Database(url)) as one, closing(Database(url)) as two:
            failures = [Failures(SharedAttempts(each)) for each in (one, two)]
            try:
                await story(*failures)
            finally:
                for each in failures:
                    await each.close()

    asyncio.run(run())


def test_the_failures_at_two_servers_count_together(postgresql: str) -> None:
    async def story(one: Failures, two: Failures) -> None:
        both = [await each.add("10.0.0.1") for _ in range(MAX_FAILURES // 2) for each in (one, two)]
        assert both == [0.0] * MAX_FAILURES
        for each in (one, two):
            assert 0 < await each.add("10.0.0.1") <= WINDOW_S
            assert await each.add("10.0.0.2") == 0.0
        with closing(Database(postgresql)) as database, database.write() as rows:
            count = rows.scalar(sa.select(table.c.count).where(table.c.network == "10.0.0.1"))
            assert count == MAX_FAILURES, "who must wait is not counted any more"
            rows.execute(sa.update(table).values(begin=table.c.begin - WINDOW_S))
        with closing(Database(postgresql)) as database:
            assert SharedAttempts(database).add("10.0.0.1") == 0.0
            with database.read() as rows:
                found = rows.execute(sa.select(table.c.network, table.c.count)).all()
        assert [tuple(row) for row in found] == [("10.0.0.1", 1)]

    at_two_servers(postgresql, story)


def test_without_the_database_each_server_counts_for_itself_until_it_is_back() -> None:
    class Away(SharedAttempts):
        def __init__(self) -> None:
            self.calls, self.is_away = 0, True

        def add(self, address: str) -> float:
            self.calls += 1
            if self.is_away:
                raise StoreError("cannot use the database", "")
            return 30.0

        def close(self) -> None:
            pass

    async def run() -> None:
        now_s, shared = 0.0, Away()
        failures = Failures(shared, lambda: now_s)
        assert [await failures.add("a") for _ in range(MAX_FAILURES)] == [0.0] * MAX_FAILURES
        assert await failures.add("a") == WINDOW_S
        assert shared.calls == 1, "it is not asked again at once"
        now_s, shared.is_away = RETRY_S, False
        assert await failures.add("b") == 30.0
        now_s += 10
        assert await failures.add("b") == 20.0
        assert shared.calls == 2
        await failures.close()

    asyncio.run(run())
