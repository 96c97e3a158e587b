"""Load versions of models, let one answer in the place of another, and end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pipeline.errors import CrucibleError, DamagedError
from service import logs
from service.errors import TimedOut
from service.registry.models import DeploymentOptions, Version
from service.registry.repository import Model
from service.serving.deployed_model import DeployedModel, LeasedDeployment
from service.serving.loader import Loader, LoaderContext
from service.serving.models.disk import DiskThread
from service.serving.models.table import ModelTable

log = logs.get("service.deployments")


class VersionSwitch:
    """Changes which versions answer. One change of a model at a time: the caller holds its lock."""

    def __init__(
        self, table: ModelTable, loader: Loader, context: LoaderContext, disk: DiskThread
    ) -> None:
        self._table, self._loader, self._context, self._disk = table, loader, context, disk
        self._draining: set[asyncio.Task[None]] = set()

    async def switch(
        self, version: Version, options: DeploymentOptions, commit: Callable[[], None] | None
    ) -> None:
        """Load a version, store the change, let the version answer, and drain the old one.

        A failure leaves the state unchanged. Without `commit` nothing is stored: so a full disk
        does not prevent the loading after a restart.
        """
        async with self._loading(version, options) as entry:
            spec = await self._disk.run(lambda: self._loader.spec(version, options))
            loaded = await self._loader.load(spec)
            if commit is not None:
                await self._commit(loaded, commit)
        old, entry.loaded = entry.loaded, loaded
        entry.version, entry.devices = version, spec.devices
        entry.state, entry.reason = "ready", ""
        if old is not None:
            await self._drain(old)

    async def _drain(self, loaded: LeasedDeployment) -> None:
        """End a version that answers no new request. That goes on if the change is cancelled."""
        task = asyncio.create_task(loaded.end())
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)
        await asyncio.shield(task)

    async def stop(self, grace_s: float) -> None:
        """Let versions that drain answer for at most this time."""
        draining = tuple(self._draining)
        if draining:
            _, late = await asyncio.wait(draining, timeout=grace_s)
            for task in late:
                task.cancel()
        await asyncio.gather(*draining, return_exceptions=True)

    @asynccontextmanager
    async def _loading(
        self, version: Version, options: DeploymentOptions
    ) -> AsyncIterator[DeployedModel]:
        """Provide the entry of a model while one of its versions is loading.

        A failure removes a new entry. It marks an entry without a loaded version as failed. An
        entry with a loaded version goes on answering.
        """
        is_new = version.model not in self._table.entries
        entry = self._table.entries.setdefault(
            version.model, DeployedModel(version, options.named_devices)
        )
        if entry.loaded is None:
            entry.state = "loading"
        try:
            yield entry
        except BaseException as error:
            if is_new:
                del self._table.entries[version.model]
            elif entry.loaded is None:
                entry.state, entry.reason = "failed", self._table.failure_message(error)
            raise

    async def _commit(self, loaded: LeasedDeployment, commit: Callable[[], None]) -> None:
        """Store the memory that a loaded version needs, then call `commit`.

        On a failure the loaded version is ended.
        """
        version = loaded.spec.version
        try:
            if loaded.spec.sessions == 1:  # several share the weights
                memory_bytes = loaded.running.memory_bytes // loaded.spec.all_instances
                await self._disk.run(
                    lambda: self._context.repository.set_memory(version, memory_bytes)
                )
            await self._disk.run_to_end(commit)
        except BaseException:
            await loaded.end()
            raise

    async def end(self, name: str) -> None:
        """Answer the last requests of a model, and free its device. No effect if it is not here."""
        entry = self._table.entries.pop(name, None)
        if entry is None:
            return
        entry.state = "draining"
        self._table.unloading[name] = entry
        try:
            if entry.loaded is not None:
                await self._drain(entry.loaded)
        finally:
            del self._table.unloading[name]

    async def resume(self, model: Model, options: DeploymentOptions) -> None:
        """Load a model with retries: a host that starts may lack memory or files for a moment.

        Other models load between the tries. A load that timed out or found damage is not retried.
        """
        version = model.version(options.version)
        entry = self._table.entries[model.name] = DeployedModel(version, options.named_devices)
        for wait_s in (*self._context.waits_s, None):
            try:
                await self.switch(version, options, commit=None)
                return
            except Exception as error:  # the edge of a model: its error does not stop the server
                log.error(
                    "model.not_loaded",
                    model=model.name,
                    version=version.version,
                    error=entry.reason,
                    exc_info=trace_of(error),
                )
                if isinstance(error, TimedOut | DamagedError):
                    return
            if wait_s is not None:
                entry.state = "loading"
                await asyncio.sleep(wait_s)


def trace_of(error: Exception) -> Exception | None:
    """Return an error for the log, if its traceback tells more than its message."""
    return None if isinstance(error, CrucibleError) else error
