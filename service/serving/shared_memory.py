"""Memory that the server shares with a worker: memfds, which have no name, need no /dev/shm, and
are gone with the last process that holds them.

The server makes every buffer and seals its size: a worker that shrank it would kill the server at
its next look (SIGBUS). A worker gets the descriptor over the control socket (SCM_RIGHTS).
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
from service.serving.worker_messages import BadMessage, Part, Placed

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MIN_BYTES = 64 * 1024
MAX_BYTES = 1 << 36  # 64 GiB: of one batch's inputs, or outputs


class Buffer:
    """One memfd, mapped. It is gone once nothing refers to it or to its arrays."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self._descriptor: int | None = descriptor

    @classmethod
    def make(cls, least: int) -> Buffer:
        """A new one of at least so many bytes. HostError if there is no memory for it."""
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
                f"no shared memory of {size} bytes: {error}",
                "free memory, or serve with a smaller max_batch",
            ) from error

    @classmethod
    def attach(cls, descriptor: int) -> Buffer:
        """The worker's view of a buffer that it was sent."""
        buffer = cls(descriptor, os.fstat(descriptor).st_size)
        buffer.give_descriptor()
        return buffer

    @property
    def descriptor(self) -> int:
        """To be sent; -1 once it is given away."""
        return -1 if self._descriptor is None else self._descriptor

    def give_descriptor(self) -> None:
        """Close it: both sides have mapped the memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.give_descriptor()

    def array(self, dtype: np.dtype[np.generic], placed: Placed) -> NDArray[np.generic]:
        """A tensor in it, in place. BadMessage for what does not lie within."""
        size = (
            math.prod(placed.shape) * dtype.itemsize
        )  # of Python's own integers: they do not overflow
        if placed.offset % ALIGNMENT or placed.offset + size > self.size:
            raise BadMessage(
                f"a tensor of {size} bytes at {placed.offset}, the buffer has {self.size}"
            )
        if size == 0:
            try:
                return np.empty(placed.shape, dtype)
            except (
                ValueError
            ) as error:  # numpy counts the other sizes, although there are no values
                raise BadMessage(f"an empty tensor of shape {placed.shape}: {error}") from error
        return np.ndarray(placed.shape, dtype, buffer=self._map, offset=placed.offset)


class Slot:
    """A place for one batch at a time: buffers for its inputs and outputs, which grow as they
    must.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.inputs: Buffer | None = None
        self.outputs: Buffer | None = None

    def reserve(self, input_bytes: int, output_bytes: int) -> dict[Part, Buffer]:
        """Room for so much: the buffers that are new, of which the worker must be told. If one
        cannot be had, both stay as it knows them.
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
    """Where tensors lie one behind the other, and how many bytes they take."""
    placed, end = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        placed.append(Placed(shape, end))
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return tuple(placed), end
