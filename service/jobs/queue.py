"""Runs the jobs: one queue per device, one child at a time on each; stores what happens, and wakes
who waits for it.

    runner = JobRunner(settings, job_store, leases)
    await runner.start()                             goes on with what an earlier server left, after
                                                     killing what is left of its children
    job, is_new = await runner.submit(job, once)     home/uploads/<job.id>/plan.json lies there
                                                     already (Folders.save_plan)
    await runner.cancel(job_id, owner)               its processes are gone within 5 s
    await runner.retry(job_id, owner)                a new job that goes on from what the old one
                                                     stored
    await runner.stop()                              ends all children and queues their jobs again

To follow a job: take `changed = runner.changed(job_id)` first, then read `job_store.events(job_id,
after)`, and `await changed.wait()` only if there were none: nothing is missed between.

The database is used in one thread of its own, in the order of asking. Killed at any moment, the
server leaves jobs that are queued or running in the database, and children that die within seconds
(service/sandbox/guardian.py); the next start queues them again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from psutil import Process

from service import logs
from service.devices.leases import Clock, Leases, utc_now
from service.errors import Conflict, Unavailable
from service.jobs.attempt import Attempt, Means
from service.jobs.process_limits import limits_from, machine_memory
from service.jobs.redact import scrubbed_event
from service.jobs.state import (
    CancelAsked,
    Died,
    Failure,
    Job,
    JobEvent,
    Requeued,
    StaleEvent,
    after_a_crash,
    new_id,
    next_of,
)
from service.jobs.store import JobStore, Once
from service.jobs.traces import current_trace
from service.sandbox import process_tree as processes
from service.settings import Settings
from service.storage.layout import Folders

WORKER = (sys.executable, "-m", "service.jobs.worker")
MAX_INTERRUPTIONS = (
    5  # so often a job may run while the server dies; then it is taken for the cause
)
STOP_S = 15.0  # for all children to be ended and their jobs to be stored
CANCELLED = Died(Failure(code="job.cancelled", message="somebody cancelled the job"))
RESTARTED = Requeued("the server was restarted")

log = logs.get("service.runner")
T = TypeVar("T")


class JobRunner:
    """All jobs of one home. Lives in one event loop."""

    def __init__(
        self,
        settings: Settings,
        jobs: JobStore,
        leases: Leases,
        worker: Sequence[str] = WORKER,
        observers: Sequence[Callable[[Job, JobEvent], None]] = (),
        clock: Clock = utc_now,
        most_interruptions: int = MAX_INTERRUPTIONS,
    ) -> None:
        self._settings, self._jobs, self._leases, self._observers, self._clock = (
            settings,
            jobs,
            leases,
            observers,
            clock,
        )
        self.folders = Folders(settings.home)
        self._most_interruptions = most_interruptions
        limits = limits_from(settings, machine_memory())
        self._means = Means(
            self.folders, leases, self._record, worker, limits, settings.job_timeout_s
        )
        self._queued: dict[str, Job] = {}
        self._attempts: dict[str, Attempt] = {}  # by device
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, "crucible-jobs")
        self._stopping = False

    async def start(self) -> None:
        """Kill what is left of an earlier server's children, queue its jobs again, and begin."""
        unfinished = await self._in_thread(self._jobs.unfinished)
        await asyncio.to_thread(_kill_leftovers, unfinished)
        for job in unfinished:
            current = (
                job
                if job.state == "queued"
                else await self._record(job.id, after_a_crash(job, self._most_interruptions))
            )
            if current.state == "queued":
                self._queued[current.id] = current
        log.info("runner.started", queued=len(self._queued), devices=self._leases.devices.names)
        self._pump()

    async def stop(self, grace_s: float = STOP_S) -> None:
        """End all children and queue their jobs again; nothing is started any more. Harmless if it
        has stopped.
        """
        if self._stopping:
            return
        self._stopping = True
        for attempt in self._attempts.values():
            attempt.stop(RESTARTED)
        for job_id in list(self._changed):
            self._wake(job_id)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace_s)
            for (
                task
            ) in late:  # the disk is full, or a process does not die: the next start finds them
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._leases.close()
        await self._in_thread(self._jobs.close)
        self._thread.shutdown()

    async def submit(self, job: Job, once: Once | None = None) -> tuple[Job, bool]:
        """Add a job, or find the one that an equal request made: see `JobStore.add`."""
        return await self._finish(self._submit(job, once))

    async def cancel(self, job_id: str, owner: str | None = None) -> Job:
        """End a job; Conflict if it has ended. One that runs is `cancelling` until its processes
        are gone.
        """
        return await self._finish(self._cancel(job_id, owner))

    async def retry(self, job_id: str, owner: str | None = None) -> Job:
        """A new job for one that failed or was cancelled, Conflict for others; it goes on from what
        is stored.
        """
        return await self._finish(self._retry(job_id, owner))

    def changed(self, job_id: str) -> asyncio.Event:
        """Set at the next event of the job, or when the runner stops. Each is for one use: ask
        again afterwards.
        """
        event = self._changed.get(job_id)
        if event is None:
            event = self._changed[job_id] = asyncio.Event()
        return event

    # -- what they do ------------------------------------------------------------

    async def _submit(self, job: Job, once: Once | None) -> tuple[Job, bool]:
        self._check_open()
        added, is_new = await self._in_thread(
            partial(self._jobs.add, job, self._clock(), once, self._settings.max_queued)
        )
        if is_new:
            self._enqueue(added)
        return added, is_new

    async def _cancel(self, job_id: str, owner: str | None) -> Job:
        await self._in_thread(partial(self._jobs.get, job_id, owner))
        try:
            job = await self._record(job_id, CancelAsked())
        except StaleEvent:
            raise Conflict(f"job {job_id} has ended", "GET it to see how") from None
        self._queued.pop(job_id, None)
        for attempt in self._attempts.values():
            if attempt.job.id == job_id:
                attempt.stop(CANCELLED)
        return job

    async def _retry(self, job_id: str, owner: str | None) -> Job:
        self._check_open()
        old = await self._in_thread(partial(self._jobs.get, job_id, owner))
        if old.state not in ("failed", "cancelled"):
            raise Conflict(
                f"job {job_id} is {old.state}",
                "only a job that failed or was cancelled can be tried again",
            )
        now = self._clock()
        created = now.isoformat(timespec="milliseconds")
        new = Job(
            id=new_id(now),
            owner=old.owner,
            identity=old.identity,
            name=old.name,
            device=old.device,
            measures=old.measures,
            created=created,
            estimate_s=old.estimate_s,
            trace=current_trace(),
        )
        added, is_new = await self._in_thread(
            partial(self._jobs.add, new, now, None, self._settings.max_queued)
        )
        if is_new:
            try:
                await asyncio.to_thread(self.folders.take_over, old.id, new.id)
            except OSError as error:
                message = f"the upload of job {old.id} cannot be used again: {error}"
                return await self._record(
                    new.id,
                    Died(
                        Failure(
                            code="host.store", message=message, next_step="send the model again"
                        )
                    ),
                )
            self._enqueue(added)
        return added

    def _check_open(self) -> None:
        if self._stopping:
            raise Unavailable("the server is stopping", "try again in a moment")

    def _enqueue(self, job: Job) -> None:
        self._wake(job.id)
        self._queued[job.id] = job
        self._pump()

    def _pump(self) -> None:
        """On every device that runs no job, begin with the next of its queue."""
        if self._stopping:
            return
        devices = self._leases.devices.names
        for device in devices:
            job = next_of(job for job in self._queued.values() if job.device == device)
            if job is not None and device not in self._attempts:
                del self._queued[job.id]
                self._attempts[device] = attempt = Attempt(job, self._means)
                self._keep(asyncio.create_task(self._run(device, attempt)))
        for job in [job for job in self._queued.values() if job.device not in devices]:
            del self._queued[job.id]
            message = f"this host has no device '{job.device}': it has {', '.join(devices)}"
            failure = Failure(
                code="backend.unavailable", message=message, next_step="send the model again"
            )
            self._keep(asyncio.create_task(self._record(job.id, Died(failure))))

    async def _run(self, device: str, attempt: Attempt) -> None:
        try:
            await attempt.run()
        finally:
            del self._attempts[device]
            self._pump()

    async def _record(self, job_id: str, event: JobEvent) -> Job:
        """Store an event, without the places of this host, and wake who waits for it."""
        job, _ = await self._in_thread(
            partial(self._jobs.append, job_id, scrubbed_event(event, self.folders), self._clock())
        )
        self._wake(job_id)
        for observe in self._observers:
            observe(job, event)
        return job

    def _wake(self, job_id: str) -> None:
        if (event := self._changed.pop(job_id, None)) is not None:
            event.set()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to its end, also if the client that asked for it goes away meanwhile."""
        task = asyncio.create_task(work)
        self._keep(task)
        return await asyncio.shield(task)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kill_leftovers(unfinished: Sequence[Job]) -> None:
    """Children of an earlier server: by the mark that they carry, and by the pid that was
    stored.
    """
    marked = {job.id for job in unfinished}
    known = [
        (job.pid, job.pid_started)
        for job in unfinished
        if job.pid is not None and job.pid_started is not None
    ]

    def left() -> list[Process]:
        return [
            *processes.of_jobs(marked),
            *(process for pid, started in known for process in processes.alive(pid, started)),
        ]

    if marked and not processes.kill_all(left):
        log.error("children.left", jobs=sorted(marked))
