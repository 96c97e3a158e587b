"""The time that a body may take: a least rate over each stretch of time, and an end.

All connections of a process are checked together, once a second: a timer for each body would cost
more, and bodies that arrive in between cost nothing but their place in a set.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from service.errors import SlowBody

CHECK_S = 1.0  # between two checks
FREE_S = 10.0  # at the start, without a least rate
WINDOW_S = 30.0  # of the mean rate
SLACK_S = 60.0  # of the whole body, beyond its bytes at the least rate


class BodyClock:
    """Judges one body at each check. Only time in which the server reads counts."""

    def __init__(self, now: float, length: int | None, min_bytes_per_s: int) -> None:
        self._last, self._length, self._min_bytes_per_s = now, length, min_bytes_per_s
        self._waited_s = 0.0
        # (`_waited_s`, bytes) of earlier checks: the first one is as old as the window
        self._checks: deque[tuple[float, int]] = deque()

    def check(self, now: float, received: int, is_reading: bool) -> None:
        """SlowBody if `received` bytes are too few by now. `is_reading` is False while the server
        itself lets the client wait.
        """
        if is_reading:  # a longer time was the server's own: it was too busy to read
            self._waited_s += min(now - self._last, 2 * CHECK_S)
        self._last = now
        waited_s, rate = self._waited_s, self._min_bytes_per_s
        if waited_s < FREE_S:
            return
        self._checks.append((waited_s, received))
        while len(self._checks) > 1 and self._checks[1][0] <= waited_s - WINDOW_S:
            self._checks.popleft()
        begin_s, begin = self._checks[0]
        span_s = waited_s - begin_s
        if span_s >= WINDOW_S and received - begin < rate * span_s:
            raise _slow(
                f"{received - begin} bytes of the body in {span_s:.0f} s, expected at least"
                f" {rate} bytes/s"
            )
        length = received if self._length is None else self._length
        if waited_s > SLACK_S + length / rate:
            raise _slow(f"the body is not complete after {waited_s:.0f} s")


def _slow(message: str) -> SlowBody:
    return SlowBody(message, "send it over a faster connection, or send less")


class ReceivingConnection(Protocol):
    """A connection whose body is not complete."""

    body_length: int | None  # None: not known
    body_received: int

    def is_reading(self) -> bool:
        """Return False while the server lets the client wait."""

    def refuse_body(self, error: SlowBody) -> None:
        """Answer, if that is possible, and close the connection."""


class OpenBodies:
    """The connections of a process whose body is not complete. Belongs to one event loop."""

    def __init__(self, min_bytes_per_s: int) -> None:
        self._min_bytes_per_s = min_bytes_per_s
        self._clocks: dict[ReceivingConnection, BodyClock | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: ReceivingConnection) -> None:
        """Watch the body of a connection until `discard`."""
        self._clocks[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def discard(self, connection: ReceivingConnection) -> None:
        """Forget the body: it is complete, or its connection is lost."""
        self._clocks.pop(connection, None)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection, clock in list(self._clocks.items()):
            if clock is None:  # most bodies end before their first check
                length = connection.body_length
                self._clocks[connection] = BodyClock(now, length, self._min_bytes_per_s)
                continue
            try:
                clock.check(now, connection.body_received, connection.is_reading())
            except SlowBody as error:
                self.discard(connection)
                connection.refuse_body(error)
        self._timer = loop.call_later(CHECK_S, self._check) if self._clocks else None
