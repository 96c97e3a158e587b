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
import platform
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline.core import Engine
from pipeline.errors import CrucibleError, DamagedError, HostError, StoreError
from pipeline.results.report import Report
from service import logs
from service.auth import Caller
from service.devices.choice import device_for
from service.devices.leases import utc_now
from service.errors import Conflict, NotFound, NotOwned, TimedOut, Unavailable, Unprocessable
from service.inference import InferAnswer, InferRequest, Served, Statistics
from service.jobs.redact import scrubbed
from service.language.generation import Answer, GenerateRequest, ServedLanguage
from service.registry.models import (
    RESERVED,
    DeploymentOptions,
    DeploymentView,
    ModelPage,
    ModelView,
    PromoteRequest,
    ServerState,
    Version,
)
from service.registry.promotion import NO_ROWS, candidate_of, version_of
from service.registry.repository import Model
from service.registry.traffic import ShapesView
from service.serving.deployed_model import DeployedModel, LeasedDeployment
from service.serving.hosts.follower import Follower
from service.serving.language.deployment import not_for_tensors
from service.serving.loader import Loader, LoaderContext
from service.serving.stats import Traffic
from service.storage.audit_entry import Details, Entry

CHECK_S = 0.5  # between two checks for idle models
SOON_S, LATER_S = 1, 5  # `Retry-After` of what changes by itself within seconds, and of the rest

log = logs.get("service.deployments")
T = TypeVar("T")


