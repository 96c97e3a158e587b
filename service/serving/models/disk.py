"""The one thread in which models use the database and the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class DiskThread:
    """Runs one call after another."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "crucible-models")

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in the thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def run_to_end(self, call: Callable[[], None]) -> None:
        """Run a call as `run` does, and wait for its end even if cancelled.

        So a change that is on the disk is made in memory too, also while the server stops.
        """
        task = asyncio.ensure_future(self.run(call))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await task

    def close(self) -> None:
        """End the thread after its last call."""
        self._thread.shutdown()
