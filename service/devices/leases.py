"""Leases of devices: the asynchronous shell around policy.py. All builds, deployments and
measurements of this server share it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable

from service.devices.policy import Devices, Lease, Use

Clock = Callable[[], dt.datetime]


def utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def steady_now() -> dt.datetime:
    """A time that no change of the host's clock moves: only its differences mean something."""
    return dt.datetime.fromtimestamp(time.monotonic(), dt.UTC)


class Leases:
    """All leases of one host. Lives in one event loop."""

    def __init__(self, devices: Devices, clock: Clock = steady_now) -> None:
        self.devices = devices
        self._clock = clock
        self._waiting: dict[tuple[str, str, Use], asyncio.Future[Lease]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, lease: Lease, patience_s: float = 0.0) -> Lease:
        """Wait for a lease. KeyError if this host does not have the device."""
        self.devices = self.devices.ask(lease, self._clock(), patience_s)
        key = (lease.holder, lease.device, lease.use)
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting[key] = granted
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            self._waiting.pop(key, None)
            self.give_back(*key)
            raise

    def serve(self, holder: str, device: str) -> None:
        """Take a lease to serve, without waiting. KeyError if this host does not have the
        device.
        """
        self.devices = self.devices.serve(holder, device)

    def measured(self, holder: str, device: str) -> Lease | None:
        """Give back this holder's lease to measure, and return its final state; None if there is
        none.
        """
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
        """End this holder's leases on a device, and its requests for them."""
        self.devices = self.devices.give_back(holder, device, use)
        self._grant()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer:
            self._timer.cancel()

    def _grant(self) -> None:
        now = self._clock()
        self.devices, granted = self.devices.grant(now)
        for lease in granted:
            future = self._waiting.pop((lease.holder, lease.device, lease.use), None)
            if future and not future.done():
                future.set_result(lease)
        self.close()
        next_time = self.devices.next_time()
        if next_time and next_time > now:
            self._timer = asyncio.get_running_loop().call_later(
                (next_time - now).total_seconds(), self._grant
            )
