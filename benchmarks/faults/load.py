"""Clients that send a request again as a good client does, and what became of their requests.

A connection that fails is opened again after a pause that doubles. 429, 503 and 504 are tried again
after `Retry-After`, or that pause. Any other status is final, and so is a right or a wrong answer.
A request without a final answer within PATIENCE_S is lost.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.serving.client import Connection, Fault, http_request
from benchmarks.serving.crucible import MODEL
from benchmarks.serving.models import INPUT, OUTPUT, image
from benchmarks.serving.soak import SIDE, TOLERANCE, Answers, Soak

CONNECTIONS = 8  # of requests with binary tensors; one more sends long JSON
JSON_ROWS = 8  # more than 64 KB of JSON: a helper process decodes it
PATIENCE_S, ATTEMPT_S = 60.0, 40.0  # an attempt: longer than the server's own limit of 30 s
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
AGAIN = (429, 503, 504)
RETRY_AFTER = b"\r\nretry-after:"

Kind = Literal["binary", "json"]
Check = Callable[[bytes, memoryview], None]
"""Raises ValueError for a wrong answer, from its head and its body."""


@dataclass(slots=True)
class Recovery:
    """From a fault to the first right answer of a request of this kind that was sent after it."""

    kind: Kind
    begun: float = field(default_factory=time.monotonic)
    seconds: float = math.inf
    answered: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Load:
    """Requests on several connections, until the block of `running` ends."""

    port: int
    right_answers: Answers
    right: int = 0
    retries: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _recovery: Recovery | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sent(self) -> int:
        """Requests that came to an end."""
        return self.right + len(self.wrong) + len(self.refused) + len(self.lost)

    def watch(self, kind: Kind) -> Recovery:
        """Measure the recovery from a fault that begins now."""
        self._recovery = Recovery(kind)
        return self._recovery

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send requests until the block ends, and wait for the end of each."""
        numbered = Soak(self.port, self.right_answers, math.inf, 0)
        threads = [
            threading.Thread(target=self._ask_binary, args=(numbered,)) for _ in range(CONNECTIONS)
        ]
        threads.append(threading.Thread(target=self._ask_json))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _ask_binary(self, numbered: Soak) -> None:
        connection = Connection(self.port)
        while not self._stop.is_set():
            with self._lock:
                request = numbered.next()
            assert request is not None
            number, data = request

            def check(head: bytes, body: memoryview, number: int = number) -> None:
                with self._lock:
                    numbered.check(number, head, body)

            self.settle(connection, "binary", data, check)
        connection.close()

    def _ask_json(self) -> None:
        connection = Connection(self.port)
        request = http_request(
            self.port,
            f"/models/{MODEL}/infer",
            json.dumps({"inputs": {INPUT: json_images().tolist()}}).encode(),
            {"Content-Type": "application/json"},
        )
        expected = np.stack(
            [
                np.frombuffer(next(iter(self.right_answers[row, 1])), np.float32)
                for row in range(JSON_ROWS)
            ]
        )

        def check(head: bytes, body: memoryview) -> None:
            values = np.array(json.loads(bytes(body))["outputs"][OUTPUT])
            if values.shape != expected.shape or not np.allclose(
                values, expected, rtol=0, atol=TOLERANCE
            ):
                raise ValueError("an answer in JSON differs from that of a direct Session")

        while not self._stop.is_set():
            self.settle(connection, "json", request, check)
        connection.close()

    def settle(self, connection: Connection, kind: Kind, request: bytes, check: Check) -> None:
        """Send a request until it has a final answer, and count it."""
        begun, pause_s, reason = time.monotonic(), FIRST_PAUSE_S, ""
        while time.monotonic() < begun + PATIENCE_S:
            wait_s = pause_s
            try:
                status, head, body = exchange(connection, request)
            except (OSError, Fault) as error:
                connection.close()
                reason = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    self._judge(begun, kind, check, head, body)
                    return
                reason = f"{status} {bytes(body[:200]).decode(errors='replace')}"
                if status not in AGAIN:
                    with self._lock:
                        self.refused.append(reason)
                    return
                wait_s = retry_after_s(head) or pause_s
            with self._lock:
                self.retries += 1
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        with self._lock:
            self.lost.append(f"no answer in {PATIENCE_S:g} s; the last: {reason}")

    def _judge(self, begun: float, kind: Kind, check: Check, head: bytes, body: memoryview) -> None:
        try:
            check(head, body)
        except (ValueError, KeyError) as error:
            with self._lock:
                self.wrong.append(str(error))
            return
        now = time.monotonic()
        with self._lock:
            self.right += 1
            recovery = self._recovery
            if recovery and recovery.kind == kind and begun >= recovery.begun:
                recovery.seconds = now - recovery.begun
                recovery.answered.set()
                self._recovery = None


def json_images() -> np.ndarray:
    """[JSON_ROWS, 3, side, side]: the first inputs of the soak."""
    return np.concatenate([image(SIDE, seed) for seed in range(JSON_ROWS)])


def exchange(connection: Connection, request: bytes) -> tuple[int, bytes, memoryview]:
    """Status, head and body of one answer; OSError or Fault if there is none."""
    connection.begin(0, request)
    assert connection.sock is not None
    connection.sock.settimeout(ATTEMPT_S)
    connection.send()
    connection.receive()
    whole = memoryview(connection.buffer)
    head = bytes(whole[: connection.head])
    return connection.status, head, whole[connection.head : connection.end]


def retry_after_s(head: bytes) -> float:
    """The seconds of `Retry-After`; 0 without it."""
    _, _, value = head.lower().partition(RETRY_AFTER)
    return float(value.partition(b"\r\n")[0]) if value else 0.0
