"""What all requests share: the home with its lock and database, keys, jobs, their runner, and how
far the server's own life is.

async with opened(settings, metrics, WORKER, probe, spans) as service:
    await service.started
    await service.stop()

opened      refuses a second server on the same home
started     this host is known, jobs run: /readyz says so
stop        streams end, jobs are queued again; harmless if repeated
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from filelock import FileLock, Timeout

from pipeline.errors import CrucibleError, StoreError
from pipeline.execution.child_process import Child
from service import logs
from service.auth import LOCAL
from service.devices.leases import Leases, utc_now
from service.devices.policy import Devices
from service.errors import NotFound, Unavailable
from service.inference import Serving
from service.jobs.messages import HostIdentity
from service.jobs.queue import JobRunner
from service.jobs.retention import DAILY_S, Collected, collect
from service.jobs.store import DamagedRow, JobStore
from service.jobs.traces import JobSpans
from service.observability.deployed_models import Models
from service.observability.prometheus import Metrics
from service.offload.pool import Helpers
from service.registry.repository import Repository
from service.serving.deployment import Deployment
from service.serving.loader import LoaderContext
from service.serving.manager import ModelManager
from service.serving.stats import Figures
from service.settings import Settings
from service.storage.database import Database
from service.storage.keys import Key, Keys
from service.storage.layout import Folders

PROBE_S = 300.0  # to import every backend that is installed, on a slow disk
# uploads at a time: an archive may take a thread for a minute, and cancelling a job needs one as
# well
UNPACKING = 2
HTTP_S = 4.0  # of `shutdown_s`: for answers that are being given when all jobs have ended

log = logs.get("service.service")
T = TypeVar("T")
Probe = Callable[[], Awaitable[HostIdentity]]


async def probe() -> HostIdentity:
    """Devices and tools of this host, asked in a child: the server itself loads no backend."""
    from service.jobs.worker import probe_host

    with Child(
        probe_host, name="probe", conversation=False
    ) as child:  # leaving it, also by cancellation, ends the child
        found: HostIdentity = await asyncio.to_thread(child.result, PROBE_S)
    return found


class Service:
    """Everything that lives as long as the server. Lives in one event loop, on a home that is
    locked.
    """

    serving: Serving  # what wires ask: `models`, or what a test gives

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        worker: Sequence[str],
        probe: Probe,
        spans: JobSpans,
    ) -> None:
        self.settings, self.metrics, self._probe = settings, metrics, probe
        self.folders = Folders(settings.home)
        self.database = Database(settings.database)
        self.keys, self.jobs = Keys(self.database), JobStore(self.database)
        if settings.admin_key_file is not None:
            self.keys.add_from_file(settings.admin_key_file)
        self._leases = Leases(Devices(()))
        self.repository = Repository(self.database, self.folders)
        load = partial(Deployment.start, figures=Figures(metrics.registry))
        loader_context = LoaderContext(
            self.repository,
            self.jobs,
            self.folders,
            self._leases,
            settings.versions_kept,
            settings.load_timeout_s,
            load,
        )
        self.models = self.serving = ModelManager(loader_context)
        self.runner = JobRunner(
            settings, self.jobs, self._leases, worker, (metrics.observe_job, spans.observe)
        )
        self.helpers = Helpers()
        self._host: HostIdentity | None = None
        self._reader = ThreadPoolExecutor(1, "crucible-read")
        self._key_reader = ThreadPoolExecutor(1, "crucible-keys")
        self.unpacking = asyncio.Semaphore(UNPACKING)
        self.stopping = False
        self._tidying: asyncio.Task[None] | None = None
        self.started = asyncio.create_task(self._start())

    def host(self) -> HostIdentity:
        """This host; Unavailable while it is not known yet, or jobs are not taken any more."""
        if self.stopping:
            raise Unavailable("the server is stopping", "try again in a moment")
        if self._host is None:
            raise Unavailable(
                f"the server is starting: {self._waits_for()}", "try again in a moment"
            )
        return self._host

    def _waits_for(self) -> str:
        """Without names, which would need a key."""
        if not self._leases.devices.names:
            return "it asks its host for devices and tools"
        loading, models = self.models.starting()
        return (
            f"{loading} of {models} deployed models are being loaded, GET /models tells which"
            if loading
            else "it takes up its jobs"
        )

    async def read(self, call: Callable[[], T]) -> T:
        """Ask the database, in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, call)

    async def verify(self, text: str) -> Key:
        """The key of this text; Unauthorized if it does not work.

        The database is asked in a thread of its own: whoever holds it holds up no other request.
        """
        if (known := self.keys.known(text)) is not None:
            return known
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._key_reader, self.keys.verify, text)

    async def stop(self, linger_s: float = 0.0) -> None:
        """Take no more jobs, end streams, end children and queue their jobs again. Models answer
        for `linger_s` more, and then what waits.
        """
        if self.stopping:
            return
        self.stopping = True
        self.started.cancel()
        await asyncio.wait([self.started])
        if self._tidying:
            self._tidying.cancel()
        grace_s = max(1.0, self.settings.shutdown_s - HTTP_S)
        await asyncio.gather(self._stop_models(linger_s, grace_s), self.runner.stop(grace_s))

    async def _stop_models(self, linger_s: float, grace_s: float) -> None:
        await asyncio.sleep(linger_s)
        await self.models.stop(max(1.0, grace_s - linger_s))

    async def close(self) -> None:
        """Stop, and let go of the database: nothing may be asked afterwards."""
        await self.stop()
        await self.models.close()
        await self.helpers.close()
        for reader in (self._reader, self._key_reader):
            await asyncio.get_running_loop().run_in_executor(reader, self.database.close)
            reader.shutdown()
        self.database.close()

    async def _start(self) -> None:
        host = await self._probe()
        await self.read(self._sweep)
        self._leases.devices = Devices(tuple(host.devices))
        await self.models.start()  # before jobs, which would measure beside it
        await self.runner.start()
        self._host = host
        self._tidying = asyncio.create_task(self._tidy())
        log.info("service.ready", devices=host.devices)

    async def _tidy(self) -> None:
        """Once a day, remove what need not be kept."""
        while True:
            try:
                log.info("retention.done", **asdict(await asyncio.to_thread(self._collect)))
            except (CrucibleError, OSError) as error:
                log.error("retention.failed", error=str(error))
            await asyncio.sleep(DAILY_S)

    def _collect(self) -> Collected:
        try:
            return collect(self.settings, self.jobs, utc_now, promoted=self.repository.jobs())
        finally:
            self.jobs.close()  # of this thread

    def _sweep(self) -> None:
        """Remove uploads that became no job, and folders that became no version, because the server
        was killed meanwhile.
        """
        if swept := self.repository.sweep():
            log.info("versions.swept", folders=swept)
        for folder in self.folders.uploads("any").parent.glob("*"):
            try:
                self.jobs.get(folder.name)
            except NotFound:
                log.info("upload.removed", upload=folder.name)
                shutil.rmtree(folder, ignore_errors=True)
            except DamagedRow:  # whoever mends it will want the files
                continue


@asynccontextmanager
async def opened(
    settings: Settings, metrics: Metrics, worker: Sequence[str], probe: Probe, spans: JobSpans
) -> AsyncIterator[Service]:
    """A service on its home; StoreError if another server has it."""
    settings.home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(settings.home / "server.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(
            f"another server uses '{settings.home}'",
            "stop that one, or give this one a home of its own with --home",
        ) from None
    try:
        service = Service(settings, metrics, worker, probe, spans)
        metrics.collect_jobs(service.jobs.counts)
        metrics.registry.register(Models(lambda: service.serving.served(LOCAL)))
        metrics.collect_devices()
        try:
            yield service
        finally:
            await service.close()
    finally:
        lock.release()
