"""A client for HTTP/1.1 that costs little: sockets, one epoll, no framework.

It asks on N connections, each sending its next request when it has an answer.

    python client.py REQUEST EXPECTED TOLERANCE PORT CONNECTIONS SECONDS

prints one line of JSON: what came, how long each took, and what this client cost.

REQUEST is a file with the bytes of a whole request, EXPECTED one with those that every answer ends
with: float32, which may differ by TOLERANCE.
"""

from __future__ import annotations

import json
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

HEAD_END, LENGTH, TIMING, BATCH = (
    b"\r\n\r\n",
    b"\r\ncontent-length:",
    b"\r\nserver-timing:",
    b"\r\ncrucible-batch-size:",
)
FIRST_BUFFER, SILENT_S = 2**20, 60.0
COMPARED = 64
"""Bytes at the end of every answer that are compared: comparing all of them would make the client
the bottleneck. The last answer of each connection is compared whole.
"""


class Traffic(Protocol):
    """What is asked, and what becomes of it."""

    def next(self) -> tuple[int, bytes] | None:
        """The next request with a number of its own; None: no more."""
        ...

    def answered(
        self, number: int, status: int, head: bytes, body: memoryview, seconds: float
    ) -> None: ...

    def lost(self, number: int, why: str) -> None:
        """No answer came to this one."""
        ...


class Fault(Exception):
    """An answer that this client cannot read, or none."""


@dataclass(slots=True)
class Connection:
    """One connection: at most one request under way."""

    port: int
    sock: socket.socket | None = None
    number: int = -1  # of the request under way
    out: memoryview = field(default_factory=lambda: memoryview(b""))  # what is still to be sent
    buffer: bytearray = field(default_factory=lambda: bytearray(FIRST_BUFFER))
    got: int = 0
    head: int = 0  # where the body begins; 0: not known yet
    end: int = 0
    begun: float = 0.0

    def begin(self, number: int, request: bytes) -> None:
        if self.sock is None:
            self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=SILENT_S)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sock.setblocking(False)
        self.number, self.out = number, memoryview(request)
        self.got = self.head = self.end = 0
        self.begun = time.perf_counter()

    def send(self) -> bool:
        """Send what the kernel takes; whether that was all."""
        assert self.sock is not None
        while self.out:
            try:
                self.out = self.out[self.sock.send(self.out) :]
            except BlockingIOError:
                return False
        return True

    def receive(self) -> bool:
        """Take what has come; whether the answer is complete."""
        assert self.sock is not None
        while not self.end or self.got < self.end:
            if self.got == len(self.buffer):
                self.buffer.extend(bytes(len(self.buffer)))
            try:
                count = self.sock.recv_into(memoryview(self.buffer)[self.got :])
            except BlockingIOError:
                return False
            if count == 0:
                raise Fault("the server closed the connection")
            self.got += count
            if not self.head:
                self._read_head()
        if self.got > self.end:
            raise Fault(f"{self.got - self.end} bytes behind the end of the answer")
        return True

    def _read_head(self) -> None:
        at = self.buffer.find(HEAD_END, 0, self.got)
        if at < 0:
            return
        self.head = at + len(HEAD_END)
        lowered = bytes(self.buffer[: self.head]).lower()
        where = lowered.find(LENGTH)
        if where < 0:
            raise Fault("an answer without Content-Length")
        self.end = self.head + int(
            lowered[where + len(LENGTH) : lowered.index(b"\r\n", where + len(LENGTH))]
        )
        if self.end > len(self.buffer):
            self.buffer.extend(bytes(self.end - len(self.buffer)))

    @property
    def status(self) -> int:
        return int(self.buffer[9:12])

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def drive(port: int, connections: int, traffic: Traffic) -> None:
    """Ask until the traffic ends and every answer is there. A connection that is lost is opened
    anew for the next request.
    """
    idle = [Connection(port) for _ in range(connections)]
    with selectors.DefaultSelector() as selector:
        under_way = sum(_ask(selector, connection, traffic) for connection in idle)
        while under_way:
            ready = selector.select(timeout=SILENT_S)
            if not ready:
                raise TimeoutError(f"no answer in {SILENT_S:g} s to {under_way} requests")
            for key, events in ready:
                if not _go_on(selector, key.data, events, traffic):
                    under_way -= 1
    for connection in idle:
        connection.close()


def _ask(selector: selectors.BaseSelector, connection: Connection, traffic: Traffic) -> bool:
    """Begin the next request; False if there is none."""
    while (asked := traffic.next()) is not None:
        known = connection.sock is not None
        connection.begin(*asked)
        assert connection.sock is not None
        try:
            wanted = (
                selectors.EVENT_READ
                if connection.send()
                else selectors.EVENT_READ | selectors.EVENT_WRITE
            )
        except OSError as error:
            _lose(selector, connection, traffic, error, known)
            continue
        if not known:
            selector.register(connection.sock, wanted, connection)
        elif wanted & selectors.EVENT_WRITE:
            selector.modify(connection.sock, wanted, connection)
        return True
    return False


