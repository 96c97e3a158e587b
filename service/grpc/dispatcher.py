"""The edge of a call: its key is checked before a byte of its message is read, whatever goes wrong
becomes a status, and it is told in one line.

Every method is entered as a stream of bytes, which is the same on the wire: so that one function
sees all calls, also those that are refused. No Host and no Origin are checked here, as HTTP's gate
does: a page in a browser cannot speak gRPC, which takes `te: trailers`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc.aio import ServicerContext

from service import logs
from service.auth import NOBODY, Caller, caller_from
from service.context import Service
from service.errors import MethodNotAllowed, Unprocessable
from service.grpc import grpc_service_pb2 as pb
from service.grpc.codec import parsed
from service.grpc.descriptors import HEALTH, SERVICE
from service.grpc.health import watch
from service.grpc.methods import METHODS, Call, Method, infer
from service.grpc.offload_worker import raw_form
from service.grpc.statuses import details_of, metadata_of, status_of
from service.grpc.stream import answer_each
from service.grpc.wire_scan import typed_bytes, without_tensors
from service.http.access_log import NO_ROUTE
from service.http.error_responses import answer_error
from service.http.guard import request_id_from
from service.offload.pool import HELP_FROM_BYTES, Helpers

Context = ServicerContext[bytes, bytes]
_Metadata = Sequence[tuple[str, str | bytes]]
STREAM, WATCH = "ModelStreamInfer", "Watch"
NAMES: Mapping[str, str] = {
    f"/{service.full_name}/{name}": name
    for service in (SERVICE, HEALTH)
    for name in service.methods_by_name
}


@dataclass(slots=True)
class _Told:
    """What the log will say of a call."""

    begin: float
    request_id: str
    caller: Caller = NOBODY
    status: grpc.StatusCode = grpc.StatusCode.OK
    sent: int = 0  # bytes


class Edge(grpc.GenericRpcHandler):
    """Takes every call that comes to the port."""

    def __init__(self, service: Service) -> None:
        self._service, self.stopping = service, asyncio.Event()
        self._helpers = Helpers(module="service.grpc.offload_worker")

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """gRPC's name for: how is this call handled?"""
        metadata: _Metadata = handler_call_details.invocation_metadata
        return grpc.stream_stream_rpc_method_handler(
            functools.partial(self._handle, handler_call_details.method, metadata)
        )

    async def _handle(
        self, path: str, metadata: _Metadata, requests: AsyncIterable[bytes], context: Context
    ) -> None:
        given = {name: value for name, value in metadata if isinstance(value, str)}
        told = _Told(time.perf_counter(), request_id_from(given.get("x-request-id", "")))
        context.set_trailing_metadata((("x-request-id", told.request_id),))
        try:
            await self._answer(path, given, requests, context, told)
        except asyncio.CancelledError:
            told.status = (
                grpc.StatusCode.DEADLINE_EXCEEDED
                if _left_s(context) == 0
                else grpc.StatusCode.CANCELLED
            )
            raise
        except Exception as error:  # noqa: BLE001  the edge of a call: its fault is not that of the others
            answer = answer_error(error, told.request_id, self._service.folders)
            told.status = status_of(answer)
            context.set_trailing_metadata((("x-request-id", told.request_id), *metadata_of(answer)))
            context.set_details(details_of(answer))
            context.set_code(told.status)
        finally:
            self._tell(path, told)

    async def _answer(
        self,
        path: str,
        given: Mapping[str, str],
        requests: AsyncIterable[bytes],
        context: Context,
        told: _Told,
    ) -> None:
        name = _name(path)
        method = _method(name)
        told.caller = await self._caller(method, given)  # before anything is read

        async def write(answer: Message) -> None:
            data: bytes = answer.SerializeToString()
            told.sent += len(data)
            await context.write(data)

        async def again() -> Call:
            caller = await self._caller(method, given)
            return Call(self._service, caller, _left_s(context))

        async def streamed(request: bytes) -> Message:
            return await self._stream_answer(again, request, told.request_id)

        if name == STREAM:
            await answer_each(requests, streamed, write, self.stopping)
            return
        async for request in requests:
            message = await self._read(method, request)
            if name == WATCH:
                await watch(self._service, message, write, self.stopping)
            else:
                await write(
                    await method.does(Call(self._service, told.caller, _left_s(context)), message)
                )
            return
        most = self._service.settings.max_infer_bytes
        raise Unprocessable(
            "the call brought no message that could be read", f"send one of at most {most} bytes"
        )

    async def _caller(self, method: Method, given: Mapping[str, str]) -> Caller:
        if method.may == "anybody":
            return NOBODY
        authorization = given.get("authorization", "")
        caller = await caller_from(authorization, self._service.settings, self._service.verify)
        if method.may != "any key":
            caller.require(method.may)
        return caller

    async def _read(self, method: Method, request: bytes) -> Any:
        """The message. Long lists of numbers are read by a helper: they would hold up all
        others.
        """
        if (
            method.takes is pb.ModelInferRequest
            and len(request) > HELP_FROM_BYTES
            and typed_bytes(request) > HELP_FROM_BYTES
        ):
            _, request = await self._helpers.ask(raw_form.__name__, [request])
        return parsed(method.takes, request)

    async def close(self) -> None:
        """End its helpers."""
        await self._helpers.close()

    async def _stream_answer(
        self,
        call: Callable[[], Awaitable[Call]],
        request: bytes,
        request_id: str,
    ) -> pb.ModelStreamInferResponse:
        """One answer of a stream, which an error does not end, not even that the key was revoked
        meanwhile.

        A parameter says that nothing more will come of this request, as Triton's does.
        """
        try:
            message = await self._read(METHODS[STREAM], request)
            answer = await infer(await call(), message)
            said = ""
        except Exception as error:  # noqa: BLE001  the edge of a request
            asked = without_tensors(request)
            answer = pb.ModelInferResponse(
                id=asked.id, model_name=asked.model_name, model_version=asked.model_version
            )
            said = details_of(answer_error(error, request_id, self._service.folders))
        answer.parameters["triton_final_response"].bool_param = True
        return pb.ModelStreamInferResponse(error_message=said, infer_response=answer)

    def _tell(self, path: str, told: _Told) -> None:
        name, seconds = _name(path), time.perf_counter() - told.begin
        method = name if name in METHODS else NO_ROUTE
        self._service.metrics.calls.labels(method, told.status.name).inc()
        self._service.metrics.call_seconds.labels(method).observe(seconds)
        logs.get("service.requests").info(
            "request",
            method="gRPC",
            path=path,
            status=told.status.name,
            seconds=round(seconds, 4),
            bytes=told.sent,
            request=told.request_id,
            key=told.caller.key or None,
        )


def _name(path: str) -> str:
    """The method's name; the path itself if there is none."""
    return NAMES.get(path, path)


def _method(name: str) -> Method:
    """MethodNotAllowed, which is UNIMPLEMENTED here, for what this server does not do."""
    if name in METHODS:
        return METHODS[name]
    if name in SERVICE.methods_by_name:
        raise MethodNotAllowed(
            f"this server has no {name}",
            "send tensors in the request; what is logged and traced is a setting of the service",
        )
    ours = ", ".join(each for each in METHODS if each in SERVICE.methods_by_name)
    raise MethodNotAllowed(f"'{name}' is no method of {SERVICE.full_name}", f"it has {ours}")


def _left_s(context: Context) -> float | None:
    """Until the client's deadline; None: it has none."""
    left: float | None = context.time_remaining()
    return left
