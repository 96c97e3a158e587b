"""Who may use which device when. Pure: a value in, a value out.

    build     one at a time on a device: kernels are timed while an engine is built
    measure   nothing else of ours on the device: neither builds nor other measuring, and no
              serving, or else the result is `contended`
    serve     at once and any number, held while an engine loads or has requests. A lease to measure
              waits for quiet, up to its patience, and is
              contended if it is not quiet then, or not any longer before it is given back: serving
              never waits

A lease that cannot be had waits in the device's queue, first come first served: a waiting lease to
measure is not overtaken by builds.
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
    contended: bool = False  # something serves there while it measures: decides nothing about speed


@dataclass(frozen=True, slots=True)
class Wish:
    """A lease that somebody waits for."""

    lease: Lease
    since: dt.datetime
    patience_s: (
        float  # a lease to measure beside engines that serve: how long it waits for them to be gone
    )


@dataclass(frozen=True, slots=True)
class Devices:
    """All leases of one host."""

    names: tuple[str, ...]
    held: tuple[Lease, ...] = ()
    waiting: tuple[Wish, ...] = ()

    def ask(self, lease: Lease, now: dt.datetime, patience_s: float = 0.0) -> Devices:
        """Queue for a lease to build or to measure; KeyError for a device that is not here."""
        if lease.device not in self.names:
            raise KeyError(lease.device)
        return replace(self, waiting=(*self.waiting, Wish(lease, now, patience_s)))

    def grant(self, now: dt.datetime) -> tuple[Devices, tuple[Lease, ...]]:
        """Give all that can be given now, in the order of asking: the devices, and the leases
        given.
        """
        current, given = replace(self, waiting=()), []
        blocked: set[str] = set()  # devices with somebody waiting who must not be overtaken
        for wish in self.waiting:
            lease = None if wish.lease.device in blocked else current._grantable(wish, now)
            if lease is None:
                blocked.add(wish.lease.device)
                current = replace(current, waiting=(*current.waiting, wish))
            else:
                given.append(lease)
                current = replace(current, held=(*current.held, lease))
        return current, tuple(given)

    def serve(self, holder: str, device: str) -> Devices:
        """Give a lease to serve; whoever measures there is contended from now on. KeyError for a
        device that is not here.
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
        """Without this holder's leases and wishes on a device; harmless where it has none."""

        def others(lease: Lease) -> bool:
            return (lease.holder, lease.device) != (holder, device) or use not in (None, lease.use)

        held = tuple(lease for lease in self.held if others(lease))
        return replace(
            self, held=held, waiting=tuple(wish for wish in self.waiting if others(wish.lease))
        )

    def next_time(self) -> dt.datetime | None:
        """When `grant` may give something although nothing is given back: the earliest end of
        somebody's patience.
        """
        return min(
            (
                w.since + dt.timedelta(seconds=w.patience_s)
                for w in self.waiting
                if w.lease.use == "measure"
            ),
            default=None,
        )

    def _grantable(self, wish: Wish, now: dt.datetime) -> Lease | None:
        uses = [
            lease.use
            for lease in self.held
            if lease.device == wish.lease.device and lease.holder != wish.lease.holder
        ]
        if {"build", "measure"} & set(uses):
            return None
        if wish.lease.use == "build" or "serve" not in uses:
            return wish.lease
        return (
            replace(wish.lease, contended=True)
            if (now - wish.since).total_seconds() >= wish.patience_s
            else None
        )
