"""Connections that send their request line and headers too slowly, or never."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from service.http import protocol as connection
from service.http.connection_limits import ConnectionLimits
from service.settings import Settings

WITHIN_S = 60.0
PATIENCE_S = 2.0


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """An application behind the service's own HTTP protocol, with little patience."""
    yield from listening(monkeypatch, 0.3)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The same for heads that have to come in time, on a busy host too."""
    yield from listening(monkeypatch, PATIENCE_S)


def listening(monkeypatch: pytest.MonkeyPatch, patience_s: float) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(connection, "HEAD_S", patience_s)
    app = FastAPI()

    @app.post("/")
    async def echo(body: dict[str, int]) -> dict[str, int]:
        return body

    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = Settings()
        http = connection.protocol(settings, ConnectionLimits(settings, lambda limit: None))
        running = uvicorn.Server(
            uvicorn.Config(app, http=http, ws="none", lifespan="off", log_config=None)
        )
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        running.should_exit = True
        thread.join(WITHIN_S)
    assert not thread.is_alive()


def answered(address: tuple[str, int], *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(address, timeout=WITHIN_S) as line:
        for piece in pieces:
            line.sendall(piece)
            time.sleep(pause_s)
        answer = b""
        while more := line.recv(65536):
            answer += more
        return answer


@pytest.mark.parametrize(
    "pieces",
    [(), (b"POST / HTTP/1.1\r\n",), (b"POST / HTTP/1.1\r\nHost: x\r\n", b"X-A: a"), (b"PO",)],
)
def test_a_head_that_does_not_come_is_refused_and_the_connection_closed(
    address: tuple[str, int], pieces: tuple[bytes, ...]
) -> None:
    answer = answered(address, *pieces)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"service.slow_head"' in answer
    assert b"not complete after 0.3 s" in answer


def test_the_second_request_of_a_connection_has_as_much_time_again_and_no_more(
    patient: tuple[str, int],
) -> None:
    request = (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length:"
        b' 8\r\n\r\n{"a": 1}'
    )
    answer = answered(patient, request, request, b"POST / HT", pause_s=0.6 * PATIENCE_S)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.count(b"HTTP/1.1 408 ") == 1


def test_a_body_and_an_answer_may_take_longer(patient: tuple[str, int]) -> None:
    def slowly() -> Iterator[bytes]:
        for piece in (b'{"a"', b": ", b"1}"):
            yield piece
            time.sleep(PATIENCE_S)

    headers = {"Content-Type": "application/json"}
    assert httpx.post(
        "http://{}:{}/".format(*patient), content=slowly(), headers=headers
    ).json() == {"a": 1}
