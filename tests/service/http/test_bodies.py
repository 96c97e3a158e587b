"""How bodies come from the socket to the application."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from service.auth import Source
from service.bytes_in_flight import BytesInFlight
from service.errors import Unauthorized
from service.http import protocol as connection
from service.http.guard import Guard, Message, Receive, Send
from service.serving.shared_memory import in_place
from service.settings import Settings
from service.storage.key import Key
from tests.service.builders.connections import listening

WITHIN_S = 60.0
MB = 10**6


@dataclass
class Application:
    """Reads bodies to their end, and keeps the lengths of the pieces they came in."""

    address: tuple[str, int] = ("", 0)
    pieces: list[list[int]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    readable: list[bool] = field(default_factory=list)  # by a worker, in place
    lost: int = 0
    patience_s: float = WITHIN_S  # of one `receive`, which is then called again
    refuses: bool = False
    may_read: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await asyncio.to_thread(self.may_read.wait, WITHIN_S)
        if self.refuses:
            await send(
                {
                    "type": "http.response.start",
                    "status": 401,
                    "headers": [(b"connection", b"close"), (b"content-length", b"2")],
                }
            )
            await send({"type": "http.response.body", "body": b"no"})
            return
        chunks: list[bytes] = []
        message: Message = {"more_body": True}
        while message.get("more_body"):
            try:
                message = await asyncio.wait_for(receive(), self.patience_s)
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                self.lost += 1
                return
            chunks.append(message.get("body", b""))
        self.pieces.append([len(piece) for piece in chunks])
        self.bodies.append(b"".join(chunks))
        arrays = [np.frombuffer(chunk, np.uint8) for chunk in chunks]
        self.readable.append(in_place(arrays, [np.dtype(np.uint8)] * len(arrays)) is not None)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def running(processes: int, **settings: Any) -> Iterator[Application]:
    """An application behind the service's own connections."""
    app = Application()
    with listening(app, processes, **settings) as address:
        app.address = address
        yield app
        app.may_read.set()


@pytest.fixture(params=[1, 2], ids=["this process", "two processes"])
def application(request: pytest.FixtureRequest) -> Iterator[Application]:
    with running(request.param) as app:
        app.may_read.set()
        yield app