class ModelManager:
    """All models of one home. Lives in one event loop."""

    def __init__(self, context: LoaderContext) -> None:
        self._context, self._repository = context, context.repository
        self._entries: dict[str, DeployedModel] = {}
        self._unloading: dict[str, DeployedModel] = {}  # these answer their last requests
        # One change of a model at a time.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._loader = Loader(context)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = ThreadPoolExecutor(1, "crucible-models")
        self._started = self._stopping = False
        self._follower: Follower | None = None
        if context.states is not None:
            self._follower = Follower(self, self._repository, context.states, self._in_thread)

    # -- the protocol `Serving`

    def served(self, caller: Caller) -> tuple[Served, ...]:
        return tuple(self._served(entry) for _, entry in sorted(self._visible(caller).items()))

    def find(self, caller: Caller, model: str | None, version: int | None = None) -> Served:
        """See `Serving.find`. Unprocessable, too: it is a language model, which has no inputs."""
        entry = self._find(caller, model, version, takes_tensors)
        if entry.version.language is not None:
            raise not_for_tensors(entry.version.model)
        return self._served(entry)

    async def infer(self, request: InferRequest) -> InferAnswer:
        caller = request.caller
        caller.require("infer")
        entry = self._find(caller, request.model, request.version, takes_tensors)
        if entry.version.language is not None:
            raise not_for_tensors(entry.version.model)
        return await self._loaded(entry).infer(request)

    def _loaded(self, entry: DeployedModel) -> LeasedDeployment:
        """Return the version that answers; Unavailable if none does."""
        if entry.loaded is None:
            reason = f": {entry.reason}" if entry.reason else ""
            raise Unavailable(
                f"model '{entry.version.model}' is {entry.state}{reason}",
                "GET /models/NAME shows its state",
                SOON_S if entry.state == "loading" else LATER_S,
            )
        return entry.loaded

    def statistics(self, caller: Caller) -> tuple[Statistics, ...]:
        models = [entry for _, entry in sorted(self._visible(caller).items())]
        return tuple(
            entry.loaded.running.statistics() for entry in models if entry.loaded is not None
        )

    async def load(self, caller: Caller, model: str) -> Served:
        stored = await self._in_thread(lambda: self._repository.get(model, caller.sees))
        await self.deploy(caller, model, stored.options or DeploymentOptions())
        return self._served(self._find(caller, model, None))

    # -- the protocol `Generating`

    def languages(self, caller: Caller) -> tuple[ServedLanguage, ...]:
        entries = (entry for _, entry in sorted(self._visible(caller).items()))
        return tuple(
            self._served_language(entry) for entry in entries if entry.version.language is not None
        )

    def find_language(
        self, caller: Caller, model: str | None, version: int | None = None
    ) -> ServedLanguage:
        return self._served_language(self._find_language(caller, model, version))

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Answer]:
        request.caller.require("infer")
        entry = self._find_language(request.caller, request.model, request.version)
        async with self._loaded(entry).generate(request) as answer:
            yield answer

    def _find_language(
        self, caller: Caller, model: str | None, version: int | None
    ) -> DeployedModel:
        entry = self._find(caller, model, version, takes_prompts)
        if entry.version.language is None:
            raise Unprocessable(
                f"'{entry.version.model}' is no language model: it takes tensors, and no prompt",
                f"send POST /models/{entry.version.model}/infer",
            )
        return entry

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
        entry = self._entries.get(name)
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

        version = await self._in_thread(copy)  # versions are pruned in the same thread
        if entry:
            return version, entry.devices[0]
        names = self._context.leases.devices.names
        return version, device_for(None, version.on_gpu, names)

    async def _deploy(self, caller: Caller, name: str, options: DeploymentOptions) -> None:
        async with self._locks[name]:
            model = await self._in_thread(lambda: self._repository.get(name, caller.sees))
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
            await self._switch(
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
            await self._in_thread(lambda: self._repository.set_deployed(name, None, unloaded))
            await self._end(name)
            log.info("model.unloaded", model=name, key=caller.key)

    async def _owner_of_deployed(self, caller: Caller, name: str) -> str:
        """Return the owner of a model that is deployed, here or at another server."""
        if self._follower is not None and name not in self._entries:
            model = await self._in_thread(lambda: self._repository.get(name, caller.sees))
            if model.deployed:
                return model.owner
        return self._find(caller, name, None).version.owner

    async def _end(self, name: str) -> None:
        """Answer the last requests of a model, and free its device. No effect if it is not here."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        entry.state = "draining"
        self._unloading[name] = entry
        try:
            if entry.loaded is not None:
                await entry.loaded.end()
        finally:
            del self._unloading[name]

    async def _promote(self, caller: Caller, name: str, request: PromoteRequest) -> None:
        async with self._locks[name]:
            context = self._context
            candidate = await self._in_thread(
                lambda: candidate_of(
                    request.report,
                    caller.sees,
                    request.override,
                    context.jobs,
                    context.folders,
                    context.fetch,
                )
            )
            models = await self._in_thread(self._repository.list)
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
            version = await self._in_thread(
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
            await self._in_thread(
                lambda: self._repository.prune(name, self._in_use(name), context.versions_kept)
            )

    async def _restore(self, model: Model, engine: Path) -> None:
        """Restore a damaged current version from its job, and load it if it had failed to load."""
        version = model.version()
        restored = await self._in_thread(lambda: self._repository.restore(version, engine))
        entry = self._entries.get(model.name)
        if restored and model.options is not None and entry is not None and entry.loaded is None:
            await self._switch(model.version(model.options.version), model.options, commit=None)

    async def _rollback(self, caller: Caller, name: str) -> None:
        async with self._locks[name]:
            model = await self._in_thread(lambda: self._repository.get(name, caller.sees))
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
                await self._switch(version, model.options, commit)
            else:
                await self._in_thread_to_end(commit)
        except BaseException:
            await self._in_thread(on_failure)
            raise

    def _follows(self, model: Model) -> bool:
        return model.deployed and model.options is not None and model.options.version is None

    def _in_use(self, name: str) -> set[int]:
        models = (self._entries.get(name), self._unloading.get(name))
        return {model.version.version for model in models if model is not None}

    # -- loading

    async def start(self) -> None:
        """Load the deployed models; return when each model is ready or has failed."""
        if not self._context.shares_home:
            await asyncio.to_thread(shutil.rmtree, self._context.folders.serving, True)
        models = await self._in_thread(self._repository.list)
        loads = [
            self._resume(model, model.options)
            for model in models
            if model.deployed and model.options
        ]
        await asyncio.gather(*loads)
        self._keep(asyncio.create_task(self._release_idle_leases()))
        self._started = True
        if self._follower is not None:
            self._keep(asyncio.create_task(self._follower.run()))

    async def _resume(self, model: Model, options: DeploymentOptions) -> None:
        """Load a model with retries: a host that starts may lack memory or files for a moment.

        Other models load between the tries. A load that timed out or found damage is not retried.
        """
        version = model.version(options.version)
        entry = self._entries[model.name] = DeployedModel(version, options.named_devices)
        for wait_s in (*self._context.waits_s, None):
            try:
                await self._switch(version, options, commit=None)
                return
            except Exception as error:  # the edge of a model: its error does not stop the server
                log.error(
                    "model.not_loaded",
                    model=model.name,
                    version=version.version,
                    error=entry.reason,
                    exc_info=_trace(error),
                )
                if isinstance(error, TimedOut | DamagedError):
                    return
            if wait_s is not None:
                entry.state = "loading"
                await asyncio.sleep(wait_s)

    async def follow(self, name: str) -> str:
        """Load, switch or unload a model as the database says, which another server has changed.
        Return why that failed, or "". After a failure the version that answered goes on.
        """
        async with self._locks[name]:
            try:
                model = await self._in_thread(lambda: self._repository.get(name))
                if not model.deployed or model.options is None:
                    await self._end(name)
                    return ""
                version, options = model.version(model.options.version), model.options
                entry = self._entries.setdefault(
                    name, DeployedModel(version, options.named_devices)
                )
                loaded = entry.loaded
                if loaded is None or loaded.deploys != (version.version, options):
                    await self._switch(version, options, commit=None)
                    log.info("model.followed", model=name, version=version.version)
            except Exception as error:  # the edge of a model: its error does not stop the server
                reason = self._failure_message(error)
                log.error("model.not_loaded", model=name, error=reason, exc_info=_trace(error))
                return reason
        return ""

    def state_of(self, name: str, server: str, reason: str) -> ServerState:
        """Return the state of a model at this server, which has this id."""
        entry = self._entries.get(name) or self._unloading.get(name)
        served = self._served(entry) if entry is not None else None
        loaded = entry.loaded if entry is not None else None
        return ServerState(
            server=server,
            host=platform.node(),
            state=served.state if served is not None else "unloaded",
            version=loaded.spec.version.version if loaded is not None else None,
            reason=reason or (served.reason if served is not None else ""),
        )

    async def _until_followed(self, name: str) -> None:
        """Wait until all servers have done a change, or failed to."""
        if self._follower is not None:
            await self._follower.until_followed(name, self._context.load_s)

    def starting(self) -> tuple[int, int]:
        """Return the number of models that are loading, and the number of all models."""
        loading = sum(entry.state == "loading" for entry in self._entries.values())
        return loading, len(self._entries)

    async def _switch(
        self, version: Version, options: DeploymentOptions, commit: Callable[[], None] | None
    ) -> None:
        """Load a version, store the change, let the version answer, and drain the old one.

        A failure leaves the state unchanged. Without `commit` nothing is stored: so a full disk
        does not prevent the loading after a restart.
        """
        async with self._loading(version, options) as entry:
            spec = await self._in_thread(lambda: self._loader.spec(version, options))
            loaded = await self._loader.load(spec)
            if commit is not None:
                await self._commit(loaded, commit)
        old, entry.loaded = entry.loaded, loaded
        entry.version, entry.devices = version, spec.devices
        entry.state, entry.reason = "ready", ""
        if old is not None:
            await old.end()

    @asynccontextmanager
    async def _loading(
        self, version: Version, options: DeploymentOptions
    ) -> AsyncIterator[DeployedModel]:
        """Provide the entry of a model while one of its versions is loading.

        A failure removes a new entry. It marks an entry without a loaded version as failed. An
        entry with a loaded version goes on answering.
        """
        is_new = version.model not in self._entries
        entry = self._entries.setdefault(
            version.model, DeployedModel(version, options.named_devices)
        )
        if entry.loaded is None:
            entry.state = "loading"
        try:
            yield entry
        except BaseException as error:
            if is_new:
                del self._entries[version.model]
            elif entry.loaded is None:
                entry.state, entry.reason = "failed", self._failure_message(error)
            raise

    async def _commit(self, loaded: LeasedDeployment, commit: Callable[[], None]) -> None:
        """Store the memory that a loaded version needs, then call `commit`.

        On a failure the loaded version is ended.
        """
        version = loaded.spec.version
        try:
            if loaded.spec.sessions == 1:  # several share the weights
                memory_bytes = loaded.running.memory_bytes // loaded.spec.all_instances
                await self._in_thread(lambda: self._repository.set_memory(version, memory_bytes))
            await self._in_thread_to_end(commit)
        except BaseException:
            await loaded.end()
            raise

    async def _release_idle_leases(self) -> None:
        """Give back the leases of idle models, so that jobs can measure on their devices."""
        while True:
            await asyncio.sleep(CHECK_S)
            for entry in self._entries.values():
                if entry.loaded is not None:
                    entry.loaded.release_when_idle(time.monotonic())

    async def stop(self, grace_s: float) -> None:
        """Cancel changes, answer waiting requests within `grace_s`, and free the devices.

        It can be called again.
        """
        self._stopping = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        models = (*self._entries.values(), *self._unloading.values())
        for entry in models:
            entry.state = "draining"
        await asyncio.gather(
            *(entry.loaded.end(grace_s) for entry in models if entry.loaded is not None),
            return_exceptions=True,
        )
        self._entries.clear()

    async def close(self) -> None:
        """Close the database, after `stop`."""
        if self._context.states is not None:
            with suppress(HostError):  # it counts as gone later
                await self._in_thread(self._context.states.forget)
        await self._in_thread(self._repository.close)
        self._thread.shutdown()

    # -- views

    async def views(self, caller: Caller) -> ModelPage:
        """All models that the caller may see, by name."""
        models = await self._in_thread(lambda: self._repository.list(caller.sees))
        states = await self._states_of(None)
        return ModelPage(models=tuple(self._view_of(model, states) for model in models))

    async def view(self, caller: Caller, name: str) -> ModelView:
        model = await self._in_thread(lambda: self._repository.get(name, caller.sees))
        return self._view_of(model, await self._states_of(name))

    async def _states_of(self, name: str | None) -> dict[str, tuple[ServerState, ...]]:
        states = self._context.states
        return {} if states is None else await self._in_thread(lambda: states.of(name))

    async def shapes(self, caller: Caller, name: str) -> ShapesView:
        """Count the shapes since the model was loaded; NotFound if it is not deployed."""
        entry = self._find(caller, name, None)
        traffic = entry.loaded.running.traffic if entry.loaded is not None else Traffic()
        return await asyncio.to_thread(traffic.view, entry.version)

    def _served(self, entry: DeployedModel) -> Served:
        """Describe a model to clients, without paths of this host.

        The last message of a worker may contain such paths.
        """
        served, folders = entry.served(), self._context.folders
        if not served.reason and not any(each.reason for each in served.devices):
            return served
        devices = tuple(
            each.model_copy(update={"reason": scrubbed(each.reason, folders)})
            for each in served.devices
        )
        return replace(served, reason=scrubbed(served.reason, folders), devices=devices)

    def _view_of(self, model: Model, states: Mapping[str, tuple[ServerState, ...]]) -> ModelView:
        entry = self._entries.get(model.name) or self._unloading.get(model.name)
        if entry is None:
            deployment = DeploymentView(
                state="unloaded", version=None, device=None, options=model.options
            )
        else:
            served, loaded = self._served(entry), entry.loaded
            deployment = DeploymentView(
                state=served.state,
                reason=served.reason,
                version=loaded.spec.version.version if loaded is not None else None,
                device=served.device,
                devices=served.devices if loaded is not None else (),
                note=loaded.spec.note if loaded is not None else "",
                options=model.options,
                memory_bytes=loaded.running.memory_bytes if loaded is not None else None,
            )
        return ModelView(
            name=model.name,
            owner=model.owner,
            current=model.version(),
            versions=model.versions,
            deployment=deployment,
            servers=states.get(model.name, ()),
        )

    # -- helpers

    def _visible(self, caller: Caller) -> dict[str, DeployedModel]:
        """The models that the caller may see. The thread that reads metrics calls this, too."""
        return {
            name: entry
            for name, entry in tuple(self._entries.items())
            if caller.sees in (None, entry.version.owner)
        }

    def _served_language(self, entry: DeployedModel) -> ServedLanguage:
        """Describe a language model to clients, as `_served` does."""
        served = self._served(entry)
        described = entry.served_language()
        return replace(described, reason=served.reason, devices=served.devices)

    def _find(
        self,
        caller: Caller,
        model: str | None,
        version: int | None,
        among: Callable[[DeployedModel], bool] = lambda entry: True,
    ) -> DeployedModel:
        """Find a deployed model. Without a name it is the only one for which `among` is true."""
        if self._closed_state and model not in self._entries:
            raise self._unavailable()  # NotFound would be wrong: the model may come back
        if model is None:
            visible = self._visible(caller).items()
            model = only(tuple(name for name, entry in visible if among(entry)))
        entry = self._entries.get(model)
        if entry is None or caller.sees not in (None, entry.version.owner):
            refusal = NotFound if entry is None else NotOwned
            raise refusal(
                f"no model '{model}' is deployed",
                "GET /models lists yours; PUT /models/NAME/deployment loads one",
            )
        if version not in (None, entry.version.version):
            raise NotFound(
                f"version {version} of '{model}' is not deployed, {entry.version.version} is",
                "leave the version out for the current one",
            )
        return entry

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Run a call that uses the database and the disk, in the one thread for them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _in_thread_to_end(self, call: Callable[[], None]) -> None:
        """Run a call as `_in_thread` does, and wait for its end even if cancelled.

        So a change that is on the disk is made in memory too, also while the server stops.
        """
        task = asyncio.ensure_future(self._in_thread(call))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await task

    async def _run_change(self, change: Coroutine[Any, Any, None]) -> None:
        """Run a change to its end, even if the client's request is cancelled.

        Unavailable if the server stops meanwhile.
        """
        if self._closed_state:
            change.close()
            raise self._unavailable()
        task = asyncio.ensure_future(change)
        self._keep(task)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            raise self._unavailable() from None

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Let `stop` end a task."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _closed_state(self) -> str:
        """`starting` or `stopping`: models may be missing and cannot be changed. Empty: open."""
        if self._stopping:
            return "stopping"
        return "" if self._started else "starting"

    def _unavailable(self) -> Unavailable:
        state = self._closed_state
        retry_after_s = SOON_S if state == "starting" else LATER_S
        return Unavailable(f"the server is {state}", "try again in a moment", retry_after_s)

    def _failure_message(self, error: BaseException) -> str:
        """The message of an error for clients."""
        message = "an error inside the service; its log has the details"
        if isinstance(error, CrucibleError):
            message = error.message
        if isinstance(error, StoreError):  # its message has an address
            message = "the service cannot use its database or its files now"
        if isinstance(error, DamagedError):
            message = f"{message}; {error.next_step}"
        return scrubbed(message, self._context.folders)


def _promotion(caller: Caller, version: Version) -> Entry:
    """The audit's entry of a promotion."""
    details: Details = {
        "version": version.version,
        "job": version.job,
        "owner": version.owner,
        "override": version.override,
    }
    return Entry(caller.actor, "model.promoted", f"model/{version.model}", details)


def takes_tensors(entry: DeployedModel) -> bool:
    return entry.version.language is None


def takes_prompts(entry: DeployedModel) -> bool:
    return entry.version.language is not None


def only(names: tuple[str, ...]) -> str:
    """The model of a request without a name: the only one that is deployed."""
    if not names:
        raise NotFound("no model is deployed", "PUT /models/NAME/deployment loads one")
    if len(names) > 1:
        raise Unprocessable(
            f"several models are deployed: {', '.join(sorted(names))}",
            "name one of them in the request",
        )
    return names[0]


def _trace(error: Exception) -> Exception | None:
    return None if isinstance(error, CrucibleError) else error
