"""The methods of the service, and who may call them. Streams are in service/grpc/stream.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from urllib.parse import unquote

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from pipeline import distribution
from service.auth import Caller
from service.codecs import oip_metadata as oip_documents
from service.codecs.oip_shared_memory import write_outputs
from service.context import Service
from service.errors import NotFound, Unavailable, Unprocessable
from service.grpc import grpc_service_pb2 as pb
from service.grpc import health
from service.grpc.codec import (
    message_from,
    places_from,
    request_from,
    shared_inputs_from,
    version_from,
)
from service.grpc.health_pb2 import HealthCheckRequest
from service.regions import OwnRegions, Region
from service.storage.key import Scope


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method, without its message."""

    service: Service
    caller: Caller
    deadline_s: float | None  # time until the client's deadline; None: it has none
    peer: str  # in gRPC's form: `ipv4:127.0.0.1:50051`
    headers: Collection[str]  # names of the call's metadata

    def regions(self) -> OwnRegions:
        """The regions of the caller; Forbidden if this call may use none."""
        return self.service.regions.of(self.caller.key, address_of(self.peer), self.headers)


@dataclass(frozen=True, slots=True)
class Method:
    """The scope that a method needs, its message type, and its function."""

    may: Scope | Literal["anybody", "any key"]
    takes: type[Message]
    does: Callable[[Call, Any], Awaitable[Message]]


def address_of(peer: str) -> str:
    """The IP address in gRPC's form of a peer, such as `ipv6:%5B::1%5D:50051`; else empty."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


async def server_live(call: Call, message: pb.ServerLiveRequest) -> Message:
    return pb.ServerLiveResponse(live=True)


async def server_ready(call: Call, message: pb.ServerReadyRequest) -> Message:
    try:
        call.service.host()
    except Unavailable:
        return pb.ServerReadyResponse(ready=False)
    return pb.ServerReadyResponse(ready=True)


async def server_metadata(call: Call, message: pb.ServerMetadataRequest) -> Message:
    document = oip_documents.server_metadata(
        distribution.version(), call.service.settings.shared_memory
    )
    return ParseDict(document, pb.ServerMetadataResponse())


async def model_ready(call: Call, message: pb.ModelReadyRequest) -> Message:
    """Answer False also for an unknown model, as Triton does."""
    version = version_from(message.version)
    try:
        served = call.service.serving.find(call.caller, message.name or None, version)
    except NotFound:
        return pb.ModelReadyResponse(ready=False)
    return pb.ModelReadyResponse(ready=served.state == "ready")


async def model_metadata(call: Call, message: pb.ModelMetadataRequest) -> Message:
    serving = call.service.serving
    served = serving.find(call.caller, message.name or None, version_from(message.version))
    models = serving.served(call.caller)
    versions = [model.version for model in models if model.model == served.model]
    return ParseDict(oip_documents.model_metadata(served, versions), pb.ModelMetadataResponse())


async def model_config(call: Call, message: pb.ModelConfigRequest) -> Message:
    served = call.service.serving.find(
        call.caller, message.name or None, version_from(message.version)
    )
    return ParseDict({"config": oip_documents.model_config(served)}, pb.ModelConfigResponse())


async def model_statistics(call: Call, message: pb.ModelStatisticsRequest) -> Message:
    """The statistics of one model, or of all models if the message names none."""
    serving, version = call.service.serving, version_from(message.version)
    if message.name:
        serving.find(call.caller, message.name, version)
    models = [
        model
        for model in serving.statistics(call.caller)
        if message.name in ("", model.model) and version in (None, model.version)
    ]
    return ParseDict(oip_documents.statistics(models), pb.ModelStatisticsResponse())


async def repository_index(call: Call, message: pb.RepositoryIndexRequest) -> Message:
    models = [
        served
        for served in call.service.serving.served(call.caller)
        if served.state == "ready" or not message.ready
    ]
    return ParseDict({"models": oip_documents.index(models)}, pb.RepositoryIndexResponse())


async def load(call: Call, message: pb.RepositoryModelLoadRequest) -> Message:
    if message.parameters:
        name = sorted(message.parameters)[0]
        raise Unprocessable(
            f"a model loads as it was deployed, without `{name}`",
            "PUT /models/NAME/deployment changes its options",
        )
    await call.service.serving.load(call.caller, message.model_name)
    return pb.RepositoryModelLoadResponse()


async def unload(call: Call, message: pb.RepositoryModelUnloadRequest) -> Message:
    await call.service.serving.unload(call.caller, message.model_name)
    return pb.RepositoryModelUnloadResponse()


async def region_status(call: Call, message: pb.SystemSharedMemoryStatusRequest) -> Message:
    regions = call.regions().status(message.name)
    documents = {region.name: asdict(region) for region in regions}
    return ParseDict({"regions": documents}, pb.SystemSharedMemoryStatusResponse())


async def region_register(call: Call, message: pb.SystemSharedMemoryRegisterRequest) -> Message:
    region = Region(message.name, message.key, message.offset, message.byte_size)
    call.regions().register(region)
    return pb.SystemSharedMemoryRegisterResponse()


async def region_unregister(call: Call, message: pb.SystemSharedMemoryUnregisterRequest) -> Message:
    call.regions().unregister(message.name)
    return pb.SystemSharedMemoryUnregisterResponse()


async def infer(call: Call, message: pb.ModelInferRequest) -> pb.ModelInferResponse:
    request = request_from(message, call.caller, call.deadline_s)
    inputs, places = shared_inputs_from(message), places_from(message)
    regions: Mapping[str, Region] = {}
    if inputs or places:
        own = call.regions()
        request = replace(request, inputs={**request.inputs, **own.inputs(inputs)})
        regions = own.outputs(places)
    answer = await call.service.serving.infer(request)
    write_outputs(answer.outputs, regions)
    return message_from(answer, places)


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
    "SystemSharedMemoryStatus": Method("infer", pb.SystemSharedMemoryStatusRequest, region_status),
    "SystemSharedMemoryRegister": Method(
        "infer", pb.SystemSharedMemoryRegisterRequest, region_register
    ),
    "SystemSharedMemoryUnregister": Method(
        "infer", pb.SystemSharedMemoryUnregisterRequest, region_unregister
    ),
    "ModelInfer": Method("infer", pb.ModelInferRequest, infer),
    "ModelStreamInfer": Method("infer", pb.ModelInferRequest, infer),  # for each request
    "Check": Method("anybody", HealthCheckRequest, check),
    "Watch": Method("anybody", HealthCheckRequest, check),  # repeatedly
}
"""The methods of this server. Shared memory of CUDA, and the client's control of traces and logs,
are not implemented: those methods are UNIMPLEMENTED.
"""
