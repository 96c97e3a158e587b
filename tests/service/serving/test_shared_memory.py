"""Shared memory: sealed, checked, and gone with its last user."""

import gc
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from pipeline.errors import HostError
from service.sandbox.framing import BadMessage
from service.serving import shared_memory
from service.serving.shared_memory import (
    ALIGNMENT,
    MIN_BYTES,
    BodyPool,
    Buffer,
    Slot,
    body_in,
    in_place,
    layout,
)
from service.serving.worker_client import WORKER, BatchResult, Task, Worker
from service.serving.worker_messages import Placed
from service.storage.layout import Work
from tests.service.serving.engines import asking, deployed, direct, linear, marked, play
from tests.service.serving.test_worker_client import order_of, until

FLOAT = np.dtype(np.float32)
BATCHES = 5


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


def tensor(body: memoryview, begin: int = 0, shape: tuple[int, ...] = (1, 8)) -> Any:
    """A tensor as the decoders of requests make it."""
    size = int(np.prod(shape)) * FLOAT.itemsize
    return np.frombuffer(body[begin : begin + size], FLOAT).reshape(shape)


def address(body: memoryview) -> int:
    return int(np.frombuffer(body, np.uint8).ctypes.data)


def test_memory_is_used_again_only_for_requests_of_the_same_kind() -> None:
    pool, path = BodyPool(), "/models/a/infer"
    first = pool.take(MIN_BYTES, (path, None))
    where, view = address(first), tensor(first)
    del first
    gc.collect()
    second = pool.take(MIN_BYTES, (path, None))
    assert address(second) != where  # `view` still needs it
    del view
    gc.collect()
    assert address(pool.take(MIN_BYTES, ("/models/b/infer", None))) != where
    assert address(pool.take(MIN_BYTES, (path, b"another key"))) != where
    assert address(pool.take(MIN_BYTES * 2, (path, None))) != where  # it is too small
    assert address(pool.take(MIN_BYTES, (path, None))) == where


def test_the_memory_that_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEPT_BYTES", 2 * MIN_BYTES)
    pool = BodyPool()
    made: list[int] = []
    make = Buffer.make

    def making(least: int) -> Buffer:
        made.append(least)
        return make(least)

    monkeypatch.setattr(Buffer, "make", making)
    taken = [pool.take(MIN_BYTES, number) for number in range(3)]
    while taken:
        del taken[0]
    gc.collect()
    kept = [pool.take(MIN_BYTES, number) for number in (2, 1)]
    assert made == [MIN_BYTES] * 3
    pool.take(MIN_BYTES, 0)
    assert made == [MIN_BYTES] * 4  # the oldest of the three was not kept
    assert len(kept) == 2


def test_without_shared_memory_a_body_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(least: int) -> Buffer:
        raise HostError("cannot allocate shared memory", "")

    monkeypatch.setattr(Buffer, "make", refused)
    body = BodyPool().take(MIN_BYTES, "key")
    assert len(body) == MIN_BYTES
    assert in_place((tensor(body),), (FLOAT,)) is None


def test_the_descriptors_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEPT_BUFFERS", 2)
    before, pool = descriptors(), BodyPool()
    taken = [pool.take(1, "key")]
    of_one = descriptors() - before
    taken += [pool.take(1, number) for number in range(5)]
    del taken
    body = pool.take(1, "another key")
    assert descriptors() == before + 3 * of_one
    assert len(body) == 1


def test_many_bodies_at_once_do_not_use_up_the_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "USED_BUFFERS", 2)
    pool = BodyPool()
    bodies = [pool.take(64, "key") for _ in range(3)]
    assert [len(body) for body in bodies] == [64] * 3
    shared = [in_place((tensor(body),), (FLOAT,)) is not None for body in bodies]
    assert shared == [True, True, False]
    bodies.clear()
    gc.collect()
    assert in_place((tensor(pool.take(64, "key")),), (FLOAT,)) is not None


