"""Keep the servers of a proxy as a list says: those that are new are added, those that are gone end
their requests and are removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pipeline.errors import HostError
from service.routing.addresses import Address
from service.routing.runtime import Runtime

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Changes:
    """What makes the present servers the wanted ones."""

    add: tuple[Address, ...]
    keep: tuple[Address, ...]  # they were leaving, and are wanted again
    leave: tuple[Address, ...]


def changes(
    present: Collection[Address], leaving: Collection[Address], wanted: Collection[Address]
) -> Changes:
    """Compare the servers of a proxy, some of which are leaving it, with those that are wanted."""
    return Changes(
        add=tuple(sorted(set(wanted) - set(present))),
        keep=tuple(sorted(set(wanted) & set(leaving))),
        leave=tuple(sorted(set(present) - set(wanted) - set(leaving))),
    )


class Pool:
    """The servers that one process has added to a proxy."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._present: set[Address] = set()
        self._leaving: set[Address] = set()

    def update(self, wanted: Collection[Address]) -> None:
        """Add new servers, and let the others leave: each is removed by an `update` after its last
        request. HostError if one cannot be added; all else is done.
        """
        found, fault = changes(self._present, self._leaving, wanted), None
        for address in found.add:
            try:
                self._runtime.add(address)
                self._present.add(address)
            except HostError as error:
                fault = error
        for address in found.keep:
            self._runtime.enable(address)
            self._leaving.remove(address)
        for address in found.leave:
            self._runtime.drain(address)
            self._leaving.add(address)
        for address in sorted(self._leaving):
            if self._runtime.active(address) == 0 and self._runtime.remove(address):
                self._present.remove(address)
                self._leaving.remove(address)
        if fault is not None:
            raise fault


def wait_until_idle(
    runtime: Runtime, address: Address, limit_s: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until a server answers no request. HostError after `limit_s`."""
    end = time.monotonic() + limit_s
    while active := runtime.active(address):
        if time.monotonic() > end:
            raise HostError(
                f"the server {address} still answers {active} requests after {limit_s:g} s;"
                " it gets no new ones",
                "wait with the same command and a longer --timeout",
            )
        sleep(POLL_S)
