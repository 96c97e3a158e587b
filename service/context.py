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
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from pipeline.errors import CrucibleError, StoreError
from pipeline.execution.child_process import Child, TimeLimit
from service import logs
from service.auth import LOCAL, Caller, Source
from service.bytes_in_flight import BytesInFlight
from service.devices.leases import Leases, utc_now
from service.devices.policy import Devices
from service.errors import NotFound, StorageFull, Unauthorized, Unavailable
from service.inference import Serving
from service.jobs.builds import builds_from
from service.jobs.claims import LEASE_S
from service.jobs.messages import HostIdentity
from service.jobs.queue import JobRunner
from service.jobs.retention import DAILY_S, Collected, collect
from service.jobs.store import DamagedRow, JobStore
from service.jobs.traces import JobSpans
from service.language.generation import Generating
from service.limits.shared import limits_from
from service.observability.deployed_models import Models
from service.observability.prometheus import Metrics
from service.offload.chat_templates import ChatTemplates
from service.offload.pool import Helpers
from service.offload.text_tokens import TextTokens
from service.refusals import Refusals
from service.regions import Regions
from service.registry.model_states import ModelStates
from service.registry.older_files import older_folders
from service.registry.promotion import prove
from service.registry.repository import Repository
from service.sandbox.layers import Sandbox
from service.sandbox.proof import Proof
from service.sandbox.proof import prove as prove_sandbox
from service.serving.deployment import Deployment
from service.serving.language.deployment import LanguageDeployment
from service.serving.language.stats import LanguageFigures
from service.serving.loader import LoaderContext
from service.serving.manager import ModelManager
from service.serving.stats import Figures
from service.settings import Settings
from service.storage.database import POSTGRESQL_MARK, database_from
from service.storage.drafts import Drafts
from service.storage.files import files_from
from service.storage.key import Key
from service.storage.keys import NEXT, Keys
from service.storage.layout import DRAFT, HOME_MODE, Folders, secure_home
from service.storage.sessions import Sessions
from service.storage.sqlite import FILE_MODE

# to import every installed backend from a slow disk
PROBE_LIMIT = TimeLimit(
    300.0, "the probe of this host's devices", "see the server's log, and start the server again"
)
# concurrent unpackings: an archive may occupy a thread for a minute, and other requests need
# threads, too
UNPACKING = 2
DRAFTS_S = 300.0  # between two looks for drafts that have ended
LOCK = "server.lock"  # in the home
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
        host: HostIdentity = await asyncio.to_thread(child.result, PROBE_LIMIT)
    return host


