"""CUDA from Python, as little of it as sessions need: errors, streams, events, memory, graphs, and
arrays of other libraries on the GPU.

Functions and classes take the imported `cuda.bindings.runtime`, which `runtime()` gives. Everything
has close(), which may be called twice; what is dropped without it is freed with it. Freeing ignores
CUDA's answer: it could only repeat the error of earlier work, and that is raised by
`Stream.synchronize`.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.feed_checks import closed
from pipeline.distribution import install_command
from pipeline.errors import (
    BackendUnavailable,
    CrucibleError,
    DataError,
    HostError,
    UnsupportedError,
)

INSTALL = install_command("tensorrt")
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
STICKY = range(
    700,
    720,
    # cudaErrorIllegalAddress to cudaErrorLaunchFailure and their like: every later call in the
    # process fails too
)
MIN_BYTES = 256  # an empty tensor has an address too
ON_THE_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged of dlpack.h


class CudaError(HostError):
    """CUDA, or a library that runs on it, cannot do what it was asked."""

    code = "host.cuda"


class OutOfDeviceMemory(HostError):
    """The GPU has not as much free memory as was asked for; what is open stays usable."""

    code = "host.out_of_device_memory"
    may_pass = True


def runtime() -> Any:
    """The imported `cuda.bindings.runtime`; BackendUnavailable where cuda-python is missing."""
    return _imported("cuda.bindings.runtime")


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            f"`{module}` of cuda-python cannot be imported: {error}", INSTALL
        ) from error


def check(rt: Any, result: tuple[Any, ...]) -> Any:
    """The value of (error, value), None of (error,), the values of (error, value, value); raises
    unless the error is cudaSuccess.
    """
    if result[0]:
        raise failure(rt, result[0])
    return result[1] if len(result) == 2 else result[1:] or None


def failure(rt: Any, error: Any) -> CrucibleError:
    """The exception for an error code of CUDA, whose "last error" is cleared, so that the next call
    does not see it again.
    """
    if int(error) == OUT_OF_MEMORY:
        return out_of_memory(rt)
    rt.cudaGetLastError()
    _, text = rt.cudaGetErrorString(error)
    if int(error) in STICKY:
        next_step = (
            "this process cannot use the GPU any more: start it again, and check the values of the"
            " inputs (indices outside their table)"
        )
    else:
        next_step = "`crucible doctor` shows what CUDA finds on this host"
    return CudaError(f"CUDA reports {error.name}: {text.decode()}", next_step)


def out_of_memory(rt: Any, wanted_bytes: int | None = None) -> OutOfDeviceMemory:
    """The exception for an allocation that failed; the next one may work."""
    rt.cudaGetLastError()
    wanted = "" if wanted_bytes is None else f": wanted {_shown(wanted_bytes)}"
    error, free, total = rt.cudaMemGetInfo()
    left = "" if error else f"{',' if wanted else ':'} {_shown(free)} of {_shown(total)} are free"
    next_step = (
        "close other engines and processes on this GPU (nvidia-smi shows them), or compile for"
        " smaller maximum shapes"
    )
    return OutOfDeviceMemory(f"the GPU is out of memory{wanted}{left}", next_step)


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def free_and_total_bytes(rt: Any) -> tuple[int, int]:
    """Memory of the current device."""
    free, total = check(rt, rt.cudaMemGetInfo())
    return free, total


def use_device(rt: Any, ordinal: int) -> None:
    """Make a GPU the current one of this thread; UnsupportedError if this host has no such GPU."""
    count = check(rt, rt.cudaGetDeviceCount())
    if ordinal >= count:
        raise UnsupportedError(
            f"there is no device 'cuda:{ordinal}': this host has {count} GPU{'s' * (count != 1)}",
            "name one from cuda:0 on",
        )
    check(rt, rt.cudaSetDevice(ordinal))


Copy = tuple[int, int, int, Any]
"""To, from, bytes (more than 0), and its kind: `Stream.to_device`, `Stream.to_host` or
`Stream.on_device`.
"""


class Stream:
    """A queue of work on the GPU, which waits for no other and is not waited for by the legacy
    default stream.
    """

    def __init__(self, rt: Any) -> None:
        self.rt = rt
        self.raw = check(rt, rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
        self.pointer = int(self.raw)
        self.to_device = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.to_host = rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.on_device = rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._memcpy = rt.cudaMemcpyAsync
        self._destroy = weakref.finalize(self, rt.cudaStreamDestroy, self.raw)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Enqueue copies; host memory must be page-locked and stay as it is until they are done."""
        memcpy, raw = self._memcpy, self.raw
        for destination, source, size, kind in copies:
            result = memcpy(destination, source, size, kind, raw)
            if result[0]:
                check(self.rt, result)

    def synchronize(self) -> None:
        """Wait until all is done; raises what went wrong meanwhile."""
        check(self.rt, self.rt.cudaStreamSynchronize(self.raw))

    @property
    def is_open(self) -> bool:
        return self._destroy.alive

    def close(self) -> None:
        """Waits for what is enqueued, so that its buffers can be freed next."""
        if self.is_open:
            self.rt.cudaStreamSynchronize(self.raw)
        self._destroy()


