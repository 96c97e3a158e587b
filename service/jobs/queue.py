"""Runs the jobs: one queue per requirement, and one child at a time on each device. The owners of
the waiting jobs take turns. Stores the events of the jobs and wakes the clients that wait for them.

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
import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from psutil import Process

from pipeline.errors import CrucibleError, StoreError
from pipeline.host.labels import Labels
from service import logs
from service.devices.leases import Clock, Leases, utc_now
from service.errors import Conflict, Unavailable
from service.jobs.attempt import Attempt, AttemptContext
from service.jobs.builds import Builds
from service.jobs.claims import LEASE_S, Claim, Claims
from service.jobs.nodes import (
    BEAT_S,
    Kind,
    Node,
    Nodes,
    no_node_failure,
    waits,
    why_no_node,
)
from service.jobs.redact import scrubbed_event
from service.jobs.state import (
    CancelAsked,
    Died,
    Failure,
    Job,
    JobEvent,
    NodeAwaited,
    Requeued,
    StaleEvent,
    after_a_crash,
    new_id,
)
from service.jobs.store import Compile, JobStore, NewJob, Once
from service.jobs.traces import current_trace
from service.sandbox import process_tree as processes
from service.sandbox.layers import Sandbox
from service.sandbox.process_limits import limits_from, machine_memory
from service.settings import Settings
from service.storage.audit_entry import SERVICE, Actor, Details, Entry
from service.storage.files import Files, StoredFile
from service.storage.layout import Folders
from service.storage.running_logs import RunningLogs

WORKER = (sys.executable, "-m", "service.jobs.worker")
MAX_INTERRUPTIONS = 5  # server crashes during one job; then the job counts as the cause
STOP_S = 15.0  # to end all children and store their jobs
CANCELLED = Died(Failure(code="job.cancelled", message="somebody cancelled the job"))
RESTARTED = Requeued("the server was restarted")
TAKEN = Requeued("the server lost its database")
POLL_S = 1.0  # between two looks at what other servers have done; also between heartbeats
MARGIN_S = 8.0  # to end a child before its job is taken for that of a dead server

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
        files: Files | None = None,
        builds: Builds | None = None,
        kind: Kind = "server",
    ) -> None:
        self._settings, self._jobs, self._leases = settings, jobs, leases
        self._observers, self._clock = observers, clock
        self.folders = Folders(settings.home)
        self._files = files or Files(jobs.database, settings.home)
        self._most_interruptions = most_interruptions
        limits = limits_from(settings, machine_memory())
        self._context = AttemptContext(
            self.folders,
            leases,
            self._record_attempt,
            worker,
            limits,
            settings.job_timeout_s,
            sandbox or Sandbox(settings.home),
            self._files,
            builds,
            RunningLogs(jobs.database) if self._files.are_shared else None,
        )
        self._shared = settings.database_url is not None
        self._runs_jobs = settings.executor == "local" or kind == "node"
        server = secrets.token_hex(8)
        self._claims = Claims(jobs.database, server)
        address = settings.address if kind == "server" else ""
        self.all_nodes = Nodes(jobs.database, server, kind, address)
        self._labels: dict[str, Labels] = {}  # by device
        self._beat_s = -BEAT_S
        self._attempts: dict[str, Attempt] = {}  # by device
        self._tokens: dict[str, int] = {}  # of the claims of running jobs, by their id
        self._unreleased: list[Claim] = []
        self._renewed_s = time.monotonic()
        self._seen: dict[str, int] = {}  # the newest event of each job that a client follows
        self._wakeup = asyncio.Event()
        self._queue: asyncio.Task[None] | None = None
        self._lease_watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, "crucible-jobs")
        self._stopping = False

    async def start(
        self, labels: Mapping[str, Labels] | None = None, candidates: Sequence[str] = ()
    ) -> None:
        """Take over the jobs of an earlier server, and start the queues. A server that shares its
        database takes over only the jobs of servers that have died. `labels`: of the devices.
        `candidates`: every `backend precision` that this host runs. A server whose `executor` are
        nodes claims no job.
        """
        self.all_nodes.candidates = tuple(candidates)
        devices = self._leases.devices.names if self._runs_jobs else ()
        self._labels = {name: (labels or {}).get(name, {}) for name in devices}
        if not self._shared:
            await self._recover(None)
            await self._in_thread(partial(self.all_nodes.send_heartbeat, self._labels))
        self._queue = asyncio.create_task(self._run_queue())
        if self._shared:
            self._lease_watch = asyncio.create_task(self._watch_lease())
        log.info("runner.started", devices=devices)

    async def stop(self, grace_s: float = STOP_S) -> None:
        """End all children, queue their jobs again and start no more. Repeated calls do nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._wakeup.set()
        if self._queue is not None:
            await asyncio.wait([self._queue], timeout=grace_s)
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
        if self._lease_watch is not None:
            self._lease_watch.cancel()
        self._leases.close()
        if self._shared and self._queue is not None:
            with contextlib.suppress(CrucibleError):  # its silence says the same, later
                await self._in_thread(self.all_nodes.leave)
        await self._in_thread(self._jobs.close)
        self._thread.shutdown()

    async def submit(
        self,
        job: Job,
        once: Once | None = None,
        actor: Actor = SERVICE,
        files: Sequence[StoredFile] = (),
    ) -> tuple[Job, bool]:
        """Add a job, or return the job of an earlier equal request: see `JobStore.add`."""
        return await self._finish(self._submit(job, once, actor, files))

    async def submit_compile(
        self, compile_id: str, new: Mapping[str, NewJob], actor: Actor = SERVICE
    ) -> Compile:
        """Add a compile with the jobs of its targets, by title: see `JobStore.add_compile`."""
        return await self._finish(self._submit_compile(compile_id, new, actor))

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

    def is_running(self, job_id: str) -> bool:
        """Return whether this server runs the job now."""
        return job_id in self._tokens

    def changed(self, job_id: str) -> asyncio.Event:
        """Return an event that is set at the job's next event, or when the runner stops. It fires
        once: call this again afterwards.
        """
        event = self._changed.get(job_id)
        if event is None:
            event = self._changed[job_id] = asyncio.Event()
        return event

    # -- their implementation ------------------------------------------------------------

    async def _submit(
        self, job: Job, once: Once | None, actor: Actor, files: Sequence[StoredFile]
    ) -> tuple[Job, bool]:
        self._check_open()
        entry, most = _submission(job, actor), self._settings.max_queued
        added, is_new = await self._in_thread(
            partial(self._jobs.add, job, self._clock(), once, most, entry, files)
        )
        if is_new:
            self._enqueue(added)
        return added, is_new

    async def _submit_compile(
        self, compile_id: str, new: Mapping[str, NewJob], actor: Actor
    ) -> Compile:
        self._check_open()
        recorded = {
            title: replace(each, entry=_submission(each.job, actor)) for title, each in new.items()
        }
        most = self._settings.max_queued
        compiled = await self._in_thread(
            partial(self._jobs.add_compile, compile_id, recorded, self._clock(), most)
        )
        for target in compiled.targets:
            self._enqueue(target.job)
        return compiled

    async def _cancel(self, job_id: str, owner: str | None, actor: Actor) -> Job:
        before = await self._in_thread(partial(self._jobs.get, job_id, owner))
        entry = Entry(actor, "job.cancelled", f"job/{job_id}", {"owner": before.owner})
        try:
            job = await self._record(job_id, CancelAsked(), entry)
        except StaleEvent:
            raise Conflict(
                f"job {job_id} has ended", f"GET /jobs/{job_id} shows its state"
            ) from None
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
            device=old.queue,
            measures=old.measures,
            recompiles=old.recompiles,
            target=old.target,
            wait_for_node_s=old.wait_for_node_s,
            created=created,
            estimate_s=old.estimate_s,
            trace=current_trace(),
        )
        details: Details = {"retries": old.id, "owner": old.owner}
        entry = Entry(actor, "job.retried", f"job/{new.id}", details)
        fault, files = "", tuple[StoredFile, ...]()
        try:  # before the job is there, which another server may run at once
            files = await asyncio.to_thread(self._take_over, old.id, new.id)
        except OSError as error:
            fault = f"the upload of job {old.id} cannot be used again: {error}"
        is_new = False
        try:
            most = self._settings.max_queued
            added, is_new = await self._in_thread(
                partial(self._jobs.add, new, now, None, most, entry, files)
            )
        finally:
            if not is_new:
                await asyncio.to_thread(self.folders.give_back, old.id, new.id)
        if is_new and fault:
            failure = Failure(code="host.store", message=fault, next_step="send the model again")
            return await self._record(new.id, Died(failure))
        if is_new:
            self._enqueue(added)
        return added

    def _take_over(self, old: str, new: str) -> tuple[StoredFile, ...]:
        """Share one job's upload with another job, and move the old job's store there."""
        source = self.folders.uploads(old)
        self._files.fetch(source)
        try:
            self.folders.take_over(old, new)
            return self._files.upload(self.folders.uploads(new), like=(source,))
        except BaseException:
            self.folders.give_back(old, new)
            raise

    def _check_open(self) -> None:
        if self._stopping:
            raise Unavailable("the server is stopping", "try again in a moment")

    def _enqueue(self, job: Job) -> None:
        self._wake(job.id)
        self._wakeup.set()

    async def _run_queue(self) -> None:
        """Start jobs whenever a device is free and a job waits, until the runner stops."""
        while not self._stopping:
            self._wakeup.clear()
            next_look_s = POLL_S if self._shared else None
            try:
                if self._shared:
                    await self._follow_others()
                for claim in tuple(self._unreleased):  # a job that ends meanwhile may add one
                    await self._in_thread(partial(self._claims.release, claim))
                    self._unreleased.remove(claim)
                if await self._start_jobs():
                    next_look_s = POLL_S
            except CrucibleError as error:  # the database cannot be used now
                log.error("queue.delayed", error=error.message)
                next_look_s = POLL_S
            except Exception:  # a fault must not end the queue
                log.exception("queue.fault")
                next_look_s = POLL_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), next_look_s)

    async def _start_jobs(self) -> bool:
        """Claim and start the next job of each device that runs none. Fail jobs that no node can
        run. Returns True if one waits for a node.
        """
        waiting = await self._in_thread(self._claims.waiting)
        this, most = self.all_nodes.this(self._labels), self._settings.max_running
        for device, labels in self._labels.items():
            here = replace(this, labels={device: labels})
            queues = [queue for queue in waiting if not why_no_node(queue, [here])]
            if device in self._attempts or not queues:
                continue
            claim = await self._in_thread(partial(self._claims.claim, queues, most))
            if claim is not None and self._stopping:
                await self._in_thread(partial(self._claims.release, claim))
            elif claim is not None:
                job = claim.job.model_copy(update={"device": device})
                self._attempts[device] = attempt = Attempt(job, self._context, claim.token)
                self._tokens[claim.job.id] = claim.token
                self._keep(asyncio.create_task(self._run(device, attempt, claim)))
        others = [queue for queue in waiting if why_no_node(queue, [this])]
        return bool(others) and await self._end_without_node(others)

    async def nodes(self) -> tuple[Node, ...]:
        """Return the nodes of the database. This one is live."""
        found = await self._in_thread(self.all_nodes.list)
        live = [replace(node, silent_s=0.0) for node in found if node.id == self.all_nodes.id]
        if not self._shared:  # the others are those of earlier starts
            return tuple(live)
        return (*live, *(node for node in found if node.id != self.all_nodes.id))

    async def _end_without_node(self, queues: Sequence[str]) -> bool:
        """Fail the jobs of these queues that no live node can run, unless they wait for one.
        Returns True if one waits.
        """
        nodes, one_waits = await self.nodes(), False
        for queue in queues:
            if not (why := why_no_node(queue, nodes)):
                continue
            waiting = await self._in_thread(partial(self._claims.waiting_for, queue))
            for job, waited_s in waiting:
                if waits(job, waited_s, nodes):
                    one_waits = True
                    with contextlib.suppress(StaleEvent):  # told before, or cancelled
                        await self._record(job.id, NodeAwaited(why))
                elif claim := await self._in_thread(partial(self._claims.claim_waiting, job.id)):
                    self._unreleased.append(claim)  # in case its end cannot be stored now
                    failed = Died(no_node_failure(why, nodes))
                    with contextlib.suppress(StaleEvent):  # somebody has cancelled it
                        await self._record(job.id, failed, token=claim.token)
                    self._unreleased.remove(claim)
        return one_waits

    async def _run(self, device: str, attempt: Attempt, claim: Claim) -> None:
        try:
            await attempt.run()
        finally:
            del self._attempts[device], self._tokens[claim.job.id]
            await self._release(claim)
            self._wakeup.set()

    async def _release(self, claim: Claim) -> None:
        """Let other servers claim the job, if it was stopped before it started. Tried again where
        the database cannot be reached now.
        """
        try:
            await self._in_thread(partial(self._claims.release, claim))
        except CrucibleError as error:
            log.error("claim.kept", job=claim.job.id, error=error.message)
            self._unreleased.append(claim)

    async def _recover(self, after_s: float | None) -> None:
        """Take over the jobs of servers that have died: kill what they left on this host, and
        queue their jobs again.
        """
        claims = await self._in_thread(partial(self._claims.expired, after_s))
        # A process id is one of this host only if no other one uses the database.
        await asyncio.to_thread(
            _kill_leftovers, [claim.job for claim in claims], by_pid=not self._shared
        )
        for claim in claims:
            if claim.job.state == "queued":
                await self._in_thread(partial(self._claims.release, claim))
                continue
            event = after_a_crash(claim.job, self._most_interruptions)
            with contextlib.suppress(StaleEvent):
                await self._record(claim.job.id, event, token=claim.token)

    async def _follow_others(self) -> None:
        """Send a heartbeat, and do what other servers want: end jobs that were cancelled there,
        take over jobs of those that have died, and wake clients that wait for their events.
        """
        begun_s = time.monotonic()
        is_due = begun_s - self._beat_s >= BEAT_S
        if is_due:
            await self._in_thread(partial(self.all_nodes.send_heartbeat, self._labels))
        held = await self._in_thread(partial(self._claims.renew, tuple(self._tokens)))
        self._renewed_s = begun_s
        for attempt in self._attempts.values():
            job = held.get(attempt.job.id)
            if job is None or job.token != self._tokens[attempt.job.id]:
                attempt.stop(TAKEN)
            elif job.state == "cancelling":
                attempt.stop(CANCELLED)
        if is_due:  # reads the jobs of all servers; after `renew`, so that it finds none of this
            await self._recover(LEASE_S)
            self._beat_s = begun_s
        newest = await self._in_thread(partial(self._jobs.newest_events, list(self._changed)))
        for job_id, seq in newest.items():
            if self._seen.get(job_id) != seq:
                self._wake(job_id)
        self._seen = newest

    async def _watch_lease(self) -> None:
        """End the attempts before another server takes their jobs for those of a dead one: also
        while the database does not answer.
        """
        while True:
            if time.monotonic() - self._renewed_s > LEASE_S - MARGIN_S:
                for attempt in self._attempts.values():
                    attempt.stop(TAKEN)
            await asyncio.sleep(POLL_S)

    async def _record_attempt(
        self, job_id: str, event: JobEvent, files: Sequence[StoredFile] = ()
    ) -> Job:
        """Store an event of a job that runs here. ClaimLost if another server has taken it.

        A database of several servers may be restarted: the job waits for it, until it is stopped.
        """
        while True:
            try:
                token = self._tokens[job_id]
                return await self._record(job_id, event, token=token, files=files)
            except StoreError as error:
                running = (each for each in self._attempts.values() if each.job.id == job_id)
                if not self._shared or any(each.is_stopped for each in running):
                    raise
                log.error("event.delayed", job=job_id, error=error.message)
                await asyncio.sleep(POLL_S)

    async def _record(
        self,
        job_id: str,
        event: JobEvent,
        entry: Entry | None = None,
        token: int | None = None,
        files: Sequence[StoredFile] = (),
    ) -> Job:
        """Store an event with the host's paths removed, and wake the clients that wait for it."""
        scrubbed = scrubbed_event(event, self.folders)
        job, _ = await self._in_thread(
            partial(self._jobs.append, job_id, scrubbed, self._clock(), entry, token, files)
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
        """Run `work` to its end, even if the client that requested it disconnects."""
        task = asyncio.create_task(work)
        self._keep(task)
        return await asyncio.shield(task)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _submission(job: Job, actor: Actor) -> Entry:
    return Entry(actor, "job.submitted", f"job/{job.id}", {"name": job.name})


def _kill_leftovers(unfinished: Sequence[Job], by_pid: bool) -> None:
    """Kill children of an earlier server: by their environment mark and, where that is one of this
    host, by the stored pid.
    """
    marked = {job.id for job in unfinished}
    known = [
        (job.pid, job.pid_started)
        for job in unfinished
        if by_pid and job.pid is not None and job.pid_started is not None
    ]

    def leftovers() -> list[Process]:
        by_mark = processes.of_jobs(marked)
        stored = chain.from_iterable(processes.alive(pid, started) for pid, started in known)
        return [*by_mark, *stored]

    if marked and not processes.kill_all(leftovers):
        log.error("children.left", jobs=sorted(marked))
