"""Calls of gRPC: giant messages, broken ones, and many streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import grpc

from service.grpc.descriptors import SERVICE
from tests.attack.expect import counted, expect
from tests.attack.targets import ANSWER_S, MODEL, Targets
from tests.service.builders.tensors import metadata_of

LIMITED = 256 * 2**20  # CRUCIBLE_SERVICE_MAX_INFER_BYTES
STREAMS = 1000
UNLIMITED = [("grpc.max_send_message_length", -1)]
INTERNAL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def giant_message(targets: Targets) -> str:
    """Send a message above the limit, plain and as gzip."""
    data = bytes(LIMITED + 1)
    codes = [
        _call(targets, "ModelInfer", data, compression=kind)
        for kind in (grpc.Compression.NoCompression, grpc.Compression.Gzip)
    ]
    expect(set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}, f"the codes are {codes}")
    return counted(code.name for code in codes)


def malformed_messages(targets: Targets) -> str:
    """Send messages to every method that are no messages, or whose fields contradict each other."""
    names = [method.name for method in SERVICE.methods]
    text = MODEL.encode()
    tensor = b"\x0a\x01x\x12\x04FP32\x1a\x0a" + b"\xff" * 9 + b"\x01"  # the shape [-1]
    bodies = (
        b"\xff" * 100,
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a" + bytes([len(text)]) + text + b"\x2a" + bytes([len(tensor)]) + tensor,
        b"\x0a" + bytes([len(text)]) + text + b"\x3a\x00" * 1000,
        b"\x2a\x80\x80\x80\x80\x08",
        b"\x0b" * 10_000,
    )
    codes = [_call(targets, name, body) for name in (*names, "Absent") for body in bodies]
    expect(not set(codes) & set(INTERNAL), f"the codes are {counted(code.name for code in codes)}")
    return counted(code.name for code in codes)


def many_streams(targets: Targets) -> str:
    """Open 1000 streams that send nothing, and call another method meanwhile."""
    stop = threading.Event()

    def nothing() -> Iterator[bytes]:
        stop.wait(ANSWER_S)
        yield from ()

    with grpc.insecure_channel(targets.server.rpc) as channel:
        stream = _stream_of(channel, "ModelStreamInfer")
        calls = [stream(nothing(), metadata=_metadata(targets)) for _ in range(STREAMS)]
        code = _call(targets, "ServerLive", b"")
        stop.set()
        for call in calls:
            call.cancel()
    expect(code is grpc.StatusCode.OK, f"ServerLive answers {code.name}")
    return f"{STREAMS} streams; ServerLive answers"


def _metadata(targets: Targets) -> tuple[tuple[str, str], ...]:
    return metadata_of(targets.server.keys["victim"])


def _stream_of(channel: grpc.Channel, name: str) -> grpc.StreamStreamMultiCallable[bytes, bytes]:
    """Return a method that takes and gives bytes."""
    return channel.stream_stream(f"/{SERVICE.full_name}/{name}")


def _call(
    targets: Targets, name: str, body: bytes, compression: grpc.Compression | None = None
) -> grpc.StatusCode:
    """Return the code of a call with these bytes as its message."""
    with grpc.insecure_channel(targets.server.rpc, options=UNLIMITED) as channel:
        call = _stream_of(channel, name)(
            iter([body]), timeout=ANSWER_S, metadata=_metadata(targets), compression=compression
        )
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        code: grpc.StatusCode = call.code()
        return code
