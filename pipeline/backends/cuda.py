"""The parts of CUDA that sessions need: errors, streams, events, memory, graphs, and arrays of
other libraries on the GPU.

Functions and classes take the imported `cuda.bindings.runtime`, which `runtime()` returns. Every
resource has close(), which may be called twice. A resource without a reference is freed even if
close() was not called. Freeing ignores CUDA's result: it could only repeat the error of earlier
work, and `Stream.synchronize` raises that.
"""

from __future__ import annotations

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
from pipeline.backends.host_copies import address_of
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
# cudaErrorIllegalAddress to cudaErrorLaunchFailure and the like: after one of them every later call
# in the process fails
STICKY = range(700, 720)
# From this many bytes on, a copy takes longer than to ask CUDA whether it is necessary.
WORTH_ASKING = 256 << 10
MIN_BYTES = 256  # an empty tensor has an address too
ON_THE_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged of dlpack.h


class CudaError(HostError):
    """CUDA, or a library that runs on it, failed.

    Next: `crucible doctor` shows what this GPU can do; restart the process if the driver
    reports a fault.
    """

    code = "host.cuda"


class OutOfDeviceMemory(HostError):
    """The GPU has less free memory than requested. Open engines and sessions stay usable.

    Next: stop other processes on the GPU, take a smaller max in the profiles, or load fewer
    instances.
    """

    code = "host.out_of_device_memory"
    may_pass = True


def runtime() -> Any:
    """Import `cuda.bindings.runtime`. BackendUnavailable if cuda-python is missing."""
    return _imported("cuda.bindings.runtime")


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            f"`{module}` of cuda-python cannot be imported: {error}", INSTALL
        ) from error


def check(rt: Any, result: tuple[Any, ...]) -> Any:
    """Return the values of a CUDA call. Raises unless its error is cudaSuccess.

    (error,) gives None, (error, value) the value, (error, value, value) both values.
    """
    if result[0]:
        raise failure(rt, result[0])
    return result[1] if len(result) == 2 else result[1:] or None


def failure(rt: Any, error: Any) -> CrucibleError:
    """Return the exception for an error code of CUDA.

    Clears CUDA's "last error", so that the next call does not report it again.
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


def out_of_memory(rt: Any, requested_bytes: int | None = None) -> OutOfDeviceMemory:
    """Return the exception for an allocation that failed. The next one may succeed."""
    rt.cudaGetLastError()
    parts = []
    if requested_bytes is not None:
        parts.append(f"requested {_size_text(requested_bytes)}")
    error, free, total = rt.cudaMemGetInfo()
    if not error:
        parts.append(f"{_size_text(free)} of {_size_text(total)} are free")
    details = f": {', '.join(parts)}" if parts else ""
    next_step = (
        "close other engines and processes on this GPU (nvidia-smi shows them), or compile for"
        " smaller maximum shapes"
    )
    return OutOfDeviceMemory(f"the GPU is out of memory{details}", next_step)


def _size_text(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def free_and_total_bytes(rt: Any) -> tuple[int, int]:
    """Return the free and the total memory of the current device."""
    free, total = check(rt, rt.cudaMemGetInfo())
    return free, total


def use_device(rt: Any, ordinal: int) -> None:
    """Make a GPU the current one of this thread. UnsupportedError if this host has no such GPU."""
    count = check(rt, rt.cudaGetDeviceCount())
    if ordinal >= count:
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        raise UnsupportedError(
            f"there is no device 'cuda:{ordinal}': this host has {gpus}",
            "name one from cuda:0 on",
        )
    check(rt, rt.cudaSetDevice(ordinal))


Copy = tuple[int, int, int, Any]
"""Destination, source, bytes (more than 0) and kind of a copy.

