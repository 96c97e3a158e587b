"""A worker process for a language model: `python -m service.serving.language.worker FD` loads the
engine, and generates answers side by side.

It runs as service/serving/worker.py does, in the same sandbox. One thread reads requests, and makes
tokens of their prompts; the other one runs the engine step by step. So a request is read while a
step runs, and joins at the next one.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NoReturn, Protocol, TypeAlias

from pipeline.errors import InternalError
from pipeline.host.gpu import VISIBLE
from pipeline.llm.engine import LanguageEngine, read_settings
from pipeline.llm.export import last_line
from pipeline.report.bundle import check_engine
from service.language.generation import Finish
from service.sandbox.framing import Failed, cut, decode, frame, read_frame
from service.serving.language.engines import EngineAnswer, Tokenizer, open_engine
from service.serving.language.messages import (
    FROM_SERVER,
    FROM_WORKER,
    MAX_TOKEN_TEXT,
    PIECES,
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
)
from service.serving.language.text import StopTexts, TextStream
from service.serving.worker import held_bytes, until_the_end

REMEMBERED = 100_000  # texts of tokens


class Sends(Protocol):
    """What takes the messages of a generator."""

    def send(self, message: FromWorker, body: bytes = b"") -> None: ...


class Server:
    """The connection to the server. Both threads of the worker send."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._stream = end, end.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: FromWorker | Failed, body: bytes = b"") -> None:
        parts = frame(FROM_WORKER.dump_json(message), [body])
        with self._sending:
            self._end.sendall(b"".join(parts))

    def receive(self) -> tuple[FromServer, bytes]:
        """Wait for a message and its body; EOFError if the server is gone."""
        head, body = read_frame(self._stream)
        return decode(FROM_SERVER, head), body


@dataclass(slots=True)
class Request:
    """A request, with the tokens of its prompt."""

    message: Generate
    prompt: list[int]
    prompt_text: str
    most: int  # tokens of the answer

    @property
    def scores_prompt(self) -> bool:
        return self.message.log_probs and self.message.echo


@dataclass(slots=True)
class Answer:
    """A running answer."""

    request: Request
    of_engine: EngineAnswer
    text: TextStream
    stops: StopTexts
    begun: bool = False  # its first token came
    ids: list[int] = field(default_factory=list)


Command: TypeAlias = Request | Cancel


