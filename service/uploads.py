"""What clients send: multipart bodies streamed to files, and archives unpacked, both under limits and never through /tmp.

Nothing is trusted: names are ours, sizes are counted as they arrive, archive members are checked before each is written.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from service.errors import TooLarge, Unprocessable

PARTS = ("model", "plan", "calibration", "selection", "validation")
MOST_MEMBERS = 10_000  # of an archive; each costs a file
DEEPEST = 16  # folders in folders
CHUNK_BYTES = 2**20
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
FIELDS = f"send multipart/form-data with `model`, `plan` and, as far as there are any, {', '.join(f'`{name}`' for name in PARTS[2:])}"
DAMAGED = "the archive is damaged or cut short"


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that an upload may have."""

    upload_bytes: int  # all parts together
    plan_bytes: int
    unpacked_bytes: int  # all members of an archive together


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an upload, on the disk."""

    name: str  # one of PARTS
    path: Path
    sha256: str
    size: int
    filename: str  # what the client calls it; for messages and its suffix only


# -- multipart ---------------------------------------------------------------------------------------------------------


async def receive(stream: AsyncIterator[bytes], content_type: str, folder: Path, limits: Limits) -> dict[str, Part]:
    """Write each part to `folder`, which is made here and removed again if anything goes wrong, a client that hangs up included."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Unprocessable(f"a body of type '{content_type or 'none'}', expected multipart/form-data", FIELDS)
    folder.mkdir(parents=True)
    try:
        with _Receiver(folder, limits) as receiver:
            parser = MultipartParser(options[b"boundary"], receiver.callbacks())
            async for chunk in stream:
                parser.write(chunk)
            parser.finalize()
            return receiver.finished()
    except FormParserError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise Unprocessable(f"the body is no multipart/form-data: {error}", FIELDS) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _Receiver:
    """Takes the parser's calls; one part is open at a time."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._parts: dict[str, Part] = {}
        self._header: dict[str, bytes] = {}
        self._field = self._value = b""
        self._file: IO[bytes] | None = None
        self._name = self._filename = ""
        self._digest = hashlib.sha256()
        self._size = self._total = 0
        self._ended = False

    def __enter__(self) -> _Receiver:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def callbacks(self) -> Any:
        """What python_multipart calls, by its names."""
        taken: dict[str, Callable[..., None]] = {
            "on_part_begin": self._header.clear,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._open,
            "on_part_data": self._on_data,
            "on_part_end": self._close,
            "on_end": self._on_end,
        }
        return taken

    def finished(self) -> dict[str, Part]:
        """All parts; Unprocessable for a body that was cut short or lacks a model."""
        if not self._ended:
            raise Unprocessable("the upload ended before its last boundary", "send it again")
        if "model" not in self._parts:
            raise Unprocessable(f"no part `model`; got {', '.join(self._parts) or 'none'}", FIELDS)
        return self._parts

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._header[self._field.decode("latin-1").lower()] = self._value
        self._field = self._value = b""

    def _on_end(self) -> None:
        self._ended = True

    def _open(self) -> None:
        _, options = parse_options_header(self._header.get("content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name not in PARTS:
            raise Unprocessable(f"a part named '{name}' is not known", FIELDS)
        if name in self._parts:
            raise Unprocessable(f"two parts named '{name}'", FIELDS)
        self._name, self._filename = name, options.get(b"filename", b"").decode("utf-8", "replace")
        self._digest, self._size = hashlib.sha256(), 0
        self._file = (self._folder / name).open("wb")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        self._size += len(piece)
        self._total += len(piece)
        if self._total > self._limits.upload_bytes:
            raise TooLarge(f"an upload of more than {self._limits.upload_bytes} bytes", "send less, or have the service's limit raised")
        if self._name == "plan" and self._size > self._limits.plan_bytes:
            raise Unprocessable(f"a plan of more than {self._limits.plan_bytes} bytes", "a plan is a page of YAML; send data as parts of their own")
        assert self._file is not None
        self._digest.update(piece)
        self._file.write(piece)

    def _close(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        self._parts[self._name] = Part(self._name, self._folder / self._name, self._digest.hexdigest(), self._size, self._filename)


# -- archives ----------------------------------------------------------------------------------------------------------


def is_archive(filename: str) -> bool:
    return filename.lower().endswith(ARCHIVES)


def unpack(part: Part, folder: Path, limits: Limits) -> Path:
    """Unpack an ONNX model with its external data into `folder`, made here; the path of its one .onnx file.

    Unprocessable for members that lie outside, links, devices, two models, or more bytes than the limit, whatever the headers say.
    """
    folder.mkdir(parents=True)
    try:
        opened = _zip_members if zipfile.is_zipfile(part.path) else _tar_members
        left = limits.unpacked_bytes
        for number, (name, stream) in enumerate(opened(part.path)):
            if number >= MOST_MEMBERS:
                raise Unprocessable(f"an archive of more than {MOST_MEMBERS} files", "send a model with one file of external data")
            left -= _write(stream, _place(folder, name), left, limits.unpacked_bytes)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            raise  # of our disk
        raise Unprocessable(f"{DAMAGED}: {error}", "pack it again, as .zip, .tar or .tar.gz") from error
    models = sorted(folder.rglob("*.onnx"))
    if len(models) != 1:
        named = ", ".join(str(model.relative_to(folder)) for model in models) or "none"
        raise Unprocessable(f"an archive with {len(models)} .onnx files ({named}), expected one", "pack one model with its external data")
    return models[0]


def _zip_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            mode = member.external_attr >> 16
            if mode & 0o170000 not in (0, 0o100000, 0o040000):
                raise Unprocessable(f"'{member.filename}' in the archive is a link or a device", "pack files only")
            if not member.is_dir():
                with archive.open(member) as stream:
                    yield member.filename, stream


def _tar_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(path, "r|*") as archive:  # a stream: nothing is read ahead, nothing is kept
        for member in archive:
            if member.isdir():
                continue
            if not member.isreg():
                raise Unprocessable(f"'{member.name}' in the archive is a link or a device", "pack files only")
            stream = archive.extractfile(member)
            assert stream is not None  # it is a regular file
            yield member.name, stream


def _place(folder: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    plain = bool(parts) and not name.startswith("/") and not {"\\", "\0"} & set(name) and ".." not in parts
    if not plain or len(parts) > DEEPEST or any(len(part.encode()) > 255 for part in parts):
        raise Unprocessable(f"'{name[:200]}' in the archive lies outside of it, or is no plain name", "pack with relative paths")
    return folder.joinpath(*parts)


def _write(stream: IO[bytes], place: Path, left: int, limit: int) -> int:
    """Copy at most `left` bytes; how many there were."""
    place.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with place.open("xb") as file, _closing(stream):
        while chunk := stream.read(min(CHUNK_BYTES, left - written + 1)):
            written += len(chunk)
            if written > left:
                raise TooLarge(f"an archive that unpacks to more than {limit} bytes", "send less, or have the service's limit raised")
            file.write(chunk)
    return written


@contextmanager
def _closing(stream: IO[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        stream.close()
