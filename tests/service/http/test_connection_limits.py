"""Connections beyond the limits."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from service.errors import Unavailable
from service.http.connection_limits import ConnectionLimits
from service.settings import Settings
from tests.service.builders.connections import listening
from tests.service.builders.jobs import WITHIN_S
from tests.service.http.test_slow_bodies import answer_of, read

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def test_connections_are_counted_by_address_and_together() -> None:
    refused: list[str] = []
    settings = Settings(home=Path("/h"), max_connections=3, max_connections_per_address=2)
    limits = ConnectionLimits(settings, refused.append)
    for address in ("a", "a", "b"):
        limits.admit(address)
    with pytest.raises(Unavailable, match="the server has 3 connections, no more") as error:
        limits.admit("b")
    assert "`max_connections`" in error.value.next_step
    limits.release("b")
    with pytest.raises(Unavailable, match="a has 2 connections to the server") as error:
        limits.admit("a")
    assert "`max_connections_per_address`" in error.value.next_step
    limits.release("a")
    limits.admit("a")
    assert refused == ["all", "address"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("limit", "settings"),
    [("all", {"max_connections": 2}), ("address", {"max_connections_per_address": 2})],
)
def test_a_connection_beyond_a_limit_is_closed_and_the_others_go_on(
    processes: int, limit: str, settings: dict[str, Any]
) -> None:
    refused: list[str] = []

    def connection() -> socket.socket:
        return socket.create_connection(address, timeout=WITHIN_S)

    def ask(line: socket.socket) -> None:
        line.sendall(REQUEST)
        assert line.recv(65536).startswith(b"HTTP/1.1 200 ")

    def is_admitted() -> bool:
        with connection() as line, contextlib.suppress(ConnectionError):
            line.sendall(REQUEST)
            return line.recv(65536).startswith(b"HTTP/1.1 200 ")
        return False

    with (
        listening(read, processes, refused.append, **settings) as address,
        connection() as first,
        connection() as second,
    ):
        ask(first)
        ask(second)
        with connection() as third:
            answer = answer_of(third)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nRetry-After: 5\r\n" in answer
        assert b"\r\nconnection: close\r\n" in answer
        second.close()
        until = time.monotonic() + WITHIN_S
        while not is_admitted():
            assert time.monotonic() < until
            time.sleep(0.05)
        ask(first)
    assert set(refused) == {limit}
