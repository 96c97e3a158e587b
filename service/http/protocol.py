"""HTTP/1.1 connections: they refuse endless headers and slow bodies, and read tensors directly into
their final buffer.

uvicorn's protocol receives a body in pieces and stops reading until the application has taken each
one, which costs five copies. For tensors only the piece with the headers takes that way: the kernel
writes the rest into one buffer, which is passed on when it is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.errors import (
    NoRequest,
    ServiceError,
    SlowBody,
    SlowHead,
    TooLargeHead,
    Unavailable,
    answer_to,
)
from service.http.connection_limits import ConnectionLimits
from service.http.guard import INFER, MAX_DIGITS
from service.http.slow_bodies import OpenBodies
from service.serving.shared_memory import BodyPool
from service.settings import Settings

HEAD_S = 30.0  # from a connection's start, or a request's first byte, to the end of its headers
# of a request's path, query and headers, without the piece in which they began
MAX_HEAD_BYTES = 65536
# uvloop's own size: with a smaller one, a refusal would more often leave bytes unread, and the
# connection's reset would overtake the answer
PIECE_BYTES = 256_000
FLUSH_FROM_BYTES = 65536  # from this size on, the transport pauses whoever writes
HEADER_LENGTH = b"inference-header-content-length"  # the bytes of JSON before the tensors
TENSORS_FROM_BYTES = 65536  # from this size on, uvicorn stops reading until a piece is taken
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
TRIM_BYTES = 64 << 20  # free memory that the process keeps
MMAP_BYTES = 32 << 20  # from this size on, blocks are returned at once; glibc's maximum


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop listening before a load balancer
    notices the shutdown.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(
    app: Any, settings: Settings, grace_s: float, http: Any = "httptools"
) -> uvicorn.Config:
    """Return uvicorn's configuration for an application, whose unfinished answers get `grace_s` at
    the end. `http` is the factory of connections that uvicorn accepts itself.
    """
    return uvicorn.Config(
        app,
        http=http,
        interface="asgi3",
        ws="none",
        lifespan="off",  # its errors reach the caller of `serve` in another way
        log_config=None,
        access_log=False,  # service.http.access_log writes a line per request
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(grace_s),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )


def protocol(settings: Settings, limits: ConnectionLimits) -> Any:
    """Return the factory of one server's connections, for uvicorn's option `http`."""
    piece, bodies = piece_buffer(), BodyPool()
    open_bodies = OpenBodies(settings.min_body_bytes_per_s)
    return lambda *arguments, **options: Connection(
        piece, LimitedHttp(limits, bodies, open_bodies, *arguments, **options)
    )


def piece_buffer() -> memoryview:
    """Return a buffer for all connections: each read is consumed before the next one starts."""
    return memoryview(bytearray(PIECE_BYTES))


def keep_memory() -> bool:
    """Keep the memory that large bodies free: glibc would return it after each request and fetch it
    again, with 150 page faults for 602 KB. Returns False without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, TRIM_BYTES) and mallopt(M_MMAP_THRESHOLD, MMAP_BYTES))


class Connection(asyncio.BufferedProtocol):
    """The event loop's view of a connection."""

    def __init__(self, piece: memoryview, http: Http) -> None:
        self._piece, self._http = piece, http

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def eof_received(self) -> None:
        self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._piece if self._http.rest is None else self._http.rest

    def buffer_updated(self, nbytes: int) -> None:
        """Handle `nbytes` new bytes in the buffer."""
        if self._http.rest is None:
            self._http.data_received(bytes(self._piece[:nbytes]))
        else:
            self._http.rest_received(nbytes)


class GatheringTransport:
    """A transport that sends everything written in one turn of the event loop by one system call.

    uvicorn writes the head and each part of a body by themselves. So the client would wake up for
    the head, while the body is still on its way.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes | memoryview] = []
        self._bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | memoryview) -> None:
        """Write at the end of this turn at the latest, or at once if there is much to write."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes >= FLUSH_FROM_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered, unless the connection is lost."""
        parts, self._parts, self._bytes = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)

    def close(self) -> None:
        """Write what was gathered, and close the connection."""
        self.flush()
        self._transport.close()


