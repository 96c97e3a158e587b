"""A deployed model: its version, its state, and the loaded version with its leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from service import logs
from service.devices.leases import Leases
from service.inference import InferAnswer, InferRequest, ModelState, Served, Statistics
from service.language.generation import Answer, GenerateRequest, ServedLanguage
from service.registry.models import DeploymentOptions, Version
from service.serving.deployment import DeploymentSpec, served_version
from service.serving.language.deployment import LanguageDeployment, LanguageSpec, language_version
from service.serving.stats import Traffic

log = logs.get("service.deployments")

QUIET_S = 2.0  # without a request, before jobs may measure on the device


class Running(Protocol):
    """One loaded version. `Deployment` and `LanguageDeployment` implement this protocol."""

    async def infer(self, request: InferRequest) -> InferAnswer: ...
    def served(self) -> Served: ...
    def statistics(self) -> Statistics: ...
    @property
    def traffic(self) -> Traffic: ...
    @property
    def memory_bytes(self) -> int: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...


AnySpec: TypeAlias = DeploymentSpec | LanguageSpec
Start = Callable[[DeploymentSpec, Path], Awaitable[Running]]
"""Load an engine, with a folder for logs and temporary files. It is ready on return."""
StartLanguage = Callable[[LanguageSpec, Path], Awaitable[LanguageDeployment]]
"""The same for a language model."""


class LeasedDeployment:
    """A loaded version that holds a lease on each of its devices while it loads and serves.

    It keeps them for QUIET_S after its last request.
    """

    def __init__(
        self, running: Running, spec: AnySpec, name: str, leases: Leases, files: ExitStack
    ) -> None:
        self.running, self.spec, self._files = running, spec, files
        self._name, self._leases = name, leases
        self._requests, self._has_leases, self._last_s = 0, True, time.monotonic()

    @classmethod
    async def start(
        cls,
        start: Callable[[Path], Awaitable[Running]],
        spec: AnySpec,
        work: Path,
        leases: Leases,
        hold: AbstractContextManager[None],
    ) -> LeasedDeployment:
        """Take the leases and load the version. On any error they are given back.

        `hold` keeps the files of the engine until the version has ended.
        """
        with ExitStack() as files:
            files.enter_context(hold)
            try:
                for device in spec.devices:
                    leases.serve(work.name, device)
                running = await start(work)
                return cls(running, spec, work.name, leases, files.pop_all())
            except BaseException:
                for device in spec.devices:
                    leases.give_back(work.name, device)
                raise

    @property
    def deploys(self) -> tuple[int, DeploymentOptions]:
        """The version, and the options with which it was loaded."""
        return self.spec.version.version, self.spec.options

    async def infer(self, request: InferRequest) -> InferAnswer:
        with self._in_use():
            return await self.running.infer(request)

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Answer]:
        """Answer a request to a language model. It holds the leases until the answer is left."""
        assert isinstance(self.running, LanguageDeployment)
        with self._in_use():
            async with self.running.generate(request) as answer:
                yield answer

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Hold the leases during a request."""
        if not self._has_leases:
            for device in self.spec.devices:
                self._leases.serve(self._name, device)
            self._has_leases = True
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._last_s = time.monotonic()

    def release_when_idle(self, now_s: float) -> None:
        """Give the leases back if there was no request for QUIET_S."""
        if self._has_leases and not self._requests and now_s - self._last_s >= QUIET_S:
            self._give_back()

    async def end(self, within_s: float | None = None) -> None:
        """Answer the waiting requests for at most `within_s`, by default the `drain_s` of the
        options, then free the devices.
        """
        limit_s = self.spec.options.drain_s if within_s is None else within_s
        try:
            async with asyncio.timeout(limit_s):
                await self.running.drain()
        except TimeoutError:  # `close` refuses the requests that still wait
            version = self.spec.version
            log.warning(
                "model.drain_ended",
                model=version.model,
                version=version.version,
                requests=self._requests,
                within_s=limit_s,
            )
        finally:
            await self.running.close()
            self._give_back()
            self._files.close()

    def _give_back(self) -> None:
        for device in self.spec.devices:
            self._leases.give_back(self._name, device)
        self._has_leases = False


@dataclass(slots=True)
class DeployedModel:
    """One deployed model."""

    version: Version  # the one that answers or, while none does, the one that loads
    devices: tuple[str, ...]  # an empty name: not chosen yet
    state: ModelState = "loading"
    reason: str = ""
    loaded: LeasedDeployment | None = None

    def served(self) -> Served:
        """Describe the model to clients."""
        if self.loaded is not None and self.state != "draining":
            return self.loaded.running.served()
        return served_version(self.version, self.devices, self.state, self.reason)

    def served_language(self) -> ServedLanguage:
        """Describe a language model to its clients."""
        running = self.loaded.running if self.loaded is not None else None
        if isinstance(running, LanguageDeployment) and self.state != "draining":
            return running.served_language()
        served = self.served()
        return language_version(self.version, served.devices, self.state, self.reason)
