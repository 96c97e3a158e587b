"""Bodies that arrive too slowly, or never."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest

from service.errors import SlowBody
from service.http import slow_bodies
from service.http.guard import Receive, Send
from service.http.slow_bodies import CHECK_S, FREE_S, SLACK_S, WINDOW_S, BodyClock
from tests.service.builders.connections import listening
from tests.service.builders.jobs import WITHIN_S

RATE = 1000
END_S = 1000


def ended_at(
    received: Callable[[int], float],
    length: int | None = 10**9,
    is_reading: Callable[[int], bool] = lambda now: True,
    step_s: int = 1,
) -> int | None:
    """The second at which a body is refused; `received` and `is_reading` take the time."""
    clock = BodyClock(0, length, RATE)
    for now in range(step_s, END_S, step_s):
        try:
            clock.check(now, int(received(now)), is_reading(now))
        except SlowBody:
            return now
    return None


def test_a_body_that_stops_is_refused_after_its_free_time_and_a_window() -> None:
    assert ended_at(lambda now: 0) == FREE_S + WINDOW_S
    assert ended_at(lambda now: RATE * min(now, 100)) == 101


def test_the_rate_is_a_mean_over_the_window() -> None:
    assert ended_at(lambda now: RATE * now) is None
    assert ended_at(lambda now: 0.99 * RATE * now) == FREE_S + WINDOW_S
    bursts = RATE * WINDOW_S  # one every 30 s
    assert ended_at(lambda now: bursts * (now // WINDOW_S + 1)) is None


def test_what_came_at_first_does_not_count_for_later() -> None:
    assert ended_at(lambda now: 10**8) == FREE_S + WINDOW_S


@pytest.mark.parametrize(("length", "bytes_at_once"), [(10_000, 0), (None, 10_000)])
def test_a_body_has_an_end(
    monkeypatch: pytest.MonkeyPatch, length: int | None, bytes_at_once: int
) -> None:
    monkeypatch.setattr(slow_bodies, "WINDOW_S", 10**6)
    ended_s = ended_at(lambda now: bytes_at_once, length)
    assert ended_s == SLACK_S + 10 + 1


def test_time_in_which_the_server_does_not_read_does_not_count() -> None:
    assert ended_at(lambda now: 0, is_reading=lambda now: False) is None
    assert ended_at(lambda now: 0, is_reading=lambda now: now > 500) == 500 + FREE_S + WINDOW_S
    checks = (FREE_S + WINDOW_S) / (2 * CHECK_S)
    assert ended_at(lambda now: 0, step_s=40) == 40 * checks  # the server was too busy to check


async def read(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Answer what ended the body."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message["more_body"]
    await asyncio.sleep(0.5 if scope["path"] == "/slow" else 0)  # beyond the end of the next body
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("CHECK_S", 0.02), ("FREE_S", 0.05), ("WINDOW_S", 0.1)):
        monkeypatch.setattr(slow_bodies, name, seconds)


def answer_of(line: socket.socket) -> bytes:
    answer = b""
    while more := line.recv(65536):
        answer += more
    return answer


@pytest.mark.parametrize("path", ["/infer", "/compile"])
@pytest.mark.parametrize("head", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_come_is_refused_and_the_connection_closed(
    monkeypatch: pytest.MonkeyPatch, path: str, head: str
) -> None:
    impatient(monkeypatch)
    with (
        listening(read, 1) as address,
        socket.create_connection(address, timeout=WITHIN_S) as line,
    ):
        line.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        answer = answer_of(line)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close\r\n" in answer
    assert b'"code":"service.slow_body"' in answer
    assert b"expected at least 65536 bytes/s" in answer


def test_a_body_behind_a_long_answer_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    first = b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n1"
    second = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    with (
        listening(read, 1) as address,
        socket.create_connection(address, timeout=WITHIN_S) as line,
    ):
        line.sendall(first + second + b"1")
        assert line.recv(12) == b"HTTP/1.1 200"
        line.sendall(b"2")
        assert answer_of(line).count(b"HTTP/1.1 200 ") == 1


def test_a_body_that_came_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    with (
        listening(read, 1) as address,
        socket.create_connection(address, timeout=WITHIN_S) as line,
    ):
        for _ in range(2):
            for piece in (request, b"1", b"2"):
                line.sendall(piece)
            assert line.recv(65536).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.3)  # longer than a body may take
