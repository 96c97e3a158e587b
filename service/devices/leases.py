"""Waiting for the use of a device: the shell around policy.py, shared by all who build, serve or
measure in this server.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable

from service.devices.policy import Devices, Lease, Use

Clock = Callable[[], dt.datetime]


def utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Leases:
    """All leases of one host. Lives in one event loop."""

    def __init__(self, devices: Devices, clock: Clock = utc_now) -> None:
        self.devices = devices
        self._clock = clock
        self._waiting: dict[tuple[str, str, Use], asyncio.Future[Lease]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, lease: Lease, patience_s: float = 0.0) -> Lease:
        """Wait until the lease is given; KeyError for a device that is not here."""
        self.devices = self.devices.ask(lease, self._clock(), patience_s)
        key = (lease.holder, lease.device, lease.use)
        given: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting[key] = given
        self._grant()
        try:
            return await given
        except asyncio.CancelledError:
            self._waiting.pop(key, None)
            self.give_back(*key)
            raise

    def serve(self, holder: str, device: str) -> None:
        """Have a lease to serve, now; KeyError for a device that is not here."""
        self.devices = self.devices.serve(holder, device)

    def measured(self, holder: str, device: str) -> Lease | None:
        """Give this holder's lease to measure back: as it was in the end."""
        held = next(
            (
                lease
                for lease in self.devices.held
                if (lease.holder, lease.device, lease.use) == (holder, device, "measure")
            ),
            None,
        )
        self.give_back(holder, device, "measure")
        return held

    def give_back(self, holder: str, device: str, use: Use | None = None) -> None:
        """End this holder's leases on a device, and its wishes for them."""
        self.devices = self.devices.give_back(holder, device, use)
        self._grant()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer:
            self._timer.cancel()

    def _grant(self) -> None:
        now = self._clock()
        self.devices, given = self.devices.grant(now)
        for lease in given:
            future = self._waiting.pop((lease.holder, lease.device, lease.use), None)
            if future and not future.done():
                future.set_result(lease)
        self.close()
        later = self.devices.next_time()
        if later and later > now:
            self._timer = asyncio.get_running_loop().call_later(
                (later - now).total_seconds(), self._grant
            )