class Event:
    """A point in a stream, with its time."""

    def __init__(self, rt: Any) -> None:
        self._rt = rt
        self.raw = check(rt, rt.cudaEventCreate())
        self.close = weakref.finalize(self, rt.cudaEventDestroy, self.raw)

    def record(self, stream: Stream) -> None:
        if not stream.is_open:
            closed()
        check(self._rt, self._rt.cudaEventRecord(self.raw, stream.raw))

    def seconds_since(self, start: Event) -> float:
        """Waits for this event; CUDA resolves about half a microsecond."""
        check(self._rt, self._rt.cudaEventSynchronize(self.raw))
        return (
            float(check(self._rt, self._rt.cudaEventElapsedTime(start.raw, self.raw))) / 1000
        )  # CUDA answers in milliseconds


class EventTimer:
    """Times what is enqueued on a stream between start and stop, on the GPU's own clock. Its times
    outlive the stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._start, self._stop = Event(stream.rt), Event(stream.rt)

    def start(self) -> None:
        self._start.record(self._stream)

    def stop(self) -> None:
        self._stop.record(self._stream)

    def elapsed_s(self) -> float:
        return self._stop.seconds_since(self._start)

    def close(self) -> None:
        self._start.close()
        self._stop.close()


class _Buffer:
    """Memory that may grow: `pointer` and `size` in bytes, both 0 while there is none."""

    def __init__(
        self, allocate: Callable[[int], int], free: Callable[[int], object], size: int | None
    ) -> None:
        self._allocate, self._free = allocate, free
        self._release: Callable[[], object] = lambda: None
        self.pointer = self.size = 0
        if size is not None:
            self.reserve(size)

    def reserve(self, size: int) -> None:
        """At least `size` bytes, and never none; what grows changes its address and loses its
        content, and is empty if that fails.
        """
        if size <= self.size and self.pointer:
            return
        self.close()
        size = max(size, MIN_BYTES)
        self.pointer = self._allocate(size)
        self.size, self._release = size, weakref.finalize(self, self._free, self.pointer)

    def close(self) -> None:
        self._release()
        self.pointer = self.size = 0


class DeviceBuffer(_Buffer):
    """Memory on the GPU. OutOfDeviceMemory if there is not enough."""

    def __init__(self, rt: Any, size: int | None = None) -> None:
        super().__init__(partial(_device_memory, rt), rt.cudaFree, size)


class PinnedBuffer(_Buffer):
    """Page-locked memory of the host: the only memory that can be copied while the CPU goes on.
    Arrays made of it must not outlive it.
    """

    def __init__(self, rt: Any, size: int | None = None) -> None:
        super().__init__(partial(_pinned_memory, rt), rt.cudaFreeHost, size)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All of it."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.pointer))

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Its first bytes as an array."""
        return self.bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _device_memory(rt: Any, size: int) -> int:
    error, pointer = rt.cudaMalloc(size)
    if int(error) == OUT_OF_MEMORY:
        raise out_of_memory(rt, size)
    return int(check(rt, (error, pointer)))


