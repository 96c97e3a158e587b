"""A client that asks at a rate of its own, whether answers have come or not.

    python -m benchmarks.limits.open_loop REQUEST PORT RATE SECONDS SEED

Requests are due at random times (a Poisson process of RATE per second). Each takes a connection
that is free, or a new one. Its latency counts from when it was due, so that a client or server that
falls behind shows. Prints one line of JSON: the latencies, and what this client cost.
"""

from __future__ import annotations

import json
import random
import selectors
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.client import SILENT_S, Connection, Fault


@dataclass(slots=True)
class OpenLoop:
    """Requests under way, and what came of those that have ended."""

    port: int
    request: bytes
    selector: selectors.BaseSelector
    idle: list[Connection] = field(default_factory=list)
    under_way: int = 0
    latencies_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def ask(self, due: float) -> None:
        connection = self.idle.pop() if self.idle else Connection(self.port)
        connection.begin(0, self.request)
        connection.begun = due
        assert connection.sock is not None
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self.selector.register(connection.sock, both, connection)
        self.under_way += 1

    def go_on(self, connection: Connection, events: int) -> None:
        """Send and receive what is possible."""
        assert connection.sock is not None
        try:
            if events & selectors.EVENT_WRITE and connection.send():
                self.selector.modify(connection.sock, selectors.EVENT_READ, connection)
            if not events & selectors.EVENT_READ or not connection.receive():
                return
        except (OSError, Fault) as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            self.selector.unregister(connection.sock)
            connection.close()
        else:
            self.selector.unregister(connection.sock)
            self.idle.append(connection)
            if connection.status == 200:
                self.latencies_s.append(time.perf_counter() - connection.begun)
            else:
                self.faults.append(f"status {connection.status}")
        self.under_way -= 1


def run(port: int, request: bytes, rate: float, seconds: float, seed: int) -> OpenLoop:
    """Ask for so many seconds, then wait for the answers that are missing."""
    draws, begin = random.Random(seed), time.perf_counter()
    due = begin + draws.expovariate(rate)
    with selectors.DefaultSelector() as selector:
        loop = OpenLoop(port, request, selector)
        while due < begin + seconds or loop.under_way:
            asking = due < begin + seconds
            while asking and due <= time.perf_counter():
                loop.ask(due)
                due += draws.expovariate(rate)
                asking = due < begin + seconds
            patience = max(0.0, due - time.perf_counter()) if asking else SILENT_S
            ready = selector.select(patience)
            if not ready and not asking:
                raise TimeoutError(f"no answer in {SILENT_S:g} s to {loop.under_way} requests")
            for key, events in ready:
                loop.go_on(key.data, events)
        for connection in loop.idle:
            connection.close()
    return loop


def main(request: str, port: str, rate: str, seconds: str, seed: str) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    found = run(int(port), Path(request).read_bytes(), float(rate), float(seconds), int(seed))
    measured = {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
        "latencies_s": found.latencies_s,
        "faults": len(found.faults),
        "first_faults": found.faults[:3],
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
