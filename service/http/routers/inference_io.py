"""What the inference routes share: a body read once, an answer awaited while its client is there,
and one sent without being joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.codecs.content_encoding import encoding_asked, packed, unpacked
from service.codecs.oip import binary_form
from service.context import Service
from service.errors import Unprocessable
from service.inference import InferAnswer, InferRequest
from service.offload.worker import answer_head

HELP_FROM_VALUES = 8 * 1024  # of tensors to be written as JSON, at some eight characters each


class Parts(Response):
    """A body in several parts, each sent as it lies in memory."""

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
        await send(
            {"type": "http.response.body", "body": last}
        )  # a message of its own would wait until the client has read all before it


async def read_body(request: Request, limit: int) -> bytes | memoryview:
    """The whole body, unpacked where it is compressed. TooLarge if it is longer than `limit` then;
    how it came was counted before.
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
    return (
        body if encoding == "identity" else await asyncio.to_thread(unpacked, body, encoding, limit)
    )


async def answer_while_there(
    service: Service, asked: InferRequest, receive: Receive
) -> InferAnswer:
    """What the model answers. If the client goes away meanwhile, the request is cancelled."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            continue
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await service.serving.infer(asked)
    except asyncio.CancelledError:
        if gone and not task.uncancel():
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
    """The answer, compressed if the client asked for that."""
    encoding = encoding_asked(request.headers.get("accept-encoding", ""))
    if encoding is None:
        return Parts(parts, media_type, headers)
    whole = await asyncio.to_thread(packed, parts, encoding)
    return Parts(
        [whole], media_type, {**headers, "Content-Encoding": encoding, "Vary": "Accept-Encoding"}
    )


async def write_elsewhere(
    service: Service, answer: InferAnswer, plain: bool, binary: Mapping[str, bool] | None = None
) -> tuple[int, bytes]:
    """A long answer, written by a helper: the length of its JSON, and the whole. `binary` says
    which outputs are not JSON.
    """
    length, parts = binary_form(answer.outputs, {})
    head, text = await service.helpers.ask(
        "encode",
        parts,
        header_length=length,
        plain=plain,
        binary=binary or {},
        **answer_head(answer),
    )
    return head["header_length"], text


def headers_of(answer: InferAnswer) -> dict[str, str]:
    """Who answered, and where the time went, in milliseconds."""
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
    """Whether so many values are better written as JSON elsewhere."""
    return sum(sizes) > HELP_FROM_VALUES


def whole_number(text: str, what: str) -> int:
    """A version, or a length, as a request names it."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise Unprocessable(
            f"expected {what} to be a whole number, got '{text[:40]}'",
            "GET /docs shows what this path takes",
        )
    return int(text)
