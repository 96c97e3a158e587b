"""Dispatch of gRPC calls: check the key before reading the message, turn every error into a status,
and log one line for each call.

Every method is handled as a stream of bytes, which is the same on the wire. So one function sees
all calls, also the refused ones. Unlike for HTTP, Host and Origin are not checked: gRPC needs
`te: trailers`, which a page in a browser cannot send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc.aio import ServicerContext

from service import logs
from service.auth import Caller, Source, caller_from
from service.bytes_in_flight import Share
from service.context import Service
from service.errors import Answer, MethodNotAllowed, SlowBody, Unavailable, Unprocessable
from service.grpc import grpc_service_pb2 as pb
from service.grpc.codec import parsed
from service.grpc.descriptors import HEALTH, SERVICE
from service.grpc.health import watch
from service.grpc.methods import METHODS, Call, Method, address_of, infer
from service.grpc.offload_worker import raw_form
from service.grpc.statuses import details_of, metadata_of, status_of
from service.grpc.stream import answer_each
from service.grpc.wire_scan import typed_bytes, without_tensors
from service.http.access_log import NO_ROUTE
from service.http.error_responses import answer_error
from service.http.guard import request_id_from
from service.http.slow_bodies import FREE_S, SLACK_S
from service.limits.client_address import HEADER, TrustedProxies
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
class _CallRecord:
    """The data of a call for its log line."""

    begin: float
    source: Source
    caller: Caller
    status: grpc.StatusCode = grpc.StatusCode.OK
    sent_bytes: int = 0


class Edge(grpc.GenericRpcHandler):
    """Handle every call to the port."""

    def __init__(self, service: Service) -> None:
        self._service, self.stopping = service, asyncio.Event()
        self._proxies = TrustedProxies(service.settings.trusted_proxies)
        self._helpers = Helpers(module="service.grpc.offload_worker", sandbox=service.sandbox)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Return the handler of a call. gRPC defines the name of this method."""
        metadata: _Metadata = handler_call_details.invocation_metadata
        return grpc.stream_stream_rpc_method_handler(
            partial(self._handle, handler_call_details.method, metadata)
        )

    async def _handle(
        self, path: str, metadata: _Metadata, requests: AsyncIterable[bytes], context: Context
    ) -> None:
        headers = {name: value for name, value in metadata if isinstance(value, str)}
        request_id = request_id_from(headers.get("x-request-id", ""))
        forwarded = [str(value) for name, value in metadata if name == HEADER]
        client = self._proxies.client(address_of(context.peer()), forwarded)
        source = Source(client, request_id)
        record = _CallRecord(time.perf_counter(), source, Caller("", (), source=source))
        context.set_trailing_metadata((("x-request-id", request_id),))
        try:
            await self._answer(path, headers, requests, context, record)
        except asyncio.CancelledError:
            record.status = (
                grpc.StatusCode.DEADLINE_EXCEEDED
                if _remaining_s(context) == 0
                else grpc.StatusCode.CANCELLED
            )
            raise
        except Exception as error:  # noqa: BLE001  the edge of a call: others go on
            answer = self._refusal(path, record, error)
            record.status = status_of(answer)
            context.set_trailing_metadata((("x-request-id", request_id), *metadata_of(answer)))
            context.set_details(details_of(answer))
            context.set_code(record.status)
        finally:
            self._log(path, record)

    async def _answer(
        self,
        path: str,
        headers: Mapping[str, str],
        requests: AsyncIterable[bytes],
        context: Context,
        record: _CallRecord,
    ) -> None:
        name = _name(path)
        method = _method(name)
        await self._authorise(method, headers, record)  # before a message is read

        async def write(answer: Message) -> None:
            data: bytes = answer.SerializeToString()
            record.sent_bytes += len(data)
            await context.write(data)

        def call_of(caller: Caller) -> Call:
            return Call(
                self._service, caller, _remaining_s(context), context.peer(), headers.keys()
            )

        async def new_call() -> Call:
            await self._authorise(method, headers, record)
            return call_of(record.caller)

        async def answer_one(request: bytes) -> Message:
            with self._service.bytes_in_flight.share() as share:
                refusal = partial(self._refusal, path, record)
                return await self._stream_answer(new_call, request, share, refusal)

        if name == STREAM:
            async with self._service.limits.stream(record.caller.key):
                await answer_each(requests, answer_one, write, self.stopping)
            return
        with self._service.bytes_in_flight.share() as share:
            message = await self._read(method, await self._receive(method, requests, share))
            if name == WATCH:
                await watch(self._service, message, write, self.stopping)
            else:
                await write(await method.does(call_of(record.caller), message))

    async def _authorise(
        self, method: Method, headers: Mapping[str, str], record: _CallRecord
    ) -> None:
        """Add the caller to the record. ServiceError if the call is refused."""
        if method.may == "anybody":
            return
        service, authorization = self._service, headers.get("authorization", "")
        record.caller = await caller_from(
            authorization, record.source, service.settings, service.verify
        )
        if method.may != "any key":
            record.caller.require(method.may)

    def _refusal(self, path: str, record: _CallRecord, error: Exception) -> Answer:
        """Convert an error to an answer, and record a refusal."""
        answer = answer_error(error, record.source.request, self._service.folders)
        self._service.refusals.of_request(record.caller, path, answer.status, error)
        return answer

    async def _receive(self, method: Method, requests: AsyncIterable[bytes], share: Share) -> bytes:
        """Receive the message of a call, and count it.

        gRPC does not tell how long an incomplete message is, nor how much of it has come. So
        tensors that take long count as the largest message, and SlowBody ends what takes too long.
        """
        loop, largest = asyncio.get_running_loop(), self._service.settings.max_infer_bytes
        has_tensors = method.takes is pb.ModelInferRequest
        limit_s = SLACK_S if has_tensors else FREE_S
        refusal: Unavailable | None = None

        def count_as_largest() -> None:
            nonlocal refusal
            try:
                share.grow(largest)
            except Unavailable as error:
                refusal = error
                timeout.reschedule(loop.time())

        timer = loop.call_later(FREE_S, count_as_largest) if has_tensors else None
        try:
            async with asyncio.timeout(limit_s) as timeout:
                async for request in requests:
                    share.grow(max(0, len(request) - share.count))
                    return request
        except TimeoutError:
            raise refusal or SlowBody(
                f"a message that is not complete after {limit_s:g} s",
                "send it over a faster connection, in parts, or over HTTP",
            ) from None
        finally:
            if timer:
                timer.cancel()
        raise Unprocessable(
            "the call had no readable message", f"send one message of at most {largest} bytes"
        )

    async def _read(self, method: Method, request: bytes) -> Any:
        """Parse a message. A helper reads long lists of numbers: they would block other calls."""
        if (
            method.takes is pb.ModelInferRequest
            and len(request) > HELP_FROM_BYTES
            and typed_bytes(request) > HELP_FROM_BYTES
        ):
            _, request = await self._helpers.ask(raw_form.__name__, [request])
        return parsed(method.takes, request)

    async def close(self) -> None:
        """End the helpers."""
        await self._helpers.close()

    async def _stream_answer(
        self,
        call: Callable[[], Awaitable[Call]],
        request: bytes,
        share: Share,
        refusal: Callable[[Exception], Answer],
    ) -> pb.ModelStreamInferResponse:
        """Answer one request of a stream.

        An error does not end the stream, not even a revoked key. A parameter marks the last answer
        of a request, as in Triton.
        """
        try:
            share.grow(len(request))
            message = await self._read(METHODS[STREAM], request)
            answer = await infer(await call(), message)
            error_message = ""
        except Exception as error:  # noqa: BLE001  the edge of a request
            header = without_tensors(request)
            answer = pb.ModelInferResponse(
                id=header.id, model_name=header.model_name, model_version=header.model_version
            )
            error_message = details_of(refusal(error))
        answer.parameters["triton_final_response"].bool_param = True
        return pb.ModelStreamInferResponse(error_message=error_message, infer_response=answer)

    def _log(self, path: str, record: _CallRecord) -> None:
        name, seconds = _name(path), time.perf_counter() - record.begin
        method = name if name in METHODS else NO_ROUTE
        self._service.metrics.calls.labels(method, record.status.name).inc()
        self._service.metrics.call_seconds.labels(method).observe(seconds)
        logs.get("service.requests").info(
            "request",
            method="gRPC",
            path=path,
            status=record.status.name,
            seconds=round(seconds, 4),
            bytes=record.sent_bytes,
            request=record.source.request,
            key=record.caller.key or None,
        )


def _name(path: str) -> str:
    """The name of the method; the path itself if there is no such method."""
    return NAMES.get(path, path)


def _method(name: str) -> Method:
    """Find a method; MethodNotAllowed, which becomes UNIMPLEMENTED, if there is none."""
    if name in METHODS:
        return METHODS[name]
    if name in SERVICE.methods_by_name:
        raise MethodNotAllowed(
            f"this server has no {name}",
            "send tensors in the request; logging and tracing are settings of the service",
        )
    methods = ", ".join(method for method in METHODS if method in SERVICE.methods_by_name)
    raise MethodNotAllowed(f"'{name}' is no method of {SERVICE.full_name}", f"it has {methods}")


def _remaining_s(context: Context) -> float | None:
    """The time until the client's deadline; None: it has none."""
    remaining_s: float | None = context.time_remaining()
    return remaining_s
