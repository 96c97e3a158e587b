"""Converts a folder to a tar stream and back. The stream is built while it is sent, without a
temporary file, and its size is known in advance.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from pipeline.errors import HostError

CHUNK_BYTES = 2**20
BLOCK_BYTES = tarfile.BLOCKSIZE
END = b"\0" * (2 * BLOCK_BYTES)
# ValueError: a number in a header; the others: a file in the place of a folder, and the reverse
_DAMAGED = (
    tarfile.TarError,
    ValueError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)


def tar(folder: Path, files: Iterable[Path] | None = None) -> Iterator[bytes]:
    """Yield a tar of all files of a folder, or of these, below the folder's name. Equal files give
    equal bytes.
    """
    for file, header in _members(folder, files):
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


def untar(packed: IO[bytes], folder: Path) -> None:
    """Extract a tar's files below `folder`. HostError for links, devices, paths outside and a
    damaged archive. (Python has a filter for this from 3.11.4 on; Debian 12 has 3.11.2.)
    """
    try:
        with tarfile.open(fileobj=packed, mode="r:") as archive:
            for member in archive:
                _extract(archive, member, folder)
    except _DAMAGED as error:
        raise HostError(
            f"the archive is damaged: {error}", "report this to the operator of the service"
        ) from error


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    path = PurePosixPath(member.name)
    content = (
        archive.extractfile(member)
        if member.isreg() and not path.is_absolute() and ".." not in path.parts
        else None
    )
    if content is not None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with content, (folder / path).open("wb") as file:
            shutil.copyfileobj(content, file)
    elif not member.isdir():
        raise HostError(
            f"the archive holds '{member.name}', expected a file inside its folder",
            "report this to the operator of the service",
        )


def _members(folder: Path, files: Iterable[Path] | None = None) -> Iterator[tuple[Path, bytes]]:
    chosen = folder.rglob("*") if files is None else files
    for file in sorted(path for path in chosen if path.is_file()):
        header = tarfile.TarInfo(str(file.relative_to(folder.parent)))
        header.size = file.stat().st_size
        yield file, header.tobuf(tarfile.PAX_FORMAT)
