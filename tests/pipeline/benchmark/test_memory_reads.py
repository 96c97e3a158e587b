"""Reading memory: the sizes of buffers, and that all of a buffer is read."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.benchmark.memory_reads import (
    COLUMNS,
    ROW_BYTES,
    last_cache_bytes,
    part_of,
    read_rate,
)


@pytest.mark.parametrize(
    ("text", "size"), [("307200K\n", 307200 * 2**10), ("32M", 2**25), ("512", 512), ("?", 0)]
)
def test_the_last_cache_is_as_large_as_linux_tells(tmp_path: Path, text: str, size: int) -> None:
    (tmp_path / "size").write_text(text)
    assert last_cache_bytes(tmp_path / "size") == size


def test_no_cache_is_known_where_linux_tells_none(tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path / "none") == 0


def test_a_part_has_whole_rows() -> None:
    buffer = np.ones((8, COLUMNS), np.float32)
    assert part_of(buffer, 3 * ROW_BYTES + 1).nbytes == 3 * ROW_BYTES
    assert part_of(buffer, 1).nbytes == ROW_BYTES
    assert part_of(buffer, 10**9).nbytes == buffer.nbytes


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rate_is_positive(threads: int) -> None:
    assert read_rate(np.ones((64, COLUMNS), np.float32), threads, 0.01) > 0
