"""Two HTTP processes, with an application in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import uvloop

from pipeline.errors import HostError
from service.http.connection_limits import ConnectionLimits
from service.http.guard import Message, Receive, Send
from service.http.processes import parent
from service.http.processes.parent import HttpProcesses
from service.settings import Settings
from tests.service.builders.jobs import WITHIN_S

GRACE_S = 5.0  # a busy host needs seconds for one answer
LARGE = b"0123456789" * 100_000


async def read(receive: Receive, kind: type[bytes | memoryview] = bytes) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        assert isinstance(message["body"], kind)
        body += message["body"]
        more = message["more_body"]
    return body


async def answer(send: Send, *bodies: bytes, **headers: str) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": encoded})
    for body in bodies:
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class Application:
    """What a request asks for by its path; counts the requests that have not ended."""

    def __init__(self) -> None:
        self.running = 0
        self.sent = 0
        self.received: list[Message] = []
        self.errors: list[Exception] = []

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        self.running += 1
        try:
            await getattr(self, scope["path"].split("/")[1])(scope, receive, send)
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            self.running -= 1

    async def echo(self, scope: Any, receive: Receive, send: Send) -> None:
        await answer(send, await read(receive))

    async def describe(self, scope: Any, receive: Receive, send: Send) -> None:
        fields = ("method", "path", "raw_path", "query_string", "http_version", "scheme")
        text = repr([scope[name] for name in fields] + scope["headers"])
        await answer(send, text.encode(), **{"x-text": "\xe9" * 100_000})

    async def endless(self, scope: Any, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.received:
            await send({"type": "http.response.body", "body": b"event" * 1000, "more_body": True})
            self.sent += 1
            await asyncio.sleep(0)

    async def follow(self, scope: Any, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"event", "more_body": True})
        await receive()
        self.received.append(await receive())

    async def impatient(self, scope: Any, receive: Receive, send: Send) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.05)
        await answer(send, b"too slow", connection="close")

    async def fail(self, scope: Any, receive: Receive, send: Send) -> None:
        raise ValueError("a bug")

    async def infer(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await answer(send, await read(receive, memoryview))
        except HostError as error:
            await answer(send, error.message.encode(), connection="close")


class Desk:
    """A client, and what stands behind the address."""

    def __init__(self, app: Application, processes: HttpProcesses, address: tuple[str, int]):
        self.app, self.processes, self.address = app, processes, address
        self._stopped: asyncio.Task[None] | None = None
        self.client = httpx.AsyncClient(
            base_url="http://{}:{}".format(*address), timeout=WITHIN_S, trust_env=False
        )

    async def connect(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(request)
        return reader, writer

    def stop(self) -> asyncio.Task[None]:
        self._stopped = self._stopped or asyncio.create_task(self.processes.stop())
        return self._stopped

    @property
    def running(self) -> list[Any]:
        return self.processes._running

    def connections(self) -> list[int]:
        return [process.connections for process in self.running]


def with_processes(story: Callable[[Desk], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        app = Application()
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        options = Settings(http_processes=2, **settings)
        limits = ConnectionLimits(options, lambda limit: None)
        processes = HttpProcesses(app, listener, options, limits, GRACE_S)
        await processes.start()
        desk = Desk(app, processes, address)
        try:
            async with desk.client:
                await story(desk)
        finally:  # what a failed test leaves open would fail the next ones
            await desk.stop()
        assert not desk.running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not reached():
            await asyncio.sleep(0.01)


def head(path: str, length: int = 0) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def test_heads_of_any_length_arrive_as_they_are() -> None:
    async def story(desk: Desk) -> None:
        path = "/describe/" + "%22%C3%A9" * 5000
        got = await desk.client.get(path + "?a=%20", headers={b"x-a": b'"\xe9' * 30_000})
        assert got.headers["x-text"] == "\xe9" * 100_000
        expected = ["GET", "/describe/" + '"\xe9' * 5000, path.encode(), b"a=%20", "1.1", "http"]
        assert got.text.startswith(repr(expected)[:-1])
        assert repr((b"x-a", b'"\xe9' * 30_000)) in got.text
        old, writer = await desk.connect(b"GET /describe HTTP/1.0\r\n\r\n")
        assert b"'1.0', 'http'" in await old.read()
        writer.close()

    with_processes(story)


def test_clients_that_leave_at_any_time_leave_nothing_behind() -> None:
    async def story(desk: Desk) -> None:
        for cut in range(1, 12):
            for path in ("/infer", "/echo"):
                _, writer = await desk.connect((head(path, len(LARGE)) + LARGE)[: cut * 10**5])
                await asyncio.sleep(0.002 * cut)
                writer.transport.abort()
        reader, writer = await desk.connect(head("/endless"))
        await reader.read(1000)
        await asyncio.sleep(0.1)
        assert desk.app.running
        writer.transport.abort()
        reader, writer = await desk.connect(head("/follow"))
        await reader.read(1000)
        writer.transport.abort()
        await until(lambda: not desk.app.running)
        assert desk.app.received == [{"type": "http.disconnect"}]
        for _ in range(6):  # both sides still agree on what is mapped
            for path in ("/infer", "/echo"):
                assert (await desk.client.post(path, content=LARGE)).content == LARGE
        await desk.client.aclose()
        await until(lambda: desk.connections() == [0, 0])
        assert desk.processes._limits.count == 0
        await until(lambda: not any(process.lender._away for process in desk.running))
        assert not any(process._requests or process._tasks for process in desk.running)

    with_processes(story)


def test_a_client_that_does_not_read_stops_the_application() -> None:
    async def story(desk: Desk) -> None:
        reader, writer = await desk.connect(head("/endless"))
        await reader.readuntil(b"event")
        before = -1
        while before != desk.app.sent:
            before = desk.app.sent
            await asyncio.sleep(0.3)
        assert desk.app.running == 1
        desk.app.received.append({})
        writer.transport.abort()
        await until(lambda: not desk.app.running)

    with_processes(story)


def test_a_body_that_does_not_come_does_not_delay_the_answer() -> None:
    async def story(desk: Desk) -> None:
        reader, writer = await desk.connect(head("/impatient", 10))
        assert b"too slow" in await asyncio.wait_for(reader.read(), WITHIN_S)
        writer.close()
        reader, writer = await desk.connect(
            head("/echo", 5).replace(b"Host", b"Expect: 100-continue\r\nHost")
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert b"hello" in await reader.readuntil(b"hello")
        writer.close()

    with_processes(story)


def test_without_shared_memory_the_application_gets_an_error() -> None:
    async def story(desk: Desk) -> None:
        reader, writer = await desk.connect(head("/infer", 1 << 59) + b"1")
        assert b"cannot allocate" in await asyncio.wait_for(reader.read(), WITHIN_S)
        writer.close()
        assert (await desk.client.post("/echo", content=LARGE)).content == LARGE

    with_processes(story)


def test_an_application_that_fails_is_answered_for(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(desk: Desk) -> None:
        assert (await desk.client.post("/fail")).status_code == 500
        assert (await desk.client.post("/echo", content=b"a")).content == b"a"

    with_processes(story)
    assert "ValueError: a bug" in capsys.readouterr().out


def test_a_process_that_is_killed_is_started_again_and_the_other_goes_on() -> None:
    async def story(desk: Desk) -> None:
        lines = [await desk.connect(head("/follow")) for _ in range(4)]
        for reader, _ in lines:
            await reader.readuntil(b"event")
        assert desk.connections() == [2, 2]
        killed, other = desk.running
        os.kill(other.pid, signal.SIGTERM)  # only the server ends its processes
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: len(desk.app.received) == 2 and killed not in desk.running)
        assert other.connections == 2
        assert (await desk.client.post("/echo", content=LARGE)).content == LARGE
        await until(lambda: len(desk.running) == 2)
        assert killed.pid not in [process.pid for process in desk.running]
        assert desk.processes._limits.count == sum(desk.connections())
        for process in list(desk.running):
            os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not desk.running)
        async with httpx.AsyncClient(base_url=desk.client.base_url, timeout=WITHIN_S) as client:
            assert (await client.post("/echo", content=b"waits")).content == b"waits"
        for _, writer in lines:
            writer.close()

    with_processes(story)


def test_connections_without_tls_are_counted_down(tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    both = tmp_path / "both.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)

    async def story(desk: Desk) -> None:
        for request in (head("/echo"), b""):
            _, writer = await desk.connect(request)
            await until(lambda: sum(desk.connections()) == 1)
            if not request:
                writer.transport.abort()
            await until(lambda: desk.connections() == [0, 0])
            writer.close()
        async with httpx.AsyncClient(verify=context, timeout=WITHIN_S) as client:
            url = "https://{}:{}/echo".format(*desk.address)
            assert (await client.post(url, content=LARGE)).content == LARGE

    with_processes(story, tls_certificate=both, tls_key=both)


def test_connections_wait_while_there_are_no_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent, "CONNECTION_DESCRIPTORS", 10**9)  # so one each

    async def story(desk: Desk) -> None:
        lines = [await desk.connect(head("/echo", 2) + b"ok") for _ in range(3)]
        for reader, _ in lines[:2]:
            assert await reader.readuntil(b"ok\r\n")
        await asyncio.sleep(0.1)
        assert desk.connections() == [1, 1]
        lines[0][1].close()
        assert await asyncio.wait_for(lines[2][0].readuntil(b"ok\r\n"), WITHIN_S)
        for _, writer in lines:
            writer.close()

    with_processes(story)


def test_at_the_end_answers_get_their_time_and_new_connections_are_refused() -> None:
    async def story(desk: Desk) -> None:
        half, half_writer = await desk.connect(head("/echo", 6) + b"hel")
        stuck, stuck_writer = await desk.connect(head("/follow"))
        await stuck.readuntil(b"event")
        stopped = desk.stop()
        await asyncio.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            await desk.connect(b"")
        half_writer.write(b"lo!")
        assert b"hello!" in await half.read()
        assert not desk.app.received
        pids = [process.pid for process in desk.running]
        await stopped
        assert await stuck.read() == b"\r\n"  # without the chunk that ends the answer
        await until(lambda: not desk.app.running)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        for writer in (half_writer, stuck_writer):
            writer.close()

    with_processes(story)
