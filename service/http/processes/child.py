"""A process that serves HTTP connections: `python -m service.http.processes.child FD`.

The server accepts connections and gives each to one of these processes. The process reads and
parses requests, and encrypts. The application runs in the server: its `receive` and `send` come
here as packets. So a body is read from the socket, and written to it, by this process alone.

It trusts the server, and ends when the server closes the connection.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pipeline.errors import HostError
from service import logs
from service.http.guard import Message, Receive, Send
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
from service.http.protocol import (
    Connection,
    Http,
    Server,
    keep_memory,
    piece_buffer,
    uvicorn_config,
)
from service.http.slow_bodies import OpenBodies
from service.serving.shared_memory import Body
from service.settings import Settings

STARTING_S = 0.01  # between looks whether the server has begun


class ChildHttp(Http):
    """A connection that says when it is lost."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.lost = asyncio.Event()
        super().__init__(*arguments, **options)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost.set()


class Child:
    """The connections of this process, and their requests."""

    def __init__(self, end: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.packets = Packets(end, self._received, lambda: os._exit(0))
        self._lender, self._borrower = Lender(self.packets), Borrower(self.packets)
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._piece = piece_buffer()
        self._open_bodies: OpenBodies
        self._started: asyncio.Future[Server] = self._loop.create_future()
        self._stopping: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        server = await self._started
        await server.serve(sockets=[])

    def _received(self, packet: Packet) -> None:
        head = packet.head
        kind = head["kind"]
        if kind == "released":
            self._lender.released(head["buffers"])
        elif kind == "forget":
            self._borrower.forget(head["buffer"])
        elif kind == "start":
            self._start(Settings.model_validate(head["settings"]), head["grace_s"])
        elif kind == "connection":
            task = self._loop.create_task(
                self._connect(head["number"], socket.socket(fileno=packet.descriptors[0]))
            )
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        elif kind == "stop":
            self._stopping = self._loop.create_task(self._stop())
        else:
            events = self._events(packet) if kind == "events" else []
            request = self._requests.get(head["number"])
            if request is None:  # its client is gone
                return
            if kind == "events":
                request.answer.put_nowait((events, head["last"]))
            else:
                request.reader = self._loop.create_task(self._read(head["number"], request.receive))

    def _start(self, settings: Settings, grace_s: float) -> None:
        logs.configure(settings)
        self._open_bodies = OpenBodies(settings.min_body_bytes_per_s)
        config = uvicorn_config(self.application, settings, grace_s)
        config.load()
        self._started.set_result(Server(config))

    async def _stop(self) -> None:
        """End the server, once it has begun: it would not tell connections that came before."""
        server = self._started.result()
        while not server.started:
            await asyncio.sleep(STARTING_S)
        server.should_exit = True

    async def _connect(self, number: int, accepted: socket.socket) -> None:
        """Serve a connection to its end."""
        server = self._started.result()
        http = ChildHttp(
            self._lender,
            self._open_bodies,
            config=server.config,
            server_state=server.server_state,
            app_state={},
        )
        try:
            accepted.setblocking(False)
            await self._loop.connect_accepted_socket(
                partial(Connection, self._piece, http), accepted, ssl=server.config.ssl
            )
            await http.lost.wait()
        except OSError:  # the client is gone, or speaks no TLS
            accepted.close()
        finally:
            self.packets.send({"kind": "ended", "number": number})

    async def application(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One request, as an ASGI application: all of it happens in the server."""
        number = next(self._numbers)
        request = self._requests[number] = _Request(receive)
        is_last = False
        try:
            head = {"kind": "request", "number": number, "scope": _text(scope)}
            if _has_arrived(receive):
                await self._pass_on(head, receive)
                request.reader = self._loop.create_task(self._watch(number, receive))
            else:
                self.packets.send(head)
            count = 0
            while not is_last:
                events, is_last = await request.answer.get()
                while events:
                    message = events.pop(0)
                    await send(message)
                    count += weight(message)
                    if count >= ACKNOWLEDGED:
                        self.packets.send({"kind": "sent", "number": number, "count": count})
                        count = 0
        finally:
            if request.reader is not None:
                request.reader.cancel()
            del self._requests[number]
            if not is_last:
                self.packets.send({"kind": "gone", "number": number})

    async def _read(self, number: int, receive: Receive) -> None:
        """Pass on the next piece of a body, and watch the client after the last one."""
        if not await self._pass_on({"kind": "received", "number": number}, receive):
            await self._watch(number, receive)

    async def _pass_on(self, head: Head, receive: Receive) -> bool:
        """Send `head` with what `receive` returns; return True if more may come."""
        try:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            place, body, descriptors = self._place(message.get("body", b""))
        except HostError as error:  # no shared memory: the application's `receive` raises it
            self.packets.send(head | {"error": (error.message, error.next_step)})
            return True
        more = message.get("more_body", False)
        self.packets.send(head | place | {"more": more}, body, descriptors)
        return bool(more)

    def _place(self, body: Bytes) -> tuple[Head, Bytes, Sequence[int]]:
        """Return where a body lies, in which packet it travels, and the descriptors for it.
        HostError if there is no shared memory.
        """
        if len(body) <= SHORT_BYTES:
            return {}, body, ()
        lent: Any = body.obj if isinstance(body, memoryview) else None
        is_piece = not isinstance(lent, Body)
        if is_piece:
            lent = self._lender.shared(len(body))
            lent.data[:] = body
        place, descriptors = self._lender.lend(lent)
        return place | {"is_piece": is_piece}, b"", descriptors

    def _events(self, packet: Packet) -> list[Message]:
        """Return the messages of the application in a packet."""
        begin, rest, descriptors = 0, memoryview(packet.body), iter(packet.descriptors)
        messages: list[Message] = []
        for event in packet.head["events"]:
            if "status" in event:
                headers = [
                    (name.encode("latin-1"), value.encode("latin-1"))
                    for name, value in event["headers"]
                ]
                messages.append(
                    {
                        "type": "http.response.start",
                        "status": event["status"],
                        "headers": headers,
                    }
                )
                continue
            if "buffer" in event:
                body = self._borrower.body(event, descriptors)
            else:
                body = rest[begin : begin + event["size"]]
                begin += event["size"]
            messages.append(
                {"type": "http.response.body", "body": body, "more_body": event["more"]}
            )
        return messages

    async def _watch(self, number: int, receive: Receive) -> None:
        """Report a client that is gone before it has its answer."""
        while (await receive())["type"] != "http.disconnect":
            continue
        self.packets.send({"kind": "gone", "number": number})


class _Request:
    """One request: what the server has sent of the answer, and who reads from the client."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.reader: asyncio.Task[None] | None = None
        # the events of a packet, and whether they are the last ones
        self.answer: asyncio.Queue[tuple[list[Message], bool]] = asyncio.Queue()


def _has_arrived(receive: Receive) -> bool:
    """Return True if a body is here to the end, or there is none."""
    cycle = getattr(receive, "__self__", None)  # none for tensors, whose body is still to be read
    if not isinstance(cycle, RequestResponseCycle):
        return False
    return not cycle.more_body and not cycle.disconnected


def _text(scope: dict[str, Any]) -> Head:
    """Return a scope in JSON."""
    return {
        "http_version": scope["http_version"],
        "server": scope["server"],
        "client": scope["client"],
        "scheme": scope["scheme"],
        "method": scope["method"],
        "root_path": scope["root_path"],
        "path": scope["path"],
        "raw_path": scope["raw_path"].decode("latin-1"),
        "query_string": scope["query_string"].decode("latin-1"),
        "headers": [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ],
    }


async def _serve(end: socket.socket) -> None:
    await Child(end).serve()


def main(descriptor: int) -> None:
    """Serve connections until the server says `stop`, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a service manager may signal all processes
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    keep_memory()
    end = socket.socket(fileno=descriptor)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(end))
    os._exit(0)  # nothing is left to write


if __name__ == "__main__":
    main(int(sys.argv[1]))
