"""Inference with common formats: JSON, raw bytes, numpy's files, images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from pipeline.core.shapes import TensorSpec
from service.codecs.images import FORMATS
from service.codecs.native_json import PlainRequest, encode_json, parse_json, timeout_from
from service.codecs.npy import array_from_npy, npy_from_array, npz_from_arrays
from service.codecs.oip import parse_request
from service.codecs.tensors import array_from, bytes_of, shape_from, size_of
from service.context import Service
from service.errors import Unprocessable
from service.http.routers.dependencies import REFUSALS, caller_of, service_of
from service.http.routers.inference_io import (
    encode_in_helper,
    headers_of,
    infer_while_connected,
    is_long,
    read_body,
    respond,
)
from service.http.routers.inference_route import InferenceRoute
from service.http.routers.reports import preferred
from service.inference import InferAnswer, InferRequest, Served
from service.offload.pool import HELP_FROM_BYTES

router = APIRouter(tags=["inference"], responses=REFUSALS, route_class=InferenceRoute)

JSON, RAW, NPY, NPZ = (
    "application/json",
    "application/octet-stream",
    "application/x-npy",
    "application/x-npz",
)
REQUEST_TYPES = (JSON, RAW, NPY, NPZ, *FORMATS)
ANSWER_TYPES = (JSON, RAW, NPY, NPZ)

_EXAMPLE = {"inputs": {"x": [[1.0, 2.0, 3.0, 4.0]]}}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_JSON_BODY = {
    "schema": {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "inputs": {
                "type": "object",
                "description": "Nested lists of numbers by input name, with the batch axis",
            },
            "outputs": {"type": "array", "items": {"type": "string"}},
            "timeout_s": {"type": "number", "exclusiveMinimum": 0},
        },
    },
    "example": _EXAMPLE,
}
_ANSWER = {
    "type": "object",
    "required": ["model", "version", "device", "outputs", "timing"],
    "examples": [
        {
            "model": "digits",
            "version": 1,
            "device": "cpu",
            "outputs": {"scores": [[0.1, 0.9]]},
            "timing": {
                "queue_ms": 0.02,
                "copy_in_ms": 0.01,
                "compute_ms": 1.9,
                "copy_out_ms": 0.01,
                "batch_size": 1,
            },
        }
    ],
}
OPENAPI: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {
            "description": (
                "The outputs in the form of Accept, or in the request's form without Accept."
                " Server-Timing contains the timing"
            ),
            "content": {JSON: {"schema": _ANSWER}, **dict.fromkeys((RAW, NPY, NPZ), _BYTES)},
        }
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {JSON: _JSON_BODY, **dict.fromkeys(REQUEST_TYPES[1:], _BYTES)},
        }
    },
}

Outputs = Annotated[str, Query(description="Names of outputs, separated by commas. Default: all")]
Shape = Annotated[
    str,
    Query(description="Shape of raw bytes if their number does not imply it, such as 1,3,224,224"),
]
Version = Annotated[int | None, Query(ge=1, le=2**53, description="Default: the current version")]
Timeout = Annotated[float | None, Query(description="Seconds. Default: the model's own limit")]


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """The options in the request's query."""

    outputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    version: int | None
    timeout_s: float | None


@router.post("/infer", **OPENAPI)
async def infer(
    request: Request,
    outputs: Outputs = "",
    shape: Shape = "",
    version: Version = None,
    timeout_s: Timeout = None,
) -> Response:
    """Run inference on the only deployed model. 409 with the list of names if several are
    deployed.
    """
    return await _answer(request, None, _query_options(outputs, shape, version, timeout_s))


@router.post("/models/{name}/infer", **OPENAPI)
async def infer_model(
    name: str,
    request: Request,
    outputs: Outputs = "",
    shape: Shape = "",
    version: Version = None,
    timeout_s: Timeout = None,
) -> Response:
    """Run inference on this model, from JSON, raw bytes of its only input, .npy, .npz, or an image
    if the model describes how an image becomes its input.
    """
    return await _answer(request, name, _query_options(outputs, shape, version, timeout_s))


async def _answer(request: Request, model: str | None, options: QueryOptions) -> Response:
    """Run inference. `model` None: the only deployed model."""
    caller, service = caller_of(request), service_of(request)
    caller.require("infer")
    served = service.serving.find(caller, model, options.version)
    kind = request.headers.get("content-type", RAW).partition(";")[0].strip().lower() or RAW
    body = await read_body(request, service.settings.max_infer_bytes)
    content = await parse_body(service, served, kind, body, options.shape)
    inference = InferRequest(
        caller,
        served.model,
        content.inputs,
        options.version,
        options.outputs or content.outputs,
        options.timeout_s or content.timeout_s,
    )
    result = await infer_while_connected(service, inference, request.receive)
    form = _form(request.headers.get("accept", ""), kind, len(result.outputs))
    parts, headers = await _encoded(service, result, form)
    return await respond(request, parts, form, headers_of(result) | headers)


def _query_options(
    outputs: str, shape: str, version: int | None, timeout_s: float | None
) -> QueryOptions:
    sizes = [
        int(size) if size.isascii() and size.isdecimal() and len(size) < 16 else size
        for size in shape.split(",")
    ]
    return QueryOptions(
        tuple(filter(None, outputs.split(","))),
        shape_from("shape", sizes) if shape else None,
        version,
        timeout_from(timeout_s),
    )


