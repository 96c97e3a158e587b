"""One place of a deployment where batches run: it has a worker, and another one after a crash.

Each crash in a row, with no batch answered between, doubles the pause before the next start; after
MAX_CRASHES the instance is `failed` and stays so. A crash costs the batches that its worker had,
and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

from pipeline.errors import CrucibleError
from pipeline.execution.exit_causes import crucible_error
from service import logs
from service.serving.worker_client import Order, Task, Worker

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 30.0
MAX_CRASHES = 5

InstanceState = Literal["starting", "ready", "failed", "closed"]

log = logs.get("service.instance")


def pause_after(crashes: int) -> float | None:
    """How long to wait before the next start, after so many crashes in a row; None: give up."""
    return None if crashes >= MAX_CRASHES else min(FIRST_PAUSE_S * 2 ** (crashes - 1), MAX_PAUSE_S)


class Instance:
    """Lives in one event loop. `changed` is called whenever its state has changed."""

    def __init__(self, order: Order, changed: Callable[[], None]) -> None:
        self._state: InstanceState = "starting"
        self.reason = ""  # of not being ready
        self.memory_bytes = 0
        self._order, self._changed = order, changed
        self._worker: Worker | None = None
        self._crashes = 0
        self._living: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ready when this returns; what keeps the worker from it is raised."""
        worker = await self._started()
        self._living = asyncio.create_task(self._live(worker))

    @property
    def state(self) -> InstanceState:
        """`starting` also while nobody has seen to it that the worker is gone."""
        return (
            "starting"
            if self._state == "ready" and (self._worker is None or self._worker.is_broken)
            else self._state
        )

    @property
    def load(self) -> int:
        """Batches that it has."""
        return self._worker.load if self._worker else 0

    @property
    def has_room(self) -> bool:
        return self._worker is not None and self._worker.has_room

    @property
    def pid(self) -> int:
        """Of the guardian of its worker; 0: it has none now."""
        return self._worker.pid if self._worker else 0

    def run(self, task: Task) -> None:
        """Give it a batch; only while it has room."""
        assert self._worker is not None
        self._worker.run(task)

    async def close(self) -> None:
        """End its worker."""
        self._state = "closed"
        if self._living is not None:
            self._living.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._living
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.end()

    async def _started(self) -> Worker:
        try:
            worker = await Worker.start(self._order)
        except OSError as error:  # of its folder
            raise crucible_error(error) from error
        self._worker, self.memory_bytes = worker, worker.memory_bytes
        self._state, self.reason = "ready", ""
        log.info(
            "worker.ready",
            worker=self._order.name,
            pid=worker.pid,
            memory_bytes=worker.memory_bytes,
        )
        self._changed()
        return worker

    async def _live(self, worker: Worker | None) -> None:
        """See to it that there is a worker, until there have been too many crashes."""
        while True:
            if worker is not None:
                said = await worker.broken()
                self._state, self.reason = "starting", f"its worker {said}"
                log.error(
                    "worker.died",
                    worker=self._order.name,
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
                    worker=self._order.name,
                    reason=self.reason,
                    crashes=self._crashes,
                )
                self._changed()
                return
            await asyncio.sleep(pause)
            try:
                worker = await self._started()
            except Exception as error:  # the edge of an instance: any fault counts as a crash
                if not isinstance(error, CrucibleError):
                    log.error("worker.not_started", worker=self._order.name, exc_info=error)
                worker, self.reason = None, crucible_error(error).message
