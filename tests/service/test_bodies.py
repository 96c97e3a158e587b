"""How bodies come from the socket to the application."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from service import server
from service.guard import Message, Receive, Send

WITHIN_S = 20.0
MB = 10**6


@dataclass
class Application:
    """Reads bodies to their end, and keeps the lengths of the pieces they came in."""

    address: tuple[str, int] = ("", 0)
    pieces: list[list[int]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    may_read: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await asyncio.to_thread(self.may_read.wait, WITHIN_S)
        found: list[bytes] = []
        message: Message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            found.append(message.get("body", b""))
        self.pieces.append([len(piece) for piece in found])
        self.bodies.append(b"".join(found))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def application() -> Iterator[Application]:
    app = Application()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(app, http=server._Http, ws="none", lifespan="off", log_config=None, loop="uvloop"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        app.address = listener.getsockname()
        app.may_read.set()
        yield app
        app.may_read.set()
        running.should_exit = True
        thread.join(WITHIN_S)
    assert not thread.is_alive()


def request(path: str, body: bytes, sized: bool = True) -> bytes:
    if sized:
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


def ask(line: socket.socket, sent: bytes, pause_at: int = 0) -> None:
    line.sendall(sent[:pause_at])
    time.sleep(0.2 if pause_at else 0.0)
    line.sendall(sent[pause_at:])
    answer = b""
    while not answer.endswith(b"ok"):
        more = line.recv(65536)
        assert more
        answer += more


def test_tensors_are_handed_on_when_they_are_whole(application: Application) -> None:
    bodies = [bytes([number]) * (number * MB + number) for number in range(4)]
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        for body in bodies:
            ask(line, request("/v2/models/m/infer", body), pause_at=len(body) // 2)
    assert application.bodies == bodies
    assert application.pieces == [[len(body)] for body in bodies]


@pytest.mark.parametrize(("path", "sized"), [("/compile", True), ("/infer", False)])
def test_other_bodies_and_those_of_unknown_length_come_in_pieces(application: Application, path: str, sized: bool) -> None:
    body = b"1" * 8 * MB
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        ask(line, request(path, body, sized))
    assert application.bodies == [body]
    assert max(application.pieces[0]) < MB


def test_of_a_request_that_waits_for_another_little_is_read(application: Application) -> None:
    application.may_read.clear()
    first, second = request("/infer", b"1"), request("/infer", b"2" * 64 * MB)
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        line.sendall(first)
        line.settimeout(1.0)
        with pytest.raises(TimeoutError):
            line.sendall(second)