def request(path: str, body: bytes, sized: bool = True) -> bytes:
    if sized:
        return (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


def ask(line: socket.socket, sent: bytes, pause_at: int = 0) -> bytes:
    line.sendall(sent[:pause_at])
    time.sleep(0.2 if pause_at else 0.0)
    line.sendall(sent[pause_at:])
    answer = b""
    while not answer.endswith(b"ok"):
        more = line.recv(65536)
        assert more
        answer += more
    return answer


def test_tensors_are_handed_on_when_they_are_whole(application: Application) -> None:
    bodies = [bytes([number]) * (number * MB + number) for number in range(4)]
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        for body in bodies:
            ask(line, request("/v2/models/m/infer", body), pause_at=len(body) // 2)
    assert application.bodies == bodies
    assert application.pieces == [[len(body)] for body in bodies]


@pytest.mark.parametrize(("path", "sized"), [("/compile", True), ("/infer", False)])
def test_other_bodies_and_those_of_unknown_length_come_in_pieces(
    application: Application, path: str, sized: bool
) -> None:
    body = b"1" * 8 * MB
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        ask(line, request(path, body, sized))
    assert application.bodies == [body]
    assert max(application.pieces[0]) < MB


@pytest.mark.parametrize("first", [b"", request("/infer", b"1"), request("/infer", b"1" * MB)])
def test_before_the_application_asks_little_is_read(application: Application, first: bytes) -> None:
    application.may_read.clear()
    with (
        socket.create_connection(application.address, timeout=1.0) as line,
        pytest.raises(TimeoutError),
    ):
        line.sendall(first + request("/infer", b"2" * 64 * MB))


def test_what_follows_tensors_is_the_next_request(application: Application) -> None:
    bodies = [b"1" * MB, b"2", b"3" * 2 * MB, b"4" * 100_000]
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        threading.Thread(
            target=line.sendall, args=[b"".join(request("/infer", body) for body in bodies)]
        ).start()
        answer = b""
        while answer.count(b"ok") < len(bodies):
            answer += line.recv(65536)
    assert application.bodies == bodies


def test_a_client_that_goes_amid_its_tensors_is_told_of(application: Application) -> None:
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        line.sendall(request("/infer", b"1" * MB)[:-1])
        time.sleep(0.2)
    until = time.monotonic() + WITHIN_S
    while not application.lost:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert application.bodies == []


def test_only_bodies_for_a_path_with_a_model_are_read_in_place(application: Application) -> None:
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        for path in ("/infer", "/models/m/infer"):
            ask(line, request(path, b"1" * MB))
    assert application.readable == [False, True]


def test_tensors_survive_that_waiting_for_them_is_cancelled(application: Application) -> None:
    application.patience_s = 0.05
    bodies = [b"1" * MB, b"2" * 100_000]
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        for body in bodies:
            ask(line, request("/infer", body), pause_at=len(body) - 10)
    assert application.bodies == bodies


def test_tensors_that_are_refused_leave_nothing_behind() -> None:
    def living() -> int:
        return sum(
            type(each) is connection.Http for each in gc.get_objects()
        )  # isinstance would ask objects of other libraries, which may warn

    with running(1) as application:
        application.refuses = True
        application.may_read.set()
        gc.collect()
        before = living()
        gc.disable()
        try:
            for _ in range(20):
                with (
                    socket.create_connection(application.address, timeout=WITHIN_S) as line,
                    contextlib.suppress(ConnectionError),
                ):
                    line.sendall(request("/infer", b"1" * MB))
                    while line.recv(65536):
                        pass
            until = time.monotonic() + WITHIN_S
            while (left := living() - before) > 2 and time.monotonic() < until:
                time.sleep(0.05)
        finally:
            gc.enable()
        assert left <= 2


def test_a_body_behind_an_upgrade_is_refused_and_is_no_request(application: Application) -> None:
    response = request("/infer", request("/infer", b"smuggled"))
    with socket.create_connection(application.address, timeout=WITHIN_S) as line:
        line.sendall(
            response.replace(
                b"Host: x", b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c"
            )
        )
        answer = b""
        while more := line.recv(65536):
            answer += more
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"content-length") == 1
    assert b"without an Upgrade header" in answer
    assert application.bodies == []


@pytest.mark.parametrize("processes", [1, 2])
def test_tensors_come_through_tls(tmp_path: Path, processes: int) -> None:
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    certificate = authority.issue_cert("127.0.0.1")
    both = tmp_path / "both.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(both)
    with running(processes, tls_certificate=both, tls_key=both) as app:
        app.may_read.set()
        with (
            socket.create_connection(app.address, timeout=WITHIN_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
        ):
            for body in (b"1" * 3 * MB, b"2" * 70_000):
                ask(line, request("/infer", body), pause_at=len(body) // 2)
                assert app.bodies[-1] == body
        assert app.pieces == [[3 * MB], [70_000]]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_body_that_does_not_fit_beside_unfinished_ones_is_refused_until_they_end(
    processes: int,
) -> None:
    async def verify(key: str, source: Source) -> Key:
        raise Unauthorized("there are no keys")

    async def no_session(token: str, source: Source) -> Key | None:
        return None

    def until_held(count: int) -> None:
        until = time.monotonic() + WITHIN_S
        while budget.held != count:
            assert time.monotonic() < until
            time.sleep(0.01)

    budget, application = BytesInFlight(3 * MB), Application()
    application.may_read.set()
    guarded = Guard(application, Settings(), verify, no_session, budget)
    sent = request("/models/m/infer", b"1" * 2 * MB).replace(b"Host: x", b"Host: localhost")
    with listening(guarded, processes) as address:
        with socket.create_connection(address, timeout=WITHIN_S) as unfinished:
            unfinished.sendall(sent[:-1])
            until_held(2 * MB)
            with socket.create_connection(address, timeout=WITHIN_S) as refused:
                refused.sendall(sent[:1000])
                assert refused.recv(65536).startswith(b"HTTP/1.1 503 ")
            assert budget.held == 2 * MB
        until_held(0)
        with socket.create_connection(address, timeout=WITHIN_S) as line:
            ask(line, sent)
        until_held(0)
    assert application.bodies == [b"1" * 2 * MB]
