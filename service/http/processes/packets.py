"""The connection between the server and one of its HTTP processes: packets, and shared memory.

A message is a head in JSON and a short body. Longer bodies lie in buffers of shared memory, which
the receiver reads in place. A buffer is used again when the receiver's last view of it is gone.

What one side sends in one turn of its event loop is one packet: each system call wakes the other
side, and costs as much as the rest of a message.

A packet that cannot be sent or handled ends the connection, and with it the process: otherwise the
two sides would no longer agree on which buffers the other one has mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from pipeline.errors import HostError
from service import logs
from service.http.guard import Message
from service.serving.shared_memory import Body, BodyPool, Buffer, body_in

# of the head, of the body, and the number of descriptors; a head without length: all of the message
# is in the file of the first descriptor
LENGTHS = struct.Struct("<III")
MAX_PACKET_BYTES = 64 * 1024  # the kernel's default limit is 208 KiB
SHORT_BYTES = 32 * 1024  # of a body within a packet
ACKNOWLEDGED = 8  # events of an answer, at once
MAX_DESCRIPTORS = 64  # of one packet
DESCRIPTORS_BYTES = socket.CMSG_LEN(MAX_DESCRIPTORS * array("i").itemsize)
# plain integers: the enum's own `&` runs in Python, for every packet
CLOSE_ON_EXEC, CUT_OFF = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)

Head = dict[str, Any]
Bytes = bytes | memoryview

log = logs.get("service.http")


class Packet(NamedTuple):
    """A message that has arrived. Its descriptors belong to the receiver."""

    head: Head
    body: Bytes
    descriptors: Sequence[int]


def weight(message: Message) -> int:
    """Return as how many events of an answer a message counts: few bodies may wait in buffers."""
    return 1 if len(message.get("body", b"")) <= SHORT_BYTES else ACKNOWLEDGED


class Packets:
    """One end of a connection. Nothing blocks: what the kernel cannot take yet is sent later."""

    def __init__(
        self,
        end: socket.socket,
        received: Callable[[Packet], None],
        closed: Callable[[], None],
    ) -> None:
        end.setblocking(False)
        self._end, self._received, self._closed = end, received, closed
        self._loop = asyncio.get_running_loop()
        self._parts: list[Bytes] = []  # of the messages of this turn
        self._descriptors: list[int] = []
        self._size = 0  # of these messages, in bytes
        self._waiting: deque[tuple[bytes, Sequence[int]]] = deque()
        self._is_open, self._thread = True, threading.get_ident()
        self._loop.add_reader(end.fileno(), self._readable)

    def send(self, head: Head, body: Bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message after all earlier ones, at the end of this turn of the event loop, and
        close its descriptors.
        """
        if not self._is_open:
            _close(descriptors)
            return
        text = orjson.dumps(head)
        size = LENGTHS.size + len(text) + len(body)
        if size > MAX_PACKET_BYTES:  # a client's head may be longer
            try:
                descriptors = (_file_with(text, body), *descriptors)
            except OSError as error:
                _close(descriptors)
                self._fail(error)
                return
            text = body = b""
            size = LENGTHS.size
        is_full = self._size + size > MAX_PACKET_BYTES
        if is_full or len(self._descriptors) + len(descriptors) > MAX_DESCRIPTORS:
            self._flush()
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts += (LENGTHS.pack(len(text), len(body), len(descriptors)), text, body)
        self._descriptors += descriptors
        self._size += size

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call something in the next turn of the event loop. It may be used in any thread and at
        any time: memory is freed in any thread, and in the middle of anything.
        """
        is_here = threading.get_ident() == self._thread
        call_soon = self._loop.call_soon if is_here else self._loop.call_soon_threadsafe
        with contextlib.suppress(RuntimeError):  # the loop has ended
            call_soon(call, *arguments)

    def close(self) -> None:
        """Close this end. It can be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())
        _close(self._descriptors)
        for _, descriptors in self._waiting:
            _close(descriptors)
        self._parts.clear()
        self._waiting.clear()
        self._end.close()
        self._closed()

    def _flush(self) -> None:
        """Send what was gathered, if it was not sent before."""
        if not self._parts:
            return
        packet = (b"".join(self._parts), self._descriptors)
        self._parts, self._descriptors, self._size = [], [], 0
        if self._waiting or not self._sent(*packet):
            self._waiting.append(packet)
            if len(self._waiting) == 1:
                self._loop.add_writer(self._end.fileno(), self._writable)

    def _sent(self, data: bytes, descriptors: Sequence[int]) -> bool:
        """Send now; False if the kernel has no room."""
        try:
            if descriptors:
                socket.send_fds(self._end, (data,), list(descriptors))
            else:
                self._end.send(data)
        except OSError as error:
            # ETOOMANYREFS: too many descriptors are on their way
            if isinstance(error, BlockingIOError) or error.errno == errno.ETOOMANYREFS:
                return False
            self._fail(error)
        _close(descriptors)
        return True

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, ConnectionError):  # the other side has ended
            log.error("http_process.connection", exc_info=error)
        self._loop.call_soon(self.close)

    def _writable(self) -> None:
        while self._waiting and self._sent(*self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting:
            self._loop.remove_writer(self._end.fileno())

    def _readable(self) -> None:
        """Take one packet. The event loop calls again if there are more: to look for another one
        here would mostly be in vain, and costs a system call.
        """
        if not self._is_open:
            return
        try:
            data, ancillary, flags, _ = self._end.recvmsg(
                MAX_PACKET_BYTES, DESCRIPTORS_BYTES, CLOSE_ON_EXEC
            )
        except BlockingIOError:
            return
        except ConnectionError:
            data, ancillary, flags = b"", [], 0
        if not data:
            self.close()
            return
        descriptors = _descriptors_in(ancillary)
        try:
            if flags & CUT_OFF:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            for packet in _messages_in(data, descriptors):
                self._received(packet)
        except Exception as error:  # noqa: BLE001  whatever it is, a message is lost
            _close(descriptors)
            self._fail(error)


def _descriptors_in(ancillary: Sequence[tuple[int, int, bytes]]) -> deque[int]:
    """Return the descriptors that came with a packet."""
    descriptors = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return deque(descriptors)


def _messages_in(data: bytes, descriptors: deque[int]) -> Iterator[Packet]:
    """Yield the messages of a packet. Each takes its own of the descriptors."""
    end = 0
    while end < len(data):
        head_bytes, body_bytes, count = LENGTHS.unpack_from(data, end)
        begin = end + LENGTHS.size
        middle = begin + head_bytes
        end = middle + body_bytes
        own = [descriptors.popleft() for _ in range(count)]
        if head_bytes:
            yield Packet(orjson.loads(data[begin:middle]), data[middle:end], own)
        else:
            yield Packet(*_read_file(own[0]), own[1:])


def _file_with(text: bytes, body: Bytes) -> int:
    """Return the descriptor of a file in memory with a head and a body."""
    descriptor = os.memfd_create("crucible", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.writelines((LENGTHS.pack(len(text), len(body), 0), text, body))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read_file(descriptor: int) -> tuple[Head, bytes]:
    """Return the head and the body in a file, and close it."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        head_bytes, _, _ = LENGTHS.unpack(file.read(LENGTHS.size))
        return orjson.loads(file.read(head_bytes)), file.read()


class Lender(BodyPool):
    """The buffers that this side writes and the other side reads."""

    def __init__(self, packets: Packets) -> None:
        super().__init__()
        self._packets = packets
        self._mapped: set[int] = set()  # by the other side
        self._away: dict[int, Body] = {}

    def take(self, size: int, key: Hashable, before: int = 0) -> memoryview:
        """Return memory as `shared` does: a body in ordinary memory would be copied here."""
        return self.shared(size, key, before).data

    def lend(self, body: Body) -> tuple[Head, Sequence[int]]:
        """Return what the other side needs to know; it may read until it calls `released`.
        HostError if there is no descriptor for it.
        """
        buffer = body.buffer
        descriptors: Sequence[int] = ()
        if buffer.number not in self._mapped:
            try:
                descriptors = (os.dup(buffer.descriptor),)
            except OSError as error:
                raise HostError(
                    f"cannot share memory: {error}", "raise the limit of open files"
                ) from error
            buffer.give_descriptor()
            self._mapped.add(buffer.number)
        self._away[buffer.number] = body
        head = {"buffer": buffer.number, "begin": body.offset, "size": body.size}
        return head | {"in_place": body.in_place}, descriptors

    def released(self, numbers: Iterable[int]) -> None:
        """Take buffers back that the other side reads no longer."""
        for number in numbers:
            self._away.pop(number, None)

    def close(self) -> None:
        """Take all memory back: the other side has ended."""
        self._away.clear()

    def dropped(self, buffer: Buffer) -> None:
        """Tell the other side to unmap a buffer."""
        if buffer.number in self._mapped:
            self._mapped.discard(buffer.number)
            self._packets.send({"kind": "forget", "buffer": buffer.number})


class Borrower:
    """The buffers that the other side writes and this side reads."""

    def __init__(self, packets: Packets, passes_on: bool = False) -> None:
        self._packets, self._passes_on = packets, passes_on
        self._buffers: dict[int, Buffer] = {}
        self._released: deque[int] = deque()

    def body(self, head: Head, descriptors: Iterator[int]) -> memoryview:
        """Return the memory that `head` describes. The other side gets it back when the last view
        of it is gone. Call it for each buffer of each packet, even if nobody wants the body.
        """
        number = head["buffer"]
        buffer = self._buffers.get(number)
        if buffer is None:
            buffer = self._buffers[number] = Buffer.attach(next(descriptors), self._passes_on)
        body = body_in(buffer, head["begin"], head["size"], head["in_place"])
        weakref.finalize(body, self._release, number).atexit = False
        return body.data

    def forget(self, number: int) -> None:
        """Unmap a buffer that the other side uses no longer."""
        self._buffers.pop(number, None)

    def _release(self, number: int) -> None:
        """Give a buffer back. Memory is freed in any thread, and in the middle of anything."""
        self._released.append(number)
        self._packets.soon(self._send_released)

    def _send_released(self) -> None:
        numbers = [self._released.popleft() for _ in range(len(self._released))]
        if numbers:
            self._packets.send({"kind": "released", "buffers": numbers})


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
