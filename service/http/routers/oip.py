"""The Open Inference Protocol v2, with its binary tensor data extension, as Triton's clients speak
it.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from pipeline import distribution
from service.auth import Caller
from service.codecs import oip_metadata as documents
from service.codecs.json_values import parsed_object
from service.codecs.oip import HEADER_LENGTH, OipRequest, encode_answer, parse_request
from service.context import Service
from service.errors import Unavailable, Unprocessable
from service.http.routers.dependencies import REFUSALS, AskedBy, AskedOf, asked_by, asked_of
from service.http.routers.inference_io import (
    answer_while_there,
    headers_of,
    is_long,
    read_body,
    respond,
    whole_number,
    write_elsewhere,
)
from service.inference import InferAnswer, InferRequest, Served
from service.offload.pool import HELP_FROM_BYTES

router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"], responses=REFUSALS)

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string"},
        "data": {
            "description": "Nested or flat; left out where the tensor's bytes follow the header"
        },
        "parameters": {"type": "object"},
    },
}
_INFER_BODY = {
    "schema": {
        "type": "object",
        "required": ["inputs"],
        "properties": {"inputs": {"type": "array", "items": _TENSOR}},
    },
    "example": {
        "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}]
    },
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ANSWERS = {
    200: {
        "description": (
            "Tensors that were asked for in binary follow the JSON, whose length"
            " Inference-Header-Content-Length tells"
        ),
        "content": {
            "application/json": {
                "schema": {"type": "object", "required": ["model_name", "outputs"]}
            },
            "application/octet-stream": _BINARY,
        },
    }
}
_INFER: dict[str, Any] = {
    "response_class": Response,
    "responses": _ANSWERS,
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {"application/json": _INFER_BODY, "application/octet-stream": _BINARY},
        }
    },
}
_OPTIONS: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {
            "content": {"application/json": {"schema": {"type": "object"}, "example": {}}}
        }
    }
}


@router.get("")
async def server_metadata() -> documents.Document:
    """Name, version and extensions of the server."""
    return documents.server_metadata(distribution.version())


@router.get("/health/live")
async def live() -> documents.Document:
    """The server answers. Needs no key."""
    return {"live": True}


@router.get("/health/ready")
async def ready(service: AskedOf) -> documents.Document:
    """As /readyz. Needs no key."""
    service.host()  # or Unavailable
    return {"ready": True}


@router.get("/models/stats")
async def all_statistics(caller: AskedBy, service: AskedOf) -> documents.Document:
    """Figures of all models."""
    return documents.statistics(service.serving.statistics(caller))


@router.get("/models/{name}")
@router.get("/models/{name}/versions/{version}")
async def model_metadata(
    name: str, caller: AskedBy, service: AskedOf, version: str = ""
) -> documents.Document:
    """Inputs, outputs and versions of a model."""
    served = _find(service, caller, name, version)
    return documents.model_metadata(
        served, (each.version for each in service.serving.served(caller) if each.model == name)
    )


@router.get("/models/{name}/ready")
@router.get("/models/{name}/versions/{version}/ready")
async def model_ready(
    name: str, caller: AskedBy, service: AskedOf, version: str = ""
) -> documents.Document:
    """Whether a model answers requests now: 503 if it does not."""
    served = _find(service, caller, name, version)
    if served.state != "ready":
        raise Unavailable(
            f"model '{name}' is {served.state}{f': {served.reason}' if served.reason else ''}",
            "GET /v2/models/NAME/ready tells when it is",
        )
    return {"name": name, "ready": True}


@router.get("/models/{name}/config")
@router.get("/models/{name}/versions/{version}/config")
async def model_config(
    name: str, caller: AskedBy, service: AskedOf, version: str = ""
) -> documents.Document:
    """A model's configuration in Triton's form."""
    return documents.model_config(_find(service, caller, name, version))


@router.get("/models/{name}/stats")
@router.get("/models/{name}/versions/{version}/stats")
async def model_statistics(
    name: str, caller: AskedBy, service: AskedOf, version: str = ""
) -> documents.Document:
    """Figures of one model since it was loaded."""
    served = _find(service, caller, name, version)
    found = service.serving.statistics(caller)
    return documents.statistics(
        each
        for each in found
        if each.model == name and (not version or each.version == served.version)
    )


@router.post("/repository/index", **_OPTIONS)
async def repository_index(
    request: Request, caller: AskedBy, service: AskedOf
) -> list[documents.Document]:
    """The models that are deployed, and their state. With `{"ready": true}` only those that answer
    requests.
    """
    only_ready = bool((await _options(request)).get("ready"))
    return documents.index(
        each for each in service.serving.served(caller) if each.state == "ready" or not only_ready
    )


@router.post("/repository/models/{name}/load", **_OPTIONS)
async def load(
    name: str, request: Request, caller: AskedBy, service: AskedOf
) -> documents.Document:
    """Deploy a model's current version; answered when it is ready. Scope admin."""
    caller.require("admin")
    if given := (await _options(request)).get("parameters"):
        raise Unprocessable(
            f"parameters {str(given)[:80]}: a model is loaded as it was promoted",
            "promote another version to change it",
        )
    await service.serving.load(caller, name)
    return {}