def _go_on(
    selector: selectors.BaseSelector, connection: Connection, events: int, traffic: Traffic
) -> bool:
    """Send and receive what is possible, and ask again after an answer; False if there is nothing
    more to ask.
    """
    assert connection.sock is not None
    try:
        if events & selectors.EVENT_WRITE and connection.send():
            selector.modify(connection.sock, selectors.EVENT_READ, connection)
        if not events & selectors.EVENT_READ or not connection.receive():
            return True
        seconds = time.perf_counter() - connection.begun
        whole = memoryview(connection.buffer)
        traffic.answered(
            connection.number,
            connection.status,
            bytes(whole[: connection.head]),
            whole[connection.head : connection.end],
            seconds,
        )
    except (OSError, Fault) as error:
        _lose(selector, connection, traffic, error, registered=True)
    return _ask(selector, connection, traffic)


def _lose(
    selector: selectors.BaseSelector,
    connection: Connection,
    traffic: Traffic,
    error: Exception,
    registered: bool,
) -> None:
    if registered and connection.sock is not None:
        selector.unregister(connection.sock)
    connection.close()
    traffic.lost(connection.number, f"{type(error).__name__}: {error}")


# -- the same request again and again ----------------------------------------


@dataclass(slots=True)
class Steady:
    """One request for some seconds."""

    request: bytes
    expected: bytes  # what every answer ends with
    tolerance: float
    until: float  # by time.perf_counter()
    asked: int = 0
    latencies_s: list[float] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)  # of the same answers
    faults: list[str] = field(default_factory=list)

    def next(self) -> tuple[int, bytes] | None:
        if time.perf_counter() >= self.until:
            return None
        self.asked += 1
        return self.asked, self.request

    def answered(
        self, number: int, status: int, head: bytes, body: memoryview, seconds: float
    ) -> None:
        last = self.expected if time.perf_counter() >= self.until else self.expected[-COMPARED:]
        if status != 200:
            self.faults.append(f"{status}: {bytes(body[:300]).decode(errors='replace')}")
        elif len(body) < len(self.expected) or not equal(
            bytes(body[len(body) - len(last) :]), last, self.tolerance
        ):
            self.faults.append(f"another answer than expected, of {len(body)} bytes")
        else:
            self.latencies_s.append(seconds)
            self.heads.append(head)

    def lost(self, number: int, why: str) -> None:
        self.faults.append(why)
        if len(self.faults) > 100:
            self.until = 0.0


def equal(found: bytes, expected: bytes, tolerance: float) -> bool:
    if tolerance == 0:
        return found == expected
    return bool(
        np.allclose(
            np.frombuffer(found, np.float32),
            np.frombuffer(expected, np.float32),
            rtol=0,
            atol=tolerance,
        )
    )


def main(
    request: str, expected: str, tolerance: str, port: str, connections: str, seconds: str
) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    traffic = Steady(
        Path(request).read_bytes(),
        Path(expected).read_bytes(),
        float(tolerance),
        start + float(seconds),
    )
    drive(int(port), int(connections), traffic)
    measured: dict[str, object] = {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
    }
    measured |= {"latencies_s": traffic.latencies_s, "stages_ms": stages_ms(traffic.heads)}
    print(
        json.dumps(measured | {"faults": len(traffic.faults), "first_faults": traffic.faults[:3]})
    )


def stages_ms(heads: Sequence[bytes]) -> dict[str, float]:
    """Medians of what the answers say in Server-Timing, by stage, and of their batch's size; empty
    where they say nothing.
    """
    found: dict[str, list[float]] = {}
    for head in heads:
        _, _, said = head.lower().partition(TIMING)
        for stage in said.partition(b"\r\n")[0].decode().split(",") if said else ():
            name, _, duration = stage.strip().partition(";dur=")
            found.setdefault(name, []).append(float(duration))
        _, _, size = head.lower().partition(BATCH)
        if size:
            found.setdefault("batch", []).append(float(size.partition(b"\r\n")[0]))
    return {name: statistics.median(values) for name, values in found.items()}


def ask_once(port: int, request: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of one answer; OSError or Fault if there is none."""
    found: list[tuple[int, bytes, bytes]] = []
    connection = Connection(port)
    try:
        connection.begin(0, request)
        assert connection.sock is not None
        connection.sock.setblocking(True)
        connection.send()
        connection.receive()
        found.append(
            (
                connection.status,
                bytes(connection.buffer[: connection.head]),
                bytes(connection.buffer[connection.head : connection.end]),
            )
        )
    finally:
        connection.close()
    return found[0]


def http_request(port: int, path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a POST."""
    given = {
        "Host": f"127.0.0.1:{port}",
        "Content-Type": "application/octet-stream",
        **(headers or {}),
        "Content-Length": str(len(body)),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


if __name__ == "__main__":
    main(*sys.argv[1:])
