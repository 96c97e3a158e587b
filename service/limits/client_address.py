"""The address of a client behind proxies that the operator has named.

Anybody can send `X-Forwarded-For`. So it counts only on a connection from a trusted proxy, and is
read from its end: each trusted proxy appended the address that it saw. The first one that is no
trusted proxy is the client's; what stands before it may be forged.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

HEADER = "x-forwarded-for"
MAX_PROXIES = 8  # that a request may have passed; an address before them is not looked at

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """The networks of the setting `trusted_proxies`."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = tuple(ipaddress.ip_network(network) for network in networks)

    def __contains__(self, address: str) -> bool:
        """Whether an IP address is that of a trusted proxy."""
        parsed = _parsed(address)
        return parsed is not None and any(parsed in network for network in self._networks)

    def client(self, peer: str, forwarded: Iterable[str]) -> str:
        """Return the client's IP address.

        `peer`: the other end of the connection. `forwarded`: the values of all headers
        X-Forwarded-For, in their order. If the last trusted proxy names no address, it counts as
        the client.
        """
        if not self._networks or peer not in self:
            return peer
        client = peer
        hops = ",".join(forwarded).rsplit(",", MAX_PROXIES)[-MAX_PROXIES:]
        for hop in reversed(hops):
            parsed = _parsed(hop.strip())
            if parsed is None:
                return client
            client = str(parsed)
            if client not in self:
                return client
        return client


def _parsed(text: str) -> Address | None:
    """An IP address in its shortest form, that of IPv4 for both versions; None if it is none."""
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.scope_id is not None:  # any text may follow the %
            return None
        return parsed.ipv4_mapped or parsed
    return parsed
