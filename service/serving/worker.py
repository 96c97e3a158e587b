"""One instance of a deployed engine: `python -m service.serving.worker FD` loads it, warms up, and
runs what the server sends.

With torch_worker the only module of serving that imports pipeline.backends, and inside functions;
it loads no torch. It runs below a guardian (service/sandbox/guardian.py) with an environment made
for it (service/jobs/worker_client.py), waits for work in one system call, and ends when the server
hangs up.

With several sessions, each has a thread: whoever is idle takes the next batch and copies it in,
while another one computes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeline.core import CODE_BACKENDS, Engine, Tensors, dtype_of
from pipeline.errors import InternalError, UserError
from pipeline.execution.exit_causes import crucible_error
from pipeline.host.gpu import VISIBLE, open_nvml
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.report.bundle import check_engine
from service.serving.shared_memory import Buffer, layout
from service.serving.worker_messages import (
    PACKET_BYTES,
    Done,
    FromServer,
    FromWorker,
    Load,
    Ready,
    Refused,
    Run,
    Short,
    cut,
    failed_from_error,
    from_server,
    packet_of,
)

if TYPE_CHECKING:
    from pipeline.backends.base import Loaded, Session, Timer

MAX_DESCRIPTORS = 2  # of one packet


class Server:
    """The server, as the worker sees it; its threads may all send."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: FromWorker) -> None:
        self._end.sendall(packet_of(message))

    def receive(self) -> tuple[FromServer, list[int]]:
        """Waits for a message, and the descriptors that come with it; EOFError if the server is
        gone.
        """
        packet, descriptors, _, _ = socket.recv_fds(
            self._end, PACKET_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        return from_server(packet), descriptors


OpenEngine = Callable[[Engine, int], "Loaded"]
"""Loads an engine that is to have so many sessions."""


def open_engine(engine: Engine, sessions: int) -> Loaded:
    """An engine of a backend that runs graphs; what is code is left to torch_worker."""
    from pipeline import backends

    if engine.target.backend in CODE_BACKENDS:
        raise InternalError(
            f"an engine of {engine.target.backend} is code, and came to a worker that loads none",
        )
    return backends.load_to_serve(engine)


def load(message: Load, open_engine: OpenEngine) -> tuple[Engine, Loaded, list[Session], int]:
    """The engine in memory with its sessions, warm, and what it holds of the device's memory.

    DamagedError before anything is loaded if a file of the engine is not what it was.
    """
    from pipeline.backends.base import run_session

    engine = Engine.model_validate_json(message.engine.read_bytes())
    check_engine(engine, message.name)
    before = (
        held_bytes() if os.environ.get(VISIBLE) else 0
    )  # on the CPU the interpreter counts, too: each instance has one
    loaded = open_engine(engine, message.sessions)
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
    """Memory in use: on a GPU all of it, by anybody, since NVML need not know our number for this
    process; on the CPU what is this process's own.
    """
    import psutil

    visible = os.environ.get(VISIBLE, "")
    if not visible:
        return int(psutil.Process().memory_full_info().uss)
    with open_nvml() as opened:
        device = opened.device(visible)
        memory = device.memory() if device else None
    return memory.used if memory else 0  # an engine does not need NVML


class SlotBuffers:
    """The worker's view of one slot."""

    def __init__(self) -> None:
        self.inputs: Buffer | None = None
        self.outputs: Buffer | None = None

    def take(self, names: Sequence[str], descriptors: Sequence[int]) -> None:
        """Use these buffers from now on."""
        for name, descriptor in zip(names, descriptors, strict=True):
            setattr(self, name, Buffer.attach(descriptor))


class Runner:
    """Runs batches on one session. `computing` is held by the one of several that computes: its
    time is then its own.
    """

    def __init__(
        self, engine: Engine, session: Session, computing: threading.Lock | None = None
    ) -> None:
        self._session, self._computing = session, computing
        self._inputs = tuple((spec.name, dtype_of(spec.dtype)) for spec in engine.inputs)
        self._outputs = tuple((spec.name, dtype_of(spec.dtype)) for spec in engine.outputs)
        self._timers: tuple[Timer, Timer, Timer] = (
            session.timer(),
            session.timer(),
            session.timer(),
        )

    def run(self, message: Run, place: SlotBuffers) -> FromWorker:
        """One batch: inputs are read where they lie, outputs copied to where the server reads
        them.
        """
        began = perf_counter()
        session, (uploading, computing, downloading) = self._session, self._timers
        assert place.inputs is not None
        feeds = {
            name: place.inputs.array(dtype, placed)
            for (name, dtype), placed in zip(self._inputs, message.inputs, strict=True)
        }
        session.bind(feeds)
        bound = perf_counter()
        _timed(uploading, session.upload)
        self._compute(computing)
        _timed(downloading, session.download)
        session.synchronize()
        finished = perf_counter()
        placed, needed = self._copy_out(session.fetch(), place)
        if needed:
            return Short(message.number, needed)
        copy_in, copy_out = (
            bound - began + uploading.elapsed_s(),
            perf_counter() - finished + downloading.elapsed_s(),
        )
        return Done(message.number, placed, copy_in, computing.elapsed_s(), copy_out)

    def _compute(self, timer: Timer) -> None:
        if self._computing is None:
            _timed(timer, self._session.execute)
            return
        with self._computing:
            _timed(timer, self._session.execute)
            self._session.synchronize()

    def _copy_out(self, results: Tensors, place: SlotBuffers) -> tuple[Any, int]:
        """Where the outputs lie now; or how many bytes they need, if there is no room."""
        arrays: list[NDArray[np.generic]] = [results[name] for name, _ in self._outputs]
        dtypes = [dtype for _, dtype in self._outputs]
        for (name, dtype), array in zip(self._outputs, arrays, strict=True):
            if array.dtype != dtype:
                raise InternalError(f"output '{name}' has dtype {array.dtype}, expected {dtype}")
        placed, size = layout([array.shape for array in arrays], dtypes)
        assert place.outputs is not None
        if size > place.outputs.size:
            return (), size
        for array, dtype, where in zip(arrays, dtypes, placed, strict=True):
            np.copyto(place.outputs.array(dtype, where), array)
        return placed, 0


def _timed(timer: Timer, step: Any) -> None:
    timer.start()
    step()
    timer.stop()


def serve(runners: Sequence[Runner], server: Server) -> None:
    """Run what comes, each runner in a thread, the first in this one, until the server hangs up;
    never returns.
    """
    places: dict[int, SlotBuffers] = {}
    receiving = threading.Lock()
    for runner in runners[1:]:
        threading.Thread(
            target=until_the_end, args=(server, partial(run_all, runner, server, places, receiving))
        ).start()
    run_all(runners[0], server, places, receiving)


def run_all(
    runner: Runner, server: Server, places: dict[int, SlotBuffers], receiving: threading.Lock
) -> None:
    """Batch by batch. What the inputs are to blame for is told, and costs nothing else."""
    while True:
        with receiving:
            message, descriptors = server.receive()
            if not isinstance(message, Run):
                raise InternalError(f"expected a batch, the server sent {message.kind}")
            place = places.setdefault(message.slot, SlotBuffers())
            place.take(message.new, descriptors)
        try:
            answer = runner.run(message, place)
        except UserError as error:
            answer = Refused(message.number, cut(error.message), cut(error.next_step))
        server.send(answer)


def until_the_end(server: Server, work: Callable[[], None]) -> NoReturn:
    """Do this, and end the process with it, whatever comes of it and in whichever thread."""
    try:
        work()
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:  # noqa: BLE001  the edge of a process: everything must reach the server
        with contextlib.suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
        server.send(failed_from_error(crucible_error(error)))
    finally:
        os._exit(1)  # libraries' threads may hang; all is said


def main(descriptor: int, open_engine: OpenEngine = open_engine) -> NoReturn:
    """Serve one engine, and end."""
    os.set_inheritable(descriptor, False)
    server = Server(socket.socket(fileno=descriptor))

    def work() -> None:
        message, _ = server.receive()
        if not isinstance(message, Load):
            raise InternalError(f"the server began with {message.kind}")
        engine, _loaded, sessions, held = load(message, open_engine)  # all to be kept
        server.send(Ready(held))
        computing = threading.Lock() if len(sessions) > 1 else None
        serve([Runner(engine, session, computing) for session in sessions], server)

    until_the_end(server, work)


if __name__ == "__main__":
    main(int(sys.argv[1]))
