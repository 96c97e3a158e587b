"""A scan of the fields of a protobuf message, which does not read their contents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap

MAX_FIELDS = 10_000  # that are scanned one by one
VARINT, LENGTH = 0, 2  # wire types
FIXED = {1: 8, 5: 4}  # wire types of fixed length, with their bytes


@dataclass(frozen=True, slots=True)
class Field:
    """Where a field is in its message. `end` may lie beyond the end of the bytes."""

    number: int
    wire_type: int
    begin: int
    content: int  # where the content begins, behind the tag and the length
    end: int


def fields(data: bytes | mmap, begin: int, end: int, most: int = MAX_FIELDS) -> Iterator[Field]:
    """Yield the fields of the message that lies between two offsets.

    IndexError if it ends within a field. ValueError if this is no message, or if it has more than
    `most` fields.
    """
    at = begin
    for _ in range(most):
        if at == end:
            return
        if at > end:
            raise IndexError(at)
        start = at
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        length = FIXED.get(wire_type, 0)
        if number == 0 or wire_type not in (VARINT, LENGTH, *FIXED):
            raise ValueError(f"no field begins with the tag {tag}")
        if wire_type == LENGTH:
            length, at = _varint(data, at)
        content = at
        if wire_type == VARINT:
            _, at = _varint(data, at)
        at += length
        yield Field(number, wire_type, start, content, at)
    raise ValueError(f"more than {most} fields")


def _varint(data: bytes | mmap, at: int) -> tuple[int, int]:
    """Read the varint at an offset; return its value and the offset behind it."""
    value = 0
    for index in range(10):
        byte = data[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise ValueError(f"a varint of more than 10 bytes at {at}")
