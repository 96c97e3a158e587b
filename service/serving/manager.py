"""All deployed models: implements the protocols `Serving` of inference.py and `Generating` of
language/generation.py, and changes of models.

    await manager.start()                              load the models that were deployed when the
                                                       server ended
    await manager.deploy(caller, "resnet50", options)  load a model; it is ready on return
    await manager.promote(caller, "resnet50", request) load the next version, make it current, then
                                                       drain the old one
    await manager.rollback(caller, "resnet50")
    await manager.unload(caller, "resnet50")

A change takes effect by one assignment between two requests, after the new version is ready and the
change is on the disk. So either the old or the new version answers a request, and no request is
lost. If anything fails before the assignment, nothing changes.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.core.artifacts import Engine
from pipeline.errors import HostError
from pipeline.results.report import Report
from service import logs
from service.auth import Caller
from service.devices.choice import device_for
from service.devices.leases import utc_now
from service.errors import Conflict, Unprocessable
from service.inference import InferAnswer, InferRequest, Served, Statistics
from service.language.generation import Answer, GenerateRequest, ServedLanguage
from service.registry.models import (
    RESERVED,
    DeploymentOptions,
    ModelPage,
    ModelView,
    PromoteRequest,
    ServerState,
    Version,
)
from service.registry.promotion import NO_ROWS, candidate_of, version_of
from service.registry.repository import Model
from service.registry.traffic import ShapesView
from service.serving.deployed_model import DeployedModel
from service.serving.hosts.follower import Follower
from service.serving.loader import Loader, LoaderContext
from service.serving.models.disk import DiskThread
from service.serving.models.switch import VersionSwitch, trace_of
from service.serving.models.table import ModelTable, answering, takes_prompts
from service.serving.stats import Traffic
from service.storage.audit_entry import Details, Entry

CHECK_S = 0.5  # between two checks for idle models

log = logs.get("service.deployments")


class ModelManager:
    """All models of one home. Lives in one event loop."""

    def __init__(self, context: LoaderContext) -> None:
        self._context, self._repository = context, context.repository
        self._table, self._disk = ModelTable(context.folders), DiskThread()
        self._loader = Loader(context)
        self._versions = VersionSwitch(self._table, self._loader, context, self._disk)
        # One change of a model at a time.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._follower: Follower | None = None
        if context.states is not None:
            self._follower = Follower(self, self._repository, context.states, self._disk.run)

    # -- the protocol `Serving`

    def served(self, caller: Caller) -> tuple[Served, ...]:
        return tuple(map(self._table.served, self._table.visible(caller)))

    def find(self, caller: Caller, model: str | None, version: int | None = None) -> Served:
        """See `Serving.find`. Unprocessable, too: it is a language model, which has no inputs."""
        entry = self._table.find_with_inputs(caller, model, version)
        return self._table.served(entry)

    async def infer(self, request: InferRequest) -> InferAnswer:
        caller = request.caller
        caller.require("infer")
        entry = self._table.find_with_inputs(caller, request.model, request.version)
        return await answering(entry).infer(request)

    def statistics(self, caller: Caller) -> tuple[Statistics, ...]:
        models = self._table.visible(caller)
        return tuple(
            entry.loaded.running.statistics() for entry in models if entry.loaded is not None
        )

    async def load(self, caller: Caller, model: str) -> Served:
        stored = await self._disk.run(lambda: self._repository.get(model, caller.sees))
        await self.deploy(caller, model, stored.options or DeploymentOptions())
        return self._table.served(self._table.find(caller, model))

    # -- the protocol `Generating`

    def languages(self, caller: Caller) -> tuple[ServedLanguage, ...]:
        entries = filter(takes_prompts, self._table.visible(caller))
        return tuple(map(self._table.served_language, entries))

    def find_language(
        self, caller: Caller, model: str | None, version: int | None = None
    ) -> ServedLanguage:
        return self._table.served_language(self._table.find_language(caller, model, version))

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Answer]:
        request.caller.require("infer")
        entry = self._table.find_language(request.caller, request.model, request.version)
        async with answering(entry).generate(request) as answer:
            yield answer

    # -- `Serving` again: loading

    async def unload(self, caller: Caller, model: str) -> None:
        caller.require("admin")
        await self._run_change(self._unload(caller, model))
        await self._until_followed(model)

    # -- changes

    async def deploy(self, caller: Caller, name: str, options: DeploymentOptions) -> ModelView:
        """Load a model, or serve it with other options. It is ready on return."""
        caller.require("admin")
        await self._run_change(self._deploy(caller, name, options))
        await self._until_followed(name)
        return await self.view(caller, name)

    async def promote(self, caller: Caller, name: str, request: PromoteRequest) -> ModelView:
        """Make the engine of a report the current version, unless it already is.

        Conflict if it may not be served.
        """
        caller.require("admin")
        if name in RESERVED:
            raise Unprocessable(
                f"the model name '{name}' is reserved: /v2/models/{name} is another path",
                "choose another name",
            )
        await self._run_change(self._promote(caller, name, request))
        await self._until_followed(name)
        return await self.view(caller, name)

    async def rollback(self, caller: Caller, name: str) -> ModelView:
        """Make the previous version current again; Conflict if there is none."""
        caller.require("admin")
        await self._run_change(self._rollback(caller, name))
        await self._until_followed(name)
        return await self.view(caller, name)

    async def lend(
        self, caller: Caller, name: str, number: int | None, job_id: str
    ) -> tuple[Version, str]:
        """Copy the report and the engine of a version into a job, and choose its device.

        Without a `number` this is the loaded version, or else the current one. A loaded version
        is measured on its own device, the first if it has several.
        """
        entry = self._table.entries.get(name)
        if entry is not None and (
            entry.loaded is None or number not in (None, entry.version.version)
        ):
            entry = None

        def copy() -> Version:
            version = self._repository.get(name, caller.sees).version(
                entry.version.version if entry else number
            )
            self._loader.engine(version)  # an error is raised here rather than in the job
            self._repository.lend(version, job_id)
            return version

        version = await self._disk.run(copy)  # versions are pruned in the same thread
        if entry:
            return version, entry.devices[0]
        names = self._context.leases.devices.names
        return version, device_for(None, version.on_gpu, names)

    async def _deploy(self, caller: Caller, name: str, options: DeploymentOptions) -> None:
        async with self._locks[name]:
            model = await self._disk.run(lambda: self._repository.get(name, caller.sees))
            version = model.version(options.version)
            most = version.most_together
            if version.language is None and (options.max_batch or 0) > most:
                reason = version.batch.reason or f"its profiles hold {most}"
                raise Unprocessable(
                    f"max_batch is {options.max_batch}, version {version.version} of '{name}' takes"
                    f" at most {most}: {reason}",
                    "give a smaller `max_batch`, or leave it out",
                )
            details: Details = {"version": version.version, "owner": version.owner}
            entry = Entry(caller.actor, "model.deployed", f"model/{name}", details)
            await self._versions.switch(
                version, options, lambda: self._repository.set_deployed(name, options, entry)
            )
            log.info(
                "model.deployed",
                model=name,
                version=version.version,
                key=caller.key,
                **options.model_dump(exclude={"version"}),
            )

    async def _unload(self, caller: Caller, name: str) -> None:
        async with self._locks[name]:
            owner = await self._owner_of_deployed(caller, name)
            unloaded = Entry(caller.actor, "model.unloaded", f"model/{name}", {"owner": owner})
            await self._disk.run(lambda: self._repository.set_deployed(name, None, unloaded))
            await self._versions.end(name)
            log.info("model.unloaded", model=name, key=caller.key)

    async def _owner_of_deployed(self, caller: Caller, name: str) -> str:
        """Return the owner of a model that is deployed, here or at another server."""
        if self._follower is not None and name not in self._table.entries:
            model = await self._disk.run(lambda: self._repository.get(name, caller.sees))
            if model.deployed:
                return model.owner
        return self._table.find(caller, name).version.owner

    async def _promote(self, caller: Caller, name: str, request: PromoteRequest) -> None:
        async with self._locks[name]:
            context = self._context
            candidate = await self._disk.run(
                lambda: candidate_of(
                    request.report,
                    caller.sees,
                    request.override,
                    context.jobs,
                    context.folders,
                    context.fetch,
                )
            )
            models = await self._disk.run(self._repository.list)
            existing = next((model for model in models if model.name == name), None)
            if existing is not None and existing.owner != candidate.owner:
                raise Conflict(f"the name '{name}' is taken", "choose another name")
            if existing is not None and existing.version().job == candidate.job:
                await self._restore(existing, candidate.engine.root)
                return
            batch = NO_ROWS
            if isinstance(candidate.engine, Engine) and isinstance(candidate.report, Report):
                padding = candidate.report.plan.serving.padding
                batch = await self._loader.proof(candidate.engine, padding)
            version = version_of(
                candidate,
                name,
                request.override,
                batch,
                utc_now().isoformat(timespec="milliseconds"),
            )
            follows = existing is not None and self._follows(existing)
            entry = _promotion(caller, version)
            newest = max((each.version for each in existing.versions), default=0) if existing else 0
            version = await self._disk.run(
                lambda: self._repository.add(
                    version, candidate.engine.root, not follows, None if follows else entry, newest
                )
            )
            if existing is not None and follows:
                await self._become_current(
                    existing,
                    version,
                    _promotion(caller, version),
                    on_failure=lambda: self._repository.remove(name, [version.version]),
                )
            if version.override:
                log.warning(
                    "model.override",
                    model=name,
                    version=version.version,
                    report=candidate.job,
                    verdict=version.verdict,
                    key=caller.key,
                )
            log.info(
                "model.promoted",
                model=name,
                version=version.version,
                report=candidate.job,
                key=caller.key,
            )
            await self._disk.run(
                lambda: self._repository.prune(
                    name, self._table.numbers_in_use(name), context.versions_kept
                )
            )

    async def _restore(self, model: Model, engine: Path) -> None:
        """Restore a damaged current version from its job, and load it if it had failed to load."""
        version = model.version()
        restored = await self._disk.run(lambda: self._repository.restore(version, engine))
        entry = self._table.entries.get(model.name)
        if restored and model.options is not None and entry is not None and entry.loaded is None:
            await self._versions.switch(
                model.version(model.options.version), model.options, commit=None
            )

    async def _rollback(self, caller: Caller, name: str) -> None:
        async with self._locks[name]:
            model = await self._disk.run(lambda: self._repository.get(name, caller.sees))
            before = model.version().before
            if before is None:
                raise Conflict(
                    f"version {model.current} of '{name}' was the first: no earlier version exists",
                    "promote another report",
                )
            details: Details = {"version": before, "owner": model.owner}
            entry = Entry(caller.actor, "model.rolled_back", f"model/{name}", details)
            await self._become_current(model, model.version(before), entry, on_failure=lambda: None)
            log.info("model.rolled_back", model=name, version=before, key=caller.key)

    async def _become_current(
        self, model: Model, version: Version, entry: Entry, on_failure: Callable[[], None]
    ) -> None:
        """Make a version current. If the deployment follows, load the version first."""

        def commit() -> None:
            self._repository.set_current(model.name, version.version, entry)

        try:
            if self._follows(model) and model.options is not None:
                await self._versions.switch(version, model.options, commit)
            else:
                await self._disk.run_to_end(commit)
        except BaseException:
            await self._disk.run(on_failure)
            raise

    def _follows(self, model: Model) -> bool:
        return model.deployed and model.options is not None and model.options.version is None

    # -- loading

    async def start(self) -> None:
        """Load the deployed models; return when each model is ready or has failed."""
        if not self._context.shares_home:
            await asyncio.to_thread(shutil.rmtree, self._context.folders.serving, True)
        models = await self._disk.run(self._repository.list)
        loads = [
            self._versions.resume(model, model.options)
            for model in models
            if model.deployed and model.options
        ]
        await asyncio.gather(*loads)
        self._keep(asyncio.create_task(self._release_idle_leases()))
        self._table.is_started = True
        if self._follower is not None:
            self._keep(asyncio.create_task(self._follower.run()))

    async def follow(self, name: str) -> str:
        """Load, switch or unload a model as the database says, which another server has changed.
        Return why that failed, or "". After a failure the version that answered goes on.
        """
        async with self._locks[name]:
            try:
                model = await self._disk.run(lambda: self._repository.get(name))
                if not model.deployed or model.options is None:
                    await self._versions.end(name)
                    return ""
                version, options = model.version(model.options.version), model.options
                entry = self._table.entries.setdefault(
                    name, DeployedModel(version, options.named_devices)
                )
                loaded = entry.loaded
                if loaded is None or loaded.deploys != (version.version, options):
                    await self._versions.switch(version, options, commit=None)
                    log.info("model.followed", model=name, version=version.version)
            except Exception as error:  # the edge of a model: its error does not stop the server
                reason = self._table.failure_message(error)
                log.error("model.not_loaded", model=name, error=reason, exc_info=trace_of(error))
                return reason
        return ""

    def state_of(self, name: str, server: str, reason: str) -> ServerState:
        """Return the state of a model at this server, which has this id."""
        return self._table.state_of(name, server, reason)

    async def _until_followed(self, name: str) -> None:
        """Wait until all servers have done a change, or failed to."""
        if self._follower is not None:
            await self._follower.until_followed(name, self._context.load_s)

    def starting(self) -> tuple[int, int]:
        """Return the number of models that are loading, and the number of all models."""
        return self._table.starting()

    async def _release_idle_leases(self) -> None:
        """Give back the leases of idle models, so that jobs can measure on their devices."""
        while True:
            await asyncio.sleep(CHECK_S)
            for entry in self._table.entries.values():
                if entry.loaded is not None:
                    entry.loaded.release_when_idle(time.monotonic())

    async def stop(self, grace_s: float) -> None:
        """Cancel changes, answer waiting requests within `grace_s`, and free the devices.

        It can be called again.
        """
        self._table.is_stopping = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        models = tuple(self._table.entries.values())
        for entry in models:
            entry.state = "draining"
        await asyncio.gather(
            self._versions.stop(grace_s),
            *(entry.loaded.end(grace_s) for entry in models if entry.loaded is not None),
            return_exceptions=True,
        )
        self._table.entries.clear()

    async def close(self) -> None:
        """Close the database, after `stop`."""
        if self._context.states is not None:
            with suppress(HostError):  # it counts as gone later
                await self._disk.run(self._context.states.forget)
        await self._disk.run(self._repository.close)
        self._disk.close()

    # -- views

    async def views(self, caller: Caller) -> ModelPage:
        """All models that the caller may see, by name."""
        models = await self._disk.run(lambda: self._repository.list(caller.sees))
        states = await self._states_of(None)
        return ModelPage(models=tuple(self._table.view(model, states) for model in models))

    async def view(self, caller: Caller, name: str) -> ModelView:
        model = await self._disk.run(lambda: self._repository.get(name, caller.sees))
        return self._table.view(model, await self._states_of(name))

    async def _states_of(self, name: str | None) -> dict[str, tuple[ServerState, ...]]:
        states = self._context.states
        return {} if states is None else await self._disk.run(lambda: states.of(name))

    async def shapes(self, caller: Caller, name: str) -> ShapesView:
        """Count the shapes since the model was loaded; NotFound if it is not deployed."""
        entry = self._table.find(caller, name)
        traffic = entry.loaded.running.traffic if entry.loaded is not None else Traffic()
        return await asyncio.to_thread(traffic.view, entry.version)

    # -- helpers

    async def _run_change(self, change: Coroutine[Any, Any, None]) -> None:
        """Run a change to its end, even if the client's request is cancelled.

        Unavailable if the server stops meanwhile.
        """
        if self._table.closed_state:
            change.close()
            raise self._table.unavailable()
        task = asyncio.ensure_future(change)
        self._keep(task)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._table.is_stopping:
                raise
            raise self._table.unavailable() from None

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Let `stop` end a task."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _promotion(caller: Caller, version: Version) -> Entry:
    """The audit's entry of a promotion."""
    details: Details = {
        "version": version.version,
        "job": version.job,
        "owner": version.owner,
        "override": version.override,
    }
    return Entry(caller.actor, "model.promoted", f"model/{version.model}", details)
