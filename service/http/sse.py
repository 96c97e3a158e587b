"""A job's events as server-sent events: each exactly once, over restarts of client and server.

    id: 17                      the event's number, which a client returns as Last-Event-ID
    event: stage                figures of a candidate, or the job's new state
    data: {"at": ..., ...}

The stream ends after the job's last event, or with `event: server-restarting`, after which a client
reconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import orjson
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Receive, Scope, Send

from service.auth import LOCAL, Caller
from service.context import Service
from service.errors import NotFound
from service.jobs.state import Job
from service.jobs.store import JobStore, StoredEvent

HEARTBEAT_S = 15.0  # proxies cut connections that are silent for a minute
HEARTBEAT = format_sse_event(comment="heartbeat")
RESTARTING = format_sse_event(event="server-restarting", data_str="{}", retry=2000)


class EventStream(StreamingResponse):
    """An answer of server-sent events. `slot` is entered for as long as it is sent, and may refuse
    it before its first byte.
    """

    def __init__(
        self, events: AsyncIterator[bytes], slot: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._slot():
            await super().__call__(scope, receive, send)


async def stream(
    service: Service,
    job_id: str,
    after: int,
    caller: Caller = LOCAL,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """Yield all events of a job with a number above `after`: the stored ones, then new ones, until
    the key of the caller is revoked.
    """
    with service.metrics.event_streams.track_inprogress():
        while True:
            # before reading, so that the next round sees events in between
            changed = service.runner.changed(job_id)
            try:
                job, events = await service.read(partial(_read, service.jobs, job_id, after))
            except NotFound:  # the job was removed meanwhile
                return
            if not await service.still_accepts(caller):
                return
            for event in events:
                yield _text(event)
                after = event.seq
            if events:
                continue
            if job.is_final:
                return
            if service.stopping:
                yield RESTARTING
                return
            try:
                await asyncio.wait_for(changed.wait(), heartbeat_s)
            except TimeoutError:
                yield HEARTBEAT


def _read(jobs: JobStore, job_id: str, after: int) -> tuple[Job, tuple[StoredEvent, ...]]:
    job = jobs.get(job_id)  # before the events: if it has ended, the last is among them
    return job, jobs.events(job_id, after)


def _text(event: StoredEvent) -> bytes:
    return format_sse_event(
        id=str(event.seq),
        event=event.kind,
        data_str=orjson.dumps({"at": event.at, **event.data}).decode(),
    )
