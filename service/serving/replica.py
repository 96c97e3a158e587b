"""One instance of a deployment: it runs batches in a worker, and restarts the worker after a crash.

Each crash in a row without an answered batch doubles the pause before the next start. After
MAX_CRASHES the instance is `failed` and stays so. A crash loses only what its worker ran.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, Literal, Protocol, TypeVar

from pipeline.errors import CrucibleError
from pipeline.execution.exit_causes import crucible_error
from service import logs
from service.serving.worker_client import Order, Task, Worker

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 30.0
MAX_CRASHES = 5

InstanceState = Literal["starting", "ready", "failed", "closed"]

log = logs.get("service.instance")


def pause_after(crashes: int) -> float | None:
    """The pause before the next start, after `crashes` in a row; None: give up."""
    return None if crashes >= MAX_CRASHES else min(FIRST_PAUSE_S * 2 ** (crashes - 1), MAX_PAUSE_S)


class AnyWorker(Protocol):
    """A running worker, whatever it runs."""

    memory_bytes: int
    has_answered: bool

    @property
    def pid(self) -> int: ...
    @property
    def is_broken(self) -> bool: ...
    def printed(self) -> str: ...
    async def broken(self) -> str: ...
    async def end(self) -> None: ...


W = TypeVar("W", bound=AnyWorker)


class Supervised(Generic[W]):
    """A worker that is started again after a crash. Belongs to one event loop; calls `changed`
    after each change of its state.
    """

    def __init__(
        self,
        name: str,
        device: str,
        start: Callable[[], Awaitable[W]],
        changed: Callable[[], None],
    ) -> None:
        self._state: InstanceState = "starting"
        self.device = device  # on which it runs
        self.reason = ""  # why it is not ready
        self.memory_bytes = 0  # of its newest worker
        self._name, self._new_worker, self._changed = name, start, changed
        self._worker: W | None = None
        self._crashes = 0
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the worker. It is ready on return; otherwise its error is raised."""
        worker = await self._start_worker()
        self._supervisor = asyncio.create_task(self._supervise(worker))

    @property
    def state(self) -> InstanceState:
        """The state; `starting` also if the worker has just broken and nothing has noticed."""
        if self._state == "ready" and (self._worker is None or self._worker.is_broken):
            return "starting"
        return self._state

    @property
    def pid(self) -> int:
        """The process id of its worker's guardian; 0 without a worker."""
        return self._worker.pid if self._worker else 0

    async def close(self) -> None:
        """End the worker."""
        self._state = "closed"
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.end()

    async def _start_worker(self) -> W:
        try:
            worker = await self._new_worker()
        except OSError as error:  # its folder cannot be written
            raise crucible_error(error) from error
        self._worker, self.memory_bytes = worker, worker.memory_bytes
        self._state, self.reason = "ready", ""
        log.info(
            "worker.ready",
            worker=self._name,
            device=self.device,
            pid=worker.pid,
            memory_bytes=worker.memory_bytes,
        )
        self._changed()
        return worker

    async def _supervise(self, worker: W | None) -> None:
        """Restart the worker after each crash, until there were too many crashes."""
        while True:
            if worker is not None:
                death = await worker.broken()
                self._state, self.reason = "starting", f"its worker {death}"
                log.error(
                    "worker.died",
                    worker=self._name,
                    reason=self.reason,
                    printed=worker.printed(),
                )
                self._changed()
                await worker.end()
                self._worker = None
                self._crashes = 0 if worker.has_answered else self._crashes
            self._crashes += 1
            pause = pause_after(self._crashes)
            if pause is None:
                self._state = "failed"
                log.error(
                    "worker.given_up",
                    worker=self._name,
                    reason=self.reason,
                    crashes=self._crashes,
                )
                self._changed()
                return
            await asyncio.sleep(pause)
            try:
                worker = await self._start_worker()
            except Exception as error:  # the edge of an instance: any error counts as a crash
                if not isinstance(error, CrucibleError):
                    log.error("worker.not_started", worker=self._name, exc_info=error)
                worker, self.reason = None, crucible_error(error).message


class Instance(Supervised[Worker]):
    """One instance of an engine."""

    def __init__(self, order: Order, changed: Callable[[], None]) -> None:
        self._order = order
        super().__init__(order.name, order.device, lambda: Worker.start(self._order), changed)

    @property
    def load(self) -> int:
        """The number of its batches."""
        return self._worker.load if self._worker else 0

    @property
    def is_idle(self) -> bool:
        """True if a further batch would run at once."""
        return self._worker is not None and self._worker.is_idle

    @property
    def has_room(self) -> bool:
        return self._worker is not None and self._worker.has_room

    def run(self, task: Task) -> None:
        """Send a batch to the worker, which must have room."""
        assert self._worker is not None
        self._worker.run(task)
