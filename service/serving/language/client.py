"""Server side of the worker of a language model: start it, send requests, check what it says.

    worker = await LanguageWorker.start(order)      the engine is loaded on return
    number = worker.generate(message, body, into)   calls the methods of `into` as tokens come
    worker.cancel(number)                           `into` hears no more
    await worker.broken()                           waits until the worker is broken; each `into`
                                                    knows by then
    await worker.end()                              kills the process

The server trusts no message of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pipeline.errors import CrucibleError
from pipeline.llm.engine import LanguageEngine
from service import logs
from service.errors import Unprocessable
from service.jobs.worker_client import GuardedProcess
from service.sandbox.framing import BadMessage, Failed, decode, frame, receive_frame
from service.sandbox.layers import Sandbox
from service.serving.language.messages import (
    FROM_SERVER,
    FROM_WORKER,
    MAX_STEP_BYTES,
    Accepted,
    Cancel,
    FromServer,
    FromWorker,
    Generate,
    Load,
    Piece,
    Ready,
    Refused,
    Step,
    pieces_from,
)
from service.serving.worker_client import FILE_BYTES, WorkerProcess
from service.storage.layout import Work

WORKER = (sys.executable, "-m", "service.serving.language.worker")

log = logs.get("service.worker")


@dataclass(frozen=True, slots=True)
class LanguageOrder:
    """The specification of a worker."""

    name: str  # for the log and for the mark of its processes
    engine_name: str  # for messages
    engine: LanguageEngine
    context: int  # tokens of prompt and answer together
    vocabulary: int
    cache_tokens: int  # of all answers together
    together: int  # answers
    prefix_caching: bool
    device: str
    work: Work
    load_s: float  # time-out for loading
    stuck_s: float  # a worker with requests that is silent for so long hangs
    command: Sequence[str] = WORKER
    sandbox: Sandbox = field(default_factory=lambda: Sandbox(Path()))


class Receiver(Protocol):
    """Who waits for an answer."""

    def accepted(self, prompt_tokens: int) -> None: ...
    def began(self) -> None: ...
    def took(self, piece: Piece) -> None: ...
    def failed(self, error: CrucibleError) -> None: ...
    def lost(self) -> None:
        """The worker is broken."""


@dataclass(slots=True)
class _Pending:
    message: Generate
    into: Receiver
    prompt_tokens: int | None = None  # None: not accepted yet
    has_begun: bool = False
    echoed: bool = False
    generated: int = 0  # tokens


class LanguageWorker(WorkerProcess):
    """A running worker. The caller of `start` must call `end`."""

    def __init__(
        self,
        order: LanguageOrder,
        process: GuardedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        super().__init__(order, process)
        self.has_answered = False  # some request with tokens
        self.cache_usage = 0.0  # share of the cache that running answers use
        self._order, self._writer = order, writer
        self._pending: dict[int, _Pending] = {}
        self._sent = 0  # requests; their numbers are below
        self._stuck: asyncio.TimerHandle | None = None
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(cls, order: LanguageOrder) -> LanguageWorker:
        """Start a process, and wait until it has loaded the engine.

        If it fails, its own error is raised and everything is cleaned up.
        """
        mark = f"serve-{order.name}-{secrets.token_hex(4)}"
        order.work.prepare()
        root, file = order.engine.root.absolute(), order.work.root / "engine.json"
        engine = {**order.engine.model_dump(mode="json"), "root": str(root)}
        file.write_text(json.dumps(engine), encoding="utf-8")
        ours, theirs = socket.socketpair()
        try:
            process = await GuardedProcess.start(
                order.command,
                theirs,
                mark,
                order.device,
                order.work,
                FILE_BYTES,
                order.sandbox,
                root,
            )
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        worker = cls(order, process, reader, writer)
        try:
            load = Load(
                file,
                order.engine_name,
                order.context,
                order.cache_tokens,
                order.together,
                order.prefix_caching,
            )
            worker._send(load)
            await worker.until_ready()
        except BaseException:
            await worker.end()
            raise
        return worker

    def generate(self, message: Generate, prompt: bytes, into: Receiver) -> int:
        """Send a request to a worker that is not broken. Return its number, which replaces that of
        the message.
        """
        number = self._sent
        numbered = replace(message, number=number)
        self._sent += 1
        self._pending[number] = _Pending(numbered, into)
        self._watch()
        self._send(numbered, prompt)
        return number

    def cancel(self, number: int) -> None:
        """Forget a request, and free its place in the worker."""
        if self._pending.pop(number, None) is not None and not self.is_broken:
            self._send(Cancel(number))

    async def end(self) -> None:
        """End the processes of the worker. Their memory is free on return."""
        self._break("was stopped")
        self._reading.cancel()
        await self._process.end()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    # -- messages --------------------------------------------------------

    def _send(self, message: FromServer, body: bytes = b"") -> None:
        self._writer.writelines(frame(FROM_SERVER.dump_json(message), [body]))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take messages until the worker ends."""
        try:
            while True:
                head, body = await receive_frame(reader, MAX_STEP_BYTES)
                self._take(decode(FROM_WORKER, head), body)
        except EOFError:
            self._break("")
        except BadMessage as error:
            log.error("worker.protocol", worker=self._order.name, error=str(error))
            self._break(f"does not keep to the protocol and was stopped: {error}")
        except Exception as error:  # a bug of ours must not leave requests without an answer
            log.error("worker.not_read", worker=self._order.name, exc_info=error)
            self._break("was stopped after an error inside the service")

    def _take(self, message: FromWorker, body: bytes) -> None:
        if body and not isinstance(message, Step):
            raise BadMessage(f"`{message.kind}` came with a body")
        self._watch()
        match message:
            case Failed():
                self._take_failed(message)
            case Ready():
                self._take_ready(message.memory_bytes)
            case Accepted():
                self._accept(message)
            case Refused():
                self._refuse(message)
            case Step():
                self._step(message, body)

    def _known(self, number: int) -> _Pending | None:
        """The request of this number; None if nobody waits for it any more. BadMessage if there was
        none.
        """
        if number >= self._sent:
            raise BadMessage(f"the worker answered request {number}, which it does not have")
        return self._pending.get(number)

    def _accept(self, message: Accepted) -> None:
        pending = self._known(message.number)
        if pending is None:
            return
        if pending.prompt_tokens is not None:
            raise BadMessage(f"the worker accepted request {message.number} a second time")
        if not 1 <= message.prompt_tokens <= self._order.context:
            raise BadMessage(f"the worker accepted a prompt of {message.prompt_tokens} tokens")
        pending.prompt_tokens = message.prompt_tokens
        pending.into.accepted(message.prompt_tokens)

    def _refuse(self, message: Refused) -> None:
        pending = self._known(message.number)
        if pending is not None:
            del self._pending[message.number]
            pending.into.failed(Unprocessable(message.message, message.next_step))

    def _step(self, message: Step, body: bytes) -> None:
        self.cache_usage = message.cache_usage
        for number in message.began:
            self._begin(number)
        for piece in pieces_from(body):
            self._give(piece)

    def _begin(self, number: int) -> None:
        pending = self._known(number)
        if pending is None:
            return
        if pending.prompt_tokens is None or pending.has_begun:
            raise BadMessage(f"the worker began request {number} without, or a second time")
        pending.has_begun = True
        pending.into.began()

    def _give(self, piece: Piece) -> None:
        pending = self._known(piece.number)
        if pending is None:
            return
        self._check(piece, pending)
        pending.echoed = pending.echoed or piece.prompt > 0
        pending.generated += len(piece.ids) - piece.prompt
        self.has_answered = self.has_answered or bool(piece.ids)
        if piece.finish is not None:
            del self._pending[piece.number]
        pending.into.took(piece)

    def _check(self, piece: Piece, pending: _Pending) -> None:
        """BadMessage unless a piece can be the next one of an answer."""
        message, prompt_tokens = pending.message, pending.prompt_tokens
        if not pending.has_begun or prompt_tokens is None:
            raise BadMessage(f"the worker answered request {piece.number} before it began")
        if piece.prompt and (
            not message.echo or pending.echoed or piece.prompt != prompt_tokens or pending.generated
        ):
            raise BadMessage(f"the worker echoed {piece.prompt} tokens of a prompt")
        most = self._order.context - prompt_tokens
        if message.sampling.max_tokens is not None:
            most = min(most, message.sampling.max_tokens)
        if pending.generated + len(piece.ids) - piece.prompt > most:
            raise BadMessage(f"expected at most {most} tokens, got more")
        if any(token >= self._order.vocabulary for token in piece.ids):
            raise BadMessage(f"expected tokens below {self._order.vocabulary}")
        # the first token of a prompt has none
        missing = sum(each is None for each in piece.log_probs)
        if missing != (piece.prompt > 0 if message.log_probs else len(piece.ids)):
            raise BadMessage(f"{missing} of {len(piece.ids)} log-probabilities are missing")

    def _watch(self) -> None:
        """Break a worker that is silent for too long from now on while requests wait for it."""
        if self._stuck is not None:
            self._stuck.cancel()
        self._stuck = self._loop.call_later(self._order.stuck_s, self._check_if_stuck)

    def _check_if_stuck(self) -> None:
        if self._pending:
            self._break("did not answer any more and was stopped")

    def _break(self, reason: str) -> None:
        """Mark the worker as broken, and tell those who wait.

        An empty reason means that the worker closed the connection: its exit tells the cause.
        """
        if self._broken.done():
            return
        self._broken.set_result(reason)
        if self._stuck is not None:
            self._stuck.cancel()
        if reason:
            self._process.terminate()
        lost, self._pending = tuple(self._pending.values()), {}
        for pending in lost:
            pending.into.lost()
