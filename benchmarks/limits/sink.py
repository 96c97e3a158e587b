"""A server that reads requests and answers with zeros: what loopback and one event loop carry.

    python sink.py PORT ANSWER_BYTES

It reads bodies as long as Content-Length says, into one buffer, and keeps nothing.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

HEAD_END, LENGTH = b"\r\n\r\n", b"content-length:"
BUFFER = 2**20


class Sink(asyncio.BufferedProtocol):
    """One connection. A client sends its next request after the answer to the last one."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._buffer = bytearray(BUFFER)
        self._head = b""
        self._left = -1  # bytes of the body that have not come; -1: the head has not ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._left < 0:
            self._head += self._buffer[:nbytes]
            head, found, body = self._head.partition(HEAD_END)
            if not found:
                return
            self._left = int(head.lower().partition(LENGTH)[2].partition(b"\r\n")[0])
            nbytes = len(body)
        self._left -= nbytes
        if self._left == 0:
            self._head, self._left = b"", -1
            self._transport.write(self._answer)


async def serve(port: int, answer: bytes) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Sink(answer), "127.0.0.1", port)
    await server.serve_forever()


def answer_of(size: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode() + bytes(size)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), answer_of(int(sys.argv[2]))))