async def parse_body(
    service: Service,
    served: Served,
    kind: str,
    body: bytes | memoryview,
    shape: tuple[int, ...] | None = None,
) -> PlainRequest:
    """Decode a body to tensors, by its Content-Type. `shape` is that of raw bytes, if given."""
    dtypes = {spec.name: spec.dtype for spec in served.inputs}
    if kind == RAW:
        spec = _only(served, "raw bytes")
        sizes = shape or shape_of(spec, len(body))
        return PlainRequest({spec.name: array_from(spec.name, spec.dtype, sizes, body)})
    if kind == NPY:
        spec = _only(served, "a .npy file")
        return PlainRequest({spec.name: array_from_npy(body, spec.name, served.inputs)})
    if kind == JSON and len(body) <= HELP_FROM_BYTES:
        return parse_json(body, dtypes)
    if kind == JSON:
        return await _decoded_by_helper(service, served, "decode_json", body, dtypes=dtypes)
    if kind == NPZ:
        return await _decoded_by_helper(
            service, served, "decode_npz", body, limit=service.settings.max_infer_bytes
        )
    if kind in FORMATS:
        if served.image is None:
            raise Unprocessable(
                f"model '{served.model}' does not say how an image becomes its input",
                f"send one of {', '.join(ANSWER_TYPES)}",
            )
        dtype = next(
            (spec.dtype for spec in served.inputs if spec.name == served.image.input), "float32"
        )
        return await _decoded_by_helper(
            service,
            served,
            "decode_image",
            body,
            recipe=served.image.model_dump(mode="json"),
            dtype=dtype,
        )
    raise Unprocessable(
        f"Content-Type '{kind[:80]}'", f"expected one of {', '.join(REQUEST_TYPES)}"
    )


async def _decoded_by_helper(
    service: Service, served: Served, work: str, body: bytes | memoryview, **arguments: object
) -> PlainRequest:
    header_length, binary = await service.helpers.ask(work, [body], **arguments)
    content = parse_request(binary, header_length, served.inputs)
    return PlainRequest(content.inputs, content.outputs, content.timeout_s)


def _only(served: Served, what: str) -> TensorSpec:
    if len(served.inputs) != 1:
        names = ", ".join(spec.name for spec in served.inputs)
        raise Unprocessable(
            f"{what} can be one input, model '{served.model}' has {len(served.inputs)}: {names}",
            f"send {NPZ} or {JSON}",
        )
    return served.inputs[0]


def shape_of(spec: TensorSpec, length: int) -> tuple[int, ...]:
    """Derive a tensor's shape from its size of `length` bytes. Unprocessable if that is
    ambiguous.
    """
    free = [axis for axis, size in enumerate(spec.shape) if isinstance(size, str)]
    if len(free) > 1:
        raise Unprocessable(
            f"the shape of '{spec.name}', {list(spec.shape)}, does not follow from {length} bytes",
            "give the shape: ?shape=1,3,224,224",
        )
    fixed = [size for size in spec.shape if isinstance(size, int)]
    row = size_of(spec.dtype, fixed)
    if not free:
        return tuple(fixed)
    if not row or length % row:
        raise Unprocessable(
            f"'{spec.name}': expected a multiple of {row} bytes ({spec.dtype} {list(spec.shape)}),"
            f" got {length}",
            "send complete rows",
        )
    return (*fixed[: free[0]], length // row, *fixed[free[0] :])


def _form(accept: str, kind: str, outputs: int) -> str:
    """Choose the media type of an answer: the preferred one of Accept, else that of the request.
    .npy and raw bytes hold one output only.
    """
    request_form = kind if kind in ANSWER_TYPES else JSON
    default = NPZ if request_form in (RAW, NPY) and outputs != 1 else request_form
    return preferred(
        accept or "*/*", (default, *(form for form in ANSWER_TYPES if form != default))
    )


async def _encoded(
    service: Service, answer: InferAnswer, form: str
) -> tuple[Sequence[bytes | memoryview], dict[str, str]]:
    """Encode an answer in this form. Returns its parts and additional headers."""
    if form == NPZ:
        return [await asyncio.to_thread(npz_from_arrays, answer.outputs)], {}
    if form == JSON:
        return await _json(service, answer), {}
    if len(answer.outputs) != 1:
        names = ", ".join(answer.outputs)
        raise Unprocessable(
            f"{form} can be one output, this answer has {len(answer.outputs)}: {names}",
            "name one with ?outputs=, or accept .npz",
        )
    (array,) = answer.outputs.values()
    if form == NPY:
        return npy_from_array(array), {}
    return [bytes_of(array)], {
        "Crucible-Dtype": array.dtype.name,
        "Crucible-Shape": ",".join(map(str, array.shape)),
    }


async def _json(service: Service, answer: InferAnswer) -> list[bytes]:
    if not is_long(array.size for array in answer.outputs.values()):
        return [encode_json(answer)]
    _, text = await encode_in_helper(service, answer, plain=True)
    return [text]
