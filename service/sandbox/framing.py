"""Messages between the server and its child processes, which run code or read bytes of strangers.

Job workers and helpers use streams of frames:

    8 bytes: length of the head | 8 bytes: length of the body | head, JSON | body, raw bytes

Model workers use packets (SOCK_SEQPACKET). The kernel keeps packets apart, and passes the
descriptors of shared memory with them. The tensors are in that memory, so a packet is one head.

A child trusts the server. The server trusts no child: it checks a length before it reads on, and
each head must be a message of the child's protocol. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from io import BufferedRWPair
from typing import Annotated, BinaryIO, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.core.frozen import Frozen
from pipeline.errors import CrucibleError

LENGTHS = struct.Struct("<QQ")
# for the longest: a batch of 1,000 tensors, or two texts of LONG_TEXT, because a character may take
# six bytes in JSON
MAX_HEAD_BYTES = 128 * 1024
LONG_TEXT = 8_000

LongText = Annotated[str, Field(max_length=LONG_TEXT)]
Parts = Sequence[bytes | memoryview]
M = TypeVar("M")


class BadMessage(Exception):
    """The other side violates the protocol."""


class Failed(Frozen):
    """The child's work ended with an error."""

    kind: Literal["failed"] = "failed"
    code: Annotated[str, Field(max_length=100, pattern=r"^[a-z_.]+$")]
    message: LongText
    next_step: LongText = ""


def failed_from_error(error: CrucibleError) -> Failed:
    """Convert an error. Texts that are too long are cut."""
    return Failed(code=error.code, message=cut(error.message), next_step=cut(error.next_step))


def cut(text: str, most: int = LONG_TEXT) -> str:
    """Cut a text to `most` characters, and replace what UTF-8 cannot encode (half of a surrogate
    pair, from a file's name).
    """
    return text[:most].encode("utf-8", "replace").decode()


def decode(messages: TypeAdapter[M], head: bytes) -> M:
    """Parse a head as one of `messages`. BadMessage if it is none."""
    _check_length(len(head), MAX_HEAD_BYTES)
    try:
        return messages.validate_json(head, strict=True)
    except ValidationError as error:
        raise BadMessage(f"not a message: {head[:100]!r} ({error.error_count()} errors)") from error


def frame(head: bytes, parts: Parts = ()) -> Parts:
    """Return the parts of a frame whose body is `parts`."""
    return (LENGTHS.pack(len(head), sum(map(len, parts))), head, *parts)


def read_frame(stream: BinaryIO | BufferedRWPair) -> tuple[bytes, bytes]:
    """Read a head and a body from the server. EOFError if the server is gone."""
    head_length, body_length = LENGTHS.unpack(_read_exactly(stream, LENGTHS.size))
    return _read_exactly(stream, head_length), _read_exactly(stream, body_length)


async def receive_frame(
    reader: asyncio.StreamReader, max_body_bytes: int = 0
) -> tuple[bytes, bytes]:
    """Receive a head and a body from a child. EOFError if the child is gone, BadMessage if one of
    them is too long.
    """
    try:
        head_length, body_length = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
        _check_length(head_length, MAX_HEAD_BYTES)
        _check_length(body_length, max_body_bytes)
        return await reader.readexactly(head_length), await reader.readexactly(body_length)
    except ConnectionError as error:
        raise EOFError(str(error)) from error


def _read_exactly(stream: BinaryIO | BufferedRWPair, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError("the server has closed the connection")
    return data


def _check_length(length: int, most: int) -> None:
    if length > most:
        raise BadMessage(f"expected at most {most} bytes, got {length}")
