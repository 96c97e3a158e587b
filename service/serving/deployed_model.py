"""What of a model is in memory: the loaded version with its lease on the device, and what is told
of one that is not there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from service.devices.leases import Leases
from service.inference import InferAnswer, InferRequest, ModelState, Served, Statistics
from service.registry.models import Version
from service.serving.deployment import DeploymentSpec

QUIET_S = 2.0  # without a request: then others may measure on the device


class Running(Protocol):
    """One loaded version, as `Deployment` is."""

    async def infer(self, request: InferRequest) -> InferAnswer: ...
    def served(self) -> Served: ...
    def statistics(self) -> Statistics: ...
    def shapes(self) -> Mapping[tuple[tuple[str, int], ...], int]: ...
    @property
    def memory_bytes(self) -> int: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...


Start = Callable[[DeploymentSpec, Path], Awaitable[Running]]
"""Load an engine, with a folder for logs and temporary files: ready when it returns."""


class Loaded:
    """A running version. It holds a lease to serve from its loading on while it has requests, and
    QUIET_S longer.
    """

    def __init__(self, running: Running, spec: DeploymentSpec, name: str, leases: Leases) -> None:
        self.running, self.spec = running, spec
        self._name, self._leases = name, leases
        self._requests, self._leased, self._last_s = 0, True, time.monotonic()

    @classmethod
    async def start(cls, start: Start, spec: DeploymentSpec, work: Path, leases: Leases) -> Loaded:
        """Load it; what keeps it from being ready is raised, and leaves nothing behind."""
        leases.serve(work.name, spec.device)
        try:
            return cls(await start(spec, work), spec, work.name, leases)
        except BaseException:
            leases.give_back(work.name, spec.device)
            raise

    async def infer(self, request: InferRequest) -> InferAnswer:
        if not self._leased:
            self._leases.serve(self._name, self.spec.device)
            self._leased = True
        self._requests += 1
        try:
            return await self.running.infer(request)
        finally:
            self._requests -= 1
            self._last_s = time.monotonic()

    def rest(self, now_s: float) -> None:
        """Give the lease back if it has been quiet."""
        if self._leased and not self._requests and now_s - self._last_s >= QUIET_S:
            self._leases.give_back(self._name, self.spec.device)
            self._leased = False

    async def end(self, within_s: float | None = None) -> None:
        """Answer what waits, but not longer than `within_s`, and free the device."""
        try:
            async with asyncio.timeout(within_s):
                await self.running.drain()
        except TimeoutError:  # what still waits is told so by close
            pass
        finally:
            await self.running.close()
            self._leases.give_back(self._name, self.spec.device)


@dataclass(slots=True)
class Slot:
    """One deployed model."""

    version: Version  # that answers, or that is to
    device: str
    state: ModelState = "loading"
    reason: str = ""
    loaded: Loaded | None = None

    def told(self) -> Served:
        """As clients are told of it."""
        if self.loaded is not None and self.state != "draining":
            return self.loaded.running.served()
        version = self.version
        return Served(
            model=version.model,
            version=version.version,
            owner=version.owner,
            device=self.device,
            backend=version.backend,
            inputs=version.inputs,
            outputs=version.outputs,
            batch=version.batch,
            max_batch=version.most_together,
            state=self.state,
            reason=self.reason,
            image=version.image,
            labels=version.labels,
        )
