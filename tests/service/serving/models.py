"""A home with jobs that have ended, and deployments of their engines by a double that answers at
once with its version.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from pipeline.core.artifacts import Engine
from pipeline.errors import ChildDied
from pipeline.report.bundle import load_engine
from pipeline.results.report import Report, Verdict
from pipeline.serving_inputs import BatchSpec, Padding, ServingConfig
from service.auth import LOCAL, Caller
from service.devices.gpus import GpuKind
from service.devices.leases import Leases, utc_now
from service.devices.policy import Devices
from service.errors import TimedOut, Unavailable
from service.inference import InferAnswer, InferRequest, Served, Statistics, Timing, Total
from service.jobs.state import Started, Succeeded
from service.jobs.store import JobStore
from service.registry.model_states import ModelStates
from service.registry.models import PromoteRequest
from service.registry.repository import Repository
from service.serving.deployment import DeploymentSpec, served_version
from service.serving.language.deployment import LanguageDeployment, LanguageSpec
from service.serving.language.stats import LanguageFigures
from service.serving.loader import LoaderContext
from service.serving.manager import ModelManager
from service.serving.stats import Traffic
from service.storage.database import Database
from service.storage.layout import Folders
from tests.service.builders.jobs import new_job, write_out

MIB = 2**20
PROVED = BatchSpec(axes={"x": 0, "y": 0}, maximum=8, proved=True, largest_error=0.0)
ALONE = BatchSpec(axes={"x": 0, "y": 0}, reason="rows influence each other")


class Double:
    """A running version that answers after a moment."""

    def __init__(self, spec: DeploymentSpec) -> None:
        self.spec = spec
        self.answering, self.answered = 0, 0
        self.drained = self.closed = False
        self.traffic = Traffic()

    async def infer(self, request: InferRequest) -> InferAnswer:
        if self.drained or self.closed:
            raise Unavailable(f"version {self.spec.version.version} was asked when it was gone")
        self.answering += 1
        try:
            await asyncio.sleep(0.001)
            assert not self.closed
            self.answered += 1
            outputs = {"y": np.full(1, self.spec.version.version)}
            return InferAnswer(
                self.spec.version.model,
                self.spec.version.version,
                self.spec.devices[-1],
                outputs,
                Timing(0, 0, 0.001, 0, 1),
                request.id,
            )
        finally:
            self.answering -= 1

    def served(self) -> Served:
        spec = self.spec
        served = served_version(spec.version, spec.devices, "ready", "")
        return replace(served, backend="double", instances=spec.instances)

    def statistics(self) -> Statistics:
        total = Total(self.answered, 0.0)
        return Statistics(
            self.spec.version.model,
            self.spec.version.version,
            total,
            Total(),
            total,
            total,
            total,
            total,
            self.answered,
            self.answered,
            0,
        )

    @property
    def memory_bytes(self) -> int:
        return 7 * MIB

    async def drain(self) -> None:
        self.drained = True
        while self.answering:
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        assert self.drained
        self.closed = True


class Host:
    """What the deployments meet: it may be short of memory, or break versions."""

    def __init__(self) -> None:
        self.free_bytes = 4096 * MIB
        self.free_bytes_of: dict[str, int] = {}  # a device with other free memory
        self.kinds: dict[str, GpuKind] = {}  # of GPUs
        self.broken: Counter[int] = Counter()  # by version: how many starts fail
        self.hanging: set[str] = set()  # models whose engine is not ready in time
        self.tried: Counter[str] = Counter()
        self.started: list[Double] = []
        self.batch = PROVED
        self.registry = CollectorRegistry()
        self.language_figures = LanguageFigures(self.registry)
        self.proofs: list[tuple[tuple[Padding, ...], str]] = []

    async def start(self, spec: DeploymentSpec, work: Path) -> Double:
        self.tried[spec.version.model] += 1
        await asyncio.sleep(0.001)
        if spec.version.model in self.hanging:
            raise TimedOut("it did not load its engine in time")
        if self.broken[spec.version.version] > 0:
            self.broken[spec.version.version] -= 1
            raise ChildDied(f"the worker of version {spec.version.version} died")
        self.started.append(Double(spec))
        return self.started[-1]

    async def start_language(self, spec: LanguageSpec, work: Path) -> LanguageDeployment:
        return await LanguageDeployment.start(spec, work, self.language_figures)

    async def prove(self, engine: Engine, padding: tuple[Padding, ...], device: str) -> BatchSpec:
        self.proofs.append((padding, device))
        return self.batch

    @property
    def alive(self) -> list[int]:
        return [worker.spec.version.version for worker in self.started if not worker.closed]


def ended_job(
    folders: Folders,
    jobs: JobStore,
    verdict: Verdict = "accepted",
    owner: str = "local",
    serving: ServingConfig | None = None,
    engine: Engine | None = None,
) -> str:
    """The id of a job that has ended with a report, and with this engine if one is given."""
    job = new_job(folders, "m").model_copy(update={"owner": owner})
    jobs.add(job, utc_now())
    jobs.append(job.id, Started(1, 1.0), utc_now())
    jobs.append(job.id, Succeeded(verdict, "w"), utc_now())
    place = folders.report(job.id)
    report: Report = write_out(place, folders.home / "store", engine)
    plan = report.plan.model_copy(update={"serving": serving or ServingConfig()})
    changes: dict[str, object] = {"verdict": verdict, "plan": plan, "reasons": ("because",)}
    if verdict == "keep":
        changes["delivered"] = load_engine(place / "engine")
    (place / "report.json").write_text(report.model_copy(update=changes).model_dump_json())
    return job.id


class Shelf:
    """A home, and the deployments on it."""

    def __init__(
        self,
        home: Path,
        host: Host,
        devices: Sequence[str] = ("cpu",),
        versions: int = 5,
        shared: tuple[str, str] | None = None,
    ) -> None:
        """`shared`: the address of a database, and the id of this server there."""
        self.home, self.host, self.folders = home, host, Folders(home)
        url, server = shared or (home / "crucible.db", "")
        self.database = Database(url)
        self.repository, self.jobs = (
            Repository(self.database, self.folders),
            JobStore(self.database),
        )
        self.leases = Leases(Devices(tuple(devices)))
        context = LoaderContext(
            self.repository,
            self.jobs,
            self.folders,
            self.leases,
            versions,
            60.0,
            host.start,
            host.start_language,
            host.prove,
            lambda device: host.free_bytes_of.get(device, host.free_bytes),
            lambda: host.kinds,
            (0.01, 0.01),
            shares_home=shared is not None,
            states=ModelStates(self.database, server, 1000.0) if shared else None,
        )
        self.deployments = ModelManager(context)

    def report(
        self,
        verdict: Verdict = "accepted",
        owner: str = "local",
        serving: ServingConfig | None = None,
        engine: Engine | None = None,
    ) -> str:
        """The id of a job that has ended with a report."""
        return ended_job(self.folders, self.jobs, verdict, owner, serving, engine)

    async def promote(
        self,
        name: str = "m",
        caller: Caller = LOCAL,
        override: bool = False,
        verdict: Verdict = "accepted",
    ) -> int:
        """A new report, promoted: the current version."""
        request = PromoteRequest(report=self.report(verdict), override=override)
        return (await self.deployments.promote(caller, name, request)).current.version

    async def ask(
        self, name: str | None = "m", caller: Caller = LOCAL, version: int | None = None
    ) -> int:
        """The version that answers."""
        return (await self.deployments.infer(InferRequest(caller, name, {}, version))).version


@asynccontextmanager
async def shelf(
    home: Path,
    host: Host | None = None,
    devices: Sequence[str] = ("cpu",),
    versions: int = 5,
    shared: tuple[str, str] | None = None,
) -> AsyncIterator[Shelf]:
    """Started; stopped at the end, and then nothing is loaded and no lease is held."""
    opened = Shelf(home, host or Host(), devices, versions, shared)
    await opened.deployments.start()
    try:
        yield opened
    finally:
        await opened.deployments.stop(5.0)
        await opened.deployments.close()
        opened.database.close()
        opened.leases.close()
        assert opened.host.alive == []
        assert opened.leases.devices.held == ()
