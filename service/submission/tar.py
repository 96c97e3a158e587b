"""A folder as a tar, made while it is sent: nothing is written to the disk, and its size is known
before. And a tar as a folder.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pipeline.errors import HostError

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
    return sum(
        len(header) + file.stat().st_size + -file.stat().st_size % BLOCK_BYTES
        for file, header in _members(folder)
    ) + len(END)


def untar(archive: tarfile.TarFile, folder: Path) -> None:
    """Its files, below `folder`; HostError for anything else. (Python has a filter for this from
    3.11.4 on; Debian 12 has 3.11.2.)
    """
    for member in archive:
        place = PurePosixPath(member.name)
        content = (
            archive.extractfile(member)
            if member.isreg() and not place.is_absolute() and ".." not in place.parts
            else None
        )
        if content is not None:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            with content, (folder / place).open("wb") as file:
                shutil.copyfileobj(content, file)
        elif not member.isdir():
            raise HostError(
                f"the archive holds '{member.name}', which is no file below its own folder",
                "have whoever made it look into it",
            )


def _members(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        about = tarfile.TarInfo(str(file.relative_to(folder.parent)))
        about.size = file.stat().st_size
        yield file, about.tobuf(tarfile.PAX_FORMAT)
