"""Server side of one worker process: start it, send batches, check its replies, stop it.

    worker = await Worker.start(order)      the engine is loaded and warm on return
    worker.run(task)                        calls `task.then` with the result, exactly once
    await worker.broken()                   waits until the worker is broken; its batches have
                                            failed by then: those that had not begun with
                                            NotStarted
    await worker.end()                      kills the process

The server trusts no reply of a worker. A slot is used again only after the worker has answered for
it: a request that has timed out keeps its slot until then. A thread that writes large inputs keeps
the slot and the inputs until it has written them, whatever becomes of the request or the worker.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import socket
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.core.artifacts import CODE_BACKENDS, Engine
from pipeline.core.shapes import dtype_of
from pipeline.errors import CrucibleError, DamagedError, HostError
from pipeline.execution.exit_causes import crucible_error
from pipeline.host.environment import usable_cores
from service import logs
from service.errors import TimedOut, Unavailable, Unprocessable
from service.jobs.worker_client import GuardedProcess
from service.sandbox.framing import MAX_HEAD_BYTES, BadMessage, Failed, decode
from service.sandbox.layers import Sandbox
from service.serving.shared_memory import MAX_BYTES, Buffer, InPlace, Slot, in_place, layout
from service.serving.worker_messages import (
    FROM_SERVER,
    FROM_WORKER,
    Done,
    FromWorker,
    Load,
    Part,
    Placed,
    Ready,
    Refused,
    Run,
    Short,
)
from service.storage.layout import Work

WORKER = (sys.executable, "-m", "service.serving.worker")
TORCH_WORKER = (sys.executable, "-m", "service.serving.torch_worker")
FILE_BYTES = 1 << 30  # limit for a file that a worker writes: its log
NOTHING_NEW: Mapping[Part, Buffer] = {}
LAYOUTS = 256  # input layouts that are remembered
# Measured with first-pixel models on two cores and 8 clients: a thread loses at 1.2 MB (a third of
# the rate), gains at 2.4 MB (a tenth) and at 10 MB (a third).
LARGE_BYTES = 2 << 20
# numpy and the kernel copy without the interpreter's lock. A few threads use up a host's memory
# bandwidth.
COPY_THREADS = ThreadPoolExecutor(max(2, min(4, usable_cores())), "crucible-copies")
LOST = ("the worker of this request was lost", "send the request again", 1)

log = logs.get("service.worker")
Array = NDArray[np.generic]


class NotStarted(Unavailable):
    """The worker was lost before it began to run this batch: another worker may run it."""


def worker_for(engine: Engine) -> Sequence[str]:
    """The command of the worker that loads this engine."""
    return TORCH_WORKER if engine.target.backend in CODE_BACKENDS else WORKER


@dataclass(frozen=True, slots=True)
class Order:
    """The specification of a worker."""

    name: str  # for the log and for the mark of its processes
    engine_name: str  # for messages
    engine: Engine
    warm: tuple[dict[str, int], ...]
    runs: int  # warm-up runs of each size
    device: str
    work: Work
    load_s: float  # time-out for loading
    stuck_s: float  # a worker without an answer to a batch for so long hangs
    sessions: int = 1  # of the engine: batches that run at the same time
    command: Sequence[str] = WORKER
    sandbox: Sandbox = field(default_factory=lambda: Sandbox(Path()))


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outputs and times of a batch.

    The outputs are views of the slot: copy them before `then` returns.
    """

    device: str
    outputs: tuple[Array, ...]
    copy_in_s: float
    compute_s: float
    copy_out_s: float


@dataclass(frozen=True, slots=True)
class Task:
    """One batch for a worker."""

    shapes: tuple[tuple[int, ...], ...]  # of the inputs
    output_bytes: int  # of the outputs of known size
    fill: Callable[[Sequence[Array]], None]  # writes the inputs; in a thread, if they are large
    then: Callable[[BatchResult | CrucibleError], None]
    inputs: Sequence[object] = ()  # of its only request, if `fill` would write them unchanged


@dataclass(slots=True)
class _PreparedBatch:
    """A batch whose inputs are about to be written."""

    task: Task
    slot: Slot
    placed: tuple[Placed, ...] = ()  # the inputs
    input_bytes: int = 0  # to write into the slot
    body: InPlace | None = None  # which holds the inputs instead
    new: dict[Part, Buffer] = field(default_factory=dict)  # unknown to the worker


@dataclass(slots=True)
class _PendingBatch:
    task: Task
    slot: Slot
    message: Run
    stuck: asyncio.TimerHandle


