"""Our decoder in slots: an answer gets a row of the cache when one is free, and leaves it at its
end. Each step reads a part of one prompt, and makes one token of each answer that goes on.

On a GPU, steps are sent before the tokens of earlier ones are read. What an answer gets beyond its
end is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.errors import HostError
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.hf import use_cores
from pipeline.llm.torch_engine.decoder import Mark, mark
from pipeline.llm.torch_engine.files import read_network
from pipeline.llm.torch_engine.slots import Slots
from service.language.generation import Finish
from service.serving.language.engines import News, Tokenizer
from service.serving.language.messages import Generate, Load
from service.serving.language.sampling import check_sampling
from service.serving.language.torch_engine.draw import draw, draw_for

AHEAD = 2
"""Steps on a GPU that wait for it or run while the host reads the tokens of an earlier one."""


def open_slots(engine: LanguageEngine, load: Load) -> Slots:
    """Open an engine with a slot for each of the answers that run together.

    HostError if the memory of the GPU is too small.
    """
    use_cores()
    try:
        network = read_network(engine.root, "cuda" if engine.is_on_gpu else "cpu")
        return Slots(network, load.together, load.context)
    except torch.OutOfMemoryError as error:
        raise HostError(
            f"the memory of the GPU is too small for {load.name} with {load.together} answers"
            " together",
            "unload another model, or set a smaller `max_batch`",
        ) from error


@dataclass(frozen=True, slots=True)
class Sent:
    """Tokens that are on their way from the device."""

    rows: tuple[tuple[int, TorchAnswer], ...]  # whose tokens count
    tokens: torch.Tensor  # [rows] int64, on the host
    log_probs: torch.Tensor  # [rows] fp32
    done: Mark  # the mark of the device behind them


class TorchEngine:
    """All answers of one network. `ahead`: how many steps are sent before the tokens of the first
    of them are read; by default AHEAD on a GPU.
    """

    keeps_prefixes = scores_prompts_alone = False

    def __init__(
        self,
        slots: Slots,
        tokenizer: Tokenizer,
        ends: frozenset[int],
        ahead: int | None = None,
    ) -> None:
        self._slots, self._ends, self.tokenizer = slots, ends, tokenizer
        self._on_gpu = slots.device.type == "cuda"
        self._ahead = AHEAD * self._on_gpu if ahead is None else ahead
        self._waiting, self._running = deque[TorchAnswer](), list[TorchAnswer]()
        self._sent = deque[Sent]()

    @property
    def is_busy(self) -> bool:
        return any(not each.has_ended for each in (*self._running, *self._waiting))

    @property
    def cache_bytes(self) -> int:
        buffers = self._slots.buffers
        return buffers.keys.nbytes + buffers.values.nbytes if self._on_gpu else 0

    @property
    def device_bytes(self) -> int:
        return int(torch.cuda.memory_reserved()) if self._on_gpu else 0

    @property
    def cache_usage(self) -> float:
        return sum(not each.has_ended for each in self._running) / self._slots.rows

    def check(self, message: Generate) -> None:
        check_sampling(message.sampling)

    def begin(self, message: Generate, prompt: Sequence[int], most: int) -> TorchAnswer:
        answer = TorchAnswer(message, prompt, most, self._ends)
        self._waiting.append(answer)
        return answer

    def step(self) -> None:
        """Read a part of one prompt, and make a token of each answer whose prompt was read."""
        self._place()
        self._read()
        active = [(each.row, each) for each in self._running if each.wants_token]
        if active:
            self._slots.step(1 + max(row for row, _ in active))
            self._send(active)
        kept = self._ahead if active else max(len(self._sent) - 1, 0)
        while len(self._sent) > kept:
            self._receive()

    def _place(self) -> None:
        """Give rows to answers that wait, and the smallest batch to those that run."""
        slots = self._slots
        self._running = [each for each in self._running if not each.has_ended]
        free = sorted({*range(slots.rows)} - {each.row for each in self._running}, reverse=True)
        while self._waiting and (free or self._waiting[0].has_ended):
            answer = self._waiting.popleft()
            if not answer.has_ended:
                answer.row = free.pop()
                self._running.append(answer)
        if not self._running:
            return
        size = slots.size_for(len(self._running))
        inside = [row for row in free if row < size]
        for answer in self._running:
            if answer.row >= size:
                row = inside.pop()
                slots.move(answer.row, row, answer.stored)
                answer.row = row

    def _read(self) -> None:
        """Read a part of the prompt that waits longest."""
        answer = next((each for each in self._running if not each.is_read), None)
        if answer is None:
            return
        answer.read_part(self._slots)
        if answer.is_read:
            self._send([(answer.row, answer)])

    def _send(self, rows: Sequence[tuple[int, TorchAnswer]]) -> None:
        """Draw the tokens that these rows have got, and send all to the host."""
        buffers = self._slots.buffers
        drawn = [(row, each.draw) for row, each in rows if each.draw is not None]
        if drawn:
            draw(buffers, drawn)
        tokens, log_probs = (self._copied(each) for each in (buffers.tokens, buffers.log_probs))
        self._sent.append(Sent(tuple(rows), tokens, log_probs, mark(self._on_gpu)))
        for _, each in rows:
            each.sent += 1

    def _copied(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host, which is complete when the device comes there."""
        found = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._on_gpu)
        return found.copy_(values, non_blocking=True)

    def _receive(self) -> None:
        """Give the oldest tokens to their answers."""
        sent = self._sent.popleft()
        sent.done.synchronize()
        tokens, log_probs = sent.tokens.tolist(), sent.log_probs.tolist()
        for row, answer in sent.rows:
            answer.take(tokens[row], log_probs[row])