class Http(HttpToolsProtocol):
    """Answers invalid requests in the service's form, and refuses headers that are too long or too
    slow, and slow bodies, for which uvicorn would wait without limit.
    """

    def __init__(
        self, bodies: BodyPool, open_bodies: OpenBodies, *arguments: Any, **options: Any
    ) -> None:
        self._bodies, self._open_bodies = bodies, open_bodies
        self.body_length: int | None = None  # None: not known
        self.body_received = 0
        # unfilled part of the tensor buffer; None: the parser gets the next bytes
        self.rest: memoryview | None = None
        # tensor buffer that has not been passed on
        self._body: memoryview | None = None
        self._in_head = self._begun = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self.url = b""
        super().__init__(*arguments, **options)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(GatheringTransport(transport, self.loop))  # type: ignore[arg-type]
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self._open_bodies.discard(self)
        if self.cycle is not None:
            # breaks the reference cycle between the request cycle and its `receive`
            vars(self.cycle).pop("receive", None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # the first piece may also hold the end of another request, and does not count
        if self._in_head and not self._begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())
        self._begun = False

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def on_message_begin(self) -> None:
        self._in_head = self._begun = True
        self._head_bytes = 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget_deadline()
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"0")  # a chunked body has none
        has_body = length.strip(b"0") or b"transfer-encoding" in headers
        if self.parser.should_upgrade() and has_body:  # the parser takes such a body for a request
            self._refuse(
                NoRequest(
                    "a request with a body asks for another protocol",
                    "send it as HTTP/1.1 without an Upgrade header",
                )
            )
            return
        super().on_headers_complete()
        if has_body:
            is_known = b"content-length" in headers and len(length) <= MAX_DIGITS
            self.body_length, self.body_received = int(length) if is_known else None, 0
            self._open_bodies.add(self)
        # pipelined requests, other paths and invalid lengths take uvicorn's way
        if self.pipeline or not self.scope["path"].endswith(INFER) or len(length) > MAX_DIGITS:
            return
        if int(length) > TENSORS_FROM_BYTES:
            # until the application reads the body: Guard has checked its length by then
            self.flow.pause_reading()
            self._body = None
            receive = partial(self._receive_tensors, self.cycle, int(length))
            self.cycle.receive = receive  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self.body_received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._open_bodies.discard(self)
        super().on_message_complete()

    async def _receive_tensors(self, cycle: RequestResponseCycle, length: int) -> Any:
        """The application's ASGI `receive`: returns the complete body first, then the disconnect.
        May be cancelled and called again.
        """
        # breaks the reference cycle between the request cycle and its `receive`
        vars(cycle).pop("receive", None)
        # else the body came with the headers, is being read, or has been passed on
        if self._body is None and cycle.more_body:
            self._body = self.memory_for(length)
            self._body[: len(cycle.body)] = cycle.body
            self.rest = self._body[len(cycle.body) :]
            cycle.body = bytearray()
            cycle.message_event.clear()  # it was set for the bytes just copied
        message = await RequestResponseCycle.receive(cycle)
        if self._body is None or message["type"] != "http.request":
            return message
        body, self._body = self._body, None
        return {**message, "body": body}

    def memory_for(self, length: int) -> memoryview:
        """Return memory for the body of the request, which only requests like it use again."""
        path, headers = self.scope["path"], dict(self.headers)
        # INFER alone is the only deployed model, which may be another one tomorrow
        key = None if path == INFER else (path, headers.get(b"authorization"))
        head = headers.get(HEADER_LENGTH, b"0")
        is_number = head.isdigit() and len(head) <= MAX_DIGITS
        return self._bodies.take(length, key, int(head) if is_number else 0)

    def rest_received(self, count: int) -> None:
        """Handle `count` new bytes in `rest`."""
        assert self.rest is not None
        self.body_received += count
        self.rest = self.rest[count:]
        if not self.rest:
            self.rest = None
            # a new parser, because the old one still waits for the body
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
            self.on_message_complete()

    def refuse_body(self, error: SlowBody) -> None:
        """Close the connection, after a refusal unless the answer has begun."""
        if self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(error)

    def is_reading(self) -> bool:
        """Return False while the application reads no more, or answers an earlier request."""
        return not self.flow.read_paused and not self.pipeline

    def _expect_head(self) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(HEAD_S, self._refuse_slow)

    def _forget_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()

    def _refuse_slow(self) -> None:
        message = f"path, query and headers are not complete after {HEAD_S:g} s"
        self._refuse(SlowHead(message, "send them at once, or close the connection"))

    def send_400_response(self, msg: str) -> None:
        """Answer a request that uvicorn's parser refuses, such as a URL of 64 KiB in one piece."""
        if len(self.url) >= MAX_HEAD_BYTES:
            self._refuse(_too_large())
        else:
            self._refuse(
                NoRequest(
                    "this is not an HTTP/1.1 request",
                    "use an HTTP client; encode bytes that a URL cannot contain as %XX",
                )
            )

    def _refuse(self, error: ServiceError) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(refusal(error))
        self.transport.close()


class LimitedHttp(Http):
    """A connection that counts against the limits of connections."""

    def __init__(self, limits: ConnectionLimits, *arguments: Any, **options: Any) -> None:
        self._limits = limits
        self._address: str | None = None  # under which it counts
        super().__init__(*arguments, **options)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        try:
            self._limits.admit(address)
        except Unavailable as error:
            self._refuse(error)
        else:
            self._address = address

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._address is not None:
            self._limits.release(self._address)


def refusal(error: ServiceError) -> bytes:
    """Return the answer that refuses a request, or a connection, and ends the connection."""
    answer = answer_to(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(answer.json)),
        "connection": "close",
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + answer.json


def _too_large() -> TooLargeHead:
    return TooLargeHead(
        f"path, query and headers of more than {MAX_HEAD_BYTES} bytes",
        "shorten them; send data in the body",
    )
