"""All models that are served: the protocol `Serving` of inference.py, and what changes it.

    await deployments.start()                              what was deployed when the server ended
                                                           is loaded again
    await deployments.deploy(caller, "resnet50", options)  ready when this returns
    await deployments.promote(caller, "resnet50", request) the next version: loaded, then current,
                                                           then the old one is drained
    await deployments.rollback(caller, "resnet50")
    await deployments.unload(caller, "resnet50")

What answers is changed by one assignment between two requests, after the new version is ready and
the change is on the disk: so a request is answered by the one or the other, and none is lost. If
anything fails before that, all is as it was.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import CrucibleError, DamagedError
from service import logs
from service.auth import Caller
from service.devices.leases import utc_now
from service.errors import Conflict, NotFound, TimedOut, Unavailable, Unprocessable
from service.inference import InferAnswer, InferRequest, Served, Statistics
from service.jobs.redact import scrubbed
from service.registry.models import (
    RESERVED,
    DeploymentOptions,
    DeploymentView,
    ModelPage,
    ModelView,
    PromoteRequest,
    SeenShape,
    ShapesView,
    Version,
    suggested,
)
from service.registry.promotion import candidate_of, version_of
from service.registry.repository import Model
from service.serving.deployed_model import Loaded, Slot
from service.serving.loader import Loader, Means, device_for

LOOK_S = 0.5  # between two looks for what is quiet

log = logs.get("service.deployments")
T = TypeVar("T")


class Deployments:
    """All models of one home. Lives in one event loop."""

    def __init__(self, means: Means) -> None:
        self._means, self._repository = means, means.repository
        self._slots: dict[str, Slot] = {}
        self._leaving: dict[str, Slot] = {}  # unloaded, and still answering
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(
            asyncio.Lock
        )  # one change of a model at a time
        self._loader = Loader(means)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = ThreadPoolExecutor(1, "crucible-models")
        self._started = self._stopping = False

    # -- what every wire asks

    def served(self, caller: Caller) -> tuple[Served, ...]:
        return tuple(self._served(slot) for _, slot in sorted(self._seen(caller).items()))

    def find(self, caller: Caller, model: str | None, version: int | None = None) -> Served:
        return self._served(self._slot(caller, model, version))

    async def infer(self, request: InferRequest) -> InferAnswer:
        request.caller.require("infer")
        slot = self._slot(request.caller, request.model, request.version)
        if slot.loaded is None:
            why = f": {slot.reason}" if slot.reason else ""
            raise Unavailable(
                f"model '{slot.version.model}' is {slot.state}{why}",
                "GET /models/NAME tells how it is",
            )
        return await slot.loaded.infer(request)

    def statistics(self, caller: Caller) -> tuple[Statistics, ...]:
        slots = [slot for _, slot in sorted(self._seen(caller).items())]
        return tuple(slot.loaded.running.statistics() for slot in slots if slot.loaded is not None)

    async def load(self, caller: Caller, model: str) -> Served:
        stored = await self._ask(lambda: self._repository.get(model, caller.sees))
        await self.deploy(caller, model, stored.options or DeploymentOptions())
        return self.find(caller, model)

    async def unload(self, caller: Caller, model: str) -> None:
        caller.require("admin")
        await self._apart(self._unload(caller, model))

    # -- changes

    async def deploy(self, caller: Caller, name: str, options: DeploymentOptions) -> ModelView:
        """Load a model, or serve it in another way; ready when this returns."""
        caller.require("admin")
        await self._apart(self._deploy(caller, name, options))
        return await self.view(caller, name)

    async def promote(self, caller: Caller, name: str, request: PromoteRequest) -> ModelView:
        """Make a report's engine the current version; one that is current already stays so.
        Conflict if it may not be served.
        """
        caller.require("admin")
        if name in RESERVED:
            raise Unprocessable(
                f"no model can be named '{name}': a path under /v2/models has that name",
                "choose another name",
            )
        await self._apart(self._promote(caller, name, request))
        return await self.view(caller, name)

    async def rollback(self, caller: Caller, name: str) -> ModelView:
        """Make the version current that was before this one; Conflict if there was none."""
        caller.require("admin")
        await self._apart(self._rollback(caller, name))
        return await self.view(caller, name)

    async def lend(
        self, caller: Caller, name: str, number: int | None, job_id: str
    ) -> tuple[Version, str]:
        """Give a job a version's report and engine: this version, or the one that is loaded, or the
        current one; with the device to measure on.
        """
        slot = self._slots.get(name)
        loaded = (
            slot
            if slot is not None
            and slot.loaded is not None
            and number in (None, slot.version.version)
            else None
        )

        def lent() -> Version:
            version = self._repository.get(name, caller.sees).version(
                loaded.version.version if loaded else number
            )
            self._loader.engine(version)  # refused here rather than in the job
            self._repository.lend(version, job_id)
            return version

        version = await self._ask(lent)  # in the thread in which versions are pruned
        return version, (
            loaded.device
            if loaded
            else device_for(None, version.on_gpu, self._means.leases.devices.names)
        )

    async def _deploy(self, caller: Caller, name: str, options: DeploymentOptions) -> None:
        async with self._changing[name]:
            model = await self._ask(lambda: self._repository.get(name, caller.sees))
            version = model.version(options.version)
            most = version.most_together
            if options.max_batch is not None and options.max_batch > most:
                why = version.batch.reason or f"its profiles hold {most}"
                raise Unprocessable(
                    f"max_batch is {options.max_batch}, version {version.version} of '{name}' takes"
                    f" at most {most}: {why}"
                )
            await self._switch(
                version, options, lambda: self._repository.set_deployed(name, options)
            )
            log.info(
                "model.deployed",
                model=name,
                version=version.version,
                key=caller.key,
                **options.model_dump(exclude={"version"}),
            )

    async def _unload(self, caller: Caller, name: str) -> None:
        async with self._changing[name]:
            slot = self._slot(caller, name, None)
            await self._ask(lambda: self._repository.set_deployed(name, None))
            slot.state = "draining"
            self._leaving[name] = self._slots.pop(name)
            try:
                if slot.loaded is not None:
                    await slot.loaded.end()
            finally:
                del self._leaving[name]
            log.info("model.unloaded", model=name, key=caller.key)

    async def _promote(self, caller: Caller, name: str, request: PromoteRequest) -> None:
        async with self._changing[name]:
            means = self._means
            candidate = await self._ask(
                lambda: candidate_of(
                    request.report, caller.sees, request.override, means.jobs, means.folders
                )
            )
            existing = next(
                (model for model in await self._ask(self._repository.list) if model.name == name),
                None,
            )
            if existing is not None and existing.owner != candidate.owner:
                raise Conflict(f"the name '{name}' is taken", "choose another name")
            if existing is not None and existing.version().job == candidate.job:
                await self._restore(existing, candidate.engine.root)
                return
            batch = await self._loader.proof(
                candidate.engine, candidate.report.plan.serving.padding
            )
            version = version_of(
                candidate,
                name,
                request.override,
                batch,
                utc_now().isoformat(timespec="milliseconds"),
            )
            follows = existing is not None and self._follows(existing)
            version = await self._ask(
                lambda: self._repository.add(version, candidate.engine.root, current=not follows)
            )
            if existing is not None and follows:
                await self._become_current(
                    existing,
                    version,
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
            await self._ask(
                lambda: self._repository.prune(name, self._in_use(name), means.versions_kept)
            )

    async def _restore(self, model: Model, engine: Path) -> None:
        """Bring a damaged current version back from its job, and load what failed to load."""
        version = model.version()
        restored = await self._ask(lambda: self._repository.restore(version, engine))
        slot = self._slots.get(model.name)
        if restored and model.options is not None and slot is not None and slot.loaded is None:
            await self._switch(model.version(model.options.version), model.options, commit=None)

    async def _rollback(self, caller: Caller, name: str) -> None:
        async with self._changing[name]:
            model = await self._ask(lambda: self._repository.get(name, caller.sees))
            before = model.version().before
            if before is None:
                raise Conflict(
                    f"version {model.current} of '{name}' was the first: there is none to go"
                    " back to",
                    "promote another report",
                )
            await self._become_current(model, model.version(before), on_failure=lambda: None)
            log.info("model.rolled_back", model=name, version=before, key=caller.key)

    async def _become_current(
        self, model: Model, version: Version, on_failure: Callable[[], None]
    ) -> None:
        """Current, and if the deployment follows, loaded first."""

        def commit() -> None:
            self._repository.set_current(model.name, version.version)

        try:
            if self._follows(model) and model.options is not None:
                await self._switch(version, model.options, commit)
            else:
                await self._surely(commit)
        except BaseException:
            await self._ask(on_failure)
            raise

    def _follows(self, model: Model) -> bool:
        return model.deployed and model.options is not None and model.options.version is None

    def _in_use(self, name: str) -> set[int]:
        return {
            slots[name].version.version for slots in (self._slots, self._leaving) if name in slots
        }

    # -- loading

    async def start(self) -> None:
        """Load what was deployed; returns when each model is ready or has failed."""
        await asyncio.to_thread(shutil.rmtree, self._means.folders.serving, True)
        models = await self._ask(self._repository.list)
        await asyncio.gather(
            *(
                self._resume(model, model.options)
                for model in models
                if model.deployed and model.options
            )
        )
        resting = asyncio.create_task(self._rest())
        self._tasks.add(resting)
        resting.add_done_callback(self._tasks.discard)
        self._started = True

    async def _resume(self, model: Model, options: DeploymentOptions) -> None:
        """Some tries, for a host that starts may be short of this or that; other models are loaded
        between them. One that hangs has had its time.
        """
        version = model.version(options.version)
        slot = self._slots[model.name] = Slot(version, options.device or "")
        for wait_s in (*self._means.waits_s, None):
            try:
                await self._switch(version, options, commit=None)
                return
            except Exception as error:  # the edge of a model: its fault is not the server's
                log.error(
                    "model.not_loaded",
                    model=model.name,
                    version=version.version,
                    error=slot.reason,
                    exc_info=_trace(error),
                )
                if isinstance(error, TimedOut | DamagedError):
                    return
            if wait_s is not None:
                slot.state = "loading"
                await asyncio.sleep(wait_s)

    def starting(self) -> tuple[int, int]:
        """How many of the models that are there are still being loaded, and how many there are."""
        return sum(slot.state == "loading" for slot in self._slots.values()), len(self._slots)

    async def _switch(
        self, version: Version, options: DeploymentOptions, commit: Callable[[], None] | None
    ) -> None:
        """Load this version, store that, let it answer, and drain the one that did.

        A failure leaves nothing that was not there before. Without `commit` nothing is stored: a
        full disk keeps nothing from being served again.
        """
        async with self._loading(version, options) as slot:
            spec = await self._ask(lambda: self._loader.spec(version, options))
            loaded = await self._loader.load(version, spec)
            if commit is not None:
                await self._commit(version, loaded, commit)
        old, slot.loaded = slot.loaded, loaded
        slot.version, slot.device = version, spec.device
        slot.state, slot.reason = "ready", ""
        if old is not None:
            await old.end()

    @asynccontextmanager
    async def _loading(self, version: Version, options: DeploymentOptions) -> AsyncIterator[Slot]:
        """Give the slot of a model while one of its versions is loaded.

        A failure removes a slot that is new, and marks one that has nothing loaded as failed. A
        slot that answers keeps answering.
        """
        is_new = version.model not in self._slots
        slot = self._slots.setdefault(version.model, Slot(version, options.device or ""))
        if slot.loaded is None:
            slot.state = "loading"
        try:
            yield slot
        except BaseException as error:
            if is_new:
                del self._slots[version.model]
            elif slot.loaded is None:
                slot.state, slot.reason = "failed", self._failure_message(error)
            raise

    async def _commit(self, version: Version, loaded: Loaded, commit: Callable[[], None]) -> None:
        """Store the memory that a loaded version needs, then what `commit` stores; on a failure
        the loaded version is ended.
        """
        spec = loaded.spec
        try:
            if not spec.overlap:  # what an instance needs is that of one session
                memory_bytes = loaded.running.memory_bytes // spec.instances
                await self._ask(lambda: self._repository.set_memory(version, memory_bytes))
            await self._surely(commit)
        except BaseException:
            await loaded.end()
            raise

    async def _rest(self) -> None:
        """Let others measure where it is quiet."""
        while True:
            await asyncio.sleep(LOOK_S)
            for slot in self._slots.values():
                if slot.loaded is not None:
                    slot.loaded.rest(time.monotonic())

    async def stop(self, grace_s: float) -> None:
        """End changes, answer what waits within `grace_s`, and free the devices. Harmless if
        repeated.
        """
        self._stopping = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        slots = (*self._slots.values(), *self._leaving.values())
        for slot in slots:
            slot.state = "draining"
        await asyncio.gather(
            *(slot.loaded.end(grace_s) for slot in slots if slot.loaded is not None),
            return_exceptions=True,
        )
        self._slots.clear()

    async def close(self) -> None:
        """After `stop`: let go of the database."""
        await self._ask(self._repository.close)
        self._thread.shutdown()

    # -- views

    async def views(self, caller: Caller) -> ModelPage:
        """All models that the caller may see, by name."""
        return ModelPage(
            models=tuple(
                map(self._viewed, await self._ask(lambda: self._repository.list(caller.sees)))
            )
        )

    async def view(self, caller: Caller, name: str) -> ModelView:
        return self._viewed(await self._ask(lambda: self._repository.get(name, caller.sees)))

    def shapes(self, caller: Caller, name: str) -> ShapesView:
        """What requests were like since the model was loaded; NotFound if it is not."""
        slot = self._slot(caller, name, None)
        counts = slot.loaded.running.shapes() if slot.loaded is not None else {}
        most_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        shapes = tuple(
            SeenShape(sizes=dict(sizes), requests=requests) for sizes, requests in most_first
        )
        return ShapesView(
            version=slot.version.version, shapes=shapes, profiles=suggested(counts, slot.version)
        )

    def _served(self, slot: Slot) -> Served:
        """A slot as clients see it, without paths of this host: a worker's last words may name
        some.
        """
        served = slot.told()
        if not served.reason:
            return served
        return replace(served, reason=scrubbed(served.reason, self._means.folders))

    def _viewed(self, model: Model) -> ModelView:
        slot = self._slots.get(model.name) or self._leaving.get(model.name)
        if slot is None:
            deployment = DeploymentView(
                state="unloaded", version=None, device=None, options=model.options
            )
        else:
            served, loaded = self._served(slot), slot.loaded
            deployment = DeploymentView(
                state=served.state,
                reason=served.reason,
                version=loaded.spec.version if loaded is not None else None,
                device=served.device,
                options=model.options,
                memory_bytes=loaded.running.memory_bytes if loaded is not None else None,
            )
        return ModelView(
            name=model.name,
            owner=model.owner,
            current=model.version(),
            versions=model.versions,
            deployment=deployment,
        )

    # -- helpers

    def _seen(self, caller: Caller) -> dict[str, Slot]:
        """Also from the thread that reads metrics."""
        return {
            name: slot
            for name, slot in tuple(self._slots.items())
            if caller.sees in (None, slot.version.owner)
        }

    def _slot(self, caller: Caller, model: str | None, version: int | None) -> Slot:
        if self._closed_because and model not in self._slots:
            raise self._unavailable()  # not NotFound: clients would believe it
        if model is None:
            model = only(tuple(self._seen(caller)))
        slot = self._slots.get(model)
        if slot is None or caller.sees not in (None, slot.version.owner):
            raise NotFound(
                f"no model '{model}' is deployed",
                "GET /models lists yours; PUT /models/NAME/deployment loads one",
            )
        if version not in (None, slot.version.version):
            raise NotFound(
                f"version {version} of '{model}' is not deployed, {slot.version.version} is",
                "leave the version out for the current one",
            )
        return slot

    async def _ask(self, call: Callable[[], T]) -> T:
        """Ask the database and the disk, in one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _surely(self, call: Callable[[], None]) -> None:
        """As `_ask`, but not left before its end: a change that is on the disk is then made in
        memory too, also while the server stops.
        """
        task = asyncio.ensure_future(self._ask(call))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await task

    async def _apart(self, change: Coroutine[Any, Any, None]) -> None:
        """To its end, also if the request that asked for it is gone; Unavailable if the server
        stops meanwhile.
        """
        if self._closed_because:
            change.close()
            raise self._unavailable()
        task = asyncio.ensure_future(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            raise self._unavailable() from None

    @property
    def _closed_because(self) -> str:
        """Why nothing can be changed, and what is not there may be there later; empty: it can."""
        return "stopping" if self._stopping else "" if self._started else "starting"

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the server is {self._closed_because}", "try again in a moment")

    def _failure_message(self, error: BaseException) -> str:
        """The message of an error as clients may read it."""
        message = "an error inside the service, which its log tells of"
        if isinstance(error, CrucibleError):
            message = error.message
        if isinstance(error, DamagedError):
            message = f"{message}; {error.next_step}"
        return scrubbed(message, self._means.folders)


def only(names: tuple[str, ...]) -> str:
    """The one model that is meant where none is named."""
    if not names:
        raise NotFound("no model is deployed", "PUT /models/NAME/deployment loads one")
    if len(names) > 1:
        raise Unprocessable(
            f"several models are deployed: {', '.join(sorted(names))}",
            "name the one that is to answer",
        )
    return names[0]


def _trace(error: Exception) -> Exception | None:
    return None if isinstance(error, CrucibleError) else error