def _pinned_memory(rt: Any, size: int) -> int:
    error, pointer = rt.cudaMallocHost(size)
    if int(error) == OUT_OF_MEMORY:
        rt.cudaGetLastError()
        raise HostError(
            f"this host cannot lock {_shown(size)} of its memory for copies to the GPU",
            "free memory, or compile for smaller shapes",
        )
    return int(check(rt, (error, pointer)))


class Graph:
    """Work that was captured, ready to be launched as one: on the same addresses, in the same
    stream.
    """

    def __init__(self, stream: Stream, raw: Any) -> None:
        self._stream, self._raw = stream, raw
        self._launch = stream.rt.cudaGraphLaunch
        self.close = weakref.finalize(self, stream.rt.cudaGraphExecDestroy, raw)

    def launch(self) -> None:
        result = self._launch(self._raw, self._stream.raw)
        if result[0]:
            check(self._stream.rt, result)


def capture(stream: Stream, enqueue: Callable[[], None]) -> Graph:
    """What `enqueue` puts on the stream, as a graph; nothing of it runs. Whatever it raises comes
    out, and the stream works as before.
    """
    rt = stream.rt
    check(
        rt,
        rt.cudaStreamBeginCapture(
            stream.raw, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        ),
    )
    try:
        enqueue()
    except BaseException:
        _abandon(stream)
        raise
    captured = check(rt, rt.cudaStreamEndCapture(stream.raw))
    try:
        return Graph(stream, check(rt, rt.cudaGraphInstantiate(captured, 0)))
    finally:
        rt.cudaGraphDestroy(captured)


def _abandon(stream: Stream) -> None:
    """End a capture that failed; CUDA answers 901 and gives no graph, or gives one if the work was
    not what failed.
    """
    rt = stream.rt
    error, captured = rt.cudaStreamEndCapture(stream.raw)
    if not error:
        rt.cudaGraphDestroy(captured)
    rt.cudaGetLastError()


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array of another library that lies on the GPU, contiguous, ready for work of the stream it
    was made for.
    """

    pointer: int
    like: NDArray[
        Any
    ]  # of its dtype and shape, with one element of memory: what the checks of host arrays look at
    owner: object  # keeps the memory alive


def device_array(name: str, value: object, stream: Stream, ordinal: int) -> DeviceArray | None:
    """An input that lies on the GPU, by DLPack or __cuda_array_interface__; None of anything else.
    DataError if it cannot be copied as it is.
    """
    try:
        if not _is_on_gpu(value):
            return None
        view = _imported("cuda.core.utils").StridedMemoryView.from_any_interface(
            value, stream_ptr=stream.pointer
        )
        dtype, shape = view.dtype, tuple(view.shape)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"input '{name}' is a {type(value).__name__} that cannot be shared: {error}",
            "give a plain, detached tensor",
        ) from error
    if dtype is None:
        raise DataError(
            f"input '{name}' has a dtype that numpy does not know",
            "convert it to the dtype that `crucible inspect` shows",
        )
    if view.device_id != ordinal:
        raise DataError(
            f"input '{name}' lies on cuda:{view.device_id}, expected cuda:{ordinal}",
            f"move it to cuda:{ordinal}",
        )
    if not is_contiguous(shape, view.strides):
        raise DataError(
            f"input '{name}' {shape} has strides {view.strides}, expected a contiguous array",
            "call .contiguous() on it, or the like",
        )
    return DeviceArray(int(view.ptr), np.broadcast_to(np.zeros((), dtype), shape), view)


def _is_on_gpu(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return False
    if device := getattr(value, "__dlpack_device__", None):
        return device()[0] in ON_THE_GPU
    return hasattr(value, "__cuda_array_interface__")


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether elements lie in C order without gaps. Strides count elements; None: they do; those of
    axes of one element mean nothing.
    """
    if strides is None or 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
