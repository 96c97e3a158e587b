"""Functions that the inference routes share: read a body, wait for an answer while the client is
connected, and send it without joining its parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.codecs.content_encoding import accepted_encoding, packed, unpacked
from service.codecs.oip import binary_form
from service.context import Service
from service.errors import Unprocessable
from service.inference import InferAnswer, InferRequest
from service.offload.worker import answer_head

T = TypeVar("T")
HELP_FROM_VALUES = 8 * 1024  # values to encode as JSON, about eight characters each


class Parts(Response):
    """A response of several body parts, sent without a copy."""

    def __init__(
        self, parts: Sequence[bytes | memoryview], media_type: str, headers: Mapping[str, str]
    ) -> None:
        self._parts = parts
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers(
            {**headers, "Content-Length": str(sum(map(len, parts))), "Content-Type": media_type}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        *first, last = self._parts
        for part in first:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        # an additional empty message would wait until the client has read all parts
        await send({"type": "http.response.body", "body": last})


async def read_body(request: Request, limit: int) -> bytes | memoryview:
    """Read the complete body, and unpack it if it is compressed. TooLarge if the unpacked body
    exceeds `limit`, Unavailable if it does not fit beside the others; Guard has checked the
    received size.
    """
    chunks = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if chunk := message.get("body", b""):
            chunks.append(chunk)
        if not message.get("more_body"):
            break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    return await asyncio.to_thread(unpacked, body, encoding, limit, request.state.share.grow)


async def infer_while_connected(
    service: Service, inference: InferRequest, receive: Receive
) -> InferAnswer:
    """Run inference, and cancel it if the client disconnects."""
    return await while_connected(service.serving.infer(inference), receive)


async def while_connected(work: Awaitable[T], receive: Receive) -> T:
    """Await work, and cancel it if the client disconnects: then ClientDisconnect."""
    task, disconnected = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            continue
        disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


async def respond(
    request: Request,
    parts: Sequence[bytes | memoryview],
    media_type: str,
    headers: Mapping[str, str],
) -> Response:
    """Build the response, compressed if the client accepts that."""
    encoding = accepted_encoding(request.headers.get("accept-encoding", ""))
    if encoding is None:
        return Parts(parts, media_type, headers)
    body = await asyncio.to_thread(packed, parts, encoding)
    return Parts(
        [body], media_type, {**headers, "Content-Encoding": encoding, "Vary": "Accept-Encoding"}
    )


async def encode_in_helper(
    service: Service,
    answer: InferAnswer,
    plain: bool,
    binary: Mapping[str, bool] | None = None,
    written: Sequence[Mapping[str, object]] = (),
) -> tuple[int, bytes]:
    """Encode a long answer in a helper process. Returns the length of its JSON, and the complete
    body. `binary` names the outputs that are not JSON; `written` describes those in shared memory.
    """
    length, parts = binary_form(answer.outputs, {})
    return await service.helpers.ask(
        "encode",
        parts,
        header_length=length,
        plain=plain,
        binary=binary or {},
        written=list(written),
        **answer_head(answer),
    )


def headers_of(answer: InferAnswer) -> dict[str, str]:
    """Return headers with the model and the timing in milliseconds."""
    timing = answer.timing
    parts = {
        "queue": timing.queue_s,
        "copy_in": timing.copy_in_s,
        "compute": timing.compute_s,
        "copy_out": timing.copy_out_s,
    }
    return {
        "Server-Timing": ", ".join(
            f"{name};dur={seconds * 1e3:.3f}" for name, seconds in parts.items()
        ),
        "Crucible-Model": quote(answer.model),
        "Crucible-Version": str(answer.version),
        "Crucible-Device": answer.device,
        "Crucible-Batch-Size": str(timing.batch_size),
    }


def is_long(sizes: Iterable[int]) -> bool:
    """Return True if a helper process should encode this many values as JSON."""
    return sum(sizes) > HELP_FROM_VALUES


def whole_number(text: str, name: str) -> int:
    """Parse a version or a length."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise Unprocessable(
            f"expected {name} to be a whole number, got '{text[:40]}'",
            "GET /docs shows name this path takes",
        )
    return int(text)
