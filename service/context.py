"""State that all requests share: the locked home, database, keys, jobs and their runner, models,
and the state of the server's startup and shutdown.

async with open_service(settings, metrics, WORKER, probe, spans) as service:
    await service.started
    await service.stop()

open_service    refuses a second server on the same home
started         the host is probed and jobs run: /readyz answers 200
stop            streams end and jobs are queued again; repeated calls do nothing
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

PROBE_S = 300.0  # to import every installed backend from a slow disk
# concurrent unpackings: an archive may occupy a thread for a minute, and other requests need
# threads, too
UNPACKING = 2
HTTP_S = 4.0  # part of `shutdown_s`: for unfinished answers after all jobs have ended

log = logs.get("service.service")
T = TypeVar("T")
Probe = Callable[[], Awaitable[HostIdentity]]


async def probe() -> HostIdentity:
    """Probe this host's devices and tools in a child, because the server itself loads no
    backend.
    """
    from service.jobs.worker import probe_host

    # the context manager ends the child, even after a cancellation
    with Child(probe_host, name="probe", conversation=False) as child:
        host: HostIdentity = await asyncio.to_thread(child.result, PROBE_S)
    return host


class Service:
    """Everything that lives as long as the server. Runs in one event loop, on a locked home."""

    serving: Serving  # `models`, or a double in tests

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
        self.helpers = Helpers(max_unpacked_bytes=settings.max_infer_bytes)
        self._host: HostIdentity | None = None
        self._reader = ThreadPoolExecutor(1, "crucible-read")
        self._key_reader = ThreadPoolExecutor(1, "crucible-keys")
        self.unpacking = asyncio.Semaphore(UNPACKING)
        self.stopping = False
        self._tidying: asyncio.Task[None] | None = None
        self.started = asyncio.create_task(self._start())

    def host(self) -> HostIdentity:
        """Return this host's identity. Unavailable while the server starts or stops."""
        if self.stopping:
            raise Unavailable("the server is stopping", "try again in a moment")
        if self._host is None:
            raise Unavailable(
                f"the server is starting: {self._startup_step()}", "try again in a moment"
            )
        return self._host

    def _startup_step(self) -> str:
        """Describe the current step of the startup, without model names, which would need a key."""
        if not self._leases.devices.names:
            return "it probes the host's devices and tools"
        loading, models = self.models.starting()
        if loading:
            return f"it loads {loading} of {models} deployed models, GET /models shows which"
        return "it queues its jobs"

    async def read(self, call: Callable[[], T]) -> T:
        """Query the database in a reader thread."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, call)

    async def verify(self, text: str) -> Key:
        """Return the key of this text. Unauthorized if it is not valid.

        A thread of its own queries the database, so that a locked database delays no other request.
        """
        known = self.keys.known(text)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._key_reader, self.keys.verify, text)

    async def stop(self, linger_s: float = 0.0) -> None:
        """Accept no more jobs, end streams, end children and queue their jobs again. Models answer
        new requests for `linger_s` more, and then the waiting ones.
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
        """Stop, and close the database. The service cannot be used afterwards."""
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
        await self.models.start()  # before the jobs, whose measurements it would disturb
        await self.runner.start()
        self._host = host
        self._tidying = asyncio.create_task(self._tidy())
        log.info("service.ready", devices=host.devices)

    async def _tidy(self) -> None:
        """Collect garbage once a day."""
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
        """Remove uploads without a job and folders without a version, which a killed server has
        left.
        """
        if swept := self.repository.sweep():
            log.info("versions.swept", folders=swept)
        for folder in self.folders.uploads("any").parent.glob("*"):
            try:
                self.jobs.get(folder.name)
            except NotFound:
                log.info("upload.removed", upload=folder.name)
                shutil.rmtree(folder, ignore_errors=True)
            except DamagedRow:  # a repair needs the files
                continue


@asynccontextmanager
async def open_service(
    settings: Settings, metrics: Metrics, worker: Sequence[str], probe: Probe, spans: JobSpans
) -> AsyncIterator[Service]:
    """Open the service on its home. StoreError if another server uses that home."""
    settings.home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(settings.home / "server.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(
            f"another server uses '{settings.home}'",
            "stop that server, or give this one another home with --home",
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
