"""Scan the bytes of a ModelInferRequest without parsing them.

Its fields follow one another, each with its length.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from service.codecs.protobuf import fields
from service.grpc.grpc_service_pb2 import ModelInferRequest

_NUMBERS = {
    name: field.number for name, field in ModelInferRequest.DESCRIPTOR.fields_by_name.items()
}


def typed_bytes(data: bytes) -> int:
    """Count the bytes of the inputs, without raw bytes; all bytes if the scan fails."""
    try:
        return sum(
            field.end - field.begin
            for field in fields(data, 0, len(data))
            if field.number == _NUMBERS["inputs"]
        )
    except (IndexError, ValueError):
        return len(data)


def without_tensors(data: bytes) -> ModelInferRequest:
    """Parse a request without its tensors; an empty message if that fails."""
    tensors = {_NUMBERS["inputs"], _NUMBERS["raw_input_contents"]}
    try:
        rest: ModelInferRequest = ModelInferRequest.FromString(
            b"".join(
                data[field.begin : field.end]
                for field in fields(data, 0, len(data))
                if field.number not in tensors
            )
        )
    except (IndexError, ValueError, DecodeError):
        return ModelInferRequest()
    return rest