class Ordered(Protocol):
    """What every order of a worker has."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def load_s(self) -> float: ...


class WorkerProcess(ABC):
    """What every running worker has: its process, whether it is ready, and how it ended."""

    def __init__(self, order: Ordered, process: GuardedProcess) -> None:
        self.memory_bytes = 0
        self._about, self._process = order, process
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[int] = self._loop.create_future()  # bytes that it holds
        self._broken: asyncio.Future[str] = self._loop.create_future()
        self._failed: Failed | None = None  # its last message

    async def until_ready(self) -> None:
        """Wait until the engine is loaded, or raise why it is not."""
        await asyncio.wait(
            (self._ready, self._broken),
            timeout=self._about.load_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not self._ready.done():
            raise await self._not_ready()
        self.memory_bytes = self._ready.result()

    async def _not_ready(self) -> CrucibleError:
        """The error of a worker that did not become ready. Its output goes to the server's log."""
        name, load_s = self._about.name, self._about.load_s
        is_late = not self._broken.done()
        message = f"did not load its engine within {load_s:g} s" if is_late else await self.death()
        log.error("worker.not_ready", worker=name, reason=message, printed=self.printed())
        if self._failed is not None and self._failed.code == DamagedError.code:
            return DamagedError(self._failed.message, self._failed.next_step)
        kind = TimedOut if is_late else HostError
        advice = "the server's log holds the output of the worker"
        if is_late:
            advice = f"load it while the host is less busy, or raise `load_timeout_s`; {advice}"
        return kind(f"the worker of '{name}' on {self._about.device} {message}", advice)

    @property
    def pid(self) -> int:
        """The process id of its guardian."""
        return self._process.pid

    @property
    def is_broken(self) -> bool:
        """True once the worker cannot answer any more."""
        return self._broken.done()

    async def death(self) -> str:
        """Describe how the worker ended. Call it only for a broken worker."""
        reason = self._broken.result()
        return reason or await self._process.death()

    async def broken(self) -> str:
        """Wait until the worker is broken, and describe how it ended."""
        await asyncio.shield(self._broken)
        return await self.death()

    def printed(self) -> str:
        """The end of the worker's log."""
        return self._process.printed()

    def _take_ready(self, memory_bytes: int) -> None:
        if self._ready.done():
            raise BadMessage("the worker sent Ready a second time")
        self._ready.set_result(memory_bytes)

    def _take_failed(self, message: Failed) -> None:
        self._failed = message
        advice = f"; {message.next_step}" if message.next_step else ""
        self._break(f"cannot go on: {message.message}{advice}")

    @abstractmethod
    def _break(self, reason: str) -> None:
        """Mark the worker as broken, and tell those who wait for it."""


