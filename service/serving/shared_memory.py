"""Memory that the server shares with a worker: memfds, for batches and for large bodies.

A memfd has no name, needs no /dev/shm, and is freed with the last process that holds it. The server
creates every buffer and seals its size: without the seal, a worker could shrink the buffer and kill
the server by SIGBUS at the next access. The worker gets the descriptor over the control socket
(SCM_RIGHTS).

A large body is received into such memory. If its request is a batch by itself, its tensors need no
copy: the worker maps the body's memory and gives it to the engine, or the GPU reads it. A worker
that has mapped a buffer can read and change it for good, and it runs a model of a stranger. So a
body's buffer is used again only for requests with the same path and the same key: they go to the
same model.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import HostError
from service.sandbox.framing import BadMessage
from service.serving.worker_messages import Part, Placed

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
MIN_ALIGNMENT = 16  # of a tensor within a body: what numpy gives its own arrays
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MIN_BYTES = 64 * 1024
NUMBERS = itertools.count()  # of the buffers of this process
KEPT_BYTES = 256 << 20  # of buffers that no request uses
KEPT_BUFFERS = 64  # each holds two descriptors here, and one in a worker
USED_BUFFERS = 128  # by bodies at the same time
MAX_BYTES = 1 << 36  # 64 GiB: the inputs of one batch, or its outputs


def rounded(least: int) -> int:
    """Return the size of a buffer for `least` bytes: a power of two."""
    return max(MIN_BYTES, 1 << (least - 1).bit_length())


class Buffer:
    """One mapped memfd. It is freed when nothing refers to it or to its arrays."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self.number = size, next(NUMBERS)
        self._map = mmap.mmap(descriptor, size)
        self._descriptor: int | None = descriptor

    @classmethod
    def make(cls, least: int) -> Buffer:
        """Create a buffer of at least `least` bytes; HostError if there is no memory for it."""
        size = rounded(least)
        try:
            descriptor = os.memfd_create("crucible", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, size)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
                return cls(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise HostError(
                f"cannot allocate {size} bytes of shared memory: {error}",
                "free memory, or serve with a smaller max_batch",
            ) from error

    @classmethod
    def attach(cls, descriptor: int, passes_on: bool = False) -> Buffer:
        """Map a buffer of another process, from the descriptor that it sent. Keep the descriptor
        if it will be passed on.
        """
        buffer = cls(descriptor, os.fstat(descriptor).st_size)
        if not passes_on:
            buffer.give_descriptor()
        return buffer

    @property
    def descriptor(self) -> int:
        """The descriptor to send; -1 after `give_descriptor`."""
        return -1 if self._descriptor is None else self._descriptor

    def give_descriptor(self) -> None:
        """Close the descriptor: both sides have mapped the memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.give_descriptor()

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The whole buffer."""
        return np.frombuffer(self._map, np.uint8)

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return int(self.memory.__array_interface__["data"][0])

    def array(
        self, dtype: np.dtype[np.generic], placed: Placed, alignment: int = ALIGNMENT
    ) -> NDArray[np.generic]:
        """A tensor as a view of the buffer; BadMessage unless it lies within."""
        # Python's integers do not overflow.
        size = math.prod(placed.shape) * dtype.itemsize
        if placed.offset % alignment or placed.offset + size > self.size:
            raise BadMessage(
                f"a tensor of {size} bytes at offset {placed.offset}, expected one within the"
                f" buffer's {self.size} bytes, at a multiple of {alignment}"
            )
        if size == 0:
            try:
                return np.empty(placed.shape, dtype)
            except ValueError as error:  # numpy limits the other sizes also of an empty array
                raise BadMessage(f"an empty tensor of shape {placed.shape}: {error}") from error
        return np.ndarray(placed.shape, dtype, buffer=self._map, offset=placed.offset)


class Slot:
    """The buffers of one batch at a time, for its inputs and outputs. They grow on demand."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inputs: Buffer | None = None
        self.outputs: Buffer | None = None

    def reserve(self, input_bytes: int, output_bytes: int) -> dict[Part, Buffer]:
        """Make room, and return the new buffers: the worker needs their descriptors.

        If a buffer cannot be allocated, the slot stays unchanged.
        """
        new: dict[Part, Buffer] = {}
        if self.inputs is None or self.inputs.size < input_bytes:
            new["inputs"] = Buffer.make(input_bytes)
        if self.outputs is None or self.outputs.size < output_bytes:
            new["outputs"] = Buffer.make(output_bytes)
        self.inputs, self.outputs = new.get("inputs", self.inputs), new.get("outputs", self.outputs)
        return new


def layout(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[np.generic]]
) -> tuple[tuple[Placed, ...], int]:
    """Place tensors one after the other; return their places and the total bytes."""
    placed, end = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        placed.append(Placed(shape, end))
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return tuple(placed), end


class Body(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of one body. Pass on its `data`, which keeps it: numpy's own views do not."""

    buffer: Buffer
    offset: int  # in the buffer
    in_place: bool  # a worker may map the buffer


def body_in(buffer: Buffer, offset: int, size: int, in_place: bool = True) -> Body:
    """Return `size` bytes of a buffer."""
    body = buffer.memory[offset : offset + size].view(Body)
    body.buffer, body.offset, body.in_place = buffer, offset, in_place
    return body


class BodyPool:
    """Buffers that are used again when nothing refers to their last body any more."""

    def __init__(self) -> None:
        self._free: list[tuple[Hashable, Buffer]] = []
        self._used = 0
        # Bodies end in any thread, and in the middle of `shared`.
        self._returned: deque[tuple[Hashable, Buffer]] = deque()

    def take(self, size: int, key: Hashable, before: int = 0) -> memoryview:
        """Return memory as `shared` does. Return ordinary memory without a key, if USED_BUFFERS are
        in use, or if no other can be had.
        """
        self._tidy()
        if key is not None and self._used < USED_BUFFERS:
            with contextlib.suppress(HostError):
                return self.shared(size, key, before).data
        return np.empty(size, np.uint8).data

    def shared(self, size: int, key: Hashable = None, before: int = 0) -> Body:
        """Return memory for a body of `size` bytes. Requests with equal keys may share it. Without
        a key, no worker reads it in place.

        What comes after the first `before` bytes, such as a head in JSON, is aligned. HostError
        without descriptors or memory.
        """
        self._tidy()
        offset = -before % ALIGNMENT
        buffer = self._kept(key, rounded(offset + size)) or Buffer.make(offset + size)
        self._used += 1
        body = body_in(buffer, offset, size, key is not None)
        weakref.finalize(body, self._returned.append, (key, buffer)).atexit = False
        return body

    def dropped(self, buffer: Buffer) -> None:
        """Called for a buffer that will not be used again."""

    def _kept(self, key: Hashable, size: int) -> Buffer | None:
        for number in reversed(range(len(self._free))):
            own, buffer = self._free[number]
            if own == key and buffer.size == size:
                del self._free[number]
                return buffer
        return None

    def _tidy(self) -> None:
        for _ in range(len(self._returned)):
            self._free.append(self._returned.popleft())
            self._used -= 1
        kept = sum(buffer.size for _, buffer in self._free)
        while kept > KEPT_BYTES or len(self._free) > KEPT_BUFFERS:
            _, buffer = self._free.pop(0)
            kept -= buffer.size
            self.dropped(buffer)


@dataclass(frozen=True, slots=True)
class InPlace:
    """Tensors of one body, and their places in its buffer."""

    buffer: Buffer
    placed: tuple[Placed, ...]


def in_place(arrays: Sequence[object], dtypes: Sequence[np.dtype[np.generic]]) -> InPlace | None:
    """Return where these tensors are, or None if a worker cannot read them there."""
    placed, buffer = [], None
    for array, dtype in zip(arrays, dtypes, strict=True):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.size == 0:
            return None
        body = _body_of(array)
        if (
            body is None
            or not body.in_place
            or not array.flags.c_contiguous
            or buffer not in (None, body.buffer)
        ):
            return None
        buffer = body.buffer
        offset = _address(array) - buffer.address
        if offset % MIN_ALIGNMENT:
            return None
        placed.append(Placed(array.shape, offset))
    return None if buffer is None else InPlace(buffer, tuple(placed))


def _body_of(array: NDArray[np.generic]) -> Body | None:
    """The body that an array is a view of."""
    owner: object = array
    while owner is not None and not isinstance(owner, Body):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])
