"""A job's events as a stream for clients (server-sent events): none left out, none twice, over
restarts of client and server.

    id: 17                      its number, which a client gives back as Last-Event-ID
    event: stage                or the state that the job came to
    data: {"at": ..., ...}

Ends after the job's last event, or with `event: server-restarting`, after which a client asks
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import orjson
from fastapi.sse import format_sse_event

from service.context import Service
from service.errors import NotFound
from service.jobs.state import Job
from service.jobs.store import JobStore, StoredEvent

HEARTBEAT_S = 15.0  # proxies cut connections on which nothing comes for a minute
HEARTBEAT = format_sse_event(comment="heartbeat")
RESTARTING = format_sse_event(event="server-restarting", data_str="{}", retry=2000)


async def stream(
    service: Service, job_id: str, after: int, heartbeat_s: float = HEARTBEAT_S
) -> AsyncIterator[bytes]:
    """All events of a job with a number over `after`, those that are there and those to come."""
    with service.metrics.event_streams.track_inprogress():
        while True:
            changed = service.runner.changed(
                job_id
            )  # before reading: what comes between is seen by the next round
            try:
                job, events = await service.read(partial(_look, service.jobs, job_id, after))
            except NotFound:  # removed meanwhile
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


def _look(jobs: JobStore, job_id: str, after: int) -> tuple[Job, tuple[StoredEvent, ...]]:
    job = jobs.get(job_id)  # before the events: if it has ended, the last is among them
    return job, jobs.events(job_id, after)


def _text(event: StoredEvent) -> bytes:
    return format_sse_event(
        id=str(event.seq),
        event=event.kind,
        data_str=orjson.dumps({"at": event.at, **event.data}).decode(),
    )
