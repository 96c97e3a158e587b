"""What can be told of a ModelInferRequest's bytes without parsing them: the parts of a message lie
one behind the other, each with its length.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from service.grpc.grpc_service_pb2 import ModelInferRequest

MAX_FIELDS = 10_000  # that are looked at one by one
VARINT, LENGTH, FIXED = 0, 2, {1: 8, 5: 4}  # protobuf's wire types, the fixed ones with their bytes
_NUMBERS = {
    name: field.number for name, field in ModelInferRequest.DESCRIPTOR.fields_by_name.items()
}


def typed_bytes(data: bytes) -> int:
    """How long the inputs are, besides raw bytes; all of it, if that cannot be told."""
    try:
        return sum(
            end - begin for number, begin, end in _fields(data) if number == _NUMBERS["inputs"]
        )
    except (IndexError, KeyError):
        return len(data)


def without_tensors(data: bytes) -> ModelInferRequest:
    """Who is asked, under which id; an empty message, if that cannot be told."""
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
    """Each part's number, and where it begins and ends. IndexError or KeyError if this is no
    message, or one of more than MAX_FIELDS parts.
    """
    at = 0
    for _ in range(MAX_FIELDS):
        if at == len(data):
            return
        begin = at
        tag, at = _varint(data, at)
        length, at = _varint(data, at) if tag & 7 in (VARINT, LENGTH) else (FIXED[tag & 7], at)
        at += length if tag & 7 != VARINT else 0
        yield tag >> 3, begin, at
    raise IndexError(at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where the next thing does."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise IndexError(at)
