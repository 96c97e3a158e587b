"""Memory that the server shares with a worker: memfds.

A memfd has no name, needs no /dev/shm, and is freed with the last process that holds it. The server
creates every buffer and seals its size: without the seal, a worker could shrink the buffer and kill
the server by SIGBUS at the next access. The worker gets the descriptor over the control socket
(SCM_RIGHTS).
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import HostError
from service.sandbox.framing import BadMessage
from service.serving.worker_messages import Part, Placed

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MIN_BYTES = 64 * 1024
MAX_BYTES = 1 << 36  # 64 GiB: the inputs of one batch, or its outputs


class Buffer:
    """One mapped memfd. It is freed when nothing refers to it or to its arrays."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self._descriptor: int | None = descriptor

    @classmethod
    def make(cls, least: int) -> Buffer:
        """Create a buffer of at least `least` bytes; HostError if there is no memory for it."""
        size = MIN_BYTES
        while size < least:
            size *= 2
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
    def attach(cls, descriptor: int) -> Buffer:
        """Map a buffer in the worker, from the descriptor that the server sent."""
        buffer = cls(descriptor, os.fstat(descriptor).st_size)
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

    def array(self, dtype: np.dtype[np.generic], placed: Placed) -> NDArray[np.generic]:
        """A tensor as a view of the buffer; BadMessage unless it lies within."""
        # Python's integers do not overflow.
        size = math.prod(placed.shape) * dtype.itemsize
        if placed.offset % ALIGNMENT or placed.offset + size > self.size:
            raise BadMessage(
                f"a tensor of {size} bytes at offset {placed.offset}, expected one within the"
                f" buffer's {self.size} bytes, at a multiple of {ALIGNMENT}"
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
