"""Frames: what is sent is what is read, and a length is checked before anything is read."""

import asyncio
import io
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as some
from pydantic import Field, TypeAdapter

from pipeline.core.frozen import Frozen
from service.sandbox.framing import (
    LENGTHS,
    MAX_HEAD_BYTES,
    BadMessage,
    Failed,
    decode,
    frame,
    read_frame,
    receive_frame,
)


class Ping(Frozen):
    kind: Literal["ping"] = "ping"
    number: Annotated[int, Field(ge=0)] = 0


MESSAGES: TypeAdapter[Ping | Failed] = TypeAdapter(
    Annotated[Ping | Failed, Field(discriminator="kind")]
)
SENT = b"".join(frame(b'{"kind": "ping"}', [b"body"]))


def received(data: bytes, max_body_bytes: int = 10_000) -> tuple[bytes, bytes]:
    """The frame that a server receives from a child that sends `data` and ends."""

    async def receive() -> tuple[bytes, bytes]:
        reader = asyncio.StreamReader(limit=16)
        reader.feed_data(data)
        reader.feed_eof()
        return await receive_frame(reader, max_body_bytes)

    return asyncio.run(receive())


@given(some.binary(max_size=100), some.lists(some.binary(max_size=100)))
def test_a_frame_comes_whole(head: bytes, parts: list[bytes]) -> None:
    sent = b"".join(frame(head, [memoryview(part) for part in parts]))
    whole = (head, b"".join(parts))
    assert received(sent) == whole
    stream = io.BytesIO(sent * 2)
    assert [read_frame(stream), read_frame(stream)] == [whole, whole]


@pytest.mark.parametrize("count", range(len(SENT)))
def test_a_frame_that_ends_early_is_none(count: int) -> None:
    with pytest.raises(EOFError):
        received(SENT[:count])
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(SENT[:count]))


@pytest.mark.parametrize(
    "lengths",
    [(MAX_HEAD_BYTES + 1, 0), (2**64 - 1, 0), (2**63, 2**63), (0, 10_001), (0, 2**64 - 1)],
)
def test_a_length_beyond_its_limit_is_refused_before_anything_is_read(
    lengths: tuple[int, int],
) -> None:
    with pytest.raises(BadMessage, match="expected at most"):
        received(LENGTHS.pack(*lengths))


def test_the_longest_frame_is_received() -> None:
    head, body = b" " * MAX_HEAD_BYTES, b"x" * 10_000
    assert received(b"".join(frame(head, [body]))) == (head, body)


def test_a_connection_that_breaks_is_the_end() -> None:
    async def receive() -> None:
        reader = asyncio.StreamReader()
        reader.set_exception(ConnectionResetError("reset"))
        await receive_frame(reader)

    with pytest.raises(EOFError, match="reset"):
        asyncio.run(receive())


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"number": 1}',
        b'{"kind": "pong"}',
        b'{"kind": "ping", "number": -1}',
        b'{"kind": "ping", "number": "1"}',
        b'{"kind": "ping", "number": 1, "more": 1}',
        b'{"kind": "ping"}{"kind": "ping"}',
        b'{"kind": "ping"}' + b" " * MAX_HEAD_BYTES,
    ],
)
def test_a_head_that_is_no_message_is_refused(head: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(MESSAGES, head)
    assert decode(MESSAGES, b'{"kind": "ping", "number": 1}') == Ping(number=1)
