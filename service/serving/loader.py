"""From a version to a process that serves it: where it is to run, whether it fits, and the proof
before it is one.

One load at a time, so that each finds the memory that is free.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.core import CODE_BACKENDS, Engine
from pipeline.errors import DamagedError
from pipeline.serving_inputs import BatchSpec, Padding
from service.devices.leases import Leases
from service.errors import Unprocessable
from service.jobs.store import JobStore
from service.registry.models import DeploymentOptions, Version
from service.registry.promotion import Prove, check_own, prove
from service.registry.repository import Repository
from service.serving.deployed_model import Loaded, Start
from service.serving.deployment import DeploymentSpec
from service.serving.memory_check import check_fit, free_bytes
from service.storage.layout import Folders

COLD_STARTS = 3.0  # as long as the build saw one take: other workers may start at the same time
WAITS_S = (1.0, 5.0)  # before each next try to load what was deployed when the server ended


@dataclass(frozen=True, slots=True)
class Means:
    """What all deployments work with; doubles stand in for the last ones."""

    repository: Repository
    jobs: JobStore
    folders: Folders
    leases: Leases
    versions_kept: int
    load_s: float  # of an engine, until it is ready
    start: Start
    prove: Prove = prove
    free: Callable[[str], int | None] = free_bytes
    waits_s: tuple[float, ...] = WAITS_S


class Loader:
    """Loads for one server."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._loading = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def load(self, version: Version, spec: DeploymentSpec) -> Loaded:
        """Ready when this returns; Conflict, before the device is touched, if it does not fit.

        DamagedError, with what brings it back, if a file of the engine is not what it was: the
        worker looks before it loads any.
        """
        async with self._loading:
            free = await asyncio.to_thread(self._means.free, spec.device)
            check_fit(version, spec.instances, free, spec.device)
            work = (
                self._means.folders.serving / f"{spec.model}-{spec.version}-{next(self._numbers)}"
            )
            try:
                return await Loaded.start(self._means.start, spec, work, self._means.leases)
            except DamagedError as error:
                advice = await asyncio.to_thread(self._means.repository.remedy, version)
                raise DamagedError(error.message, advice) from error

    def spec(self, version: Version, options: DeploymentOptions) -> DeploymentSpec:
        """What is to be loaded; Unprocessable for a device that the engine does not run on.

        Conflict for code of others. Reads the disk.
        """
        most, engine = version.most_together, self.engine(version)
        return DeploymentSpec(
            model=version.model,
            version=version.version,
            owner=version.owner,
            engine_folder=self._means.repository.engine_folder(version),
            engine=engine,
            batch=version.batch,
            device=device_for(options.device, version.on_gpu, self._means.leases.devices.names),
            instances=options.instances,
            overlap=options.overlap,
            max_batch=min(options.max_batch or most, most),
            max_delay_s=options.max_delay_s,
            queue_limit=options.queue_limit,
            timeout_s=options.timeout_s,
            load_s=max(self._means.load_s, COLD_STARTS * (engine.cold_start_s or 0)),
            image=version.image,
            labels=version.labels,
        )

    def engine(self, version: Version) -> Engine:
        """A version's engine; Conflict for code that no job of this server has built."""
        repository = self._means.repository
        engine = repository.engine(version)
        if engine.target.backend in CODE_BACKENDS:
            check_own(engine, repository.manifest(version), self._means.jobs.get(version.job))
        return engine

    async def proof(self, engine: Engine, padding: tuple[Padding, ...]) -> BatchSpec:
        """Which requests may run together, tried on the device on which it would serve."""
        holder = f"proof-{next(self._numbers)}"
        device = device_for(
            None, engine.target.compute_capability is not None, self._means.leases.devices.names
        )
        self._means.leases.serve(holder, device)
        try:
            return await self._means.prove(engine, padding, device)
        finally:
            self._means.leases.give_back(holder, device)


def device_for(asked: str | None, on_gpu: bool, names: Sequence[str]) -> str:
    """Where an engine is to run; Unprocessable where it cannot."""
    fitting = [name for name in names if name.startswith("gpu:") == on_gpu]
    if asked is None and fitting:
        return fitting[0]
    if asked is None or asked not in fitting:
        kind = "a GPU" if on_gpu else "a CPU"
        message = f"device '{asked}'" if asked else f"a device for an engine for {kind}"
        raise Unprocessable(
            f"{message} is not one that this engine runs on; here are:"
            f" {', '.join(fitting) or 'none'}",
            f"the engine is one for {kind}",
        )
    return asked
