"""Uploads: multipart bodies are streamed to files, and archives are unpacked. Both have limits and
never use /tmp.

No input is trusted: file names are ours, sizes are counted as bytes arrive, and each archive member
is checked before it is written.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import io
import math
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from service.errors import TooLarge, Unprocessable

TOKENIZER = "tokenizer"  # of an encoder of texts
PARTS = (
    "model",
    "plan",
    "calibration",
    "selection",
    "validation",
    "selection_labels",
    "validation_labels",
    TOKENIZER,
)
MAX_MEMBERS = 10_000  # of an archive; each costs a file
MAX_DIRECTORY_BYTES = 4 * 2**20  # of a .zip: about 400 bytes for each of MAX_MEMBERS
# of a .tar between two files: names of up to 4096 bytes, and read-ahead
MAX_HEADER_BYTES = 64 * 2**10
MAX_DEPTH = 16  # levels of folders
CHUNK_BYTES = 2**20
TOKEN = "csrf"  # field of a browser's form
MAX_FIELD_BYTES = 1024
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
FIELDS = (
    "send multipart/form-data with `model`, `plan` and, as far as there are any,"
    f" {', '.join(f'`{name}`' for name in PARTS[2:])}"
)
GZIP = b"\x1f\x8b"
# errors that a damaged archive causes; all others come from our disk
ARCHIVE_ERRORS = (
    None,
    errno.EEXIST,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
)
DAMAGED = "the archive is damaged or cut short"


@dataclass(frozen=True, slots=True)
class Limits:
    """Size limits of an upload."""

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
    filename: str  # the client's name, used only for messages and its suffix


# -- multipart ---------------------------------------------------------------


CheckToken = Callable[[str], None]
"""Forbidden unless the text is the token of a browser's session."""


async def receive(
    stream: AsyncIterator[bytes],
    content_type: str,
    folder: Path,
    limits: Limits,
    check_token: CheckToken | None = None,
) -> dict[str, Part]:
    """Write each part to the new folder `folder`. It is removed again if anything fails, even if
    the client disconnects.

    With `check_token`, the body is the form of a browser: its token comes before its files, and a
    file that was not chosen has an empty name.

    A thread writes to the disk, which may be slow, so that other requests are answered meanwhile.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise Unprocessable(
            f"a body of type '{content_type or 'none'}', expected multipart/form-data", FIELDS
        )
    if not options.get(b"boundary"):
        raise Unprocessable(
            "a Content-Type of multipart/form-data without its boundary",
            "let the HTTP client set the header, as curl -F does",
        )
    folder.mkdir(parents=True)
    try:
        with _Receiver(folder, limits, check_token) as receiver:
            parser = MultipartParser(options[b"boundary"], receiver.callbacks())
            async for chunk in stream:
                await asyncio.to_thread(parser.write, chunk)
            parser.finalize()
            return receiver.parts()
    except BaseException as error:
        await asyncio.to_thread(shutil.rmtree, folder, True)
        if isinstance(error, FormParserError):
            raise Unprocessable(f"the body is no multipart/form-data: {error}", FIELDS) from error
        raise


class _Receiver:
    """Handles the multipart parser's callbacks. One part is open at a time."""

    def __init__(self, folder: Path, limits: Limits, check_token: CheckToken | None) -> None:
        self._folder, self._limits, self._check_token = folder, limits, check_token
        self._is_checked = check_token is None
        self._field_text: bytes | None = None  # of a field, which is no part
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
        """Return the callbacks by python_multipart's names."""
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._header.clear,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._open,
            "on_part_data": self._on_data,
            "on_part_end": self._close,
            "on_end": self._on_end,
        }
        return callbacks

    def parts(self) -> dict[str, Part]:
        """Return all parts. Unprocessable if the body was cut short or has no model."""
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
        unchosen = name in PARTS and options.get(b"filename") == b""
        if self._check_token is not None and (name == TOKEN or unchosen):
            self._name, self._field_text = name, b""
            return
        if name not in PARTS:
            raise Unprocessable(f"a part named '{name}' is not known", FIELDS)
        if name in self._parts:
            raise Unprocessable(f"two parts named '{name}'", FIELDS)
        self._name, self._filename = name, options.get(b"filename", b"").decode("utf-8", "replace")
        if name != "plan" and not self._filename:
            raise Unprocessable(
                f"the part '{name}' has no file name, expected a file",
                f"curl sends one with -F {name}=@FILE",
            )
        if not self._is_checked:
            self._check("")
        self._digest, self._size = hashlib.sha256(), 0
        self._file = (self._folder / name).open("wb")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._field_text is not None:
            self._field_text += piece
            if len(self._field_text) > MAX_FIELD_BYTES:
                raise Unprocessable(
                    f"the field '{self._name}' has more than {MAX_FIELD_BYTES} bytes", FIELDS
                )
            return
        self._size += len(piece)
        self._total += len(piece)
        if self._total > self._limits.upload_bytes:
            raise TooLarge(
                f"an upload of more than {self._limits.upload_bytes} bytes",
                "send less, or ask the operator to raise the limit",
            )
        if self._name == "plan" and self._size > self._limits.plan_bytes:
            raise Unprocessable(
                f"a plan of more than {self._limits.plan_bytes} bytes",
                "a plan is a page of YAML; send data as parts of their own",
            )
        assert self._file is not None
        self._digest.update(piece)
        self._file.write(piece)

    def _check(self, token: str) -> None:
        assert self._check_token is not None
        self._check_token(token)
        self._is_checked = True

    def _close(self) -> None:
        if self._field_text is not None:
            if self._name == TOKEN:
                self._check(self._field_text.decode("utf-8", "replace"))
            self._field_text = None
            return
        assert self._file is not None
        self._file.close()
        self._file = None
        self._parts[self._name] = Part(
            self._name,
            self._folder / self._name,
            self._digest.hexdigest(),
            self._size,
            self._filename,
        )


