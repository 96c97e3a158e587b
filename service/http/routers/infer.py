"""Inference in the forms that are at hand: JSON, raw bytes, numpy's files, images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from pipeline.core import TensorSpec
from service.codecs.images import FORMATS
from service.codecs.native_json import PlainRequest, encode_json, parse_json, timeout_from
from service.codecs.npy import array_from_npy, npy_from_array, npz_from_arrays
from service.codecs.oip import parse_request
from service.codecs.tensors import array_from, bytes_of, shape_from, size_of
from service.context import Service
from service.errors import Unprocessable
from service.http.routers.dependencies import REFUSALS, asked_by, asked_of
from service.http.routers.inference_io import (
    answer_while_there,
    headers_of,
    is_long,
    read_body,
    respond,
    write_elsewhere,
)
from service.http.routers.reports import preferred
from service.inference import InferAnswer, InferRequest, Served
from service.offload.pool import HELP_FROM_BYTES

router = APIRouter(tags=["inference"], responses=REFUSALS)

JSON, RAW, NPY, NPZ = (
    "application/json",
    "application/octet-stream",
    "application/x-npy",
    "application/x-npz",
)
TAKEN = (JSON, RAW, NPY, NPZ, *FORMATS)
GIVEN = (JSON, RAW, NPY, NPZ)

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
                "description": "Nested lists of numbers by input, with the batch axis",
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
                "In the form that Accept asks for; in that of the request if it asks for none."
                " Server-Timing tells where the time went"
            ),
            "content": {JSON: {"schema": _ANSWER}, **dict.fromkeys((RAW, NPY, NPZ), _BYTES)},
        }
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {JSON: _JSON_BODY, **dict.fromkeys(TAKEN[1:], _BYTES)},
        }
    },
}

Outputs = Annotated[str, Query(description="Names, separated by commas; all if left out")]
Shape = Annotated[
    str,
    Query(
        description="Of raw bytes where it does not follow from their number, such as 1,3,224,224"
    ),
]
Version = Annotated[int | None, Query(ge=1, le=2**53, description="The current one if left out")]
Timeout = Annotated[float | None, Query(description="Seconds; the model's own if left out")]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the address says, beside the body."""

    outputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    version: int | None
    timeout_s: float | None


NO_WISH = Wish((), None, None, None)


@router.post("/infer", **OPENAPI)
async def infer(
    request: Request,
    outputs: Outputs = "",
    shape: Shape = "",
    version: Version = None,
    timeout_s: Timeout = None,
) -> Response:
    """An answer of the only model that is deployed; refused with their names where there are
    several.
    """
    return await answer(request, None, _wish(outputs, shape, version, timeout_s))


@router.post("/models/{name}/infer", **OPENAPI)
async def infer_model(
    name: str,
    request: Request,
    outputs: Outputs = "",
    shape: Shape = "",
    version: Version = None,
    timeout_s: Timeout = None,
) -> Response:
    """An answer of this model, from JSON, raw bytes of the only input, .npy, .npz, or an image
    where the model says how it becomes an input.
    """
    return await answer(request, name, _wish(outputs, shape, version, timeout_s))


async def answer(request: Request, model: str | None, wish: Wish) -> Response:
    """The same, for whoever has found the route."""
    caller, service = asked_by(request), asked_of(request)
    caller.require("infer")
    served = service.serving.find(caller, model, wish.version)
    kind = request.headers.get("content-type", RAW).partition(";")[0].strip().lower() or RAW
    body = await read_body(request, service.settings.max_infer_bytes)
    asked = await _parsed(service, served, kind, body, wish)
    outputs, timeout_s = wish.outputs or asked.outputs, wish.timeout_s or asked.timeout_s
    whole = InferRequest(caller, served.model, asked.inputs, wish.version, outputs, timeout_s)
    found = await answer_while_there(service, whole, request.receive)
    form = _form(request.headers.get("accept", ""), kind, len(found.outputs))
    parts, headers = await _written(service, found, form)
    return await respond(request, parts, form, headers_of(found) | headers)