The kind is `Stream.to_device`, `Stream.to_host` or `Stream.on_device`.
"""


class Stream:
    """A queue of work on the GPU. It and the legacy default stream do not wait for each other."""

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
        """Enqueue copies. Host memory must be page-locked and stay unchanged meanwhile."""
        memcpy, raw = self._memcpy, self.raw
        for destination, source, size, kind in copies:
            result = memcpy(destination, source, size, kind, raw)
            if result[0]:
                check(self.rt, result)

    def synchronize(self) -> None:
        """Wait until all enqueued work is done. Raises its errors."""
        check(self.rt, self.rt.cudaStreamSynchronize(self.raw))

    @property
    def is_open(self) -> bool:
        return self._destroy.alive

    def close(self) -> None:
        """Wait for the enqueued work, whose buffers may be freed next, and close the stream."""
        if self.is_open:
            self.rt.cudaStreamSynchronize(self.raw)
        self._destroy()


class Event:
    """A point in a stream with a timestamp."""

    def __init__(self, rt: Any) -> None:
        self._rt = rt
        self.raw = check(rt, rt.cudaEventCreate())
        self.close = weakref.finalize(self, rt.cudaEventDestroy, self.raw)

    def record(self, stream: Stream) -> None:
        if not stream.is_open:
            closed()
        check(self._rt, self._rt.cudaEventRecord(self.raw, stream.raw))

    def seconds_since(self, start: Event) -> float:
        """Wait for this event and return the seconds since `start`.

        The resolution is about half a microsecond.
        """
        check(self._rt, self._rt.cudaEventSynchronize(self.raw))
        milliseconds = float(check(self._rt, self._rt.cudaEventElapsedTime(start.raw, self.raw)))
        return milliseconds / 1000


class EventTimer:
    """A timer for the work that is enqueued on a stream between start and stop.

    It uses the GPU's own clock. Its times outlive the stream.
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
    """Memory that can grow, at `pointer` with `size` bytes; both are 0 while it is empty."""

    def __init__(
        self, allocate: Callable[[int], int], free: Callable[[int], object], size: int | None
    ) -> None:
        self._allocate, self._free = allocate, free
        self._release: Callable[[], object] = lambda: None
        self.pointer = self.size = 0
        if size is not None:
            self.reserve(size)

    def reserve(self, size: int) -> None:
        """Make the buffer hold at least `size` bytes, and at least MIN_BYTES.

        A buffer that grows changes its address and loses its content. If the allocation fails, it
        is empty.
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
    """Memory on the GPU. OutOfDeviceMemory if the GPU has too little."""

    def __init__(self, rt: Any, size: int | None = None) -> None:
        super().__init__(partial(_device_memory, rt), rt.cudaFree, size)


class PinnedBuffer(_Buffer):
    """Page-locked memory of the host: the only host memory that CUDA copies asynchronously.

    Its arrays keep it alive. They are invalid once it grows or is closed.
    """

    def __init__(self, rt: Any, size: int | None = None) -> None:
        super().__init__(partial(_pinned_memory, rt), rt.cudaFreeHost, size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.pointer, False),
        }

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the first bytes as an array."""
        size = math.prod(shape) * dtype.itemsize
        return np.asarray(self)[:size].view(dtype).reshape(shape)


