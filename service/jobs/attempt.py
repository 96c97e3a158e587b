"""One attempt at a job: wait for the device, start the child, read its messages, watch its limits,
end it, and return the event that concludes the job.

    started -> leased to build -> child -> [Stage | Wants | Returns]* -> Finished -> child gone ->
    verified -> published
                                     └── Failed, death, bad message, timeout, limit, stop ->
                                     child gone ┘

In every case the child and all its descendants are gone before the last event is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from pipeline.errors import (
    CrucibleError,
    DiskFull,
    HostError,
    ObjectStoreError,
    StoreAway,
    StoreError,
)
from pipeline.execution.exit_causes import crucible_error
from pipeline.execution.stage_event import StageEvent
from pipeline.plan.schema import Plan
from service import logs
from service.devices.leases import Leases
from service.devices.policy import Lease
from service.jobs.builds import Builds
from service.jobs.messages import (
    MAX_MESSAGES,
    MEASURING,
    Finished,
    Granted,
    Made,
    Pace,
    Returned,
    Returns,
    Seeks,
    Sought,
    Stage,
    Start,
    Wants,
)
from service.jobs.publish import engine_digest, publish, take_over
from service.jobs.redact import scrubbed
from service.jobs.state import (
    Died,
    Failure,
    Job,
    JobEvent,
    Requeued,
    StaleEvent,
    Started,
    Succeeded,
)
from service.jobs.worker_client import Child, environment_for
from service.sandbox import process_limits as watchdog
from service.sandbox.framing import BadMessage, Failed
from service.sandbox.layers import Box, Sandbox, named_files, shared_files
from service.storage.files import Files, StoredFile
from service.storage.layout import Folders
from service.storage.running_logs import RunningLogs

PATIENCE_S = 60.0  # how long a measurement waits for engines to stop serving on the device
# delay per message of a child that sends too many, so that the server has time for others
SLOWED_S = 0.005
DISK_CODES = ("job.disk", DiskFull.code)
LOG_S, MAX_LOG_PART_BYTES = 2.0, 256 * 1024  # between two parts of a log, and of one
RETRY_S = 2.0  # between attempts to store how a job ended, where the disk is full

log = logs.get("service.attempt")

T = TypeVar("T")


class Record(Protocol):
    """Stores an event of a job, with files, and returns the job after it."""

    async def __call__(
        self, job_id: str, event: JobEvent, files: Sequence[StoredFile] = ()
    ) -> Job: ...


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """Dependencies and limits that all attempts share."""

    folders: Folders
    leases: Leases
    record: Record
    # command of the child; the number of its end of the socket is appended as last argument
    worker: Sequence[str]
    limits: watchdog.Limits
    timeout_s: float
    sandbox: Sandbox
    files: Files
    builds: Builds | None  # None: no other server shares them
    logs: RunningLogs | None = None  # None: other servers see the file


class Attempt:
    """One attempt. Call `run` once and `stop` at any time."""

    def __init__(self, job: Job, context: AttemptContext, token: int) -> None:
        """`token` is that of the job's claim."""
        self.job, self._context, self._token = job, context, token
        self._work = context.folders.work(job.id)
        self._sharing: set[asyncio.Task[None]] = set()
        self._stored: tuple[StoredFile, ...] = ()  # what the last event makes known
        self._ends_s = time.monotonic() + context.timeout_s
        self._stop: asyncio.Future[JobEvent] = asyncio.get_running_loop().create_future()

    def stop(self, ending: JobEvent) -> None:
        """End the child. The job then takes the event `ending`, unless it has ended before."""
        if not self._stop.done():
            self._stop.set_result(ending)

    @property
    def is_stopped(self) -> bool:
        return self._stop.done()

    async def run(self) -> None:
        """Wait for the device, run the child, and store the job's last event."""
        try:
            with self._context.files.hold(self._context.folders.uploads(self.job.id)):
                ending = await self._run_child()
        except StaleEvent:  # cancelled before its child was started
            return
        except Exception as error:  # edge of a job: its fault must not stop the server
            if not isinstance(error, CrucibleError):
                log.exception("job.fault", job=self.job.id)
            ending = Died(_failure_from(crucible_error(error)))
            if self.is_stopped and isinstance(error, StoreError):  # the cause of both
                ending = self._stop.result()
        finally:
            self._context.leases.give_back(self.job.id, self.job.device)
        await self._conclude(ending)

    async def _run_child(self) -> JobEvent:
        if not await self._acquire(Lease(self.job.device, "build", self.job.id)):
            return self._stop.result()
        context, work = self._context, self._work
        self._ends_s = time.monotonic() + context.timeout_s
        await asyncio.to_thread(work.prepare)
        await self._when_back(partial(context.files.fetch, context.folders.uploads(self.job.id)))
        plan = await asyncio.to_thread(context.folders.load_plan, self.job.id)
        environment = environment_for(self.job.id, self.job.device, work, os.environ)
        # twice the disk limit, so that the watchdog acts before the limit of one file
        file_bytes = 2 * context.limits.disk_bytes
        box = await asyncio.to_thread(self._enter, plan)
        try:
            ending = await self._run_in(box, plan.name, file_bytes, environment)
        finally:
            await self._end_sharing()
            await asyncio.to_thread(box.close)
            # a job that has filled the disk leaves no space to store its last event
            await asyncio.to_thread(work.clear_temporary)
        return await self._publish() if ending is None else ending

    def _enter(self, plan: Plan) -> Box:
        """Make the sandbox of this job's child."""
        context, home = self._context, self._context.folders.home
        return context.sandbox.enter(
            self.job.id,
            self._work,
            self.job.device,
            read=(context.folders.uploads(self.job.id), *named_files(plan, home)),
            shared=shared_files(home),
            memory_bytes=context.limits.memory_bytes,
            cpu_s=context.timeout_s,
        )

    async def _run_in(
        self, box: Box, name: str, file_bytes: int, environment: Mapping[str, str]
    ) -> JobEvent | None:
        """Run the child. Returns None if it has finished its report."""
        context, work = self._context, self._work
        child = await Child.start(context.worker, self.job.id, work, file_bytes, environment, box)
        sharing_log = asyncio.create_task(self._share_log())
        try:
            held, device = context.sandbox.held(self.job.device), self.job.device
            started = Started(child.pid, child.started, held, device)
            await context.record(self.job.id, started)
            log.info("job.started", job=self.job.id, pid=child.pid, device=self.job.device)
            await child.send(self._start(name))
            return await self._first_ending(child, box)
        finally:
            await _cancel_all(sharing_log)
            await child.end()

    async def _share_log(self) -> None:
        """Send the output of the child to servers that do not see its file, while it runs."""
        sent = 0
        while self._context.logs is not None:
            await asyncio.sleep(LOG_S)
            sent = await asyncio.to_thread(self._send_log, self._context.logs, sent)

    def _send_log(self, shared: RunningLogs, sent: int) -> int:
        """Send what has come after byte `sent` of the log. Returns how far it is sent then."""
        data, begin = self._work.read_log(MAX_LOG_PART_BYTES, sent)
        lines = data[: data.rfind(b"\n") + 1]  # a path must not be cut before it is removed
        if not lines and len(data) == MAX_LOG_PART_BYTES:
            lines = data
        if not lines:
            return sent
        text = scrubbed(lines.decode("utf-8", "replace"), self._context.folders)
        try:
            shared.append(self.job.id, self._token, begin + len(lines), text)
        except StoreError as error:  # tried again
            log.error("log.not_shared", job=self.job.id, error=error.message)
            return sent
        return begin + len(lines)

    def _forget_log(self, shared: RunningLogs) -> None:
        """Remove what was sent of the log, which is stored now."""
        with contextlib.suppress(StoreError):  # it goes with the job
            shared.forget(self.job.id, self._token)

    def _start(self, name: str) -> Start:
        folders, job = self._context.folders, self.job
        compiled = folders.compiled(job.id) if job.measures else None
        action = ""
        if job.measures:
            action = (
                f"version {job.measures.version} of model '{job.measures.model}' measured again, "
            )
        if job.recompiles:
            version = f"version {job.recompiles.version} of model '{job.recompiles.model}'"
            action = f"{version} compiled again, "
        command = f"a request to the service, {action}job {job.id} ('{name}')"
        return Start(
            plan=folders.uploads(job.id) / "plan.json",
            work=self._work.root,
            shared=folders.home,
            compiled=compiled,
            command=command,
            shares_builds=self._context.builds is not None,
        )

    async def _acquire(self, lease: Lease) -> bool:
        """Wait for a lease. Returns False if the attempt is stopped first."""
        request = asyncio.ensure_future(self._context.leases.ask(lease))
        try:
            await asyncio.wait((request, self._stop), return_when=asyncio.FIRST_COMPLETED)
            return not self._stop.done() and request.result() is not None
        finally:
            await _cancel_all(request)

    async def _first_ending(self, child: Child, box: Box) -> JobEvent | None:
        """Return the event that ends the child first; None if the child has finished its report."""
        listening = asyncio.ensure_future(self._listen(child, box))
        watching = asyncio.ensure_future(self._watch(child))
        try:
            done, _ = await asyncio.wait(
                (self._stop, watching, listening),
                timeout=self._context.timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._stop in done:
                return self._stop.result()
            if watching in done:
                return Died(watching.result())
            if listening in done:
                return listening.result()
        finally:
            await _cancel_all(listening, watching)
        message = (
            f"the job took longer than its limit of {self._context.timeout_s:g} s, and was stopped"
        )
        return Died(
            Failure(
                code="job.timeout",
                message=message,
                next_step="retry it, which reuses its artifacts; or raise job_timeout_s",
            )
        )

    async def _listen(self, child: Child, box: Box) -> JobEvent | None:
        """Handle the child's messages until the last one. Returns None for Finished, else the job's
        event.
        """
        pace, count = Pace(), 0
        try:
            while True:
                message = await child.receive()
                if isinstance(message, Finished):
                    return None
                if isinstance(message, Failed):
                    return Died(
                        Failure(
                            code=message.code,
                            message=message.message,
                            next_step=message.next_step,
                        )
                    )
                if isinstance(message, Stage) and not pace.lets(message.event, time.monotonic()):
                    await asyncio.sleep(SLOWED_S)
                    continue
                await self._reply(child, message)
                count += 1
                if count > MAX_MESSAGES:
                    raise BadMessage(f"more than {MAX_MESSAGES} messages")
        except EOFError:
            usage = await self._usage(child)  # a limit may have killed it between two checks
            limits = self._context.limits
            if box.ran_out_of_memory:
                usage = replace(usage, memory_bytes=limits.memory_bytes + 1)
            over = watchdog.verdict(usage, limits)
            return Died(_failure(over) if over else await child.death())
        except BadMessage as error:
            failure = Failure(
                code="job.protocol",
                message=f"the job's process violates the protocol: {error}",
                next_step="retry the job; its log shows what it did",
            )
            return Died(failure)

    async def _reply(self, child: Child, message: Stage | Wants | Returns | Seeks | Made) -> None:
        """Record a stage, grant the device or take it back, or share an artifact."""
        leases, builds = self._context.leases, self._context.builds
        match message:
            case Stage():
                await self._context.record(self.job.id, message.event)
            case Wants():
                request = Lease(self.job.device, "measure", self.job.id)
                lease = await leases.ask(request, PATIENCE_S)
                await child.send(Granted(contended=lease.contended))
            case Returns():
                if measured := leases.measured(self.job.id, self.job.device):
                    await child.send(Returned(contended=measured.contended))
            case Seeks(stage=stage, key=key) if builds is not None:
                is_exclusive = stage not in MEASURING
                seek = partial(builds.seek, self.job.id, stage, key, is_exclusive)
                await child.send(Sought(answer=await asyncio.to_thread(seek)))
            case Made(stage=stage, key=key) if builds is not None and stage not in MEASURING:
                made = partial(builds.made, self.job.id, self._work.home, stage, key)
                task = asyncio.create_task(asyncio.to_thread(made))  # the child goes on meanwhile
                self._sharing.add(task)
                task.add_done_callback(self._sharing.discard)
            case Seeks() | Made():
                raise BadMessage(f"{message.kind}, although nothing is shared")

    async def _end_sharing(self) -> None:
        """Wait for uploads of artifacts, and let other jobs make what is not finished."""
        if self._context.builds is not None:
            await asyncio.gather(*self._sharing, return_exceptions=True)
            await asyncio.to_thread(self._context.builds.release, self.job.id)

    async def _watch(self, child: Child) -> Failure:
        """Check every EVERY_S seconds, and return when the job exceeds a limit."""
        while True:
            if over := watchdog.verdict(await self._usage(child), self._context.limits):
                return _failure(over)
            await asyncio.sleep(watchdog.EVERY_S)

    async def _usage(self, child: Child) -> watchdog.Sample:
        return await asyncio.to_thread(
            watchdog.sample, child.pid, self._work.root, self._context.limits
        )

    async def _publish(self) -> JobEvent:
        files, folder = self._context.files, self._context.folders.report(self.job.id)
        report = await asyncio.to_thread(publish, self._work.out, folder, self._context.folders)
        await asyncio.to_thread(self._take_over)
        self._stored += await self._when_back(partial(files.upload, folder, self._token))
        return Succeeded(report.verdict, report.winner or None, engine_digest(folder))

    def _take_over(self) -> None:
        builds, home = self._context.builds, self._context.folders.home
        try:
            take_over(self._work, home, builds.store if builds else None)
            if builds is not None:
                builds.push()
        except (OSError, CrucibleError) as error:  # the report is kept; the next job takes longer
            log.error("store.not_filled", job=self.job.id, error=str(error))

    async def _when_back(self, call: Callable[[], T]) -> T:
        """Call a function in a thread, again while the object store of the files is away: to the
        end of the job's time. The job's events say that it waits.
        """
        is_told = False
        while True:
            try:
                return await asyncio.to_thread(call)
            except ObjectStoreError as error:
                log.error("files.away", job=self.job.id, error=error.message)
                is_late = time.monotonic() > self._ends_s
                if self.is_stopped or is_late or not isinstance(error, StoreAway):
                    raise StoreError(  # without the address of the bucket
                        "the store of the service's files cannot be used, and the job has to end",
                        "retry the job, which reuses its artifacts; the operator finds the cause"
                        " in the log",
                    ) from error
            if not is_told:
                text = "the store of the service's files does not answer; the job waits for it"
                event = StageEvent("files", text=text, state="waiting")
                await self._context.record(self.job.id, event)
                is_told = True
            await asyncio.wait((self._stop,), timeout=RETRY_S)

    def _store_log(self) -> None:
        """Store the job's log with its last event. Without it the job has ended, too."""
        try:
            self._work.shorten_log()
            log_file = self._work.log.name
            self._stored += self._context.files.upload(
                self._work.root, self._token, paths=(log_file,)
            )
        except (OSError, StoreError) as error:
            log.error("log.not_stored", job=self.job.id, error=str(error))

    async def _conclude(self, ending: JobEvent) -> None:
        """Store the job's last event. Retries until that succeeds, because the server must not lose
        it. A job that has filled the disk keeps only its log, so that there is space for the event.
        """
        if isinstance(ending, Died) and ending.failure.code in DISK_CODES:
            await asyncio.to_thread(self._work.empty)
        if not isinstance(ending, Requeued):
            await asyncio.to_thread(self._store_log)
        while True:
            try:
                job = await self._context.record(self.job.id, ending, self._stored)
                break
            except StaleEvent:
                return
            except HostError as error:
                log.error("job.not_stored", job=self.job.id, error=error.message)
                await asyncio.sleep(RETRY_S)
            except CrucibleError as error:  # its row is damaged
                log.error("job.not_stored", job=self.job.id, error=error.message)
                return
        log.info(
            "job.ended",
            job=job.id,
            state=job.state,
            failure=job.failure.message if job.failure else None,
        )
        await asyncio.to_thread(self._tidy, job)

    def _tidy(self, job: Job) -> None:
        """Delete what a retry does not need."""
        if self._context.logs is not None and job.is_final:
            self._forget_log(self._context.logs)
        with contextlib.suppress(OSError):
            self._work.shorten_log()
        if job.state == "succeeded":
            self._work.empty()
            self._context.files.shrink()
        if job.state != "succeeded":
            shutil.rmtree(self._context.folders.report(job.id), ignore_errors=True)


def _failure_from(error: CrucibleError) -> Failure:
    return Failure(code=error.code, message=error.message, next_step=error.next_step)


async def _cancel_all(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _failure(over: watchdog.Exceeded) -> Failure:
    return Failure(code=over.code, message=over.message, next_step=over.next_step)
