"""Read .npz files by rows, with bounded memory. Stored and deflated arrays, never pickled ones."""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError

ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,
    UnicodeDecodeError,
)
"""Errors of Python's archive reader. RuntimeError: encrypted, or unknown compression.
UnicodeDecodeError: a name that is not the UTF-8 it claims to be.
"""

_MALFORMED = (
    TypeError,
    KeyError,
    SyntaxError,
    RecursionError,
    MemoryError,
    OverflowError,
    tokenize.TokenError,
)
"""Errors, besides ValueError, of numpy's header reader, which parses headers as Python."""


@dataclass(frozen=True, slots=True)
class Member:
    """One array of an .npz file."""

    name: str
    dtype: str  # numpy's byte-exact form: "<f4"
    shape: tuple[int, ...]  # [samples, ...]
    whole: bool = False  # each row is a whole input, without the model's batch axis

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Header:
    """Dtype, shape and order of an array, without its values."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    by_columns: bool = False  # Fortran order


def read_headers(path: Path) -> dict[str, Header]:
    """Read dtype and shape of every array of a file.

    DataError for a missing file, or for one that numpy.savez has not written.
    """
    if not path.is_file():
        raise DataError(
            f"no data file at '{path}'", "paths in a plan are relative to the plan's own folder"
        )
    with _archive(path) as archive:
        return {
            info.filename.removesuffix(".npy"): _header(path, archive, info.filename)
            for info in archive.infolist()
        }


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a .npz file. Errors in its bytes become a DataError."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except ZIP_ERRORS as error:
        raise DataError(
            f"'{path}' is not a readable .npz file: {error}",
            "write it with numpy.savez(path, input_name=array)",
        ) from error


def _header(path: Path, archive: zipfile.ZipFile, filename: str) -> Header:
    if not filename.endswith(".npy"):
        raise DataError(
            f"'{path}': '{filename}' is not a numpy array: expected a name that ends in .npy",
            "write the file with numpy.savez",
        )
    with archive.open(filename) as stream:
        try:
            header = header_from_npy(stream)
        except ValueError as error:
            raise DataError(
                f"'{path}': '{filename}' is not a numpy array: {error}",
                "write the file with numpy.savez",
            ) from error
    if header.dtype.hasobject:
        raise DataError(
            f"'{path}': '{filename}' holds pickled Python objects, which are never loaded",
            "save plain numeric arrays",
        )
    if header.by_columns and len(header.shape) > 1:
        raise DataError(
            f"'{path}': '{filename}' is stored by columns, so that its rows cannot be streamed",
            "save np.ascontiguousarray(array)",
        )
    return header


def header_from_npy(stream: IO[bytes]) -> Header:
    """Read a .npy file's header and leave the stream at the first value.

    ValueError for anything but versions 1 and 2 (3 is for structured arrays).
    """
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, by_columns, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"unsupported .npy version {version}")
    except _MALFORMED as error:
        raise ValueError(f"a header that numpy cannot read: {error}") from error
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {list(shape)} has a negative size")
    return Header(dtype, shape, by_columns)


@contextmanager
def row_reader(
    path: Path, members: Sequence[Member]
) -> Iterator[Callable[[int], dict[str, NDArray[np.generic]]]]:
    """Return a function that reads the next `count` rows of every array, as writable copies."""
    with _archive(path) as archive, ExitStack() as stack:
        streams = [stack.enter_context(archive.open(f"{member.name}.npy")) for member in members]
        for stream in streams:
            header_from_npy(stream)

        def read(count: int) -> dict[str, NDArray[np.generic]]:
            return {
                member.name: _rows(stream, member, count)
                for member, stream in zip(members, streams, strict=True)
            }

        yield read


@contextmanager
def feed_reader(
    path: Path,
) -> Iterator[Callable[[Sequence[Member]], tuple[NDArray[np.generic], ...]]]:
    """Return a function that reads the only row of each of these arrays, as writable copies."""
    with _archive(path) as archive:

        def read(members: Sequence[Member]) -> tuple[NDArray[np.generic], ...]:
            return tuple(_only_row(archive, member) for member in members)

        yield read


def _only_row(archive: zipfile.ZipFile, member: Member) -> NDArray[np.generic]:
    with archive.open(f"{member.name}.npy") as stream:
        header_from_npy(stream)
        return _rows(stream, member, 1)


def _rows(stream: IO[bytes], member: Member, count: int) -> NDArray[np.generic]:
    buffer = bytearray(stream.read(count * member.row_bytes))
    if len(buffer) < count * member.row_bytes:
        raise EOFError(f"'{member.name}' ends before its last row")
    return np.ndarray(
        member.shape[1:] if member.whole else (count, *member.shape[1:]),
        np.dtype(member.dtype),
        buffer,
    )