class Worker(WorkerProcess):
    """A running worker. The caller of `start` must call `end`."""

    def __init__(self, order: Order, process: GuardedProcess, end: socket.socket) -> None:
        super().__init__(order, process)
        self.has_answered = False  # at least one batch
        self._order, self._socket = order, end
        # A batch runs in each session, and one is ready to run.
        self._free = [Slot(number) for number in range(order.sessions + 1)]
        self._sent: dict[int, _PendingBatch] = {}  # in the order in which the worker takes them
        self._copies: dict[asyncio.Future[None], _PreparedBatch] = {}  # that threads write now
        self._mapped: set[int] = set()  # buffers of bodies that the worker has mapped
        self._freed: deque[int] = deque()  # those of them that are gone here
        self._numbers = itertools.count()
        self._dtypes = tuple(dtype_of(spec.dtype) for spec in order.engine.inputs)
        self._layout = lru_cache(LAYOUTS)(partial(layout, dtypes=self._dtypes))
        self._outputs = tuple(
            (len(spec.shape), dtype_of(spec.dtype)) for spec in order.engine.outputs
        )
        self._loop.add_reader(end.fileno(), self._readable)

    @classmethod
    async def start(cls, order: Order) -> Worker:
        """Start a process, and wait until it has loaded and run the engine.

        If it fails, its own error is raised and everything is cleaned up.
        """
        mark = f"serve-{order.name}-{secrets.token_hex(4)}"
        order.work.prepare()
        file = order.work.root / "engine.json"
        engine = {**order.engine.model_dump(mode="json"), "root": str(order.engine.root.absolute())}
        file.write_text(json.dumps(engine), encoding="utf-8")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            file_bytes = FILE_BYTES + order.engine.size_bytes  # torch unpacks a package to load it
            process = await GuardedProcess.start(
                order.command,
                theirs,
                mark,
                order.device,
                order.work,
                file_bytes,
                order.sandbox,
                order.engine.root.absolute(),
            )
        except BaseException:
            ours.close()
            raise
        worker = cls(order, process, ours)
        try:
            load = Load(file, order.warm, order.runs, order.engine_name, order.sessions)
            worker._send(load)
            await worker.until_ready()
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def load(self) -> int:
        """The number of its batches."""
        return len(self._sent) + len(self._copies)

    @property
    def is_idle(self) -> bool:
        """True if a further batch would run at once."""
        return self.load < self._order.sessions

    @property
    def has_room(self) -> bool:
        return bool(self._free)  # a broken worker has no free slot

    def run(self, task: Task) -> None:
        """Send a batch to the worker, which must have room. A thread writes large inputs."""
        batch = _PreparedBatch(task, self._free.pop())
        try:
            targets = self._prepare(batch)
            if batch.input_bytes >= LARGE_BYTES:
                copy = self._loop.run_in_executor(COPY_THREADS, task.fill, targets)
                self._copies[copy] = batch
                copy.add_done_callback(self._written)
                return
            if batch.body is None:
                task.fill(targets)
        except Exception as error:  # noqa: BLE001  the edge of a batch: its error costs no slot
            self._give_up(batch, error)
        else:
            self._start_batch(batch)

    def _prepare(self, batch: _PreparedBatch) -> Sequence[Array]:
        """Make room in the slot. Return the arrays to write; none if the inputs stay in a body."""
        task = batch.task
        if task.inputs:
            batch.body = in_place(task.inputs, self._dtypes)
        if batch.body is not None:
            batch.placed = batch.body.placed
        else:
            batch.placed, batch.input_bytes = self._layout(task.shapes)
        if batch.input_bytes > MAX_BYTES:
            raise Unprocessable(
                f"the inputs of the batch have {batch.input_bytes} bytes, expected at most"
                f" {MAX_BYTES}",
                "send smaller inputs",
            )
        batch.new = batch.slot.reserve(batch.input_bytes, task.output_bytes)
        if batch.body is not None:
            return ()
        inputs = batch.slot.inputs
        assert inputs is not None
        return [
            inputs.array(dtype, tensor)
            for dtype, tensor in zip(self._dtypes, batch.placed, strict=True)
        ]

    def _written(self, copy: asyncio.Future[None]) -> None:
        """Send a batch that a thread has written. If the worker broke meanwhile, it has failed."""
        batch, error = self._copies.pop(copy), copy.exception()
        if self.is_broken:
            return
        if error is not None:
            self._give_up(batch, error)
        else:
            self._start_batch(batch)

    def _give_up(self, batch: _PreparedBatch, error: BaseException) -> None:
        """Fail a batch that was not written."""
        # A CrucibleError is no bug: there is no memory, or the inputs are too large.
        if not isinstance(error, CrucibleError):
            log.error("worker.batch_not_written", worker=self._order.name, exc_info=error)
        # The worker does not know the new buffers: the next batch gets an empty slot.
        self._free.append(Slot(batch.slot.number) if batch.new else batch.slot)
        batch.task.then(crucible_error(error))

    def _start_batch(self, batch: _PreparedBatch) -> None:
        """Send a batch whose inputs are in their place."""
        new, body, number = batch.new, batch.body, None
        if body is not None:
            number = body.buffer.number
            if number not in self._mapped:
                self._mapped.add(number)
                weakref.finalize(body.buffer, self._freed.append, number).atexit = False
                new["body"] = body.buffer
        freed = tuple(self._freed.popleft() for _ in range(len(self._freed)))
        self._mapped.difference_update(freed)
        slot = batch.slot
        message = Run(next(self._numbers), slot.number, batch.placed, tuple(new), number, freed)
        stuck = self._loop.call_later(
            self._order.stuck_s, self._break, "did not answer any more and was stopped"
        )
        self._sent[message.number] = _PendingBatch(batch.task, slot, message, stuck)
        self._send(message, new)

    async def end(self) -> None:
        """End the processes of the worker and the copies to it. Their memory is free on return."""
        self._break("was stopped")
        await self._process.end()
        if self._copies:
            await asyncio.wait(tuple(self._copies))

    # -- messages --------------------------------------------------------

    def _send(self, message: Load | Run, new: Mapping[Part, Buffer] = NOTHING_NEW) -> None:
        try:
            packet = FROM_SERVER.dump_json(message)
            if new:
                descriptors = [buffer.descriptor for buffer in new.values()]
                socket.send_fds(self._socket, [packet], descriptors)
            else:
                self._socket.send(packet)
        except ConnectionError:
            pass  # The worker is gone: `_readable` takes its last answers and breaks it.
        except OSError as error:  # the worker does not read its messages
            self._break(f"did not accept a message: {error}")
        for part, buffer in new.items():
            if part != "body":  # another worker may need that one
                buffer.give_descriptor()

    def _readable(self) -> None:
        try:
            self._receive()
        except ConnectionError:
            # A worker that left messages unread has ended. The kernel reports this once, before
            # the answers that the worker sent, and uvloop does not call again.
            while not self.is_broken:
                self._receive()

    def _receive(self) -> None:
        """Take one message, or the end; ConnectionError if the worker reset the connection."""
        try:
            packet = self._socket.recv(MAX_HEAD_BYTES + 1)
        except BlockingIOError:
            return
        except ConnectionError:
            raise
        except OSError:
            packet = b""
        if not packet:
            self._break("")
            return
        try:
            self._take(decode(FROM_WORKER, packet))
        except BadMessage as error:
            log.error("worker.protocol", worker=self._order.name, error=str(error))
            self._break(f"does not keep to the protocol and was stopped: {error}")

    def _take(self, message: FromWorker) -> None:
        match message:
            case Failed():
                self._take_failed(message)
            case Ready():
                self._take_ready(message.memory_bytes)
            case Short():
                self._run_again(self._pending(message.number), message.output_bytes)
            case Refused():
                self._finish(message.number, Unprocessable(message.message, message.next_step))
            case Done():
                self._finish(message.number, self._checked(message))
                self.has_answered = True

    def _pending(self, number: int) -> _PendingBatch:
        """The batch with this number; BadMessage if the worker does not have it."""
        sent = self._sent.get(number)
        if sent is None:
            raise BadMessage(f"the worker answered batch {number}, which it does not have")
        return sent

    def _checked(self, message: Done) -> BatchResult:
        """The outputs as views of the slot; BadMessage unless they lie within its buffer."""
        buffer = self._pending(message.number).slot.outputs
        if len(message.outputs) != len(self._outputs) or buffer is None:
            raise BadMessage(f"expected {len(self._outputs)} outputs, got {len(message.outputs)}")
        arrays = []
        for (rank, dtype), placed in zip(self._outputs, message.outputs, strict=True):
            if len(placed.shape) != rank:
                raise BadMessage(f"expected an output of rank {rank}, got rank {len(placed.shape)}")
            arrays.append(buffer.array(dtype, placed))
        return BatchResult(
            self._order.device,
            tuple(arrays),
            message.copy_in_s,
            message.compute_s,
            message.copy_out_s,
        )

    def _run_again(self, sent: _PendingBatch, output_bytes: int) -> None:
        """Run the batch again with more room for its outputs. Its inputs are still in the slot."""
        outputs = sent.slot.outputs
        if outputs is None or not outputs.size < output_bytes <= MAX_BYTES:
            raise BadMessage(
                f"the worker asked for {output_bytes} bytes of outputs, expected more than its"
                f" buffer has and at most {MAX_BYTES}"
            )
        try:
            new = sent.slot.reserve(0, output_bytes)
        except HostError as error:
            self._finish(sent.message.number, error)
            return
        # The worker runs it after the batches that it already has.
        self._sent[sent.message.number] = self._sent.pop(sent.message.number)
        self._send(replace(sent.message, new=tuple(new), freed=()), new)

    def _finish(self, number: int, result: BatchResult | CrucibleError) -> None:
        sent = self._pending(number)
        del self._sent[number]
        sent.stuck.cancel()
        try:
            sent.task.then(result)
        finally:
            self._free.append(sent.slot)

    def _break(self, reason: str) -> None:
        """Mark the worker as broken and fail its batches.

        An empty reason means that the worker closed the connection: its exit tells the cause.
        Each session takes the next batch, so the first `sessions` batches may have begun, and one
        of them may be the cause.
        """
        if self._broken.done():
            return
        self._broken.set_result(reason)
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if reason:
            self._process.terminate()
        self._free.clear()
        lost, self._sent = tuple(self._sent.values()), {}
        unsent = tuple(self._copies.values())  # their threads go on in memory that nobody reads
        for place, sent in enumerate(lost):
            sent.stuck.cancel()
            kind = Unavailable if place < self._order.sessions else NotStarted
            sent.task.then(kind(*LOST))
        for batch in unsent:
            batch.task.then(NotStarted(*LOST))