# -- archives ----------------------------------------------------------------


def is_archive(filename: str) -> bool:
    return filename.lower().endswith(ARCHIVES)


def unpack(part: Part, folder: Path, limits: Limits) -> Path:
    """Unpack an ONNX model with its external data into the new folder `folder`. Returns the path of
    its only .onnx file. Errors as for `extract`.
    """
    extract(part, folder, limits)
    models = sorted(folder.rglob("*.onnx"))
    if len(models) != 1:
        names = ", ".join(str(model.relative_to(folder)) for model in models) or "none"
        raise Unprocessable(
            f"an archive with {len(models)} .onnx files ({names}), expected one",
            "pack one model with its external data; the plan of a language model begins with"
            " `language_model: {}`, and comes with it to POST /compile",
        )
    return models[0]


def extract(part: Part, folder: Path, limits: Limits) -> None:
    """Unpack an archive into the new folder `folder`.

    Unprocessable for members outside the folder, links, devices, or headers that would fill the
    memory; TooLarge for more bytes than the limit, whatever the headers claim.
    """
    folder.mkdir(parents=True)
    try:
        members = _zip_members if zipfile.is_zipfile(part.path) else _tar_members
        remaining_bytes = limits.unpacked_bytes
        for number, (name, stream) in enumerate(members(part.path)):
            if number >= MAX_MEMBERS:
                raise Unprocessable(
                    f"an archive of more than {MAX_MEMBERS} files",
                    "send fewer files, such as one file of external data",
                )
            if stream is not None:
                remaining_bytes -= _write(
                    stream, _member_path(folder, name), remaining_bytes, limits.unpacked_bytes
                )
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        if isinstance(error, OSError) and error.errno not in ARCHIVE_ERRORS:
            raise  # from our disk
        raise Unprocessable(
            f"{DAMAGED}: {error}", "pack it again, as .zip, .tar or .tar.gz"
        ) from error


Members = Iterator[tuple[str, IO[bytes] | None]]
"""Name and content of each member; content None: a folder."""


class _Bounded(io.FileIO):
    """A .zip file with a limit on its directory, which zipfile reads at once into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise Unprocessable(
                f"a .zip whose directory has {size} bytes, expected at most {MAX_DIRECTORY_BYTES}",
                "pack fewer files",
            )
        return super().read(size)


def _zip_members(path: Path) -> Members:
    with _Bounded(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            mode = member.external_attr >> 16
            if mode & 0o170000 not in (0, 0o100000, 0o040000):
                raise Unprocessable(
                    f"'{member.filename}' in the archive is a link or a device", "pack files only"
                )
            # the windows of other methods may take gigabytes
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise Unprocessable(
                    f"'{member.filename}' is compressed by a method other than deflate",
                    "pack it again, with `zip`",
                )
            if member.is_dir():
                yield member.filename, None
            else:
                with archive.open(member) as stream:
                    yield member.filename, stream


class _Metered(io.RawIOBase):
    """A .tar stream with a limit on headers: one header may claim gigabytes or an endless list of
    holes, which tarfile keeps in memory.
    """

    def __init__(self, stream: IO[bytes] | gzip.GzipFile) -> None:
        self._stream = stream
        self.header_bytes: float = MAX_HEADER_BYTES

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self.header_bytes -= len(data)
        if self.header_bytes < 0:
            raise Unprocessable(
                f"a .tar with a header of more than {MAX_HEADER_BYTES} bytes",
                "pack plain files with short names",
            )
        return data


def _tar_members(path: Path) -> Members:
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        metered = _Metered(gzip.GzipFile(fileobj=file) if packed else file)
        with tarfile.open(fileobj=metered, mode="r|") as archive:  # r|: a stream, no seeking
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it keeps all members
                if not (member.isreg() or member.isdir()):
                    raise Unprocessable(
                        f"'{member.name}' in the archive is a link or a device", "pack files only"
                    )
                metered.header_bytes = math.inf
                yield member.name, archive.extractfile(member)
                metered.header_bytes = MAX_HEADER_BYTES


def _member_path(folder: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    plain = (
        bool(parts)
        and not name.startswith("/")
        and not {"\\", "\0"} & set(name)
        and ".." not in parts
    )
    if not plain or len(parts) > MAX_DEPTH or any(len(part.encode()) > 255 for part in parts):
        raise Unprocessable(
            f"'{name[:200]}' in the archive lies outside of it, or is not a plain name",
            "pack with relative paths",
        )
    return folder.joinpath(*parts)


def _write(stream: IO[bytes], path: Path, remaining_bytes: int, limit: int) -> int:
    """Copy at most `remaining_bytes` to a new file. Returns the number of bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with path.open("xb") as file, _closing(stream):
        while chunk := stream.read(min(CHUNK_BYTES, remaining_bytes - written + 1)):
            written += len(chunk)
            if not path.parent.is_dir():  # removed after a disconnect or at shutdown
                raise Unprocessable("the upload was aborted", "send it again")
            if written > remaining_bytes:
                raise TooLarge(
                    f"an archive that unpacks to more than {limit} bytes",
                    "send less, or ask the operator to raise the limit",
                )
            file.write(chunk)
    return written


@contextmanager
def _closing(stream: IO[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        stream.close()
