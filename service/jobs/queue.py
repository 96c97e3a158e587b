"""Runs the jobs: one queue per device and one child at a time on each. The owners of the waiting
jobs take turns. Stores the events of the jobs and wakes the clients that wait for them.

    runner = JobRunner(settings, job_store, leases)
    await runner.start()                             kills children that an earlier server left and
                                                     queues its jobs again
    job, is_new = await runner.submit(job, once)     requires home/uploads/<job.id>/plan.json
                                                     (Folders.save_plan)
    await runner.cancel(job_id, owner)               its processes are gone within 5 s
    await runner.retry(job_id, owner)                adds a new job that continues from the old
                                                     job's artifacts
    await runner.stop()                              ends all children and queues their jobs again

To follow a job without missing an event: take `changed = runner.changed(job_id)` first, then read
`job_store.events(job_id, after)`, and `await changed.wait()` only if there are none.

One thread uses the database, in the order of the calls. If the server is killed, queued and running
jobs stay in the database and the children end within seconds (service/sandbox/guardian.py); the
next start queues the jobs again.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from psutil import Process

from service import logs
from service.devices.leases import Clock, Leases, utc_now
from service.errors import Conflict, Unavailable
from service.jobs.attempt import Attempt, AttemptContext
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
    Started,
    after_a_crash,
    new_id,
    next_of,
)
from service.jobs.store import JobStore, Once
from service.jobs.traces import current_trace
from service.sandbox import process_tree as processes
from service.sandbox.layers import Sandbox
from service.settings import Settings
from service.storage.audit_entry import SERVICE, Actor, Details, Entry
from service.storage.layout import Folders

WORKER = (sys.executable, "-m", "service.jobs.worker")
MAX_INTERRUPTIONS = 5  # server crashes during one job; then the job counts as the cause
STOP_S = 15.0  # to end all children and store their jobs
CANCELLED = Died(Failure(code="job.cancelled", message="somebody cancelled the job"))
RESTARTED = Requeued("the server was restarted")

log = logs.get("service.runner")
T = TypeVar("T")


class JobRunner:
    """Runs all jobs of one home. Lives in one event loop."""

    def __init__(
        self,
        settings: Settings,
        jobs: JobStore,
        leases: Leases,
        worker: Sequence[str] = WORKER,
        sandbox: Sandbox | None = None,
        observers: Sequence[Callable[[Job, JobEvent], None]] = (),
        clock: Clock = utc_now,
        most_interruptions: int = MAX_INTERRUPTIONS,
    ) -> None:
        self._settings, self._jobs, self._leases = settings, jobs, leases
        self._observers, self._clock = observers, clock
        self.folders = Folders(settings.home)
        self._most_interruptions = most_interruptions
        limits = limits_from(settings, machine_memory())
        self._context = AttemptContext(
            self.folders,
            leases,
            self._record,
            worker,
            limits,
            settings.job_timeout_s,
            sandbox or Sandbox(settings.home),
        )
        self._queued: dict[str, Job] = {}
        self._last_starts: dict[tuple[str, str], str] = {}  # UTC, by device and owner
        self._attempts: dict[str, Attempt] = {}  # by device
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, "crucible-jobs")
        self._stopping = False

    async def start(self) -> None:
        """Kill children that an earlier server left, queue its jobs again, and start the queues."""
        unfinished = await self._in_thread(self._jobs.unfinished)
        self._last_starts = await self._in_thread(self._jobs.last_starts)
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
        """End all children, queue their jobs again and start no more. Repeated calls do nothing."""
        if self._stopping:
            return
        self._stopping = True
        for attempt in self._attempts.values():
            attempt.stop(RESTARTED)
        for job_id in list(self._changed):
            self._wake(job_id)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace_s)
            # the disk is full, or a process does not die: the next start handles these jobs
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._leases.close()
        await self._in_thread(self._jobs.close)
        self._thread.shutdown()

    async def submit(
        self, job: Job, once: Once | None = None, actor: Actor = SERVICE
    ) -> tuple[Job, bool]:
        """Add a job, or return the job of an earlier equal request: see `JobStore.add`."""
        return await self._finish(self._submit(job, once, actor))

    async def cancel(self, job_id: str, owner: str | None = None, actor: Actor = SERVICE) -> Job:
        """Cancel a job. Conflict if it has ended. A running job stays `cancelling` until its
        processes are gone.
        """
        return await self._finish(self._cancel(job_id, owner, actor))

    async def retry(self, job_id: str, owner: str | None = None, actor: Actor = SERVICE) -> Job:
        """Add a new job for one that failed or was cancelled. It continues from the stored
        artifacts. Conflict for a job in any other state.
        """
        return await self._finish(self._retry(job_id, owner, actor))

    def changed(self, job_id: str) -> asyncio.Event:
        """Return an event that is set at the job's next event, or when the runner stops. It fires
        once: call this again afterwards.
        """
        event = self._changed.get(job_id)
        if event is None:
            event = self._changed[job_id] = asyncio.Event()
        return event

    # -- their implementation ------------------------------------------------------------

    async def _submit(self, job: Job, once: Once | None, actor: Actor) -> tuple[Job, bool]:
        self._check_open()
        entry = Entry(actor, "job.submitted", f"job/{job.id}", {"name": job.name})
        added, is_new = await self._in_thread(
            partial(self._jobs.add, job, self._clock(), once, self._settings.max_queued, entry)
        )
        if is_new:
            self._enqueue(added)
        return added, is_new

    async def _cancel(self, job_id: str, owner: str | None, actor: Actor) -> Job:
        before = await self._in_thread(partial(self._jobs.get, job_id, owner))
        entry = Entry(actor, "job.cancelled", f"job/{job_id}", {"owner": before.owner})
        try:
            job = await self._record(job_id, CancelAsked(), entry)
        except StaleEvent:
            raise Conflict(
                f"job {job_id} has ended", f"GET /jobs/{job_id} shows its state"
            ) from None
        self._queued.pop(job_id, None)
        for attempt in self._attempts.values():
            if attempt.job.id == job_id:
                attempt.stop(CANCELLED)
        return job

    async def _retry(self, job_id: str, owner: str | None, actor: Actor) -> Job:
        self._check_open()
        old = await self._in_thread(partial(self._jobs.get, job_id, owner))
        if old.state not in ("failed", "cancelled"):
            raise Conflict(
                f"job {job_id} is {old.state}",
                "only a job that failed or was cancelled can be retried",
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
            recompiles=old.recompiles,
            created=created,
            estimate_s=old.estimate_s,
            trace=current_trace(),
        )
        details: Details = {"retries": old.id, "owner": old.owner}
        entry = Entry(actor, "job.retried", f"job/{new.id}", details)
        added, is_new = await self._in_thread(
            partial(self._jobs.add, new, now, None, self._settings.max_queued, entry)
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
        """Start the next job of each device that runs none. Owners that run as many jobs as they
        may are left out. Fail jobs for devices that this host does not have.
        """
        if self._stopping:
            return
        devices = self._leases.devices.names
        running = Counter(attempt.job.owner for attempt in self._attempts.values())
        most = self._settings.max_running or len(devices)
        for device in devices:
            if device in self._attempts:
                continue
            waiting = (
                job
                for job in self._queued.values()
                if job.device == device and running[job.owner] < most
            )
            job = next_of(waiting, self._last_starts)
            if job is not None:
                running[job.owner] += 1
                del self._queued[job.id]
                self._attempts[device] = attempt = Attempt(job, self._context)
                self._keep(asyncio.create_task(self._run(device, attempt)))
        for job in [job for job in self._queued.values() if job.device not in devices]:
            del self._queued[job.id]
            message = f"this host has no device '{job.device}'; it has {', '.join(devices)}"
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

    async def _record(self, job_id: str, event: JobEvent, entry: Entry | None = None) -> Job:
        """Store an event with the host's paths removed, and wake the clients that wait for it."""
        scrubbed = scrubbed_event(event, self.folders)
        job, _ = await self._in_thread(
            partial(self._jobs.append, job_id, scrubbed, self._clock(), entry)
        )
        if isinstance(event, Started) and job.started is not None:
            self._last_starts[job.device, job.owner] = job.started
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
        """Run `work` to its end, even if the client that requested it disconnects."""
        task = asyncio.create_task(work)
        self._keep(task)
        return await asyncio.shield(task)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kill_leftovers(unfinished: Sequence[Job]) -> None:
    """Kill children of an earlier server: by their environment mark and by the stored pid."""
    marked = {job.id for job in unfinished}
    known = [
        (job.pid, job.pid_started)
        for job in unfinished
        if job.pid is not None and job.pid_started is not None
    ]

    def leftovers() -> list[Process]:
        by_mark = processes.of_jobs(marked)
        by_pid = chain.from_iterable(processes.alive(pid, started) for pid, started in known)
        return [*by_mark, *by_pid]

    if marked and not processes.kill_all(leftovers):
        log.error("children.left", jobs=sorted(marked))
