"""Scan the bytes of a ModelInferRequest without parsing them.

Its fields follow one another, each with its length.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from service.grpc.grpc_service_pb2 import ModelInferRequest

MAX_FIELDS = 10_000  # that are scanned one by one
VARINT, LENGTH = 0, 2  # wire types of protobuf
FIXED = {1: 8, 5: 4}  # wire types of fixed length, with their bytes
_NUMBERS = {
    name: field.number for name, field in ModelInferRequest.DESCRIPTOR.fields_by_name.items()
}


def typed_bytes(data: bytes) -> int:
    """Count the bytes of the inputs, without raw bytes; all bytes if the scan fails."""
    try:
        return sum(
            end - begin for number, begin, end in _fields(data) if number == _NUMBERS["inputs"]
        )
    except (IndexError, KeyError):
        return len(data)


def without_tensors(data: bytes) -> ModelInferRequest:
    """Parse a request without its tensors; an empty message if that fails."""
    tensors = {_NUMBERS["inputs"], _NUMBERS["raw_input_contents"]}
    try:
        rest: ModelInferRequest = ModelInferRequest.FromString(
            b"".join(
                data[begin:end] for number, begin, end in _fields(data) if number not in tensors
            )
        )
    except (IndexError, KeyError, DecodeError):
        return ModelInferRequest()
    return rest


def _fields(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the number, begin and end of each field.

    IndexError or KeyError if this is no message, or if it has more than MAX_FIELDS fields.
    """
    at = 0
    for _ in range(MAX_FIELDS):
        if at == len(data):
            return
        begin = at
        tag, at = _varint(data, at)
        wire_type = tag & 7
        if wire_type == VARINT:
            _, at = _varint(data, at)
        elif wire_type == LENGTH:
            length, at = _varint(data, at)
            at += length
        else:
            at += FIXED[wire_type]
        yield tag >> 3, begin, at
    raise IndexError(at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the varint at an offset; return its value and the offset behind it."""
    value = 0
    for index in range(10):
        byte = data[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise IndexError(at)
