"""A CUDA without a GPU, for what sessions do with it: work waits on its stream, memory is counted
and checked at each use.
"""

# ruff: noqa: N802, N815 - CUDA's own names

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

Work = Callable[[], None]


class Error(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidResourceHandle = 400
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureInvalidated = 901


class CopyKind(Enum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class MemoryType(Enum):
    cudaMemoryTypeUnregistered = 0
    cudaMemoryTypeHost = 1


@dataclass(frozen=True)
class Attributes:
    type: MemoryType


class CaptureMode(Enum):
    cudaStreamCaptureModeThreadLocal = 1


@dataclass(eq=False)
class StreamDouble:
    number: int
    waiting: list[Work] = field(default_factory=list)
    captured: list[Work] | None = None  # while it is being captured
    is_invalid: bool = False

    def __int__(self) -> int:
        return self.number

    def put(self, work: Work) -> None:
        (self.waiting if self.captured is None else self.captured).append(work)


@dataclass(eq=False)
class EventDouble:
    seconds: float = 0.0


class CudaDouble:
    """Stands for the module `cuda.bindings.runtime`. What is wrong with memory is an
    AssertionError, not an error code.
    """

    cudaStreamNonBlocking = 1
    cudaHostRegisterPortable = 1
    cudaMemcpyKind = CopyKind
    cudaMemoryType = MemoryType
    cudaStreamCaptureMode = CaptureMode

    def __init__(self, total: int = 1 << 28) -> None:
        self.total = total
        self.device: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, StreamDouble] = {}
        self.graphs: list[list[Work]] = []
        self.events: list[EventDouble] = []
        self.launches = 0
        self.fault = Error.cudaSuccess  # what the next synchronisation answers

    @property
    def used(self) -> int:
        return sum(len(block) for block in self.device.values())

    def stream_at(self, pointer: int) -> StreamDouble:
        return self.streams[pointer]

    # memory

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return Error.cudaSuccess, 1

    def cudaSetDevice(self, ordinal: int) -> tuple[Any, ...]:
        assert ordinal == 0
        return (Error.cudaSuccess,)

    def cudaMemGetInfo(self) -> tuple[Any, ...]:
        return Error.cudaSuccess, self.total - self.used, self.total

    def cudaGetLastError(self) -> tuple[Any, ...]:
        return (Error.cudaSuccess,)

    def cudaGetErrorString(self, error: Error) -> tuple[Any, ...]:
        return Error.cudaSuccess, error.name.removeprefix("cudaError").encode()

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        assert size > 0
        if self.used + size > self.total:
            return Error.cudaErrorMemoryAllocation, None
        return Error.cudaSuccess, self._allocate(self.device, size)

    def cudaMallocHost(self, size: int) -> tuple[Any, ...]:
        return (
            (Error.cudaErrorMemoryAllocation, None)
            if size > self.total
            else (Error.cudaSuccess, self._allocate(self.pinned, size))
        )

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaHostRegisterPortable
        if size > self.total:
            return (Error.cudaErrorMemoryAllocation,)
        assert pointer not in self.pinned, "locked twice"
        self.pinned[pointer] = bytes(size)  # the size counts, not the bytes
        return (Error.cudaSuccess,)

    def cudaHostUnregister(self, pointer: int) -> tuple[Any, ...]:
        return self.cudaFreeHost(pointer)

    def cudaPointerGetAttributes(self, pointer: int) -> tuple[Any, ...]:
        kind = "Host" if is_inside(self.pinned, pointer, 1) else "Unregistered"
        return Error.cudaSuccess, Attributes(MemoryType[f"cudaMemoryType{kind}"])

    def _allocate(self, blocks: dict[int, Any], size: int) -> int:
        block = ctypes.create_string_buffer(b"\xab" * size, size)  # never zeros by chance
        blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def cudaFree(self, pointer: int) -> tuple[Any, ...]:
        self._drain_all()  # as the real one does
        del self.device[pointer]
        return (Error.cudaSuccess,)

    def cudaFreeHost(self, pointer: int) -> tuple[Any, ...]:
        assert not any(stream.waiting for stream in self.streams.values()), (
            "page-locked memory freed while copies may use it"
        )
        del self.pinned[pointer]
        return (Error.cudaSuccess,)

    def cudaMemcpyAsync(
        self, to: int, source: int, size: int, kind: CopyKind, stream: StreamDouble
    ) -> tuple[Any, ...]:
        assert size > 0

        def work() -> None:
            assert is_inside(
                self.pinned if kind is CopyKind.cudaMemcpyDeviceToHost else self.device, to, size
            )
            assert is_inside(
                self.pinned if kind is CopyKind.cudaMemcpyHostToDevice else self.device,
                source,
                size,
            )
            ctypes.memmove(to, source, size)

        stream.put(work)
        return (Error.cudaSuccess,)

    # streams, events, graphs

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaStreamNonBlocking
        stream = StreamDouble(max(self.streams, default=100) + 1)
        self.streams[stream.number] = stream
        return Error.cudaSuccess, stream

    def cudaStreamDestroy(self, stream: StreamDouble) -> tuple[Any, ...]:
        del self.streams[stream.number]
        return (Error.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: StreamDouble) -> tuple[Any, ...]:
        assert stream.number in self.streams
        self._drain(stream)
        return (self.fault,)

    def _drain(self, stream: StreamDouble) -> None:
        while stream.waiting:
            stream.waiting.pop(0)()

    def _drain_all(self) -> None:
        for stream in self.streams.values():
            self._drain(stream)

    def cudaEventCreate(self) -> tuple[Any, ...]:
        self.events.append(EventDouble())
        return Error.cudaSuccess, self.events[-1]

    def cudaEventDestroy(self, event: EventDouble) -> tuple[Any, ...]:
        self.events.remove(event)
        return (Error.cudaSuccess,)

    def cudaEventRecord(self, event: EventDouble, stream: StreamDouble) -> tuple[Any, ...]:
        stream.put(lambda: setattr(event, "seconds", time.monotonic()))
        return (Error.cudaSuccess,)

    def cudaEventSynchronize(self, event: EventDouble) -> tuple[Any, ...]:
        self._drain_all()
        return (Error.cudaSuccess,)

    def cudaEventElapsedTime(self, start: EventDouble, stop: EventDouble) -> tuple[Any, ...]:
        return Error.cudaSuccess, (stop.seconds - start.seconds) * 1000

    def cudaStreamBeginCapture(self, stream: StreamDouble, mode: CaptureMode) -> tuple[Any, ...]:
        stream.captured, stream.is_invalid = [], False
        return (Error.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: StreamDouble) -> tuple[Any, ...]:
        captured, stream.captured = stream.captured, None
        return (
            (Error.cudaErrorStreamCaptureInvalidated, None)
            if stream.is_invalid
            else (Error.cudaSuccess, captured)
        )

    def cudaGraphInstantiate(self, captured: list[Work], flags: int) -> tuple[Any, ...]:
        self.graphs.append(list(captured))
        return Error.cudaSuccess, self.graphs[-1]

    def cudaGraphDestroy(self, captured: list[Work]) -> tuple[Any, ...]:
        captured.clear()
        return (Error.cudaSuccess,)

    def cudaGraphExecDestroy(self, graph: list[Work]) -> tuple[Any, ...]:
        self.graphs = [each for each in self.graphs if each is not graph]
        return (Error.cudaSuccess,)

    def cudaGraphLaunch(self, graph: list[Work], stream: StreamDouble) -> tuple[Any, ...]:
        assert any(each is graph for each in self.graphs), "a destroyed graph was launched"
        self.launches += 1
        stream.waiting.extend(graph)
        return (Error.cudaSuccess,)


def is_inside(blocks: Mapping[int, Any], pointer: int, size: int) -> bool:
    """Whether these bytes lie in memory that is allocated."""
    return any(
        start <= pointer and pointer + size <= start + len(block) for start, block in blocks.items()
    )