class Tokens:
    """Text to tokens and back. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Sequence[int]) -> None:
        self._tokenizer, self.ends = tokenizer, frozenset(end_tokens)
        self.text = lru_cache(REMEMBERED)(self._text)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _text(self, token: int) -> str:
        """Return the text of one token. At the start of a text some tokenizers leave out its
        space, so this is its text after itself.
        """
        one, two = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return two[len(one) :][:MAX_TOKEN_TEXT]


class Generator:
    """Generates answers side by side: all methods but `admit` belong to one thread."""

    def __init__(self, load: Load, server: Sends) -> None:
        self._load, self._server = load, server
        engine = LanguageEngine.model_validate_json(load.engine.read_bytes())
        check_engine(engine, load.name)
        settings = read_settings(engine.root)
        self._engine = open_engine(engine, load, frozenset(settings.end_tokens))
        self._vocabulary = settings.vocabulary
        self._tokens = Tokens(self._engine.tokenizer, settings.end_tokens)
        self._commands = queue.SimpleQueue[Command]()
        self._waiting = deque[Request]()
        self._running: dict[int, Answer] = {}

    # -- the thread that reads requests

    def admit(self, message: Generate, body: bytes) -> None:
        """Make tokens of a prompt, and refuse it if it does not fit."""
        if message.is_text:
            text = body.decode()
            prompt = self._tokens.encode(text, message.special_tokens) if text else []
        else:
            prompt, text = list(array("i", body)), ""
        fault = self._fault(message, prompt)
        if fault is not None:
            self._server.send(fault)
            return
        if message.echo and not message.is_text:
            text = self._tokens.decode(prompt)
        room = self._load.context - len(prompt)
        wanted = message.sampling.max_tokens
        most = room if wanted is None else min(wanted, room)
        self._server.send(Accepted(message.number, len(prompt)))
        self._commands.put(Request(message, prompt, text, most))

    def bytes_beside_cache(self, more_bytes: int) -> int:
        """Return the memory that the engine holds besides its cache. `more_bytes`: how much more of
        the device is in use than before, by all processes: others may have freed theirs meanwhile.
        """
        return max(more_bytes, self._engine.device_bytes) - self._engine.cache_bytes

    def cancel(self, message: Cancel) -> None:
        self._commands.put(message)

    def _fault(self, message: Generate, prompt: Sequence[int]) -> Refused | None:
        number, context = message.number, self._load.context
        if not prompt:
            return Refused(number, "the prompt is empty", "send at least one token")
        if any(not 0 <= token < self._vocabulary for token in prompt):
            return Refused(
                number,
                f"the prompt has unknown tokens: expected 0 to {self._vocabulary - 1}",
                "send tokens of this model, or text",
            )
        if len(prompt) >= context and not (len(prompt) == context and message.echo):
            return Refused(
                number,
                f"the prompt has {len(prompt)} tokens, and {self._load.name} takes {context} of"
                " prompt and answer together",
                "send a shorter prompt",
            )
        if message.log_probs and message.echo and self._engine.keeps_prefixes:
            return Refused(
                number,
                "the log-probabilities of a prompt are not known where prompts are cached",
                "load the model with `prefix_caching: false`, or leave out `echo`",
            )
        try:
            self._engine.check(message)
        except (RuntimeError, TypeError, ValueError) as error:
            return Refused(number, cut(last_line(error)), "correct this parameter")
        return None

    # -- the thread that runs the engine

    def step(self) -> None:
        """Run the engine once with all that has been read; wait for a request if it is idle."""
        self._take_commands()
        began, pieces = self._begin()
        if self._engine.is_busy:
            self._engine.step()
        pieces += self._collect()
        step = Step(self._engine.cache_usage, tuple(began))
        self._server.send(step, PIECES.dump_json(tuple(pieces)))

    @property
    def is_idle(self) -> bool:
        """True if no request waits, and the engine has none."""
        return not (self._waiting or self._running or self._engine.is_busy)

    def _take_commands(self) -> None:
        """Take what has been read. Wait for it if there is nothing else to do."""
        while True:
            try:
                command = self._commands.get(block=self.is_idle)
            except queue.Empty:
                return
            if isinstance(command, Request):
                self._waiting.append(command)
                continue
            number = command.number
            self._waiting = deque(each for each in self._waiting if each.message.number != number)
            if (answer := self._running.pop(number, None)) is not None:
                answer.of_engine.leave()

    def _begin(self) -> tuple[list[int], list[Piece]]:
        """Start the requests whose turn it is. Return their numbers, and what they begin with."""
        began, pieces = list[int](), list[Piece]()
        while self._waiting and len(self._running) < self._load.together:
            request = self._waiting[0]
            alone = self._engine.scores_prompts_alone and (
                request.scores_prompt
                or any(
                    each.request.scores_prompt and not each.begun for each in self._running.values()
                )
            )
            if alone and self._engine.is_busy:
                break
            self._waiting.popleft()
            message = request.message
            began.append(message.number)
            if message.echo and not message.log_probs:
                pieces.append(self._echo(request, [None] * len(request.prompt)))
            if not request.most and not request.scores_prompt:
                pieces.append(Piece(message.number, "", finish="length"))
                continue
            self._running[message.number] = self._started(request)
        return began, pieces

    def _started(self, request: Request) -> Answer:
        message = request.message
        of_engine = self._engine.begin(message, request.prompt, max(request.most, 1))
        stops = StopTexts(message.sampling.stop)
        return Answer(request, of_engine, TextStream(self._tokens.decode), stops)

    def _collect(self) -> list[Piece]:
        """Read what the last step has generated. Answers that have ended leave."""
        pieces = []
        for number, answer in tuple(self._running.items()):
            news = answer.of_engine.read()
            if news.has_no_room:
                del self._running[number]
                message = "the cache of this model has no room for the request"
                self._server.send(Refused(number, message, "load it with more `cache_tokens`"))
                continue
            if news.ids or news.finish:
                pieces += self._pieces(answer, news.ids, news.log_probs, news.finish)
        return pieces

    def _pieces(
        self, answer: Answer, ids: list[int], log_probs: list[float], finish: Finish | None
    ) -> list[Piece]:
        """Make text of new tokens. The first ones of a scored prompt are those of the prompt."""
        request, pieces = answer.request, list[Piece]()
        number = request.message.number
        if request.scores_prompt and not answer.begun:
            count = len(request.prompt)
            pieces.append(self._echo(request, [None, *log_probs[1:count]]))
            ids, log_probs = ids[count:], log_probs[count:]
        answer.begun = True
        if not request.most:  # the prompt alone: the engine had to generate one token
            ids, log_probs, finish = [], [], "length"
        is_end = finish == "stop" and bool(ids) and ids[-1] in self._tokens.ends
        new = answer.text.add(ids[:-1] if is_end else ids)
        if finish:
            new += answer.text.end()
        text = answer.stops.add(new)
        if answer.stops.found:
            finish = "stop"
        elif finish:
            text += answer.stops.end()
        if finish:
            del self._running[number]
        if answer.stops.found:
            answer.of_engine.leave()
        scored = request.message.log_probs
        pieces.append(
            Piece(
                number,
                text,
                tuple(ids),
                tuple(map(self._tokens.text, ids)),
                tuple(_log_prob(each) for each in log_probs) if scored else (None,) * len(ids),
                finish=finish,
            )
        )
        return pieces

    def _echo(self, request: Request, log_probs: Sequence[float | None]) -> Piece:
        ids = tuple(request.prompt)
        return Piece(
            request.message.number,
            request.prompt_text,
            ids,
            tuple(map(self._tokens.text, ids)),
            tuple(None if each is None else _log_prob(each) for each in log_probs),
            prompt=len(ids),
        )


def _log_prob(value: float) -> float:
    return min(float(value), 0.0)  # rounding may add some 1e-7


def read_all(generator: Generator, server: Server) -> NoReturn:
    """Read requests until the server closes the connection."""
    while True:
        message, body = server.receive()
        if isinstance(message, Generate):
            generator.admit(message, body)
        elif isinstance(message, Cancel):
            generator.cancel(message)
        else:
            raise InternalError(f"expected `generate` or `cancel`, got `{message.kind}`")


def main(descriptor: int) -> NoReturn:
    """Serve one engine until the server closes the connection."""
    os.set_inheritable(descriptor, False)
    server = Server(socket.socket(fileno=descriptor))

    def work() -> None:
        message, _ = server.receive()
        if not isinstance(message, Load):
            raise InternalError(f"expected the message `load` first, got `{message.kind}`")
        before = held_bytes() if os.environ.get(VISIBLE) else 0  # a GPU's are of all processes
        generator = Generator(message, server)
        server.send(Ready(generator.bytes_beside_cache(held_bytes() - before)))
        reading = partial(until_the_end, server, partial(read_all, generator, server))
        threading.Thread(target=reading).start()
        while True:
            generator.step()

    until_the_end(server, work)


if __name__ == "__main__":
    main(int(sys.argv[1]))
