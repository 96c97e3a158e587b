"""Copies of large arrays in host memory, by several threads.

One thread copies a few gigabytes per second, a fraction of what the memory or a PCIe bus moves.
Where the process has loaded PyTorch, PyTorch's own threads copy: they need no interpreter's lock,
and took 0.4 ms for 38.5 MB on a host with 16 cores. Elsewhere threads of Python copy, 0.6 to 1 ms
there: `ctypes.memmove` runs without the lock, but each wake-up and each chunk waits for it, some
20 us. Below LARGE, one thread is faster.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
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
LEAST_OF_TORCH, MOST_OF_TORCH = 2 << 20, 8 << 20  # bytes of a chunk; PyTorch wakes no thread for it
ENOUGH_OF_TORCH = 4  # threads; with fewer PyTorch is not faster

Chunk = tuple[int, int]
"""Offset and bytes."""


def chunks_of(size: int, least: int = LEAST_CHUNK, most: int = MOST_CHUNK) -> list[Chunk]:
    """Cut `size` bytes into FEW equal chunks; more where they are too large, fewer if too small."""
    step = min(max(-(-size // FEW), least), most) // 8 * 8
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


def copy_memory(
    to: int, source: int, size: int, then: Callable[[int, int], object] | None = None
) -> None:
    """Copy `size` bytes between two addresses, and call `then(offset, size)` behind each chunk.

    `then` runs in the thread that copied the chunk, so that a chunk can travel while others are
    copied. Returns when all is done. Raises the first exception of `then`.
    """
    torch = _parallel_torch()
    if torch is not None:
        ours, theirs = (torch.from_numpy(_numbers_at(address, size)) for address in (to, source))
        width = ours.element_size()
        for offset, length in chunks_of(size, LEAST_OF_TORCH, MOST_OF_TORCH):
            part = slice(offset // width, (offset + length) // width)
            ours[part].copy_(theirs[part])
            if then:
                then(offset, length)
        return

    def copy(offset: int, length: int) -> None:
        ctypes.memmove(to + offset, source + offset, length)
        if then:
            then(offset, length)

    copy_threads().run(chunks_of(size), copy)


def _parallel_torch() -> Any:
    """PyTorch, if this process has loaded it and lets it use enough threads."""
    torch = sys.modules.get("torch")
    # while another thread imports it, it has no such function yet
    threads = getattr(torch, "get_num_threads", None)
    return torch if threads and threads() >= ENOUGH_OF_TORCH else None


def _numbers_at(address: int, size: int) -> NDArray[Any]:
    """The memory at an address as an array that can be written, whoever owns it."""
    memory = (ctypes.c_char * size).from_address(address)
    numbers: NDArray[Any] = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]  # it takes any buffer
    return numbers.view(np.int64) if size % 8 == 0 else numbers


def copy_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of an array in C order."""
    if array.nbytes < LARGE or not array.flags.c_contiguous:
        return array.copy()
    fresh = np.empty(array.shape, array.dtype)
    copy_memory(address_of(fresh), address_of(array), array.nbytes)
    return fresh


def address_of(array: NDArray[Any]) -> int:
    """Return the address of the first element. Faster than `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])
