"""The server's side of its HTTP processes: it accepts connections, gives each to the process with
the fewest, and runs the application for their requests.

processes = HttpProcesses(app, listener, settings, limits, grace_s)
await processes.start()     connections are accepted
await processes.stop()      no new connections; unfinished answers get `grace_s`
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import socket
import sys
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from pipeline.errors import HostError
from service import logs
from service.errors import Unavailable
from service.http.connection_limits import ConnectionLimits
from service.http.guard import Application, Message
from service.http.processes.packets import (
    ACKNOWLEDGED,
    SHORT_BYTES,
    Borrower,
    Bytes,
    Head,
    Lender,
    Packet,
    Packets,
    weight,
)
from service.http.protocol import refusal
from service.offload.pool import environment
from service.serving.shared_memory import KEPT_BUFFERS
from service.settings import Settings

CHILD = (sys.executable, "-m", "service.http.processes.child")
AHEAD = 2 * ACKNOWLEDGED  # events of an answer that may wait in the process
AGAIN_S = 1.0  # after the end of a process, until it is started again
KILLED_S = 1.0  # after `grace_s`
ACCEPTED = 100  # connections in one turn of the event loop
PAUSE_S = 1.0  # without descriptors, until connections are accepted again
# of the server: two for a connection's request, and one for each body of its answer that may wait
CONNECTION_DESCRIPTORS = 2 + 1 + AHEAD // ACKNOWLEDGED
OTHER_DESCRIPTORS = 128  # of the server

log = logs.get("service.http")


class HttpProcesses:
    """All HTTP processes of a server. Belongs to one event loop."""

    def __init__(
        self,
        app: Application,
        listener: socket.socket,
        settings: Settings,
        limits: ConnectionLimits,
        grace_s: float,
    ) -> None:
        self._app, self._listener, self._settings = app, listener, settings
        self._limits, self._grace_s = limits, grace_s
        self._loop = asyncio.get_running_loop()
        self._running: list[_Process] = []
        self._is_stopping = False
        self._most = max(1, _most_connections(settings.http_processes))  # of a process
        self.ended: asyncio.Future[Any] = self._loop.create_future()

    async def start(self) -> None:
        """Start the processes, and accept connections. HostError if one cannot be started."""
        count = self._settings.http_processes
        try:
            processes = await asyncio.gather(*(self._start_one() for _ in range(count)))
        except OSError as error:
            raise HostError(
                f"cannot start {count} HTTP processes: {error}",
                "set a lower CRUCIBLE_SERVICE_HTTP_PROCESSES",
            ) from error
        self._listener.setblocking(False)
        self.ended = asyncio.gather(*map(self._keep, processes))

    async def stop(self) -> None:
        """Refuse new connections, and end the processes. Unfinished answers get `grace_s`."""
        self._is_stopping = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        processes = list(self._running)
        for process in processes:
            process.packets.send({"kind": "stop"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended, self._grace_s + KILLED_S)
        for process in processes:
            process.cancel()

    async def _start_one(self) -> _Process:
        return await _Process.start(self._app, self._settings, self._limits, self._grace_s)

    async def _keep(self, process: _Process) -> None:
        """Start a process again whenever it ends."""
        while True:
            self._running.append(process)
            self._listen()
            if self._is_stopping:  # since it was started
                process.packets.send({"kind": "stop"})
            try:
                status = await process.ended()
            finally:
                self._running.remove(process)
            if self._is_stopping:
                return
            log.error("http_process.ended", pid=process.pid, status=status)
            if not self._running:
                self._loop.remove_reader(self._listener.fileno())
            process = await self._start_again()

    async def _start_again(self) -> _Process:
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                return await self._start_one()
            except OSError as error:
                log.error("http_process.start", error=str(error))

    def _listen(self) -> None:
        if self._running and not self._is_stopping:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED):
            process = min(self._running, key=lambda process: process.connections)
            try:
                if process.connections >= self._most:
                    raise OSError(f"every HTTP process has {self._most} connections")
                accepted, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("http_process.accept", error=str(error))
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_S, self._listen)
                return
            try:
                self._limits.admit(address[0])
            except Unavailable as error:
                self._turn_away(accepted, error)
            else:
                process.take(accepted, address[0])

    def _turn_away(self, accepted: socket.socket, error: Unavailable) -> None:
        """Close a connection; without TLS, after an answer."""
        with accepted, contextlib.suppress(OSError):
            accepted.setblocking(False)
            if self._settings.tls_certificate is None:
                accepted.send(refusal(error))


def _most_connections(count: int) -> int:
    """Return how many connections each of `count` processes may have: without a free descriptor,
    the server could no longer map the body of a request.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = limit - OTHER_DESCRIPTORS - 3 * count * KEPT_BUFFERS
    return free // (count * CONNECTION_DESCRIPTORS)