@router.post("/repository/models/{name}/unload", **_OPTIONS)
async def unload(
    name: str, request: Request, caller: AskedBy, service: AskedOf
) -> documents.Document:
    """Answer what waits, then free the device. Scope admin."""
    caller.require("admin")
    await _options(request)
    await service.serving.unload(caller, name)
    return {}


@router.post("/models/{name}/infer", **_INFER)
@router.post("/models/{name}/versions/{version}/infer", **_INFER)
async def infer(name: str, request: Request, version: str = "") -> Response:
    """An answer of this model. No Content-Type is needed; Inference-Header-Content-Length counts
    bytes of the body before compression.
    """
    return await answer(request, name, version)


async def answer(request: Request, name: str, version: str) -> Response:
    """The same, for whoever has found the route."""
    caller, service = asked_by(request), asked_of(request)
    caller.require("infer")
    served = _find(service, caller, name, version)
    given = request.headers.get(HEADER_LENGTH)
    header_length = None if given is None else whole_number(given, HEADER_LENGTH)
    body = await read_body(request, service.settings.max_infer_bytes)
    if (len(body) if header_length is None else header_length) > HELP_FROM_BYTES:
        head, body = await service.helpers.ask("decode_oip", [body], header_length=header_length)
        header_length = head["header_length"]
    asked = parse_request(body, header_length, served.inputs)
    wanted = served.version if version else None
    whole = InferRequest(
        caller, served.model, asked.inputs, wanted, asked.outputs, asked.timeout_s, asked.id
    )
    return await _written(
        request, service, await answer_while_there(service, whole, request.receive), asked
    )


async def _written(
    request: Request, service: Service, answer: InferAnswer, asked: OipRequest
) -> Response:
    binary = {name: asked.wants_binary(name) for name in answer.outputs}
    headers = headers_of(answer)
    if is_long(array.size for name, array in answer.outputs.items() if not binary[name]):
        length, whole = await write_elsewhere(service, answer, plain=False, binary=binary)
        parts: list[bytes | memoryview] = [whole]
    else:
        parts = encode_answer(answer, asked)
        length = len(parts[0])
    if not any(binary.values()):
        return await respond(request, parts, "application/json", headers)
    return await respond(
        request, parts, "application/octet-stream", {**headers, HEADER_LENGTH: str(length)}
    )


def _find(service: Service, caller: Caller, name: str, version: str) -> Served:
    return service.serving.find(
        caller, name, whole_number(version, "the version") if version else None
    )


async def _options(request: Request) -> documents.Document:
    """What a request of the repository says; an empty body says nothing."""
    body = await request.body()
    return dict(parsed_object(body, "the body")) if body else {}
