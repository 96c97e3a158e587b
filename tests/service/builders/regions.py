"""Files of shared memory, as clients create them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.regions import FOLDER


@contextmanager
def shared_file(content: bytes) -> Iterator[Path]:
    """A file of shared memory with this content. Its name is the key of shm_open."""
    file = FOLDER / f"crucible-test-{uuid.uuid4().hex}"
    file.write_bytes(content)
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)