def _wish(outputs: str, shape: str, version: int | None, timeout_s: float | None) -> Wish:
    sizes = [
        int(size) if size.isascii() and size.isdecimal() and len(size) < 16 else size
        for size in shape.split(",")
    ]
    return Wish(
        tuple(filter(None, outputs.split(","))),
        shape_from("shape", sizes) if shape else None,
        version,
        timeout_from(timeout_s),
    )


async def _parsed(
    service: Service, served: Served, kind: str, body: bytes | memoryview, wish: Wish
) -> PlainRequest:
    """The tensors of a body, by its Content-Type."""
    dtypes = {spec.name: spec.dtype for spec in served.inputs}
    if kind == RAW:
        spec = _only(served, "raw bytes")
        return PlainRequest(
            {
                spec.name: array_from(
                    spec.name, spec.dtype, wish.shape or shape_of(spec, len(body)), body
                )
            }
        )
    if kind == NPY:
        spec = _only(served, "a .npy file")
        return PlainRequest({spec.name: array_from_npy(body, spec.name, served.inputs)})
    if kind == JSON and len(body) <= HELP_FROM_BYTES:
        return parse_json(body, dtypes)
    if kind == JSON:
        return await _helped(service, served, "decode_json", body, dtypes=dtypes)
    if kind == NPZ:
        return await _helped(
            service, served, "decode_npz", body, limit=service.settings.max_infer_bytes
        )
    if kind in FORMATS:
        if served.image is None:
            raise Unprocessable(
                f"model '{served.model}' does not say how an image becomes its input",
                f"send one of {', '.join(GIVEN)}",
            )
        dtype = next(
            (spec.dtype for spec in served.inputs if spec.name == served.image.input), "float32"
        )
        return await _helped(
            service,
            served,
            "decode_image",
            body,
            recipe=served.image.model_dump(mode="json"),
            dtype=dtype,
        )
    raise Unprocessable(f"Content-Type '{kind[:80]}'", f"expected one of {', '.join(TAKEN)}")


async def _helped(
    service: Service, served: Served, work: str, body: bytes | memoryview, **arguments: object
) -> PlainRequest:
    head, binary = await service.helpers.ask(work, [body], **arguments)
    found = parse_request(binary, head["header_length"], served.inputs)
    return PlainRequest(found.inputs, found.outputs, found.timeout_s)


def _only(served: Served, what: str) -> TensorSpec:
    if len(served.inputs) != 1:
        names = ", ".join(spec.name for spec in served.inputs)
        raise Unprocessable(
            f"{what} can be one input, model '{served.model}' has {len(served.inputs)}: {names}",
            f"send {NPZ} or {JSON}",
        )
    return served.inputs[0]


def shape_of(spec: TensorSpec, length: int) -> tuple[int, ...]:
    """The shape of so many bytes; Unprocessable where it cannot be told."""
    free = [axis for axis, size in enumerate(spec.shape) if isinstance(size, str)]
    if len(free) > 1:
        raise Unprocessable(
            f"the shape of '{spec.name}', {list(spec.shape)}, does not follow from {length} bytes",
            "name it: ?shape=1,3,224,224",
        )
    fixed = [size for size in spec.shape if isinstance(size, int)]
    row = size_of(spec.dtype, fixed)
    if not free:
        return tuple(fixed)
    if not row or length % row:
        raise Unprocessable(
            f"'{spec.name}': expected a multiple of {row} bytes ({spec.dtype} {list(spec.shape)}),"
            f" got {length}",
            "send whole rows",
        )
    return (*fixed[: free[0]], length // row, *fixed[free[0] :])


def _form(accept: str, kind: str, outputs: int) -> str:
    """The form of an answer: that which Accept likes best, else that of the request. .npy and raw
    bytes hold one output.
    """
    like = kind if kind in GIVEN else JSON
    usual = NPZ if like in (RAW, NPY) and outputs != 1 else like
    return preferred(accept or "*/*", (usual, *(form for form in GIVEN if form != usual)))


async def _written(
    service: Service, answer: InferAnswer, form: str
) -> tuple[Sequence[bytes | memoryview], dict[str, str]]:
    """An answer in this form, and the headers that belong to it."""
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
    _, text = await write_elsewhere(service, answer, plain=True)
    return [text]
