"""Policy for the use of devices. Pure: each function takes a value and returns a new one.

    build     one at a time on a device, because a build times kernels
    measure   excludes builds and other measurements on the device. Engines that serve there make
              the result `contended`
    serve     at once and in any number, held while an engine loads or has requests. A lease to
              measure waits for them up to its patience. It is contended if engines serve at that
              time, or start before it is given back. Serving never waits

A lease that is not available waits in the device's queue, first come first served: builds do not
overtake a waiting lease to measure.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from typing import Literal

Use = Literal["build", "serve", "measure"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The use of one device by one holder."""

    device: str
    use: Use
    holder: str  # a job's id, or a deployment's name
    contended: bool = False  # engines serve there meanwhile: the figures prove nothing about speed


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A waiting request for a lease."""

    lease: Lease
    since: dt.datetime
    patience_s: float  # how long a lease to measure waits for engines to stop serving


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one host, with their leases and waiting requests."""

    names: tuple[str, ...]
    held: tuple[Lease, ...] = ()
    waiting: tuple[LeaseRequest, ...] = ()

    def ask(self, lease: Lease, now: dt.datetime, patience_s: float = 0.0) -> Devices:
        """Queue a request to build or to measure. KeyError if this host does not have the
        device.
        """
        if lease.device not in self.names:
            raise KeyError(lease.device)
        return replace(self, waiting=(*self.waiting, LeaseRequest(lease, now, patience_s)))

    def grant(self, now: dt.datetime) -> tuple[Devices, tuple[Lease, ...]]:
        """Grant all leases that are available now, in the order of the requests. Returns the new
        state and the granted leases.
        """
        current, granted = replace(self, waiting=()), []
        blocked: set[str] = (
            set()
        )  # devices with an earlier waiting request, which must not be overtaken
        for request in self.waiting:
            lease = None if request.lease.device in blocked else current._grantable(request, now)
            if lease is None:
                blocked.add(request.lease.device)
                current = replace(current, waiting=(*current.waiting, request))
            else:
                granted.append(lease)
                current = replace(current, held=(*current.held, lease))
        return current, tuple(granted)

    def serve(self, holder: str, device: str) -> Devices:
        """Add a lease to serve. Leases to measure on the device become contended. KeyError if this
        host does not have the device.
        """
        if device not in self.names:
            raise KeyError(device)
        held = (
            (
                replace(lease, contended=True)
                if (lease.use, lease.device) == ("measure", device)
                else lease
            )
            for lease in self.held
        )
        return replace(self, held=(*held, Lease(device, "serve", holder)))

    def give_back(self, holder: str, device: str, use: Use | None = None) -> Devices:
        """Remove this holder's leases and requests on a device. Does nothing if it has none."""

        def remains(lease: Lease) -> bool:
            return (lease.holder, lease.device) != (holder, device) or use not in (None, lease.use)

        held = tuple(lease for lease in self.held if remains(lease))
        waiting = tuple(request for request in self.waiting if remains(request.lease))
        return replace(self, held=held, waiting=waiting)

    def next_time(self) -> dt.datetime | None:
        """Return when `grant` may next grant a lease without a change: the earliest end of a
        request's patience.
        """
        measuring = [request for request in self.waiting if request.lease.use == "measure"]
        return min(
            (request.since + dt.timedelta(seconds=request.patience_s) for request in measuring),
            default=None,
        )

    def _grantable(self, request: LeaseRequest, now: dt.datetime) -> Lease | None:
        uses = [
            lease.use
            for lease in self.held
            if lease.device == request.lease.device and lease.holder != request.lease.holder
        ]
        if {"build", "measure"} & set(uses):
            return None
        if request.lease.use == "build" or "serve" not in uses:
            return request.lease
        if (now - request.since).total_seconds() < request.patience_s:
            return None
        return replace(request.lease, contended=True)
