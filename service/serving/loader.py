"""Load a version: choose devices, check their free memory, start workers. Prove its batches.

Loads run one at a time, so that each load sees the memory that is really free.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.core.artifacts import Engine
from pipeline.errors import DamagedError
from pipeline.llm.engine import LanguageEngine
from pipeline.serving_inputs import BatchSpec, Padding
from service import logs
from service.devices.choice import all_devices_for, device_for
from service.devices.gpus import GpuKind, gpu_kinds
from service.devices.leases import Leases
from service.errors import Unprocessable
from service.jobs.publish import AnyEngine
from service.jobs.store import JobStore
from service.registry.model_states import ModelStates
from service.registry.models import ALL_DEVICES, DeploymentOptions, Version
from service.registry.promotion import Prove, check_own, is_code
from service.registry.repository import Repository
from service.serving.deployed_model import AnySpec, LeasedDeployment, Running, Start, StartLanguage
from service.serving.deployment import DeploymentSpec
from service.serving.language.deployment import LanguageSpec
from service.serving.memory_check import check_fit, fitting_instances, fitting_tokens, free_bytes
from service.storage.layout import Folders

log = logs.get("service.loader")

# Time-out of a load in cold starts of the build: other workers may start at the same time.
COLD_STARTS = 3.0
WAITS_S = (1.0, 5.0)  # before each retry to load a deployed model when the server starts


@dataclass(frozen=True, slots=True)
class LoaderContext:
    """The dependencies of all deployments. Tests replace `start` and the fields after it."""

    repository: Repository
    jobs: JobStore
    folders: Folders
    leases: Leases
    versions_kept: int
    load_s: float  # time-out for an engine to become ready
    start: Start
    start_language: StartLanguage
    prove: Prove
    free: Callable[[str], int | None] = free_bytes
    kinds: Callable[[], Mapping[str, GpuKind]] = gpu_kinds
    waits_s: tuple[float, ...] = WAITS_S
    fetch: Callable[[Path], object] = lambda folder: None  # a report, from where servers share it
    shares_home: bool = False  # with other servers, which load models, too
    states: ModelStates | None = None  # of the servers that share the models; None: there is one


class Loader:
    """Load versions and prove batches for one server."""

    def __init__(self, context: LoaderContext) -> None:
        self._context = context
        self._loading = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def load(self, spec: AnySpec) -> LeasedDeployment:
        """Load a version. It is ready on return.

        Conflict, before a device is used, if its free memory is too small. DamagedError, with
        the way to restore it, if a file of the engine has changed: the worker checks all files
        before it loads any.
        """
        version = spec.version
        async with self._loading:
            free = {
                device: await asyncio.to_thread(self._context.free, device)
                for device in spec.devices
            }
            if isinstance(spec, LanguageSpec):
                free_here = min((each for each in free.values() if each is not None), default=None)
                spec = replace(spec, fitting_tokens=fitting_tokens(version, free_here))
                cache = spec.cache
            else:
                if spec.options.instances is None:
                    spec = self._with_fitting_instances(spec, free)
                cache = None
            for device, free_here in free.items():
                check_fit(version, spec.instances, free_here, device, cache)
            # unlike those of other servers, which may share the home
            name = f"{version.model}-{version.version}-{secrets.token_hex(4)}"
            work = self._context.folders.serving / name
            try:
                return await LeasedDeployment.start(
                    self._start(spec),
                    spec,
                    work,
                    self._context.leases,
                    self._context.repository.hold(version),
                )
            except DamagedError as error:
                advice = await asyncio.to_thread(self._context.repository.remedy, version)
                raise DamagedError(error.message, advice) from error

    def _start(self, spec: AnySpec) -> Callable[[Path], Awaitable[Running]]:
        if isinstance(spec, LanguageSpec):
            return partial(self._context.start_language, spec)
        return partial(self._context.start, spec)

    def _with_fitting_instances(
        self, spec: DeploymentSpec, free: Mapping[str, int | None]
    ) -> DeploymentSpec:
        """Reduce the number that the compile found best to what fits on each device."""
        fitting = min(
            fitting_instances(spec.version, spec.instances, free_here)
            for free_here in free.values()
        )
        if fitting < spec.instances:
            log.warning(
                "deployment.fewer_instances",
                model=spec.version.model,
                best=spec.instances,
                fitting=fitting,
                free_bytes=free,
            )
        return replace(spec, most_instances=fitting)

    def spec(self, version: Version, options: DeploymentOptions) -> AnySpec:
        """Describe the deployment of a version. Reads the disk.

        Unprocessable if the engine does not run on the devices. Conflict if the engine is code
        that no job of this server has built.
        """
        engine = self.engine(version)
        names, note = self._context.leases.devices.names, ""
        if isinstance(engine, LanguageEngine):
            (wanted, *others) = options.named_devices
            if others or options.instances not in (None, 1):
                raise Unprocessable(
                    f"'{version.model}' is a language model, which runs in one process on one"
                    " device",
                    "leave out `instances` and further devices; `max_batch` says how many answers"
                    " are generated together",
                )
            device = device_for(wanted or None, engine.is_on_gpu, names)
            return LanguageSpec(version, engine, options, (device,), self._context.load_s)
        if options.device == ALL_DEVICES and engine.is_on_gpu:
            devices, note = all_devices_for(engine, names, self._context.kinds())
        elif options.device in (None, ALL_DEVICES):
            devices = (device_for(None, engine.is_on_gpu, names),)
        else:
            devices = tuple(
                device_for(device, engine.is_on_gpu, names) for device in options.named_devices
            )
        load_s = max(self._context.load_s, COLD_STARTS * (engine.cold_start_s or 0))
        return DeploymentSpec(version, engine, options, devices, load_s, note=note)

    def engine(self, version: Version) -> AnyEngine:
        """Return the engine of a version; Conflict for code that no job of this server built."""
        repository = self._context.repository
        engine = repository.engine(version)
        if is_code(engine):
            check_own(engine, repository.manifest(version), self._context.jobs.get(version.job))
        return engine

    async def proof(self, engine: Engine, padding: tuple[Padding, ...]) -> BatchSpec:
        """Prove which requests may run together, on the device on which the engine would serve."""
        holder = f"proof-{next(self._numbers)}"
        device = device_for(
            None, engine.target.compute_capability is not None, self._context.leases.devices.names
        )
        self._context.leases.serve(holder, device)
        try:
            return await self._context.prove(engine, padding, device)
        finally:
            self._context.leases.give_back(holder, device)