class TorchAnswer:
    """One answer, from its prompt to its end."""

    def __init__(
        self, message: Generate, prompt: Sequence[int], most: int, ends: frozenset[int]
    ) -> None:
        self._prompt, self._most, self._ends = np.array(prompt, dtype=np.int64), most, ends
        self._own = list[torch.Tensor]()  # log-probabilities of a scored prompt
        self._is_scored = message.log_probs and message.echo
        self._end = 0  # of what was read of the prompt
        self._ids, self._log_probs = list[int](), list[float]()  # what nobody has read
        self._count = 0
        self._finish: Finish | None = None
        self.draw = draw_for(message.sampling)
        self.row = -1
        self.sent = 0  # tokens that the device was asked for
        self.has_ended = False

    @property
    def is_read(self) -> bool:
        """True if the device was given all of its prompt."""
        return self._end == self._prompt.size

    @property
    def wants_token(self) -> bool:
        """True if it is to have a token from the next step."""
        return self.is_read and not self.has_ended and self.sent < self._most

    @property
    def stored(self) -> int:
        """How many tokens the cache has of it, at most."""
        return self._end + self.sent

    def read_part(self, slots: Slots) -> None:
        if not self._is_scored:
            self._end = slots.read(self.row, self._prompt, self._end)
            return
        self._end, own = slots.read_scored(self.row, self._prompt, self._end)
        self._own.append(own)

    def take(self, token: int, log_prob: float) -> None:
        """Add the next token, unless the answer has ended."""
        if self.has_ended:
            return
        if self._own:  # the first token of a text has none before it
            self._ids += self._prompt.tolist()
            self._log_probs += [0.0, *torch.cat(self._own).tolist()]
            self._own = []
        self._ids.append(token)
        self._log_probs.append(log_prob)
        self._count += 1
        if token in self._ends or self._count == self._most:
            self._finish = "stop" if token in self._ends else "length"
            self.has_ended = True

    def read(self) -> News:
        ids, log_probs = self._ids, self._log_probs
        self._ids, self._log_probs = [], []
        return News(ids, log_probs, self._finish)

    def leave(self) -> None:
        self.has_ended = True
