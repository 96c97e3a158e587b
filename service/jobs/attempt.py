"""One attempt at one job: wait for the device, start the child, listen, watch, end it, and say how
the job goes on.

    started -> leased to build -> child -> [Stage | Wants | Returns]* -> Finished -> child gone ->
    verified -> published
                                     └── Failed, death, rubbish, too long, too large, stop -> child
                                     gone ┘

Whatever happens: the child, and all that it started, are gone before the last event is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import CrucibleError, HostError
from pipeline.execution.exit_causes import crucible_error
from service import logs
from service.devices.leases import Leases
from service.devices.policy import Lease
from service.jobs import process_limits as watchdog
from service.jobs.messages import (
    MAX_MESSAGES,
    BadMessage,
    Failed,
    Finished,
    Granted,
    Pace,
    Returned,
    Returns,
    Stage,
    Start,
    Wants,
)
from service.jobs.publish import engine_digest, publish, take_over
from service.jobs.state import (
    Died,
    Failure,
    Job,
    JobEvent,
    Progress,
    StageSeen,
    StaleEvent,
    Started,
    Succeeded,
)
from service.jobs.worker_client import Child, environment_for
from service.storage.layout import Folders

PATIENCE_S = 60.0  # how long measuring waits for engines that serve on the device to be gone
# a child that tells more than it should is heard slowly, so that the server has time for others
SLOWED_S = 0.005
RETRY_S = 2.0  # between attempts to store how a job ended, where the disk is full

log = logs.get("service.attempt")

Record = Callable[[str, JobEvent], Awaitable[Job]]
"""Store an event of a job: the job after it."""


@dataclass(frozen=True, slots=True)
class Means:
    """What every attempt works with."""

    folders: Folders
    leases: Leases
    record: Record
    worker: Sequence[
        str
    ]  # the command of the child; gets the number of its end of the socket as last argument
    limits: watchdog.Limits
    timeout_s: float


class Attempt:
    """One attempt. `run` it once; `stop` it at any time."""

    def __init__(self, job: Job, means: Means) -> None:
        self.job, self._means = job, means
        self._work = means.folders.work(job.id)
        self._stop: asyncio.Future[JobEvent] = asyncio.get_running_loop().create_future()

    def stop(self, ending: JobEvent) -> None:
        """End the child; the job then takes `ending`, unless it had ended before."""
        if not self._stop.done():
            self._stop.set_result(ending)

    async def run(self) -> None:
        """From the wait for the device until how it ended is stored."""
        try:
            ending = await self._until_the_end()
        except StaleEvent:  # cancelled before its child was started
            return
        except Exception as error:  # the edge of a job: its fault is not the server's
            if not isinstance(error, CrucibleError):
                log.exception("job.fault", job=self.job.id)
            ending = Died(_failure_from(crucible_error(error)))
        finally:
            self._means.leases.give_back(self.job.id, self.job.device)
        await self._conclude(ending)

    async def _until_the_end(self) -> JobEvent:
        if not await self._got(Lease(self.job.device, "build", self.job.id)):
            return self._stop.result()
        means, work = self._means, self._work
        await asyncio.to_thread(work.prepare)
        plan = await asyncio.to_thread(means.folders.load_plan, self.job.id)
        environment = environment_for(self.job.id, self.job.device, work, os.environ)
        child = await Child.start(
            means.worker, self.job.id, work, 2 * means.limits.disk_bytes, environment
        )  # the watchdog is to be first
        try:
            await means.record(self.job.id, Started(child.pid, child.started))
            log.info("job.started", job=self.job.id, pid=child.pid, device=self.job.device)
            await child.send(self._start(plan.name))
            ending = await self._first_end(child)
        finally:
            await child.end()
            await asyncio.to_thread(
                work.clear_temporary
            )  # or a job that has filled the disk leaves no space to store how it ended
        return await asyncio.to_thread(self._publish) if ending is None else ending

    def _start(self, name: str) -> Start:
        folders, job = self._means.folders, self.job
        compiled = folders.compiled(job.id) if job.measures else None
        what = (
            f"version {job.measures.version} of model '{job.measures.model}' measured again, "
            if job.measures
            else ""
        )
        command = f"a request to the service, {what}job {job.id} ('{name}')"
        return Start(
            plan=folders.uploads(job.id) / "plan.json",
            work=self._work.root,
            shared=folders.home,
            compiled=compiled,
            command=command,
        )

    async def _got(self, lease: Lease) -> bool:
        """Wait for a lease; False if the attempt is stopped before."""
        asked = asyncio.ensure_future(self._means.leases.ask(lease))
        try:
            await asyncio.wait((asked, self._stop), return_when=asyncio.FIRST_COMPLETED)
            return not self._stop.done() and asked.result() is not None
        finally:
            await _cancelled(asked)

    async def _first_end(self, child: Child) -> JobEvent | None:
        """What ends it first; None: the child says that the report is there."""
        listening, watching = (
            asyncio.ensure_future(self._listen(child)),
            asyncio.ensure_future(self._watch(child)),
        )
        try:
            done, _ = await asyncio.wait(
                (self._stop, watching, listening),
                timeout=self._means.timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._stop in done:
                return self._stop.result()
            if watching in done:
                return Died(watching.result())
            if listening in done:
                return listening.result()
        finally:
            await _cancelled(listening, watching)
        message = (
            f"the job took longer than the {self._means.timeout_s:g} s it may, and was stopped"
        )
        return Died(
            Failure(
                code="job.timeout",
                message=message,
                next_step="retry it, which goes on from what is stored; or raise job_timeout_s",
            )
        )

    async def _listen(self, child: Child) -> JobEvent | None:
        """Take the child's messages until its last."""
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
                if isinstance(message, Stage) and not pace.lets(message, time.monotonic()):
                    await asyncio.sleep(SLOWED_S)
                    continue
                await self._reply(child, message)
                count += 1
                if count > MAX_MESSAGES:
                    raise BadMessage(f"more than {MAX_MESSAGES} messages")
        except EOFError:
            taken = await self._taken(child)  # it may have died of that between two looks
            return Died(watchdog.verdict(taken, self._means.limits) or await child.death())
        except BadMessage as error:
            said = f"the job's process does not keep to the protocol: {error}"
            return Died(
                Failure(
                    code="job.protocol",
                    message=said,
                    next_step="retry the job; its log tells what it did",
                )
            )

    async def _reply(self, child: Child, message: Stage | Wants | Returns) -> None:
        """Record a stage, or answer a question about the device."""
        leases = self._means.leases
        match message:
            case Stage():
                await self._means.record(self.job.id, _seen(message))
            case Wants():
                wanted = Lease(self.job.device, "measure", self.job.id)
                lease = await leases.ask(wanted, PATIENCE_S)
                await child.send(Granted(contended=lease.contended))
            case Returns():
                if measured := leases.measured(self.job.id, self.job.device):
                    await child.send(Returned(contended=measured.contended))

    async def _watch(self, child: Child) -> Failure:
        """Look every half second until the job takes too much."""
        while True:
            if failure := watchdog.verdict(await self._taken(child), self._means.limits):
                return failure
            await asyncio.sleep(watchdog.EVERY_S)

    async def _taken(self, child: Child) -> watchdog.Sample:
        return await asyncio.to_thread(
            watchdog.sample, child.pid, self._work.root, self._means.limits
        )

    def _publish(self) -> JobEvent:
        place = self._means.folders.report(self.job.id)
        report = publish(self._work.out, place, self._means.folders)
        try:
            take_over(self._work, self._means.folders.home)
        except (
            OSError,
            CrucibleError,
        ) as error:  # costs the next job time, not this one its report
            log.error("store.not_filled", job=self.job.id, error=str(error))
        return Succeeded(report.verdict, report.winner, engine_digest(place))

    async def _conclude(self, ending: JobEvent) -> None:
        """Store how it ended, however long that takes: the server may not forget it."""
        while True:
            try:
                job = await self._means.record(self.job.id, ending)
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
        """Keep what a retry goes on from; not of a job that took the whole disk it may."""
        with contextlib.suppress(OSError):
            self._work.shorten_log()
        if job.state == "succeeded" or (job.failure and job.failure.code == "job.disk"):
            self._work.empty()
        if job.state != "succeeded":
            shutil.rmtree(self._means.folders.report(job.id), ignore_errors=True)


def _seen(message: Stage) -> StageSeen:
    progress = Progress(
        stage=message.stage,
        subject=message.subject,
        fraction=message.fraction,
        text=message.text,
        elapsed_s=message.elapsed_s,
        estimate_s=message.estimate_s,
    )
    return StageSeen(message.state, progress, message.seconds)


def _failure_from(error: CrucibleError) -> Failure:
    return Failure(code=error.code, message=error.message, next_step=error.next_step)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
