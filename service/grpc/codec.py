"""Convert requests and answers from and to the protocol's messages.

Raw inputs are read-only views of the received bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from service.auth import Caller
from service.codecs.oip import REFUSED, timing_parameters
from service.codecs.oip_shared_memory import REGION, parameters_of, place_from, shared_input
from service.codecs.tensors import (
    Array,
    array_from,
    datatype_of,
    dtype_of,
    dtype_of_datatype,
    shape_from,
)
from service.errors import Unprocessable
from service.grpc.grpc_service_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
)
from service.inference import InferAnswer, InferRequest
from service.regions import Place, SharedInput

_Kind = type[np.generic]
ParsedMessage = TypeVar("ParsedMessage", bound=Message)
CONTENTS: Mapping[str, tuple[str, _Kind]] = {
    "BOOL": ("bool_contents", np.bool_),
    **dict.fromkeys(("INT8", "INT16", "INT32"), ("int_contents", np.int32)),
    "INT64": ("int64_contents", np.int64),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), ("uint_contents", np.uint32)),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}
"""The field of InferTensorContents for each datatype, and the numpy type of its values.

FP16 and BF16 have no field: they come as raw bytes only.
"""

_Input = ModelInferRequest.InferInputTensor
_Parameters = Mapping[str, InferParameter]


def request_from(
    message: ModelInferRequest, caller: Caller, deadline_s: float | None
) -> InferRequest:
    """Convert a message to a request; Unprocessable if it is invalid.

    `deadline_s` is the time until the client's deadline.
    """
    _check_parameters(message.parameters, "the request")
    for output in message.outputs:
        _check_parameters(output.parameters, output.name)
    times = [time for time in (deadline_s, _timeout_s(message.parameters)) if time is not None]
    return InferRequest(
        caller=caller,
        model=message.model_name or None,
        inputs=inputs_from(message),
        version=version_from(message.model_version),
        outputs=tuple(output.name for output in message.outputs),
        timeout_s=min(times, default=None),
        id=message.id,
    )


def parsed(kind: type[ParsedMessage], data: bytes) -> ParsedMessage:
    """Parse bytes as this message; Unprocessable if that fails."""
    try:
        message: ParsedMessage = kind.FromString(data)
    except DecodeError as error:
        raise Unprocessable(
            f"this is no {kind.DESCRIPTOR.full_name}: {error}",
            "send a message that the protocol defines",
        ) from None
    return message


def message_from(answer: InferAnswer, places: Mapping[str, Place]) -> ModelInferResponse:
    """Convert an answer: the outputs as raw bytes, the times as parameters.

    Outputs with a place were written there, and have no raw bytes.
    """
    return ModelInferResponse(
        model_name=answer.model,
        model_version=str(answer.version),
        id=answer.id,
        parameters={name: _parameter(value) for name, value in timing_parameters(answer).items()},
        outputs=[
            ModelInferResponse.InferOutputTensor(
                name=name,
                datatype=datatype_of(array.dtype.name),
                shape=array.shape,
                parameters=_place_parameters(places.get(name), array.nbytes),
            )
            for name, array in answer.outputs.items()
        ],
        raw_output_contents=[
            b"" if name in places else array.tobytes() for name, array in answer.outputs.items()
        ],
    )


def version_from(text: str) -> int | None:
    """Parse a version number; None for an empty text: the current version."""
    if text and not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) > 0):
        raise Unprocessable(
            f"expected a version to be a whole number from 1, got '{text[:40]}'",
            "leave it out for the current one",
        )
    return int(text) if text else None


def inputs_from(message: ModelInferRequest) -> dict[str, Array]:
    """Read the tensors of a request that it holds itself, by name."""
    inputs = [tensor for tensor in message.inputs if REGION not in tensor.parameters]
    raw = message.raw_input_contents
    if raw and len(raw) != len(inputs):
        raise Unprocessable(
            f"expected raw_input_contents of all {len(inputs)} inputs, got {len(raw)}",
            "send one for each input, in their order",
        )
    arrays: dict[str, Array] = {}
    for index, tensor in enumerate(inputs):
        name = tensor.name
        _check_parameters(tensor.parameters, name)
        if name in arrays:
            raise Unprocessable(f"input '{name}' comes twice", "send each input once")
        arrays[name] = _array_from_raw(tensor, raw[index]) if raw else _array_from_contents(tensor)
    return arrays


def shared_inputs_from(message: ModelInferRequest) -> dict[str, SharedInput]:
    """The inputs in shared memory, by name."""
    shared: dict[str, SharedInput] = {}
    names = {tensor.name for tensor in message.inputs if REGION not in tensor.parameters}
    for tensor in message.inputs:
        name = tensor.name
        place = _place_from(name, tensor.parameters)
        if place is None:
            continue
        _check_parameters(tensor.parameters, name)
        if name in names or name in shared:
            raise Unprocessable(f"input '{name}' comes twice", "send each input once")
        if _filled(tensor.contents):
            raise Unprocessable(
                f"input '{name}' comes in `contents` and in shared memory", "send it in one of them"
            )
        dtype = dtype_of_datatype(name, tensor.datatype)
        shape = shape_from(name, tuple(tensor.shape))
        shared[name] = shared_input(name, dtype, shape, place)
    return shared


def places_from(message: ModelInferRequest) -> dict[str, Place]:
    """The places of the outputs that belong into shared memory, by name."""
    places = (
        (output.name, _place_from(output.name, output.parameters)) for output in message.outputs
    )
    return {name: place for name, place in places if place is not None}


def _place_from(name: str, parameters: _Parameters) -> Place | None:
    return place_from(name, {key: _value(parameters[key]) for key in parameters})


def _place_parameters(place: Place | None, byte_size: int) -> dict[str, InferParameter]:
    if place is None:
        return {}
    parameters = parameters_of(replace(place, byte_size=byte_size))
    return {name: _parameter(value) for name, value in parameters.items()}


def _array_from_raw(tensor: _Input, buffer: bytes) -> Array:
    if _filled(tensor.contents):
        raise Unprocessable(
            f"input '{tensor.name}' comes in `contents` and in raw_input_contents",
            "send it in one of them",
        )
    dtype = dtype_of_datatype(tensor.name, tensor.datatype)
    return array_from(tensor.name, dtype, shape_from(tensor.name, tuple(tensor.shape)), buffer)


def _array_from_contents(tensor: _Input) -> Array:
    name = tensor.name
    dtype = dtype_of_datatype(name, tensor.datatype)
    shape = shape_from(name, tuple(tensor.shape))
    if tensor.datatype not in CONTENTS:
        raise Unprocessable(
            f"input '{name}': `contents` has no field for {tensor.datatype}",
            "send it in raw_input_contents",
        )
    field, kind = CONTENTS[tensor.datatype]
    other_fields = [other for other in _filled(tensor.contents) if other != field]
    if other_fields:
        raise Unprocessable(
            f"input '{name}' is {tensor.datatype}: expected its values in {field}, got some in"
            f" {', '.join(other_fields)}",
            f"use {field}",
        )
    values = getattr(tensor.contents, field)
    if len(values) != math.prod(shape):
        raise Unprocessable(
            f"input '{name}': shape {list(shape)} has {math.prod(shape)} values, got {len(values)}",
            "send exactly as many",
        )
    wide = np.array(values, kind)  # narrow integers are sent as 32 bits
    array: Array = wide.astype(dtype_of(name, dtype), copy=False)
    if array.dtype != wide.dtype and (array != wide).any():
        raise Unprocessable(
            f"input '{name}' is {tensor.datatype}: a value is out of its range",
            "send values within the range of the datatype",
        )
    return array.reshape(shape)


def _filled(contents: InferTensorContents) -> list[str]:
    return [field.name for field, _ in contents.ListFields()]


def _check_parameters(parameters: _Parameters, where: str) -> None:
    """Unprocessable if a parameter would change the result, and this server does not have it."""
    refused = [name for name in REFUSED if name in parameters and _value(parameters[name])]
    if refused:
        raise Unprocessable(
            f"{where}: this server has no `{refused[0]}`",
            "ServerMetadata lists the extensions of this server",
        )


def _timeout_s(parameters: _Parameters) -> float | None:
    """Convert `timeout` from microseconds; 0 means no time-out."""
    value = _value(parameters["timeout"]) if "timeout" in parameters else None
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise Unprocessable(
            f"expected `timeout` to be a number of microseconds, got {value!r:.40}",
            "leave it out for the time-out of the model",
        )
    return value / 1e6 or None


def _value(parameter: InferParameter) -> object:
    chosen = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, chosen) if chosen else None


def _parameter(value: float | int | str) -> InferParameter:
    match value:
        case str():
            return InferParameter(string_param=value)
        case int():
            return InferParameter(int64_param=value)
        case _:
            return InferParameter(double_param=value)
