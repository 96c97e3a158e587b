"""One worker process as the server sees it: started, given batches in slots, believed in nothing,
and ended.

    worker = await Worker.start(order)      ready: the engine is loaded and warm
    worker.run(task)                        task.then is called with what came of it, always once
    await worker.broken()                   until it is of no use any more; what it had is lost by
                                            then
    await worker.end()                      kills it

A slot is used again only after the worker has answered for it: a request that nobody waits for any
more keeps its slot until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from pipeline.core import CODE_BACKENDS, Engine, dtype_of
from pipeline.errors import CrucibleError, DamagedError, HostError
from pipeline.execution.exit_causes import crucible_error, memory_kills
from service import logs
from service.errors import TimedOut, Unavailable, Unprocessable
from service.jobs.worker_client import end_guarded, environment_for, how_it_ended, start_guarded
from service.serving.shared_memory import MAX_BYTES, Buffer, Slot, layout
from service.serving.worker_messages import (
    PACKET_BYTES,
    BadMessage,
    Done,
    Failed,
    FromWorker,
    Load,
    Part,
    Ready,
    Refused,
    Run,
    Short,
    from_worker,
    packet_of,
)
from service.storage.layout import Work

WORKER = (sys.executable, "-m", "service.serving.worker")
TORCH_WORKER = (sys.executable, "-m", "service.serving.torch_worker")
SLOTS = 2  # one that runs, one that is ready to run
FILE_BYTES = 1 << 30  # of what a worker writes: its log
LAYOUTS = 256  # of inputs, that are remembered
PRINTED_BYTES = 2000  # of a worker's log, for the server's

log = logs.get("service.worker")
Array = NDArray[np.generic]


def worker_for(engine: Engine) -> Sequence[str]:
    """The command of the worker that loads such engines."""
    return TORCH_WORKER if engine.target.backend in CODE_BACKENDS else WORKER


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to be."""

    name: str  # for the log and for its processes' mark
    engine_name: str  # for messages
    engine: Engine
    warm: tuple[dict[str, int], ...]
    runs: int  # of each size, until it is warm
    device: str
    work: Work
    load_s: float  # until it is ready
    stuck_s: float  # without an answer to a batch: it hangs
    sessions: int = 1  # of the engine; SLOTS of them: while one computes, the other copies
    command: Sequence[str] = WORKER


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch. The outputs lie in the slot: they are to be copied before `then`
    returns.
    """

    outputs: tuple[Array, ...]
    copy_in_s: float
    compute_s: float
    copy_out_s: float


@dataclass(frozen=True, slots=True)
class Task:
    """One batch for a worker."""

    shapes: tuple[tuple[int, ...], ...]  # of the inputs
    output_bytes: int  # as far as they are known
    fill: Callable[[Sequence[Array]], None]  # writes the inputs
    then: Callable[[BatchResult | CrucibleError], None]


@dataclass(slots=True)
class _PendingBatch:
    task: Task
    slot: Slot
    message: Run
    stuck: asyncio.TimerHandle


class Worker:
    """A running worker. Whoever starts it must `end` it."""

    def __init__(
        self, order: Order, process: asyncio.subprocess.Process, end: socket.socket, mark: str
    ) -> None:
        self.memory_bytes = 0
        self.has_answered = False  # a batch
        self._order, self._process, self._socket, self._mark = order, process, end, mark
        self._loop = asyncio.get_running_loop()
        self._kills = memory_kills()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._broken: asyncio.Future[str] = self._loop.create_future()
        self._failed: Failed | None = None  # what it said as its last
        self._free = [Slot(number) for number in range(SLOTS)]
        self._sent: dict[int, _PendingBatch] = {}
        self._numbers = itertools.count()
        self._dtypes = tuple(dtype_of(spec.dtype) for spec in order.engine.inputs)
        self._layout = lru_cache(LAYOUTS)(partial(layout, dtypes=self._dtypes))
        self._outputs = tuple(
            (len(spec.shape), dtype_of(spec.dtype)) for spec in order.engine.outputs
        )
        self._loop.add_reader(end.fileno(), self._readable)

    @classmethod
    async def start(cls, order: Order) -> Worker:
        """Start a process, and wait until it has loaded and run the engine. Its own error if it
        cannot; nothing is left then.
        """
        mark = f"serve-{order.name}-{secrets.token_hex(4)}"
        order.work.prepare()
        file = order.work.root / "engine.json"
        engine = {**order.engine.model_dump(mode="json"), "root": str(order.engine.root.absolute())}
        file.write_text(json.dumps(engine), encoding="utf-8")
        environment = environment_for(mark, order.device, order.work, os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            file_bytes = FILE_BYTES + order.engine.size_bytes  # torch unpacks a package to load it
            process = await start_guarded(
                order.command,
                theirs,
                order.work,
                file_bytes,
                environment,
            )
        except BaseException:
            ours.close()
            raise
        worker = cls(order, process, ours, mark)
        try:
            load = Load(file, order.warm, order.runs, order.engine_name, order.sessions)
            worker._send(load)
            await asyncio.wait(
                (worker._ready, worker._broken),
                timeout=order.load_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not worker._ready.done():
                raise await worker._not_ready()
            worker.memory_bytes = worker._ready.result().memory_bytes
        except BaseException:
            await worker.end()
            raise
        return worker

    async def _not_ready(self) -> CrucibleError:
        """Why it is not ready; what it printed goes to the server's log."""
        name, load_s = self._order.name, self._order.load_s
        is_late = not self._broken.done()
        message = f"did not load its engine within {load_s:g} s" if is_late else await self.death()
        log.error("worker.not_ready", worker=name, reason=message, printed=self.printed())
        if self._failed is not None and self._failed.code == DamagedError.code:
            return DamagedError(self._failed.message, self._failed.next_step)
        kind = TimedOut if is_late else HostError
        advice = "the log of the server holds what it printed"
        return kind(f"the worker of '{name}' {message}", advice)

    @property
    def pid(self) -> int:
        """Of its guardian."""
        return self._process.pid

    @property
    def load(self) -> int:
        """Batches that it has."""
        return len(self._sent)

    @property
    def has_room(self) -> bool:
        return bool(self._free)  # of what is broken, none is

    @property
    def is_broken(self) -> bool:
        """It is of no use any more."""
        return self._broken.done()

    def run(self, task: Task) -> None:
        """Give it a batch; only while it has room."""
        slot = self._free.pop()
        new: Mapping[Part, Buffer] = {}
        try:
            placed, size = self._layout(task.shapes)
            if size > MAX_BYTES:
                raise Unprocessable(
                    f"inputs of {size} bytes, a batch may have {MAX_BYTES}", "send less"
                )
            new = slot.reserve(size, task.output_bytes)
            assert slot.inputs is not None
            task.fill(
                [
                    slot.inputs.array(dtype, each)
                    for dtype, each in zip(self._dtypes, placed, strict=True)
                ]
            )
        except Exception as error:  # the edge of a batch: its fault costs no slot
            if not isinstance(error, CrucibleError):  # which says: no memory, or too much
                name = self._order.name
                log.error("worker.batch_not_written", worker=name, exc_info=error)
            # New buffers were not sent: with a slot of none, the next batch has others.
            self._free.append(Slot(slot.number) if new else slot)
            task.then(crucible_error(error))
            return
        message = Run(next(self._numbers), slot.number, placed, tuple(new))
        stuck = self._loop.call_later(
            self._order.stuck_s, self._break, "did not answer any more, and was stopped"
        )
        self._sent[message.number] = _PendingBatch(task, slot, message, stuck)
        self._send(message, new.values())

    async def death(self) -> str:
        """How it ended, in words; to be asked once it has hung up."""
        said = self._broken.result()
        return said or await how_it_ended(self._process, self._kills)

    async def broken(self) -> str:
        """Waits until it is of no use any more, and says how it ended."""
        await asyncio.shield(self._broken)
        return await self.death()

    def printed(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self._order.work.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - PRINTED_BYTES))
            return file.read().decode(errors="replace")
        return ""

    async def end(self) -> None:
        """End its processes. Their memory is free when this returns."""
        self._break("was stopped")
        ending = asyncio.ensure_future(end_guarded(self._process, self._mark))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # by whoever is in a hurry: but no process is left behind
            await asyncio.wait([ending])
            raise
        await asyncio.to_thread(self._order.work.clear_temporary)

    # -- the conversation --------------------------------------------------------

    def _send(self, message: Load | Run, buffers: Collection[Buffer] = ()) -> None:
        try:
            socket.send_fds(
                self._socket, [packet_of(message)], [buffer.descriptor for buffer in buffers]
            )
        except OSError as error:  # it has gone, or takes nothing although it has little to do
            self._break("" if isinstance(error, ConnectionError) else f"took no message: {error}")
        for buffer in buffers:
            buffer.give_descriptor()

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(PACKET_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._break("")
            return
        try:
            self._take(from_worker(packet))
        except BadMessage as error:
            log.error("worker.protocol", worker=self._order.name, error=str(error))
            self._break(f"does not keep to the protocol, and was stopped: {error}")

    def _take(self, message: FromWorker) -> None:
        match message:
            case Failed():
                self._failed = message
                self._break(
                    f"cannot go on: {message.message}"
                    + (f"; {message.next_step}" if message.next_step else "")
                )
            case Ready():
                if self._ready.done():
                    raise BadMessage("ready a second time")
                self._ready.set_result(message)
            case Short():
                self._again(self._asked(message.number), message.output_bytes)
            case Refused():
                self._finish(message.number, Unprocessable(message.message, message.next_step))
            case Done():
                self._finish(message.number, self._checked(message))
                self.has_answered = True

    def _asked(self, number: int) -> _PendingBatch:
        sent = self._sent.get(number)
        if sent is None:
            raise BadMessage(f"an answer to batch {number}, which it does not have")
        return sent

    def _checked(self, message: Done) -> BatchResult:
        """The outputs, where they lie within the slot's buffer; BadMessage otherwise."""
        buffer = self._asked(message.number).slot.outputs
        if len(message.outputs) != len(self._outputs) or buffer is None:
            raise BadMessage(f"{len(message.outputs)} outputs, expected {len(self._outputs)}")
        arrays = []
        for (rank, dtype), placed in zip(self._outputs, message.outputs, strict=True):
            if len(placed.shape) != rank:
                raise BadMessage(f"an output of rank {len(placed.shape)}, expected {rank}")
            arrays.append(buffer.array(dtype, placed))
        return BatchResult(tuple(arrays), message.copy_in_s, message.compute_s, message.copy_out_s)

    def _again(self, sent: _PendingBatch, output_bytes: int) -> None:
        """The batch once more, with more room for its outputs; its inputs still lie in the slot."""
        outputs = sent.slot.outputs
        if outputs is None or not outputs.size < output_bytes <= MAX_BYTES:
            raise BadMessage(
                f"outputs of {output_bytes} bytes, which the buffer holds, or nobody would"
            )
        try:
            new = sent.slot.reserve(0, output_bytes)
        except HostError as error:
            self._finish(sent.message.number, error)
            return
        self._send(replace(sent.message, new=tuple(new)), new.values())

    def _finish(self, number: int, result: BatchResult | CrucibleError) -> None:
        sent = self._asked(number)
        del self._sent[number]
        sent.stuck.cancel()
        try:
            sent.task.then(result)
        finally:
            self._free.append(sent.slot)

    def _break(self, how: str) -> None:
        """It is of no use any more: what it had is lost. Empty: it hung up, and its death tells
        how.
        """
        if self._broken.done():
            return
        self._broken.set_result(how)
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if how:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        self._free.clear()
        lost, self._sent = self._sent, {}
        for sent in lost.values():
            sent.stuck.cancel()
            sent.task.then(
                Unavailable("the worker that ran this request was lost", "send it again", 1)
            )
