"""How fast this host reads memory: the roof of an engine that reads all its weights for each token.

A copy also writes, and allocates cache lines for what it writes; so its rate is not this one. Two
ways of reading are tried, and the fastest run of both counts: the maximum of each thread's part,
and a matrix-vector product, which writes 1/1024 of what it reads. The product runs on NumPy's own
threads, so it is left out if not all cores are to be used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.host.environment import usable_cores
from pipeline.measurement.clock import measure_block

COLUMNS = 1024
ROW_BYTES = 4 * COLUMNS
MIN_BYTES = 256 * 2**20
TIMES_CACHE = 2  # the buffer, of the largest cache
L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

Buffer = NDArray[np.float32]  # [rows, COLUMNS]


def last_cache_bytes(file: Path = L3) -> int:
    """Return the size of the third-level cache; 0 where Linux does not tell it."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return 0
    found = re.fullmatch(r"(\d+)([KM]?)", text)
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]] if found else 0


def buffer_beyond_caches() -> Buffer:
    """Return a buffer that no cache holds."""
    size = max(MIN_BYTES, TIMES_CACHE * last_cache_bytes())
    return np.ones((size // ROW_BYTES, COLUMNS), np.float32)  # written, so that it has pages


def part_of(buffer: Buffer, size: int) -> Buffer:
    """Return the first `size` bytes of a buffer, in whole rows; all of a smaller buffer."""
    return buffer[: max(1, size // ROW_BYTES)]


def read_rate(buffer: Buffer, threads: int, seconds: float) -> float:
    """Return the bytes per second of the fastest read of a buffer by this number of threads."""
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        ways: list[Callable[[], object]] = [lambda: list(pool.map(np.max, parts))]
        if threads == usable_cores():
            vector = np.ones(COLUMNS, np.float32)
            ways.append(lambda: buffer @ vector)
        best_s = min(min(measure_block(way, min_s=seconds / len(ways))) for way in ways)
    return buffer.nbytes / best_s
