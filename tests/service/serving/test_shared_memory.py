"""Shared memory: sealed, checked, and gone with its last user."""

import gc
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from pipeline.errors import HostError
from service.sandbox.framing import BadMessage
from service.serving.shared_memory import ALIGNMENT, MIN_BYTES, Buffer, Slot, layout
from service.serving.worker_messages import Placed

FLOAT = np.dtype(np.float32)


def descriptors() -> int:
    gc.collect()
    return sum(
        "crucible" in str(path.readlink())
        for path in Path("/proc/self/fd").iterdir()
        if path.is_symlink()
    )


def test_what_one_side_writes_the_other_reads() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        buffer = Buffer.make(100)
        buffer.array(FLOAT, Placed((2, 3), 64))[:] = 7
        socket.send_fds(ours, [b"x"], [buffer.descriptor])
        buffer.give_descriptor()
        _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
        other = Buffer.attach(received)
        assert other.array(FLOAT, Placed((6,), 64)).tolist() == [7] * 6
        other.array(FLOAT, Placed((1,), 64))[:] = 8
        assert buffer.array(FLOAT, Placed((2, 3), 64))[0, 0] == 8


def test_a_slot_that_gets_no_memory_stays_as_the_worker_knows_it() -> None:
    slot = Slot(0)
    assert set(slot.reserve(1, 1)) == {"inputs", "outputs"}
    with pytest.raises(HostError):
        slot.reserve(2 * MIN_BYTES, 1 << 62)
    assert set(slot.reserve(2 * MIN_BYTES, 1)) == {"inputs"}  # of which the worker has not heard


def test_an_empty_tensor_that_numpy_cannot_count_is_no_message() -> None:
    with pytest.raises(BadMessage, match="an empty tensor"):
        Buffer.make(1).array(FLOAT, Placed((0, 2**48, 2**48), 0))


def test_nobody_can_take_memory_away_from_the_other_side() -> None:
    buffer = Buffer.make(1)
    for size in (0, MIN_BYTES - 1, 2 * MIN_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.descriptor, size)


def test_memory_and_descriptors_go_with_the_last_array() -> None:
    before = descriptors()
    buffer = Buffer.make(1)
    array = buffer.array(FLOAT, Placed((4,), 0))
    array[:] = 1
    del buffer
    assert descriptors() > before
    assert array.tolist() == [1, 1, 1, 1]
    del array
    assert descriptors() == before


@pytest.mark.parametrize(
    "placed",
    [
        Placed((1,), MIN_BYTES),
        Placed((MIN_BYTES // 4 + 1,), 0),
        Placed((MIN_BYTES // 4,), ALIGNMENT),
        Placed((1 << 40,), 0),
        Placed((1 << 33, 1 << 33), 0),
        Placed((1,), 4),
    ],
)
def test_what_does_not_lie_in_a_buffer_is_refused(placed: Placed) -> None:
    with pytest.raises(BadMessage):
        Buffer.make(1).array(FLOAT, placed)


def test_empty_and_scalar_tensors_have_a_place() -> None:
    buffer = Buffer.make(1)
    assert buffer.array(FLOAT, Placed((), 0)).shape == ()
    assert buffer.array(FLOAT, Placed((0, 5), MIN_BYTES)).shape == (0, 5)


def test_a_slot_grows_and_tells_what_is_new() -> None:
    slot = Slot(0)
    assert list(slot.reserve(10, 10)) == ["inputs", "outputs"]
    assert slot.reserve(MIN_BYTES, 10) == {}
    new = slot.reserve(MIN_BYTES + 1, 0)
    assert [(name, buffer.size) for name, buffer in new.items()] == [("inputs", 2 * MIN_BYTES)]


def test_more_memory_than_there_can_be_is_an_error_of_the_host() -> None:
    with pytest.raises(HostError, match="bytes of shared memory"):
        Buffer.make(1 << 62)


@given(some.lists(some.lists(some.integers(0, 5), max_size=3).map(tuple), max_size=5))
def test_tensors_lie_apart_and_aligned(shapes: list[tuple[int, ...]]) -> None:
    placed, size = layout(shapes, [FLOAT] * len(shapes))
    end = 0
    for each in placed:
        assert each.offset % ALIGNMENT == 0
        assert each.offset >= end
        end = each.offset + 4 * int(np.prod(each.shape))
    assert end <= size