class _Process:
    """One HTTP process and the requests of its connections."""

    def __init__(
        self,
        app: Application,
        limits: ConnectionLimits,
        child: asyncio.subprocess.Process,
        end: socket.socket,
    ) -> None:
        self.pid = child.pid
        self._app, self._limits, self._child = app, limits, child
        self._numbers = itertools.count()
        self._addresses: dict[int, str] = {}  # of the connections
        self._requests: dict[int, _Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.packets = Packets(end, self._received, self._lost)
        self.lender, self.borrower = Lender(self.packets), Borrower(self.packets, True)

    @classmethod
    async def start(
        cls, app: Application, settings: Settings, limits: ConnectionLimits, grace_s: float
    ) -> _Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                child = await asyncio.create_subprocess_exec(
                    *CHILD,
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=environment(),
                    start_new_session=True,  # Ctrl-C reaches the server only
                )
            except BaseException:
                ours.close()
                raise
        process = cls(app, limits, child, ours)
        head = {"kind": "start", "settings": settings.model_dump(mode="json"), "grace_s": grace_s}
        process.packets.send(head)
        return process

    async def ended(self) -> int:
        """Wait for the end of the process; return its status. Cancelling kills it."""
        try:
            return await self._child.wait()
        finally:
            if self._child.returncode is None:
                self._child.kill()
                await self._child.wait()
            self.packets.close()
            while self._addresses:
                self._limits.release(self._addresses.popitem()[1])

    @property
    def connections(self) -> int:
        return len(self._addresses)

    def take(self, accepted: socket.socket, address: str) -> None:
        """Give a connection to the process."""
        number = next(self._numbers)
        self._addresses[number] = address
        self.packets.send({"kind": "connection", "number": number}, b"", (accepted.detach(),))

    def cancel(self) -> None:
        """Cancel the requests that have not ended."""
        for task in self._tasks:
            task.cancel()

    def _received(self, packet: Packet) -> None:
        head = packet.head
        kind = head["kind"]
        if kind == "released":
            self.lender.released(head["buffers"])
        elif kind == "forget":
            self.borrower.forget(head["buffer"])
        elif kind == "ended":
            self._limits.release(self._addresses.pop(head["number"]))
        else:
            body = packet.body
            if "buffer" in head:
                body = self.borrower.body(head, iter(packet.descriptors))
                if head["is_piece"]:  # parsers of uploads want bytes
                    body = bytes(body)
            if kind == "request":
                self._start_request(head, body)
            elif (request := self._requests.get(head["number"])) is not None:
                request.received(head, body)

    def _start_request(self, head: Head, body: Bytes) -> None:
        number = head["number"]
        request = self._requests[number] = _Request(self, number)
        if "more" in head or "error" in head:  # its body came with it
            request.received(head, body)
        task = asyncio.get_running_loop().create_task(self._run(request, number, head["scope"]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: _Request, number: int, scope: Head) -> None:
        try:
            await request.run(self._app, scope)
        finally:
            del self._requests[number]

    def _lost(self) -> None:
        self.lender.close()
        for request in self._requests.values():
            request.gone()


class _Request:
    """One request: what the application receives, and what it sends."""

    def __init__(self, process: _Process, number: int) -> None:
        self._process, self._number = process, number
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # anything that `receive` or `send` may wait for
        self._message: Message | HostError | None = None  # for the next `receive`
        self._is_requested = False  # the next piece of the body
        self._is_complete = False  # the body
        self._is_gone = False  # the client
        self._events: list[Head] = []
        self._short: list[Bytes] = []
        self._descriptors: list[int] = []
        self._flush: asyncio.Handle | None = None
        self._unsent = 0

    async def run(self, app: Application, scope: Head) -> None:
        """Run the application. It answers its own errors."""
        try:
            await app(_scope(scope), self.receive, self.send)
        except Exception as error:  # the edge of a request: others go on
            log.error("http_process.request", exc_info=error)
        finally:
            self._send_events(is_last=True)

    def received(self, head: Head, body: Bytes) -> None:
        """Take a packet of this request."""
        if head["kind"] == "gone":
            self.gone()
        elif head["kind"] == "sent":
            self._unsent -= head["count"]
            self._changed.set()
        elif not self._is_gone:
            self._is_requested = False
            if "error" in head:
                self._message = HostError(*head["error"])
            else:
                more = head["more"]
                self._is_complete = not more
                self._message = {"type": "http.request", "body": body, "more_body": more}
            self._changed.set()

    def gone(self) -> None:
        """The client is gone."""
        self._is_gone = True
        self._changed.set()

    async def receive(self) -> Message:
        """The application's ASGI `receive`. May be cancelled and called again."""
        while self._message is None:
            if self._is_gone:
                return {"type": "http.disconnect"}
            if not (self._is_complete or self._is_requested):
                self._is_requested = True
                self._process.packets.send({"kind": "receive", "number": self._number})
            self._changed.clear()
            await self._changed.wait()
        message, self._message = self._message, None
        if isinstance(message, HostError):
            raise message
        return message

    async def send(self, message: Message) -> None:
        """The application's ASGI `send`. What it sends in one turn of the loop is one packet."""
        if self._is_gone:
            return
        self._unsent += weight(message)
        if message["type"] == "http.response.start":
            headers = [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message.get("headers", ())
            ]
            self._events.append({"status": message["status"], "headers": headers})
        else:
            self._add_body(message.get("body", b""), message.get("more_body", False))
        if self._flush is None:
            self._flush = self._loop.call_soon(self._send_events)
        while self._unsent > AHEAD and not self._is_gone:
            self._changed.clear()
            await self._changed.wait()

    def _add_body(self, body: Bytes, more: bool) -> None:
        event: Head = {"size": len(body), "more": more}
        if len(body) <= SHORT_BYTES:
            if len(body) + sum(map(len, self._short)) > SHORT_BYTES:
                self._send_events()
            self._short.append(body)
        else:
            shared = self._process.lender.shared(len(body))
            shared[:] = np.frombuffer(body, np.uint8)
            place, descriptors = self._process.lender.lend(shared)
            event |= place
            self._descriptors += descriptors
        self._events.append(event)

    def _send_events(self, is_last: bool = False) -> None:
        """Send what was gathered."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._events or is_last:
            head = {
                "kind": "events",
                "number": self._number,
                "events": self._events,
                "last": is_last,
            }
            self._process.packets.send(head, b"".join(self._short), self._descriptors)
        self._events, self._short, self._descriptors = [], [], []


def _scope(head: Head) -> MutableMapping[str, Any]:
    """Return the ASGI scope that the process has described."""
    return {
        **head,
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "server": head["server"] and tuple(head["server"]),
        "client": head["client"] and tuple(head["client"]),
        "raw_path": head["raw_path"].encode("latin-1"),
        "query_string": head["query_string"].encode("latin-1"),
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]
        ],
        "state": {},
    }
