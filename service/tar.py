"""A folder as a tar, made while it is sent: nothing is written to the disk, and its size is known before."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 2**20
BLOCK_BYTES = tarfile.BLOCKSIZE
END = b"\0" * (2 * BLOCK_BYTES)


def tar(folder: Path) -> Iterator[bytes]:
    """All files of a folder, below its name; the same bytes for the same files."""
    for file, header in _members(folder):
        yield header
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
        yield b"\0" * (-file.stat().st_size % BLOCK_BYTES)
    yield END


def size_of_tar(folder: Path) -> int:
    return sum(len(header) + file.stat().st_size + -file.stat().st_size % BLOCK_BYTES for file, header in _members(folder)) + len(END)


def _members(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        about = tarfile.TarInfo(str(file.relative_to(folder.parent)))
        about.size = file.stat().st_size
        yield file, about.tobuf(tarfile.PAX_FORMAT)
