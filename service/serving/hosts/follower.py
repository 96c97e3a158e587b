"""Follow the changes of models that other servers make.

Each server looks at the revisions of all models every POLL_S. It loads or unloads what has changed,
and stores the state of the model at this server. If a load fails, the version that answered goes
on, and the load is tried again after RETRY_S, twice that, ... up to MAX_RETRY_S. Without the
database the models stay as they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.errors import HostError
from service import logs
from service.registry.model_states import Followed, ModelStates
from service.registry.models import ServerState
from service.registry.repository import Repository

POLL_S = 1.0
RETRY_S, MAX_RETRY_S = 10.0, 300.0
WAIT_S = 0.2  # between two looks at servers that have not followed yet

log = logs.get("service.follower")


class Models(Protocol):
    """The models of this server. `ModelManager` implements this protocol."""

    async def follow(self, name: str) -> str:
        """Load, switch or unload a model as the database says. Return why that failed, or ""."""

    def state_of(self, name: str, server: str, reason: str) -> ServerState:
        """Return the state of a model at this server."""


InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Run a call that uses the database, in a thread."""


@dataclass(slots=True)
class _Progress:
    """How far this server has followed a model."""

    revision: int = -1
    reason: str = ""
    retry_s: float = float("inf")
    wait_s: float = RETRY_S
    following: asyncio.Task[None] | None = None


class Follower:
    """Keeps the models of one server as the database has them. Lives in one event loop."""

    def __init__(
        self, models: Models, repository: Repository, states: ModelStates, in_thread: InThread
    ) -> None:
        self._models, self._repository, self._states = models, repository, states
        self._in_thread = in_thread
        self._progress: dict[str, _Progress] = {}
        self._stored: dict[str, Followed] = {}
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Follow until cancelled."""
        fault = ""
        try:
            while True:
                try:
                    await self.look()
                    fault = ""
                except HostError as error:  # tried again
                    if fault != error.message:
                        log.error("models.not_followed", error=error.message)
                    fault = error.message
                await asyncio.sleep(POLL_S)
        finally:
            following = [each.following for each in self._progress.values() if each.following]
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def look(self) -> None:
        """Begin to follow what has changed, and store what has been followed."""
        async with self._looking:
            revisions: dict[str, int] = await self._in_thread(self._repository.revisions)
            for name, revision in revisions.items():
                self._begin(name, revision, time.monotonic())
            self._progress = {name: self._progress[name] for name in revisions}
            await self._store()

    def _begin(self, name: str, revision: int, now_s: float) -> None:
        progress = self._progress.setdefault(name, _Progress())
        due = revision != progress.revision or now_s >= progress.retry_s
        if due and progress.following is None:
            progress.following = asyncio.create_task(self._follow(name, revision, progress))

    async def _follow(self, name: str, revision: int, progress: _Progress) -> None:
        try:
            reason = await self._models.follow(name)
            if revision != progress.revision:
                progress.wait_s = RETRY_S
            progress.revision, progress.reason = revision, reason
            progress.retry_s = time.monotonic() + progress.wait_s if reason else float("inf")
            progress.wait_s = min(2 * progress.wait_s, MAX_RETRY_S)
        finally:
            progress.following = None

    async def _store(self) -> None:
        """Store the states that have changed."""
        now = {
            name: (
                progress.revision,
                self._models.state_of(name, self._states.server, progress.reason),
            )
            for name, progress in self._progress.items()
            if progress.revision >= 0
        }
        if new := {name: each for name, each in now.items() if self._stored.get(name) != each}:
            await self._in_thread(lambda: self._states.store(new))
        self._stored = now

    async def until_followed(self, name: str, limit_s: float) -> None:
        """Wait until all live servers have followed the present state of a model, or `limit_s`."""
        end_s = time.monotonic() + limit_s
        revisions: dict[str, int] = await self._in_thread(self._repository.revisions)
        revision = revisions[name]
        await self.look()
        while late := await self._in_thread(lambda: self._states.late(name, revision)):
            if time.monotonic() > end_s:
                log.warning("model.late", model=name, servers=late)
                return
            await asyncio.sleep(WAIT_S)
        while self._progress[name].revision < revision:
            await asyncio.sleep(WAIT_S)
        await self.look()
