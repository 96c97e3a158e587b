"""The Open Inference Protocol v2 with its binary tensor data extension, compatible with Triton's
clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from pipeline import distribution
from service.auth import Caller
from service.codecs import oip_metadata as documents
from service.codecs.json_values import parsed_object
from service.codecs.oip import HEADER_LENGTH, OipRequest, encode_answer, parse_request
from service.codecs.oip_shared_memory import without_outputs, write_outputs, written_outputs
from service.context import Service
from service.errors import Unavailable, Unprocessable
from service.http.routers.dependencies import (
    REFUSALS,
    CurrentCaller,
    CurrentService,
    caller_of,
    regions_of,
    service_of,
)
from service.http.routers.inference_io import (
    encode_in_helper,
    headers_of,
    infer_while_connected,
    is_long,
    read_body,
    respond,
    whole_number,
)
from service.http.routers.inference_route import InferenceRoute
from service.inference import InferAnswer, InferRequest, Served
from service.offload.pool import HELP_FROM_BYTES
from service.regions import Inputs, Region

_ROUTER: dict[str, Any] = {
    "prefix": "/v2",
    "tags": ["Open Inference Protocol"],
    "responses": REFUSALS,
}
router = APIRouter(**_ROUTER)
infer_router = APIRouter(**_ROUTER, route_class=InferenceRoute)

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string"},
        "data": {
            "description": "Nested or flat; absent for bytes behind the header or in shared memory"
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
            "Tensors that were requested in binary follow the JSON."
            " Inference-Header-Content-Length is the length of the JSON"
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
async def server_metadata(service: CurrentService) -> documents.Document:
    """Return the server's name, version and extensions."""
    return documents.server_metadata(distribution.version(), service.settings.shared_memory)


@router.get("/health/live")
async def live() -> documents.Document:
    """The server is alive. Needs no key."""
    return {"live": True}


@router.get("/health/ready")
async def ready(service: CurrentService) -> documents.Document:
    """The server accepts jobs, as /readyz. Needs no key."""
    service.host()  # raises Unavailable
    return {"ready": True}


@router.get("/models/stats")
async def all_statistics(caller: CurrentCaller, service: CurrentService) -> documents.Document:
    """Return the statistics of all models."""
    return documents.statistics(service.serving.statistics(caller))


@router.get("/models/{name}")
@router.get("/models/{name}/versions/{version}")
async def model_metadata(
    name: str, caller: CurrentCaller, service: CurrentService, version: str = ""
) -> documents.Document:
    """Return the inputs, outputs and versions of a model."""
    served = _find(service, caller, name, version)
    deployed = service.serving.served(caller)
    versions = (model.version for model in deployed if model.model == name)
    return documents.model_metadata(served, versions)


@router.get("/models/{name}/ready")
@router.get("/models/{name}/versions/{version}/ready")
async def model_ready(
    name: str, caller: CurrentCaller, service: CurrentService, version: str = ""
) -> documents.Document:
    """Check that a model answers requests now; 503 if it does not."""
    served = _find(service, caller, name, version)
    if served.state != "ready":
        reason = f": {served.reason}" if served.reason else ""
        raise Unavailable(
            f"model '{name}' is {served.state}{reason}",
            "repeat GET /v2/models/NAME/ready until it answers 200",
        )
    return {"name": name, "ready": True}


@router.get("/models/{name}/config")
@router.get("/models/{name}/versions/{version}/config")
async def model_config(
    name: str, caller: CurrentCaller, service: CurrentService, version: str = ""
) -> documents.Document:
    """Return a model's configuration in Triton's form."""
    return documents.model_config(_find(service, caller, name, version))


@router.get("/models/{name}/stats")
@router.get("/models/{name}/versions/{version}/stats")
async def model_statistics(
    name: str, caller: CurrentCaller, service: CurrentService, version: str = ""
) -> documents.Document:
    """Return the statistics of one model since it was loaded."""
    served = _find(service, caller, name, version)
    statistics = service.serving.statistics(caller)
    return documents.statistics(
        model
        for model in statistics
        if model.model == name and (not version or model.version == served.version)
    )


@router.post("/repository/index", **_OPTIONS)
async def repository_index(
    request: Request, caller: CurrentCaller, service: CurrentService
) -> list[documents.Document]:
    """List the deployed models and their state. With `{"ready": true}` only those that answer
    requests.
    """
    only_ready = bool((await _options(request)).get("ready"))
    return documents.index(
        model
        for model in service.serving.served(caller)
        if model.state == "ready" or not only_ready
    )


@router.post("/repository/models/{name}/load", **_OPTIONS)
async def load(
    name: str, request: Request, caller: CurrentCaller, service: CurrentService
) -> documents.Document:
    """Deploy a model's current version. It is ready when this request ends. Scope admin."""
    caller.require("admin")
    parameters = (await _options(request)).get("parameters")
    if parameters:
        raise Unprocessable(
            f"parameters {str(parameters)[:80]}: a model is loaded as it was promoted",
            "promote another version to change it",
        )
    await service.serving.load(caller, name)
    return {}


@router.post("/repository/models/{name}/unload", **_OPTIONS)
async def unload(
    name: str, request: Request, caller: CurrentCaller, service: CurrentService
) -> documents.Document:
    """Answer the waiting requests, then free the device. Scope admin."""
    caller.require("admin")
    await _options(request)
    await service.serving.unload(caller, name)
    return {}


@infer_router.post("/models/{name}/infer", **_INFER)
@infer_router.post("/models/{name}/versions/{version}/infer", **_INFER)
async def infer(name: str, request: Request, version: str = "") -> Response:
    """Run inference on this model. No Content-Type is needed; Inference-Header-Content-Length
    counts bytes of the body before compression.
    """
    caller, service = caller_of(request), service_of(request)
    caller.require("infer")
    served = _find(service, caller, name, version)
    length_header = request.headers.get(HEADER_LENGTH)
    header_length = None if length_header is None else whole_number(length_header, HEADER_LENGTH)
    body = await read_body(request, service.settings.max_infer_bytes)
    if (len(body) if header_length is None else header_length) > HELP_FROM_BYTES:
        header_length, body = await service.helpers.ask(
            "decode_oip", [body], header_length=header_length
        )
    content = parse_request(body, header_length, served.inputs)
    inputs: Inputs = content.inputs
    regions: Mapping[str, Region] = {}
    if content.shared_inputs or content.shared_outputs:
        own = regions_of(request)
        inputs = {**inputs, **own.inputs(content.shared_inputs)}
        regions = own.outputs(content.shared_outputs)
    version_number = served.version if version else None
    inference = InferRequest(
        caller,
        served.model,
        inputs,
        version_number,
        content.outputs,
        content.timeout_s,
        content.id,
    )
    result = await infer_while_connected(service, inference, request.receive)
    write_outputs(result.outputs, regions)
    return await _response(request, service, result, content)


async def _response(
    request: Request, service: Service, result: InferAnswer, content: OipRequest
) -> Response:
    written = written_outputs(result.outputs, content.shared_outputs)
    answer = without_outputs(result, content.shared_outputs)
    binary = {name: content.wants_binary(name) for name in answer.outputs}
    headers = headers_of(answer)
    if is_long(array.size for name, array in answer.outputs.items() if not binary[name]):
        length, body = await encode_in_helper(
            service, answer, plain=False, binary=binary, written=written
        )
        parts: list[bytes | memoryview] = [body]
    else:
        parts = encode_answer(answer, content, written)
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
    """Parse the body of a repository request. An empty body means no options."""
    body = await request.body()
    return dict(parsed_object(body, "the body")) if body else {}
