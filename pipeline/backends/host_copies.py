"""Copies of large arrays in host memory, by several threads.

One thread copies a few gigabytes per second, a fraction of what the memory or a PCIe bus moves.
`ctypes.memmove` runs without the interpreter's lock, so that threads of Python copy at the same
time. Waking a thread costs tens of microseconds: below LARGE, one thread is faster.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.host.environment import usable_cores

LARGE = 2 << 20  # bytes
# Each chunk costs some 30 us, of the interpreter's lock and of CUDA, so that few equal ones are
# fastest up to 10 MB. Larger arrays travel while they are copied.
LEAST_CHUNK, MOST_CHUNK, FEW = 3 << 19, 3 << 20, 4  # bytes, bytes, chunks
MOST_THREADS = 8  # more did not help on a host with 16 cores

Chunk = tuple[int, int]
"""Offset and bytes."""


def chunks_of(size: int) -> list[Chunk]:
    """Cut `size` bytes into FEW equal chunks; more where they are too large, fewer if too small."""
    step = min(max(-(-size // FEW), LEAST_CHUNK), MOST_CHUNK)
    return [(offset, min(step, size - offset)) for offset in range(0, size, step)]


class CopyThreads:
    """Threads that work on the chunks of one copy. The calling thread takes part."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._busy = threading.Lock()  # one copy at a time: the memory is shared in any case
        self._wakes: list[SimpleQueue[_Work]] = [SimpleQueue() for _ in range(count - 1)]
        for number, wake in enumerate(self._wakes):
            threading.Thread(
                target=_run_all, args=(wake,), name=f"copy-{number}", daemon=True
            ).start()

    def run(self, chunks: Iterable[Chunk], copy: Callable[[int, int], object]) -> None:
        """Call `copy(offset, size)` for every chunk, in about their order.

        Returns when all calls have returned. Raises the first exception of any of them; chunks that
        had not begun by then are left out.
        """
        work = _Work(chunks, copy)
        with self._busy:
            # A thread that wakes up too late finds no chunk left.
            for wake in self._wakes[: work.total - 1]:
                wake.put(work)
            work.run()
            work.finished.acquire()
        if work.errors:
            raise work.errors[0]


class _Work:
    """The chunks of one copy that no thread has taken yet."""

    def __init__(self, chunks: Iterable[Chunk], copy: Callable[[int, int], object]) -> None:
        self._chunks, self._copy = deque(chunks), copy
        self.total = len(self._chunks)
        # Its next() is atomic, so that exactly one thread sees the last number.
        self._done = itertools.count(1)
        self.finished = threading.Lock()
        if self.total:
            self.finished.acquire()
        self.errors: list[BaseException] = []

    def run(self) -> None:
        while True:
            try:
                offset, size = self._chunks.popleft()
            except IndexError:
                return
            try:
                if not self.errors:
                    self._copy(offset, size)
            except BaseException as error:  # noqa: BLE001  the caller of `CopyThreads.run` gets it
                self.errors.append(error)
            if next(self._done) == self.total:
                self.finished.release()


def _run_all(wake: SimpleQueue[_Work]) -> None:
    while True:
        wake.get().run()


@cache
def copy_threads() -> CopyThreads:
    """The threads of this process: half of the usable cores, at most MOST_THREADS."""
    return CopyThreads(min(max(usable_cores() // 2, 1), MOST_THREADS))


def copy_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of an array in C order."""
    if array.nbytes < LARGE or not array.flags.c_contiguous:
        return array.copy()
    fresh = np.empty(array.shape, array.dtype)
    to, source, threads = address_of(fresh), address_of(array), copy_threads()
    threads.run(
        chunks_of(array.nbytes),
        lambda offset, size: ctypes.memmove(to + offset, source + offset, size),
    )
    return fresh


def address_of(array: NDArray[Any]) -> int:
    """Return the address of the first element. Faster than `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])
