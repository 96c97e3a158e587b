"""Events of a job, read from a stream that may break off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from httpx_sse import EventSource

if TYPE_CHECKING:
    pass


MAX_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a job."""

    seq: int  # rises; pass the last one to `events` to continue after it
    kind: str  # "stage", "figures" of a candidate, or the job's new State
    data: Mapping[str, Any]


def wait_times(patience_s: float) -> Iterator[float]:
    """Yield the waits between attempts, until `patience_s` has passed: half a second, then twice as
    long each time, up to MAX_WAIT_S.
    """
    wait_s, waited_s = 0.5, 0.0
    while waited_s < patience_s:
        yield wait_s
        waited_s += wait_s
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def events_of_stream(answer: httpx.Response) -> Iterator[Event]:
    """Parse the service's server-sent events. Skips heartbeats and events without an id; drops an
    incomplete last event.
    """
    last = 0  # an event without an id inherits the id of the one before
    for event in EventSource(answer).iter_sse():
        seq = int(event.id or 0)
        if seq > last:
            last = seq
            yield Event(seq, event.event, event.json())