def page_locked_array(rt: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in page-locked memory of its own, with arbitrary values.

    HostError if the host cannot lock that much memory.
    """
    return PinnedBuffer(rt, math.prod(shape) * dtype.itemsize).array(shape, dtype)


def is_page_locked(rt: Any, array: NDArray[Any]) -> bool:
    """Return True if CUDA can copy from this array directly: it is contiguous and page-locked.

    It may be anybody's: of `page_locked_array`, of `page_lock`, or of another library.
    """
    if not array.flags.c_contiguous or not array.nbytes:
        return False
    first = address_of(array)
    for address in (first, first + array.nbytes - 1):
        error, attributes = rt.cudaPointerGetAttributes(address)
        if error:
            rt.cudaGetLastError()
            return False
        if attributes.type != rt.cudaMemoryType.cudaMemoryTypeHost:
            return False
    return True


def page_lock(rt: Any, memory: NDArray[np.uint8]) -> Callable[[], object]:
    """Page-lock memory that exists, and return the function that undoes it.

    That must be called before the memory is freed. HostError if the host cannot lock that much.
    """
    address = address_of(memory)
    (error,) = rt.cudaHostRegister(address, memory.nbytes, rt.cudaHostRegisterPortable)
    if error:
        rt.cudaGetLastError()
        raise _cannot_lock(memory.nbytes)
    return partial(rt.cudaHostUnregister, address)


def _device_memory(rt: Any, size: int) -> int:
    error, pointer = rt.cudaMalloc(size)
    if int(error) == OUT_OF_MEMORY:
        raise out_of_memory(rt, size)
    return int(check(rt, (error, pointer)))


def _pinned_memory(rt: Any, size: int) -> int:
    error, pointer = rt.cudaMallocHost(size)
    if int(error) == OUT_OF_MEMORY:
        rt.cudaGetLastError()
        raise _cannot_lock(size)
    return int(check(rt, (error, pointer)))


def _cannot_lock(size: int) -> HostError:
    return HostError(
        f"this host cannot lock {_size_text(size)} of its memory for copies to the GPU",
        "free memory, or compile for smaller shapes",
    )


class Graph:
    """Captured work that is launched as one unit, on the same addresses and in the same stream."""

    def __init__(self, stream: Stream, raw: Any) -> None:
        self._stream, self._raw = stream, raw
        self._launch = stream.rt.cudaGraphLaunch
        self.close = weakref.finalize(self, stream.rt.cudaGraphExecDestroy, raw)

    def launch(self) -> None:
        result = self._launch(self._raw, self._stream.raw)
        if result[0]:
            check(self._stream.rt, result)


def capture(stream: Stream, enqueue: Callable[[], None]) -> Graph:
    """Capture the work that `enqueue` puts on the stream as a graph, without running it.

    Exceptions of `enqueue` are passed on, and the stream stays usable.
    """
    rt = stream.rt
    mode = rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    check(rt, rt.cudaStreamBeginCapture(stream.raw, mode))
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
    """End a capture that failed.

    CUDA returns error 901 and no graph, or a graph if the failure came from elsewhere.
    """
    rt = stream.rt
    error, captured = rt.cudaStreamEndCapture(stream.raw)
    if not error:
        rt.cudaGraphDestroy(captured)
    rt.cudaGetLastError()


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A contiguous array of another library on the GPU, ordered before later work of our stream."""

    pointer: int
    # An array of the same dtype and shape, with one element of memory, for the checks of feeds.
    like: NDArray[Any]
    owner: object  # keeps the memory alive


def device_array(name: str, value: object, stream: Stream, ordinal: int) -> DeviceArray | None:
    """Return an input on the GPU, by DLPack or __cuda_array_interface__; None for any other value.

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


@dataclass(frozen=True, slots=True)
class DeviceOutput:
    """An output where it lies on the GPU.

    Libraries that take DLPack or __cuda_array_interface__, such as PyTorch and CuPy, use it without
    a copy: `torch.from_dlpack(output)`. The session's next run overwrites it, and closing the
    session frees it.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ordinal: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "stream": None,  # the run is finished
        }

    def __dlpack__(self, **options: Any) -> Any:
        view = _imported("cuda.core.utils").StridedMemoryView
        # -1: nothing to wait for
        return view.from_cuda_array_interface(self, stream_ptr=-1).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return ON_THE_GPU[0], self.ordinal


def _is_on_gpu(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return False
    device = getattr(value, "__dlpack_device__", None)
    if device:
        return device()[0] in ON_THE_GPU
    return hasattr(value, "__cuda_array_interface__")


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Return True if the elements lie in C order without gaps.

    Strides count elements; None means C order. The strides of axes of size 1 are ignored.
    """
    if strides is None or 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