def test_memory_is_given_once_if_another_body_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "KEPT_BYTES", 2 * MIN_BYTES)
    pool = BodyPool()
    held: list[memoryview] = []

    class Key:
        """Equal to all others. The comparison ends the bodies in `held`, as a collection may."""

        def __eq__(self, other: object) -> bool:
            held.clear()
            return True

        __hash__ = object.__hash__

    bodies = [pool.take(1, Key()) for _ in range(3)]
    held.append(bodies.pop())
    bodies.clear()  # two buffers are free, and a third will be while the next is looked for
    bodies = [pool.take(1, Key()) for _ in range(3)]
    assert len({address(body) for body in bodies}) == 3


@pytest.mark.parametrize("head", [0, 1, 63, 64, 200])
def test_what_follows_the_head_is_aligned(head: int) -> None:
    body = BodyPool().take(MIN_BYTES, "key", head)
    assert len(body) == MIN_BYTES
    assert (address(body) + head) % ALIGNMENT == 0


def test_only_whole_tensors_of_one_body_are_read_in_place() -> None:
    pool = BodyPool()
    body, other = pool.take(4096, "key"), pool.take(4096, "key")
    x, y = tensor(body, 64), tensor(body, 256, (2, 2))
    found = in_place((x, y), (FLOAT, FLOAT))
    assert found is not None
    assert [(each.shape, each.offset) for each in found.placed] == [((1, 8), 64), ((2, 2), 256)]
    assert tensor(found.buffer.memory.data, 64).ctypes.data == x.ctypes.data
    refused: list[Sequence[Any]] = [
        (x, tensor(other)),  # of two bodies
        (x, y.T),  # not contiguous
        (x, tensor(body, 4)),  # not aligned
        (x, tensor(body, 0, (0, 8))),  # empty
        (x, marked(1)),  # not of a body
        (x, y.view(np.int32)),
        (x, object()),
    ]
    assert [in_place(arrays, (FLOAT, FLOAT)) for arrays in refused] == [None] * len(refused)


def test_a_worker_reads_a_body_in_place_and_forgets_it(tmp_path: Path) -> None:
    engine = linear(tmp_path / "engine")
    pool = BodyPool()

    def written(targets: Sequence[Any]) -> None:
        raise AssertionError("a tensor was copied")

    async def story() -> None:
        worker = await Worker.start(
            replace(order_of(Work(tmp_path / "work"), engine, ""), command=WORKER)
        )
        try:
            for number in range(BATCHES):
                x = tensor(pool.take(32, "key" if number < 3 else number))
                x.flags.writeable = True
                x[...] = marked(number)
                expected = direct(engine, {"x": x})["y"]
                got: list[Any] = []

                def then(result: Any, got: list[Any] = got) -> None:
                    got.append(
                        result.outputs[0].copy() if isinstance(result, BatchResult) else result
                    )

                await until(lambda: worker.has_room)
                worker.run(Task(((1, 8),), 32, written, then, (x,)))
                del x
                await until(lambda got=got: got)
                np.testing.assert_array_equal(got[0], expected)
                gc.collect()
        finally:
            await worker.end()

    play(story)


def test_a_deployment_answers_bodies_as_other_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = linear(tmp_path / "engine")
    body = body_in(Buffer.make(4096), 0, 4096)
    body[: marked(3).nbytes] = marked(3).view(np.uint8).ravel()
    x = tensor(body.data)

    async def story() -> None:
        async with deployed(tmp_path, engine) as bench:
            rows = bench.deployment._rows
            copied: list[Any] = []
            fill = rows.fill

            def copying(*given: Any) -> None:
                copied.append(given)
                fill(*given)

            monkeypatch.setattr(rows, "fill", copying)
            plain = await bench.deployment.infer(asking({"x": marked(3)}))
            assert len(copied) == 1
            in_body = await bench.deployment.infer(asking({"x": x}))
            assert len(copied) == 1
            np.testing.assert_array_equal(in_body.outputs["y"], plain.outputs["y"])

    play(story)
