"""The worker's side of an instance, in this process: several sessions."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.backends import page_lock
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import Tensors
from pipeline.errors import HostError
from service.sandbox.framing import MAX_HEAD_BYTES, decode
from service.serving.shared_memory import MIN_BYTES, Buffer, Slot, layout
from service.serving.worker import Buffers, Runner, Server, run_all
from service.serving.worker_messages import FROM_SERVER, FROM_WORKER, Done, Run
from tests.service.serving.engines import linear, marked

WAIT_S = 20.0
BATCHES = 12


class Timer:
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def elapsed_s(self) -> float:
        return 0.5


class Session:
    """y = x, computed when `synchronize` returns, as on a GPU.

    `together` is passed only by two sessions that compute at the same time.
    """

    def __init__(self, together: threading.Barrier) -> None:
        self._together, self._computes = together, False
        self._x: Any = None

    def bind(self, feeds: Tensors) -> None:
        self._x = feeds["x"].copy()

    def upload(self) -> None: ...
    def download(self) -> None: ...

    def execute(self) -> None:
        self._computes = True

    def synchronize(self) -> None:
        if self._computes:
            self._together.wait(WAIT_S)
            self._computes = False

    def lent_outputs(self) -> Tensors:
        return {"y": self._x}

    def fetch(self) -> Tensors:
        raise AssertionError("outputs that can be lent were copied")

    def timer(self) -> Timer:
        return Timer()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return linear(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def ends() -> Iterator[Sequence[socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(ours), closing(theirs):
        ours.settimeout(WAIT_S)
        yield ours, theirs


def test_two_sessions_compute_at_the_same_time(
    engine: Engine, ends: Sequence[socket.socket]
) -> None:
    ours, theirs = ends
    together, receiving = threading.Barrier(2), threading.Lock()
    buffers = Buffers(partial(page_lock, engine))

    def work(runner: Runner) -> None:
        with pytest.raises(EOFError):
            run_all(runner, Server(theirs), buffers, receiving)

    threads = [
        threading.Thread(
            target=work,
            args=(Runner(engine, Session(together)),),  # type: ignore[arg-type]
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    slots = [Slot(number) for number in range(2)]
    answers: dict[int, list[list[float]]] = {}
    for first in range(0, BATCHES, 2):
        for number in (first, first + 1):
            send_batch(ours, slots, number)
        for _ in range(2):
            answer = received(ours)
            outputs = slots[answer.number % 2].outputs
            assert outputs is not None
            answers[answer.number] = outputs.array(np.dtype(np.float32), answer.outputs[0]).tolist()
    ours.shutdown(socket.SHUT_WR)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert answers == {number: marked(number).tolist() for number in range(BATCHES)}


def test_inputs_are_unlocked_before_their_memory_is_replaced() -> None:
    locked: dict[int, int] = {}
    most = 0

    def lock(memory: np.ndarray[Any, Any]) -> Callable[[], object]:
        nonlocal most
        if memory.nbytes > MIN_BYTES:
            raise HostError("no memory can be locked", "")
        address = memory.ctypes.data
        memory[:] = 1  # it is mapped and can be written
        locked[address] = memory.nbytes
        most = max(most, len(locked))
        return lambda: locked.pop(address)

    buffers = Buffers(lock)
    for _ in range(3):
        new = Buffer.make(1), Buffer.make(1)
        buffers.take(
            Run(0, 0, (), ("inputs", "outputs")), [os.dup(each.descriptor) for each in new]
        )
        assert list(locked.values()) == [MIN_BYTES]
    assert most == 1
    larger = Buffer.make(MIN_BYTES + 1)
    # refused: used without a lock
    inputs, _ = buffers.take(Run(0, 0, (), ("inputs",)), [os.dup(larger.descriptor)])
    assert locked == {}
    assert inputs.size == 2 * MIN_BYTES


def test_a_body_is_mapped_once_and_unlocked_when_it_comes_no_more() -> None:
    locked: list[int] = []

    def lock(memory: np.ndarray[Any, Any]) -> Callable[[], object]:
        address = memory.ctypes.data
        locked.append(address)
        return lambda: locked.remove(address)

    buffers, body = Buffers(lock), Buffer.make(1)
    slot = [Buffer.make(1), Buffer.make(1), body]
    body.memory[:4] = 7
    new = Run(0, 0, (), ("inputs", "outputs", "body"), body=body.number)
    first, _ = buffers.take(new, [os.dup(each.descriptor) for each in slot])
    again, _ = buffers.take(Run(1, 0, (), body=body.number), ())
    assert again is first
    assert first.memory[:4].tolist() == [7] * 4
    assert len(locked) == 2
    other, _ = buffers.take(Run(2, 0, (), freed=(body.number,)), ())
    assert other is not first
    assert len(locked) == 1


def send_batch(end: socket.socket, slots: Sequence[Slot], number: int) -> None:
    slot, x = slots[number % 2], marked(number)
    placed, size = layout([x.shape], [x.dtype])
    new = slot.reserve(size, size)
    assert slot.inputs is not None
    slot.inputs.array(x.dtype, placed[0])[...] = x
    message = Run(number, slot.number, placed, tuple(new))
    socket.send_fds(
        end, [FROM_SERVER.dump_json(message)], [buffer.descriptor for buffer in new.values()]
    )
    for buffer in new.values():
        buffer.give_descriptor()


def received(end: socket.socket) -> Done:
    message = decode(FROM_WORKER, end.recv(MAX_HEAD_BYTES))
    assert isinstance(message, Done)
    return message


@pytest.mark.parametrize("thread", ["the first", "another"])
@pytest.mark.parametrize("fault", ["RuntimeError('lost')", "SystemExit(0)"])
def test_a_fault_in_any_thread_ends_the_process_although_its_log_is_full(
    thread: str, fault: str
) -> None:
    program = f"""
    import socket, threading, time
    from service.serving.worker import Server, until_the_end
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    def fail():
        raise {fault}
    def rest():
        time.sleep(600)
    first, other = (fail, rest) if {thread!r} == "the first" else (rest, fail)
    threading.Thread(target=until_the_end, args=(Server(theirs), other)).start()
    until_the_end(Server(theirs), first)
    """
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", textwrap.dedent(program)]
        result = subprocess.run(command, stderr=full, timeout=300, check=False)
    assert result.returncode == 1