class Service:
    """Everything that lives as long as the server. Runs in one event loop, on a locked home."""

    serving: Serving  # `models`, or a double in tests
    generating: Generating  # of language models, or a double in tests
    bytes_in_flight: BytesInFlight  # of HTTP and gRPC

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
        self.database = database_from(settings)
        self.keys, self.jobs = Keys(self.database), JobStore(self.database)
        self.sessions = Sessions(self.database)
        self.files = files_from(settings, self.database)
        self._builds = builds_from(settings, self.database)
        self.drafts = Drafts(self.folders, self.files)
        self.refusals = Refusals(self.database, settings.database_url is not None)
        self._leases = Leases(Devices(()))
        self.repository = Repository(self.database, self.folders, self.files)
        self.sandbox = Sandbox(settings.home)
        self.runner = JobRunner(
            settings,
            self.jobs,
            self._leases,
            worker,
            self.sandbox,
            (metrics.observe_job, spans.observe),
            files=self.files,
            builds=self._builds,
        )
        load = partial(Deployment.start, figures=Figures(metrics.of_models), sandbox=self.sandbox)
        language_figures = LanguageFigures(metrics.of_models)
        load_language = partial(
            LanguageDeployment.start, figures=language_figures, sandbox=self.sandbox
        )
        loader_context = LoaderContext(
            self.repository,
            self.jobs,
            self.folders,
            self._leases,
            settings.most_versions,
            settings.load_timeout_s,
            load,
            load_language,
            partial(prove, sandbox=self.sandbox),
            fetch=self.files.fetch,
            shares_home=settings.shares_home,
            states=self._model_states(),
        )
        self.models = self.serving = ModelManager(loader_context)
        self.helpers = Helpers(max_unpacked_bytes=settings.max_infer_bytes, sandbox=self.sandbox)
        uploads = self.folders.home / "uploads"
        self.upload_readers = Helpers(1, sandbox=self.sandbox, read=(uploads,))
        self.chat_templates = ChatTemplates(self.sandbox)
        self.text_tokens = TextTokens(self.sandbox)
        self.regions = Regions(settings)
        self.limits = limits_from(settings, self.database, self.runner.all_nodes.id, LEASE_S)
        self._host: HostIdentity | None = None
        self._reader = ThreadPoolExecutor(1, "crucible-read")
        self._key_reader = ThreadPoolExecutor(1, "crucible-keys")
        self.unpacking = asyncio.Semaphore(UNPACKING)
        self.comparing = asyncio.Lock()  # the original of a model runs, beside its engine
        self.stopping = False
        self._tidying: tuple[asyncio.Task[None], ...] = ()
        self._proof: asyncio.Task[Proof] | None = None
        self.started = asyncio.create_task(self._start())

    def _model_states(self) -> ModelStates | None:
        """Return what says how far the servers of the database have followed their models."""
        if self.settings.database_url is None:
            return None
        return ModelStates(self.database, self.runner.all_nodes.id, LEASE_S)

    def host(self) -> HostIdentity:
        """Return this host's identity. Unavailable while the server starts or stops."""
        if self.stopping:
            raise Unavailable("the server is stopping", "try again in a moment")
        if self._host is None:
            raise Unavailable(
                f"the server is starting: {self._startup_step()}", "try again in a moment"
            )
        return self._host

    def host_for_job(self) -> HostIdentity:
        """Return this host's identity for a new job. Unavailable as for `host`, StorageFull if less
        of the disk is free than the reserve.
        """
        host, reserve = self.host(), self.settings.disk_reserve_bytes
        if not self.has_disk_reserve():
            raise StorageFull(
                f"the disk of the service is nearly full: no job is accepted with less than"
                f" {reserve} bytes free (`disk_reserve_bytes`)",
                "the operator can free space with `crucible gc`, or by hand",
            )
        return host

    async def job_devices(self) -> tuple[str, ...]:
        """Return the devices that jobs can run on: of this host or, if nodes run them, of the live
        nodes. Unavailable as for `host`.
        """
        host = self.host()
        if self.settings.executor == "local":
            return tuple(host.devices)
        live = [node for node in await self.runner.nodes() if node.is_live]
        return tuple(sorted({device for node in live for device in node.labels}))

    def has_disk_reserve(self) -> bool:
        """Return True if the disk of the home has the free space that new jobs require."""
        return shutil.disk_usage(self.settings.home).free >= self.settings.disk_reserve_bytes

    @property
    def devices(self) -> Devices:
        """The devices of this host, who uses them, and who waits."""
        return self._leases.devices

    @contextmanager
    def serving_on(self, device: str, holder: str) -> Iterator[None]:
        """Hold a lease to serve, so that no measurement goes on unmarked beside other work."""
        self._leases.serve(holder, device)
        try:
            yield
        finally:
            self._leases.give_back(holder, device, "serve")

    def _startup_step(self) -> str:
        """Describe the current step of the startup, without model names, which would need a key."""
        if not self.devices.names:
            return "it probes the host's devices and tools"
        loading, models = self.models.starting()
        if loading:
            return f"it loads {loading} of {models} deployed models, GET /models shows which"
        return "it queues its jobs"

    async def read(self, call: Callable[[], T]) -> T:
        """Query the database in a reader thread."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, call)

    async def verify(self, text: str, source: Source) -> Key:
        """Return the key of this text, and count its request. Unauthorized if it is not valid;
        TooMany if that has happened too often at this address, or the key sends too many requests.

        A thread of its own queries the database, so that a locked database delays no other request.
        """
        key = self.keys.known(text)
        if key is None:
            key = await self._look_up(text, source)
        await self.limits.take_request(key.prefix)
        return key

    async def key_of_session(self, token: str, source: Source) -> Key | None:
        """Return the key of a browser's session, and count its request; None if it has ended."""
        key = await self._in_key_reader(partial(self.sessions.key_of, token))
        if key is not None:
            await self.limits.take_request(key.prefix)
        return key

    async def has_session(self, token: str) -> bool:
        """Return whether a browser's session goes on; it always does where no key is needed."""
        if not self.settings.needs_keys:
            return True
        return await self._in_key_reader(partial(self.sessions.key_of, token)) is not None

    async def still_accepts(self, caller: Caller) -> bool:
        """Return whether the key of a caller, whose stream goes on, has not been revoked."""
        if not self.settings.needs_keys:
            return True
        return await self._in_key_reader(partial(self.keys.is_valid, caller.key))

    async def _look_up(self, text: str, source: Source) -> Key:
        try:
            if not text:
                raise Unauthorized("this service needs a key", NEXT)
            return await self._in_key_reader(partial(self.keys.verify, text))
        except Unauthorized as error:
            answer = await self.refusals.of_authentication(error, text, source)
            self.metrics.failed_authentications.labels(str(answer.status)).inc()
            raise answer from None

    async def add_admin_key(self) -> None:
        """Add the admin key of the settings, if they name one."""
        file = self.settings.admin_key_file
        if file is not None:
            await self._in_key_reader(partial(self.keys.add_from_file, file))

    async def _in_key_reader(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._key_reader, call)

    async def stop(self, linger_s: float = 0.0) -> None:
        """Accept no more jobs, end streams, end children and queue their jobs again. Models answer
        new requests for `linger_s` more, and then the waiting ones.
        """
        if self.stopping:
            return
        self.stopping = True
        self.started.cancel()
        await asyncio.wait([self.started])
        for task in self._tidying:
            task.cancel()
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
        await self.upload_readers.close()
        await self.chat_templates.close()
        await self.text_tokens.close()
        await self.refusals.close()
        await self.limits.close()
        if self._builds is not None:
            self._builds.close()
        for reader in (self._reader, self._key_reader):
            await asyncio.get_running_loop().run_in_executor(reader, self.database.close)
            reader.shutdown()
        self.database.close()

    async def _start(self) -> None:
        host, _ = await asyncio.gather(self._probe(), self._find_sandbox())
        if not self.settings.shares_home:  # else another server may write what has no job yet
            await self.read(self._sweep)
        self._leases.devices = Devices(tuple(host.devices))
        await self.models.start()  # before the jobs, whose measurements it would disturb
        await self.runner.start(host.labels, host.possible_candidates)
        self._host = host
        self._tidying = tuple(map(asyncio.create_task, (self._tidy(), self._end_drafts())))
        log.info("service.ready", devices=host.devices)

    async def _find_sandbox(self) -> None:
        if self.settings.sandbox == "auto":
            await asyncio.to_thread(self.sandbox.find)

    def proof(self) -> asyncio.Task[Proof]:
        """Return the proof of what the sandbox holds; the first call starts it, and another one if
        the acts could not be tried. Await it only when the server has started.
        """
        proof = self._proof
        if proof is None or (proof.done() and (proof.exception() or proof.result().fault)):
            # without a file of the database, any other file that only the server may read
            secret = self.database.path or self.settings.home / LOCK
            find = partial(prove_sandbox, self.sandbox, secret)
            proof = self._proof = asyncio.create_task(asyncio.to_thread(find))
        return proof

    async def _tidy(self) -> None:
        """Collect garbage once a day."""
        while True:
            try:
                log.info("retention.done", **asdict(await asyncio.to_thread(self._collect)))
            except (CrucibleError, OSError) as error:
                log.error("retention.failed", error=str(error))
            await asyncio.sleep(DAILY_S)

    async def _end_drafts(self) -> None:
        """Remove the drafts that have ended."""
        while True:
            try:
                if ended := await asyncio.to_thread(self.drafts.remove_ended):
                    log.info("drafts.removed", drafts=ended)
            except OSError as error:  # tried again
                log.warning("drafts.kept", error=str(error))
            await asyncio.sleep(DRAFTS_S)

    def _collect(self) -> Collected:
        try:
            if self.files.are_shared and (older := older_folders(self.database, self.folders)):
                step = "`crucible upload-home` lets other servers find them"
                log.warning("files.not_uploaded", folders=len(older), next=step)
            promoted = self.repository.jobs()
            return collect(
                self.settings,
                self.jobs,
                utc_now,
                promoted=promoted,
                files=self.files,
                builds=self._builds,
            )
        finally:
            self.jobs.close()  # of this thread

    def _sweep(self) -> None:
        """Remove uploads without a job and folders without a version, which a killed server has
        left. Drafts remain until they end.
        """
        if swept := self.repository.sweep():
            log.info("versions.swept", folders=swept)
        for folder in self.folders.uploads("any").parent.glob("*"):
            if (folder / DRAFT).is_file():
                continue
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
    _secure_home(settings.home)
    lock = FileLock(settings.home / LOCK)
    try:
        if not settings.shares_home:
            lock.acquire(timeout=0)
        if settings.database_url is not None:
            for name in (LOCK, POSTGRESQL_MARK):
                (settings.home / name).touch(FILE_MODE)
    except Timeout:
        raise StoreError(
            f"another server uses '{settings.home}'",
            "stop that server, or give this one another home with --home",
        ) from None
    try:
        service = Service(settings, metrics, worker, probe, spans)
        metrics.collect_jobs(service.jobs.counts)
        metrics.of_models.register(Models(lambda: service.serving.served(LOCAL)))
        metrics.collect_devices()
        try:
            await service.add_admin_key()
            yield service
        finally:
            await service.close()
    finally:
        lock.release()


def _secure_home(home: Path) -> None:
    """Let only the service's user into the home. A log line says what changed."""
    try:
        if before := secure_home(home):
            log.warning("home.secured", before=before, now=f"{HOME_MODE:04o}")
    except PermissionError:  # a volume that belongs to root, such as one of Kubernetes
        mode = f"{stat.S_IMODE(home.stat().st_mode):04o}"
        log.warning("home.not_secured", mode=mode, next="give the home to the service's user")
