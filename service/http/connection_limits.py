"""How many connections there may be, in all and from one address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from service.errors import Unavailable
from service.limits.client_address import TrustedProxies
from service.settings import Settings


class ConnectionLimits:
    """The connections of one server. `refused` is called with the limit of each refusal: `all` or
    `address`. Connections of a trusted proxy count only in all: its clients share them.
    """

    def __init__(self, settings: Settings, refused: Callable[[str], None]) -> None:
        self._most = settings.max_connections
        self._most_per_address = settings.max_connections_per_address
        self._refused = refused
        self._proxies = TrustedProxies(settings.trusted_proxies)
        self.count, self._counts = 0, Counter[str]()

    def admit(self, address: str) -> None:
        """Count a connection until `release`. Beyond a limit, Unavailable, without counting it."""
        if self.count >= self._most:
            self._refuse("all", f"the server has {self._most} connections", "max_connections")
        is_full = self._counts[address] >= self._most_per_address
        if is_full and address not in self._proxies:
            self._refuse(
                "address",
                f"{address} has {self._most_per_address} connections to the server",
                "max_connections_per_address",
            )
        self.count += 1
        self._counts[address] += 1

    def release(self, address: str) -> None:
        """A connection has ended."""
        self.count -= 1
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def _refuse(self, limit: str, message: str, setting: str) -> None:
        self._refused(limit)
        raise Unavailable(
            f"{message}, no more are accepted",
            f"keep connections open and use them again, or ask the operator to raise `{setting}`",
        )
