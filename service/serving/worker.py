"""A worker process for one instance: `python -m service.serving.worker FD` loads the engine, warms
up, and runs the batches that the server sends.

Only this module and torch_worker import pipeline.backends in serving, and only inside functions.
This module loads no torch. The process runs below a guardian (service/sandbox/guardian.py) in the
environment of service/jobs/worker_client.py. It waits for work in one system call, and ends when
the server closes the connection.

Several sessions have one thread each, and run and copy batches at the same time. An idle one takes
the next batch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.core.artifacts import CODE_BACKENDS, Engine
from pipeline.core.shapes import Tensors, dtype_of
from pipeline.errors import HostError, InternalError, UserError
from pipeline.execution.exit_causes import crucible_error
from pipeline.host.gpu import VISIBLE, open_nvml
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.report.bundle import check_engine
from service.sandbox.framing import MAX_HEAD_BYTES, Failed, cut, decode, failed_from_error
from service.serving.shared_memory import ALIGNMENT, MIN_ALIGNMENT, Buffer, layout
from service.serving.worker_messages import (
    FROM_SERVER,
    FROM_WORKER,
    Done,
    FromServer,
    FromWorker,
    Load,
    Ready,
    Refused,
    Run,
    Short,
)

if TYPE_CHECKING:
    from pipeline.backends.base import Loaded, Session, Timer

MAX_DESCRIPTORS = 3  # of one packet
LAYOUTS = 256  # output layouts that are remembered


class Connection(Protocol):
    """What takes the last message of a worker that fails."""

    def send(self, message: Failed) -> None: ...


class Server:
    """The connection to the server. All threads of the worker may send."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: FromWorker) -> None:
        self._end.sendall(FROM_WORKER.dump_json(message))

    def receive(self) -> tuple[FromServer, list[int]]:
        """Wait for a message and its descriptors; EOFError if the server is gone."""
        packet, descriptors, _, _ = socket.recv_fds(
            self._end, MAX_HEAD_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not packet:
            raise EOFError("the server closed the connection")
        return decode(FROM_SERVER, packet), descriptors


OpenEngine = Callable[[Engine], "Loaded"]


def open_engine(engine: Engine) -> Loaded:
    """Load an engine of a backend that runs graphs; torch_worker loads code."""
    from pipeline import backends

    if engine.target.backend in CODE_BACKENDS:
        raise InternalError(
            f"an engine of {engine.target.backend} is code, and came to a worker that loads none",
        )
    return backends.load_to_serve(engine)


def load(message: Load, open_engine: OpenEngine) -> tuple[Engine, Loaded, list[Session], int]:
    """Load the engine, open its sessions and warm them up.

    Return the engine, its sessions, and the device memory in bytes that they hold. DamagedError,
    before anything is loaded, if a file of the engine has changed.
    """
    from pipeline.backends.base import run_session

    engine = Engine.model_validate_json(message.engine.read_bytes())
    check_engine(engine, message.name)
    # On the CPU the interpreter counts, too: each instance has one.
    before = held_bytes() if os.environ.get(VISIBLE) else 0
    loaded = open_engine(engine)
    sessions = [loaded.session() for _ in range(message.sessions)]
    profiles = engine.profiles
    for sizes in message.warm:
        values = next(
            (profile.values_at("opt") for profile in profiles if profile.holds(sizes)), None
        )
        feeds = draw_feeds(engine.inputs, sizes, 0, values)
        for session in sessions:
            for _ in range(message.runs):
                run_session(session, feeds)
    return engine, loaded, sessions, max(0, held_bytes() - before)


def held_bytes() -> int:
    """Return the memory in use.

    On a GPU this is the memory of all processes: NVML may know this process by another id. On the
    CPU it is the memory of this process alone.
    """
    import psutil

    visible = os.environ.get(VISIBLE, "")
    if not visible:
        return int(psutil.Process().memory_full_info().uss)
    with open_nvml() as opened:
        device = opened.device(visible)
        memory = device.memory() if device else None
    return memory.used if memory else 0  # an engine works without NVML, too


PageLock = Callable[[NDArray[np.uint8]], Callable[[], object]]
"""`backends.page_lock` of an engine."""


class InputBuffer:
    """A buffer that the server writes. A GPU reads it directly, if the host can lock its memory."""

    def __init__(self, descriptor: int, page_lock: PageLock) -> None:
        self.buffer = Buffer.attach(descriptor)
        self.unlock: Callable[[], object] = lambda: None
        try:
            self.unlock = page_lock(self.buffer.memory)
        except HostError as error:  # sessions copy from it instead
            with contextlib.suppress(OSError):  # the log's disk may be full
                print(error, file=sys.stderr)


class Buffers:
    """The worker's view of the buffers of all slots, and of the bodies that it reads in place."""

    def __init__(self, page_lock: PageLock) -> None:
        self._page_lock = page_lock
        self._inputs: dict[int, InputBuffer] = {}
        self._outputs: dict[int, Buffer] = {}
        self._bodies: dict[int, InputBuffer] = {}

    def take(self, message: Run, descriptors: Sequence[int]) -> tuple[Buffer, Buffer]:
        """Map what is new. Return the buffers that hold the inputs and take the outputs."""
        for number in message.freed:
            _forget(self._bodies, number)
        for part, descriptor in zip(message.new, descriptors, strict=True):
            if part == "outputs":
                self._outputs[message.slot] = Buffer.attach(descriptor)
            elif part == "inputs":
                _forget(self._inputs, message.slot)  # before the old memory is unmapped
                self._inputs[message.slot] = InputBuffer(descriptor, self._page_lock)
            else:
                assert message.body is not None
                self._bodies[message.body] = InputBuffer(descriptor, self._page_lock)
        inputs = self._inputs[message.slot] if message.body is None else self._bodies[message.body]
        return inputs.buffer, self._outputs[message.slot]


def _forget(buffers: dict[int, InputBuffer], number: int) -> None:
    known = buffers.pop(number, None)
    if known is not None:
        known.unlock()


class Runner:
    """Run batches on one session."""

    def __init__(self, engine: Engine, session: Session) -> None:
        from pipeline.backends.base import LendsOutputs

        self._session = session
        self._results = session.lent_outputs if isinstance(session, LendsOutputs) else session.fetch
        self._inputs = tuple((spec.name, dtype_of(spec.dtype)) for spec in engine.inputs)
        self._outputs = tuple((spec.name, dtype_of(spec.dtype)) for spec in engine.outputs)
        dtypes = tuple(dtype for _, dtype in self._outputs)
        self._layout = lru_cache(LAYOUTS)(partial(layout, dtypes=dtypes))
        self._timers: tuple[Timer, Timer, Timer] = (
            session.timer(),
            session.timer(),
            session.timer(),
        )

    def run(self, message: Run, inputs: Buffer, outputs: Buffer) -> FromWorker:
        """Run one batch: read the inputs where they are, copy the outputs into their buffer."""
        began = perf_counter()
        session, (uploading, computing, downloading) = self._session, self._timers
        alignment = ALIGNMENT if message.body is None else MIN_ALIGNMENT
        feeds = {
            name: inputs.array(dtype, placed, alignment)
            for (name, dtype), placed in zip(self._inputs, message.inputs, strict=True)
        }
        session.bind(feeds)
        bound = perf_counter()
        _timed(uploading, session.upload)
        _timed(computing, session.execute)
        _timed(downloading, session.download)
        session.synchronize()
        finished = perf_counter()
        placed, needed = self._copy_out(self._results(), outputs)
        if needed:
            return Short(message.number, needed)
        copy_in_s = bound - began + uploading.elapsed_s()
        copy_out_s = perf_counter() - finished + downloading.elapsed_s()
        return Done(message.number, placed, copy_in_s, computing.elapsed_s(), copy_out_s)

    def _copy_out(self, results: Tensors, buffer: Buffer) -> tuple[Any, int]:
        """Copy the outputs; return their places, or the bytes they need if there is no room."""
        arrays: list[NDArray[np.generic]] = [results[name] for name, _ in self._outputs]
        for (name, dtype), array in zip(self._outputs, arrays, strict=True):
            if array.dtype != dtype:
                raise InternalError(f"output '{name}' has dtype {array.dtype}, expected {dtype}")
        placed, size = self._layout(tuple([array.shape for array in arrays]))
        if size > buffer.size:
            return (), size
        for array, where in zip(arrays, placed, strict=True):
            np.copyto(buffer.array(array.dtype, where), array)
        return placed, 0


def _timed(timer: Timer, step: Any) -> None:
    timer.start()
    step()
    timer.stop()


def serve(runners: Sequence[Runner], server: Server, page_lock: PageLock) -> None:
    """Run batches until the server closes the connection; never returns.

    The first runner works in this thread, each other one in its own.
    """
    buffers = Buffers(page_lock)
    receiving = threading.Lock()
    for runner in runners[1:]:
        threading.Thread(
            target=until_the_end,
            args=(server, partial(run_all, runner, server, buffers, receiving)),
        ).start()
    run_all(runners[0], server, buffers, receiving)


def run_all(runner: Runner, server: Server, buffers: Buffers, receiving: threading.Lock) -> None:
    """Run batch after batch. Bad inputs refuse their batch, and the worker goes on."""
    while True:
        with receiving:
            message, descriptors = server.receive()
            if not isinstance(message, Run):
                raise InternalError(f"expected the message `run`, got `{message.kind}`")
            inputs, outputs = buffers.take(message, descriptors)
        try:
            answer = runner.run(message, inputs, outputs)
        except UserError as error:
            answer = Refused(message.number, cut(error.message), cut(error.next_step))
        server.send(answer)


def until_the_end(server: Connection, work: Callable[[], None]) -> NoReturn:
    """Call `work`, then end the process, also after an error and from any thread."""
    try:
        work()
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:  # noqa: BLE001  the edge of a process: the server must know
        with contextlib.suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
        server.send(failed_from_error(crucible_error(error)))
    finally:
        os._exit(1)  # threads of libraries may hang; every message is sent


def main(descriptor: int, open_engine: OpenEngine = open_engine) -> NoReturn:
    """Serve one engine until the server closes the connection."""
    os.set_inheritable(descriptor, False)
    server = Server(socket.socket(fileno=descriptor))

    def work() -> None:
        from pipeline import backends

        message, _ = server.receive()
        if not isinstance(message, Load):
            raise InternalError(f"expected the message `load` first, got `{message.kind}`")
        # `_loaded` keeps the engine in memory.
        engine, _loaded, sessions, held = load(message, open_engine)
        server.send(Ready(held))
        runners = [Runner(engine, session) for session in sessions]
        serve(runners, server, partial(backends.page_lock, engine))

    until_the_end(server, work)


if __name__ == "__main__":
    main(int(sys.argv[1]))
