"""Waiting for a device: given in turn, given back when the waiter goes, and contended after the
patience.
"""

import asyncio
import datetime as dt

import pytest

from service.devices.leases import Leases, steady_now
from service.devices.policy import Devices, Lease

BUILD, MEASURE = Lease("cpu", "build", "a"), Lease("cpu", "measure", "b")


class Clock:
    def __init__(self) -> None:
        self.now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

    def __call__(self) -> dt.datetime:
        return self.now


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_lease_is_given_when_the_other_is_given_back() -> None:
    async def story() -> None:
        leases = Leases(Devices(("cpu",)))
        assert await leases.ask(BUILD) == BUILD
        request = asyncio.ensure_future(leases.ask(MEASURE))
        await settled()
        assert not request.done()
        leases.give_back("a", "cpu")
        assert await request == MEASURE
        leases.give_back("b", "cpu", "measure")
        assert leases.devices.held == ()

    asyncio.run(story())


def test_a_job_measures_while_it_holds_the_device_to_build() -> None:
    async def story() -> None:
        leases = Leases(Devices(("cpu",)))
        await leases.ask(BUILD)
        await leases.ask(Lease("cpu", "measure", "a"))
        leases.give_back("a", "cpu", "measure")
        assert leases.devices.held == (BUILD,)

    asyncio.run(story())


def test_who_goes_away_waits_no_more() -> None:
    async def story() -> None:
        leases = Leases(Devices(("cpu",)))
        await leases.ask(BUILD)
        request = asyncio.ensure_future(leases.ask(MEASURE))
        await settled()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert (leases.devices.waiting, leases.devices.held) == ((), (BUILD,))

    asyncio.run(story())


def test_measuring_beside_what_serves_is_contended_when_the_patience_is_over() -> None:
    async def story() -> None:
        clock = Clock()
        leases = Leases(Devices(("cpu",)), clock)
        leases.serve("s", "cpu")
        request = asyncio.ensure_future(leases.ask(MEASURE, patience_s=0.01))
        await settled()
        assert not request.done()
        clock.now += dt.timedelta(seconds=1)
        assert (await request).contended
        leases.close()

    asyncio.run(story())


def test_serving_that_begins_under_a_measurement_is_told_in_the_end() -> None:
    async def story() -> None:
        leases = Leases(Devices(("cpu",)))
        assert not (await leases.ask(MEASURE)).contended
        leases.serve("s", "cpu")
        leases.give_back("s", "cpu")
        measured = leases.measured("b", "cpu")
        assert measured is not None
        assert measured.contended
        assert leases.measured("b", "cpu") is None
        assert leases.devices.held == ()

    asyncio.run(story())


def test_a_jump_of_the_clock_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that asked while the host's clock was 400 days ahead waited for those 400 days."""
    monkeypatch.setattr("time.time", lambda: 1e9)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    before = steady_now()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert steady_now() == before
    monkeypatch.setattr("time.monotonic", lambda: 7.5)
    assert (steady_now() - before).total_seconds() == 2.5
