"""The client's address: what a trusted proxy says, and nothing that anybody else says."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from service.errors import Unavailable
from service.http.connection_limits import ConnectionLimits
from service.limits.client_address import MAX_PROXIES, TrustedProxies
from service.limits.failures import MAX_FAILURES
from service.settings import Settings
from tests.service.builders.app import URL, Desk, at_desk

PROXIES = TrustedProxies(("10.0.0.9", "10.1.0.0/16", "fd00::/8"))


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.9", ["192.0.2.7"], "192.0.2.7"),
        ("::ffff:10.0.0.9", ["192.0.2.7"], "192.0.2.7"),  # of a socket for both versions
        ("fd00::1", ["2001:DB8:0::7"], "2001:db8::7"),
        ("10.0.0.9", ["192.0.2.7, 10.1.2.3"], "192.0.2.7"),  # through two proxies
        ("10.0.0.9", ["192.0.2.7", "10.1.2.3"], "192.0.2.7"),  # in two headers
        # what the client itself wrote stands before what the proxy appended
        ("10.0.0.9", ["127.0.0.1, 198.51.100.1", "192.0.2.7"], "192.0.2.7"),
        ("10.0.0.9", ["10.1.2.3, 192.0.2.7"], "192.0.2.7"),
        # from elsewhere
        ("192.0.2.7", ["127.0.0.1"], "192.0.2.7"),
        ("10.0.0.8", ["127.0.0.1, 10.0.0.9"], "10.0.0.8"),
        ("", ["127.0.0.1"], ""),
        # no address
        ("10.0.0.9", [], "10.0.0.9"),
        ("10.0.0.9", ["", " , "], "10.0.0.9"),
        ("10.0.0.9", ["192.0.2.7, unknown"], "10.0.0.9"),
        ("10.0.0.9", ["192.0.2.7:80"], "10.0.0.9"),
        ("10.0.0.9", ["fe80::1%<script>"], "10.0.0.9"),
        ("10.0.0.9", ["192.0.2.7, oops, 10.1.2.3"], "10.1.2.3"),
    ],
)
def test_the_last_address_that_is_no_proxy_is_the_client(
    peer: str, forwarded: list[str], client: str
) -> None:
    assert PROXIES.client(peer, forwarded) == client
    assert TrustedProxies(()).client(peer, forwarded) == peer


def test_a_long_chain_is_not_followed_to_its_end() -> None:
    chain = ", ".join(["192.0.2.7", *["10.1.2.3"] * MAX_PROXIES])
    assert PROXIES.client("10.0.0.9", [chain]) == "10.1.2.3"


def test_a_trusted_proxy_has_no_limit_of_its_own() -> None:
    refused: list[str] = []
    settings = Settings(
        home=Path("/h"),
        max_connections=4,
        max_connections_per_address=1,
        trusted_proxies=("10.0.0.9",),
    )
    limits = ConnectionLimits(settings, refused.append)
    for address in ("10.0.0.9", "10.0.0.9", "192.0.2.7"):
        limits.admit(address)
    with pytest.raises(Unavailable, match=r"192\.0\.2\.7 has 1 connections"):
        limits.admit("192.0.2.7")
    limits.admit("10.0.0.9")
    with pytest.raises(Unavailable, match="the server has 4 connections"):
        limits.admit("10.0.0.9")
    assert refused == ["address", "all"]


def test_failures_count_for_the_client_and_a_forged_header_changes_nothing(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async def statuses(peer: str, forwarded: str) -> list[int]:
            transport = httpx.ASGITransport(desk.app, client=(peer, 1))
            async with httpx.AsyncClient(transport=transport, base_url=URL) as web:
                headers = {"X-Forwarded-For": forwarded}
                answers = [await web.get("/jobs", headers=headers) for _ in range(MAX_FAILURES + 1)]
            return sorted({answer.status_code for answer in answers})

        # each client of the proxy has attempts of its own
        assert await statuses("10.0.0.9", "192.0.2.1") == [401, 429]
        assert await statuses("10.0.0.9", "192.0.2.1") == [429]
        assert await statuses("10.0.0.9", "192.0.2.1, 192.0.2.2") == [401, 429]
        # elsewhere, a new header is no new client
        assert await statuses("192.0.2.3", "192.0.2.4") == [401, 429]
        assert await statuses("192.0.2.3", "192.0.2.5") == [429]
        assert await statuses("192.0.2.4", "") == [401, 429]

    at_desk(tmp_path, story, keys_required=True, trusted_proxies=("10.0.0.9",))


def test_shared_memory_believes_no_header(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        transport = httpx.ASGITransport(desk.app, client=("10.0.0.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url=URL) as web:
            answer = await web.get(
                "/v2/systemsharedmemory/status", headers={"X-Forwarded-For": "127.0.0.1"}
            )
        assert (answer.status_code, "this host" in answer.text) == (403, True)

    at_desk(tmp_path, story, shared_memory=True, trusted_proxies=("10.0.0.9",))
