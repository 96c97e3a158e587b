"""Connections of HTTP/1.1: heads without end are refused, and tensors are read to where they are to
lie.

uvicorn's protocol takes what comes in pieces, and stops reading until the application has taken
each, which by then was copied five times. Of tensors only the piece with the head goes that way:
the kernel writes the rest into one buffer, which is handed on when it is full.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import numpy as np
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.errors import NoRequest, ServiceError, SlowHead, TooLargeHead, answer_to
from service.http.guard import INFER, MAX_DIGITS

HEAD_S = 30.0  # from a connection's start, or a request's first byte, to the end of its headers
# of a request's path, query and headers, besides what came in the piece in which they began
MAX_HEAD_BYTES = 65536
# as uvloop reads: of less, a refusal would more often find the rest unread, and the reset of the
# connection overtake it
PIECE_BYTES = 256_000
TENSORS_FROM_BYTES = 65536  # from here on uvicorn would stop reading until a piece is taken


def protocol() -> Any:
    """What makes the connections of one server, as uvicorn's `http` wants it."""
    piece = memoryview(
        bytearray(PIECE_BYTES)
    )  # of all of them: it is emptied before the next one reads
    return lambda *arguments, **options: Connection(piece, Http(*arguments, **options))


class Connection(asyncio.BufferedProtocol):
    """What the event loop sees of a connection."""

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
        """Where to write what comes next."""
        return self._piece if self._http.rest is None else self._http.rest

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have been written there."""
        if self._http.rest is None:
            self._http.data_received(bytes(self._piece[:nbytes]))
        else:
            self._http.rest_received(nbytes)


class Http(HttpToolsProtocol):
    """Refuses what is no request in the form of all refusals, and heads without end, in bytes or in
    time, which uvicorn would wait for and keep.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.rest: memoryview | None = (
            None  # of tensors, where it is to lie; None: what comes is for the parser
        )
        self._whole: memoryview | None = (
            None  # tensors that are being read, and have not been handed over
        )
        self._in_head = self._begun = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self.url = b""
        super().__init__(*arguments, **options)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        if self.cycle is not None:
            vars(self.cycle).pop(
                "receive", None
            )  # nobody asked for these tensors: it and its cycle would hold each other
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if (
            self._in_head and not self._begun
        ):  # the piece in which it begins may hold the end of another request
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())
        self._begun = False

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
        if self.parser.should_upgrade() and (
            length.strip(b"0") or b"transfer-encoding" in headers
        ):  # the parser takes such a body for a request
            self._refuse(
                NoRequest(
                    "a request with a body asks for another protocol",
                    "send it as HTTP/1.1 without an Upgrade header",
                )
            )
            return
        super().on_headers_complete()
        if (
            self.pipeline or not self.scope["path"].endswith(INFER) or len(length) > MAX_DIGITS
        ):  # what waits goes uvicorn's way
            return
        if int(length) > TENSORS_FROM_BYTES:
            # until the application asks for it: by then Guard has seen how long it is
            self.flow.pause_reading()
            self._whole = None
            self.cycle.receive = partial(self._receive_tensors, self.cycle, int(length))  # type: ignore[method-assign]

    async def _receive_tensors(self, cycle: RequestResponseCycle, length: int) -> Any:
        """ASGI's `receive` of the application: first the whole body, then that the client has gone.
        May be cancelled, and called again.
        """
        vars(cycle).pop(
            "receive", None
        )  # it has been handed over: kept, it and its cycle would hold each other
        if (
            self._whole is None and cycle.more_body
        ):  # else all came with the head, or is on its way, or has been taken
            self._whole = np.empty(length, np.uint8).data
            self._whole[: len(cycle.body)] = cycle.body
            self.rest = self._whole[len(cycle.body) :]
            cycle.body = bytearray()
            cycle.message_event.clear()  # which was set for what is copied now
        message = await RequestResponseCycle.receive(cycle)
        if self._whole is None or message["type"] != "http.request":
            return message
        whole, self._whole = self._whole, None
        return {**message, "body": whole}

    def rest_received(self, count: int) -> None:
        """So many bytes have been written to `rest`."""
        assert self.rest is not None
        self.rest = self.rest[count:]
        if not self.rest:
            self.rest = None
            self.parser = httptools.HttpRequestParser(
                self
            )  # the last one waits for a body that it will not see
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.on_message_complete()

    def _expect_head(self) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(HEAD_S, self._refuse_slow)

    def _forget_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()

    def _refuse_slow(self) -> None:
        message = f"path, query and headers that are not whole after {HEAD_S:g} s"
        self._refuse(SlowHead(message, "send them at once, or close the connection"))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers where its parser refuses: a URL of 64 KiB in one piece among all
        else.
        """
        if len(self.url) >= MAX_HEAD_BYTES:
            self._refuse(_too_large())
        else:
            self._refuse(
                NoRequest(
                    "this is no HTTP/1.1 request",
                    "send one with an HTTP client; bytes that no URL holds are written as %XX",
                )
            )

    def _refuse(self, error: ServiceError) -> None:
        if self.transport.is_closing():
            return
        answer = answer_to(error)
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type:"
            f" application/json\r\ncontent-length: {len(answer.json)}"
        )
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + answer.json)
        self.transport.close()


def _too_large() -> TooLargeHead:
    return TooLargeHead(
        f"path, query and headers of more than {MAX_HEAD_BYTES} bytes",
        "send them shorter; data belongs into the body",
    )
