"""Copies by several threads."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.backends.host_copies import (
    LARGE,
    LEAST_CHUNK,
    MOST_CHUNK,
    CopyThreads,
    address_of,
    chunks_of,
    copy_memory,
    copy_of,
)


@pytest.mark.parametrize("size", [0, 1, LEAST_CHUNK, LARGE, 4_000_001, 38_535_168, 200 << 20])
def test_chunks_cover_every_byte_once(size: int) -> None:
    chunks = chunks_of(size)
    assert sum(length for _, length in chunks) == size
    assert [offset for offset, _ in chunks] == [
        sum(length for _, length in chunks[:number]) for number in range(len(chunks))
    ]
    for _, length in chunks[:-1]:
        assert LEAST_CHUNK <= length <= MOST_CHUNK


@pytest.mark.parametrize(
    "array",
    [
        np.arange(LARGE // 4 + 1, dtype=np.int32),
        np.arange(LARGE, dtype=np.int32).reshape(2, -1).T,
        np.arange(3, dtype=np.int8),
        np.array(True),
        np.zeros((0, 3), np.float32),
    ],
    ids=["large", "large, another order", "small", "a number", "empty"],
)
def test_a_copy_is_equal_and_its_own(array: np.ndarray) -> None:
    copy = copy_of(array)
    np.testing.assert_array_equal(copy, array)
    assert (copy.dtype, copy.flags.owndata, copy.flags.c_contiguous) == (array.dtype, True, True)


def test_several_threads_take_part_and_the_caller_waits_for_them() -> None:
    threads, barrier, seen = CopyThreads(3), threading.Barrier(3), set()

    def copy(offset: int, size: int) -> None:
        barrier.wait(20)  # only three threads at the same time pass it
        seen.add((offset, threading.get_ident()))

    for _ in range(5):
        seen.clear()
        threads.run([(0, 1), (1, 1), (2, 1)], copy)
        assert {offset for offset, _ in seen} == {0, 1, 2}
        assert len({thread for _, thread in seen}) == 3
    threads.run([], copy)


def test_the_first_exception_reaches_the_caller_and_the_threads_go_on() -> None:
    threads = CopyThreads(2)

    def copy(offset: int, size: int) -> None:
        raise ValueError(f"chunk {offset}")

    for _ in range(3):
        with pytest.raises(ValueError, match="chunk"):
            threads.run([(number, 1) for number in range(10)], copy)
    done: list[int] = []
    threads.run([(number, 1) for number in range(10)], lambda offset, _: done.append(offset))
    assert sorted(done) == list(range(10))


def test_copies_of_several_callers_do_not_mix() -> None:
    threads, errors = CopyThreads(3), list[str]()

    def work(value: int) -> None:
        for _ in range(50):
            target = np.zeros(64, np.int64)

            def fill(offset: int, size: int, target: np.ndarray = target) -> None:
                target[offset : offset + size] = value

            threads.run([(offset, 8) for offset in range(0, 64, 8)], fill)
            if not (target == value).all():
                errors.append(f"{value}: {target}")

    callers = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert errors == []


@pytest.mark.parametrize("torch_threads", [None, 1, 4])
@pytest.mark.parametrize("size", [LARGE, 4_000_001, 38_535_168])
def test_memory_is_copied_with_and_without_pytorch(
    monkeypatch: pytest.MonkeyPatch, size: int, torch_threads: int | None
) -> None:
    if torch_threads is None:
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        import torch

        monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    source.flags.writeable = False  # its owner's affair: it is only read
    target, copied = np.zeros_like(source), list[tuple[int, int]]()

    def then(offset: int, length: int) -> None:
        part = slice(offset, offset + length)
        assert (target[part] == source[part]).all()
        copied.append((offset, length))

    copy_memory(address_of(target), address_of(source), size, then)
    ends = [offset + length for offset, length in sorted(copied)]
    assert [offset for offset, _ in sorted(copied)] == [0, *ends[:-1]]
    assert ends[-1] == size


def test_a_pytorch_that_is_being_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    source = np.arange(LARGE, dtype=np.int8)
    target = np.zeros_like(source)
    copy_memory(address_of(target), address_of(source), source.nbytes)
    assert (target == source).all()
