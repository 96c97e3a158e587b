"""What each method of the service does, and who may call it. ModelInfer's stream is in
service/grpc/stream.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from pipeline import distribution
from service.auth import Caller
from service.codecs import oip_metadata as oip_documents
from service.context import Service
from service.errors import NotFound, Unavailable, Unprocessable
from service.grpc import grpc_service_pb2 as pb
from service.grpc import health
from service.grpc.codec import message_from, request_from, version_from
from service.grpc.health_pb2 import HealthCheckRequest
from service.storage.keys import Scope


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method, without its message."""

    service: Service
    caller: Caller
    deadline_s: float | None  # the time that the client's deadline leaves; None: it has none


@dataclass(frozen=True, slots=True)
class Method:
    """Who may call a method, what it takes, and what it does."""

    may: Scope | Literal["anybody", "any key"]
    takes: type[Message]
    does: Callable[[Call, Any], Awaitable[Message]]


async def server_live(call: Call, message: pb.ServerLiveRequest) -> Message:
    return pb.ServerLiveResponse(live=True)


async def server_ready(call: Call, message: pb.ServerReadyRequest) -> Message:
    try:
        call.service.host()
    except Unavailable:
        return pb.ServerReadyResponse(ready=False)
    return pb.ServerReadyResponse(ready=True)


async def server_metadata(call: Call, message: pb.ServerMetadataRequest) -> Message:
    return ParseDict(
        oip_documents.server_metadata(distribution.version()), pb.ServerMetadataResponse()
    )


async def model_ready(call: Call, message: pb.ModelReadyRequest) -> Message:
    """False also of a model that is not there, as Triton answers."""
    version = version_from(message.version)
    try:
        found = call.service.serving.find(call.caller, message.name or None, version)
    except NotFound:
        return pb.ModelReadyResponse(ready=False)
    return pb.ModelReadyResponse(ready=found.state == "ready")


async def model_metadata(call: Call, message: pb.ModelMetadataRequest) -> Message:
    serving = call.service.serving
    found = serving.find(call.caller, message.name or None, version_from(message.version))
    versions = [each.version for each in serving.served(call.caller) if each.model == found.model]
    return ParseDict(oip_documents.model_metadata(found, versions), pb.ModelMetadataResponse())


async def model_config(call: Call, message: pb.ModelConfigRequest) -> Message:
    found = call.service.serving.find(
        call.caller, message.name or None, version_from(message.version)
    )
    return ParseDict({"config": oip_documents.model_config(found)}, pb.ModelConfigResponse())


async def model_statistics(call: Call, message: pb.ModelStatisticsRequest) -> Message:
    """Of all models where none is named."""
    serving, version = call.service.serving, version_from(message.version)
    if message.name:
        serving.find(call.caller, message.name, version)
    found = [
        each
        for each in serving.statistics(call.caller)
        if message.name in ("", each.model) and version in (None, each.version)
    ]
    return ParseDict(oip_documents.statistics(found), pb.ModelStatisticsResponse())


async def repository_index(call: Call, message: pb.RepositoryIndexRequest) -> Message:
    found = [
        each
        for each in call.service.serving.served(call.caller)
        if each.state == "ready" or not message.ready
    ]
    return ParseDict({"models": oip_documents.index(found)}, pb.RepositoryIndexResponse())


async def load(call: Call, message: pb.RepositoryModelLoadRequest) -> Message:
    if message.parameters:
        said = f"a model loads as it was deployed, without `{sorted(message.parameters)[0]}`"
        raise Unprocessable(said, "PUT /models/NAME/deployment changes how")
    await call.service.serving.load(call.caller, message.model_name)
    return pb.RepositoryModelLoadResponse()


async def unload(call: Call, message: pb.RepositoryModelUnloadRequest) -> Message:
    await call.service.serving.unload(call.caller, message.model_name)
    return pb.RepositoryModelUnloadResponse()


async def infer(call: Call, message: pb.ModelInferRequest) -> pb.ModelInferResponse:
    return message_from(
        await call.service.serving.infer(request_from(message, call.caller, call.deadline_s))
    )


async def check(call: Call, message: HealthCheckRequest) -> Message:
    return health.check(call.service, message)


METHODS: Mapping[str, Method] = {
    "ServerLive": Method("anybody", pb.ServerLiveRequest, server_live),
    "ServerReady": Method("anybody", pb.ServerReadyRequest, server_ready),
    "ServerMetadata": Method("any key", pb.ServerMetadataRequest, server_metadata),
    "ModelReady": Method("any key", pb.ModelReadyRequest, model_ready),
    "ModelMetadata": Method("any key", pb.ModelMetadataRequest, model_metadata),
    "ModelConfig": Method("any key", pb.ModelConfigRequest, model_config),
    "ModelStatistics": Method("any key", pb.ModelStatisticsRequest, model_statistics),
    "RepositoryIndex": Method("any key", pb.RepositoryIndexRequest, repository_index),
    "RepositoryModelLoad": Method("admin", pb.RepositoryModelLoadRequest, load),
    "RepositoryModelUnload": Method("admin", pb.RepositoryModelUnloadRequest, unload),
    "ModelInfer": Method("infer", pb.ModelInferRequest, infer),
    "ModelStreamInfer": Method("infer", pb.ModelInferRequest, infer),  # of each request
    "Check": Method("anybody", HealthCheckRequest, check),
    "Watch": Method("anybody", HealthCheckRequest, check),  # again and again
}
"""What this server does. It has no shared memory, and no traces and logs that a client could
switch: those methods are UNIMPLEMENTED.
"""
