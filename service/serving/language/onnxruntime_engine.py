"""ONNX Runtime GenAI: each answer has keys and values of its own, and they take turns.

The library batches nothing on a CPU, so answers at once are each slower. Long prompts are read in
chunks, between which the other answers go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.llm.ort_genai.opened import Text
from pipeline.llm.scoring import log_softmax
from service.language.generation import Finish
from service.serving.language.engines import News, Tokenizer
from service.serving.language.messages import Generate
from service.serving.language.sampling import Sampler, check_sampling

CHUNK = 256  # tokens of a prompt: about a second of SmolLM2 on two cores


class Model(Protocol):
    """What begins texts, as OpenModel does."""

    def text(self, tokens: int) -> Text: ...


class OnnxruntimeEngine:
    """An opened folder. The cache is memory that answers claim as they begin, in tokens."""

    keeps_prefixes = scores_prompts_alone = False
    cache_bytes = device_bytes = 0

    def __init__(
        self, model: Model, tokenizer: Tokenizer, cache_tokens: int, ends: frozenset[int]
    ) -> None:
        self._model, self._room, self._ends = model, cache_tokens, ends
        self.tokenizer = tokenizer
        self._waiting = deque[OnnxruntimeAnswer]()
        self._running = list[OnnxruntimeAnswer]()

    @property
    def is_busy(self) -> bool:
        return any(not each.has_ended for each in (*self._running, *self._waiting))

    @property
    def cache_usage(self) -> float:
        claimed = sum(each.size for each in self._running if not each.has_ended)
        return min(1.0, claimed / self._room)

    def check(self, message: Generate) -> None:
        check_sampling(message.sampling)

    def begin(self, message: Generate, prompt: Sequence[int], most: int) -> OnnxruntimeAnswer:
        answer = OnnxruntimeAnswer(message, prompt, most, self._ends)
        if answer.size > self._room:
            answer.refuse()
        else:
            self._waiting.append(answer)
        return answer

    def step(self) -> None:
        """Let each answer read once: a chunk of its prompt, or its last token."""
        self._running = [each for each in self._running if not each.has_ended]
        free = self._room - sum(each.size for each in self._running)
        while self._waiting and (self._waiting[0].has_ended or self._waiting[0].size <= free):
            answer = self._waiting.popleft()
            if not answer.has_ended:
                self._running.append(answer)
                free -= answer.size
        for answer in self._running:
            answer.step(self._model)


class OnnxruntimeAnswer:
    """One answer, from its prompt to its end."""

    def __init__(
        self, message: Generate, prompt: Sequence[int], most: int, ends: frozenset[int]
    ) -> None:
        self._prompt, self._most, self._ends = np.array(prompt), most, ends
        self._scores_prompt = message.log_probs and message.echo
        self._sampler = Sampler(message.sampling)
        self._text: Text | None = None
        self._unread = self._prompt  # tokens that the model has not read
        self._ids, self._log_probs = list[int](), list[float]()  # what nobody has read
        self._count, self._has_no_room = 0, False
        self._finish: Finish | None = None
        self._log_before: NDArray[np.float64] | None = None  # of the token at the next chunk
        self.has_ended = False

    @property
    def size(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return self._prompt.size + self._most

    def refuse(self) -> None:
        self._has_no_room = True
        self._end()

    def leave(self) -> None:
        self._end()

    def read(self) -> News:
        if not self._count:  # a scored prompt comes as a whole, with the first token
            return News([], [], has_no_room=self._has_no_room)
        ids, log_probs = self._ids, self._log_probs
        self._ids, self._log_probs = [], []
        return News(ids, log_probs, self._finish, self._has_no_room)

    def step(self, model: Model) -> None:
        """Read a chunk; after the last one, choose the next token."""
        if self._text is None:
            self._text = model.text(self.size)
        chunk, self._unread = self._unread[:CHUNK], self._unread[CHUNK:]
        if self._scores_prompt and not self._count:
            logits = self._scored(self._text.read_all(chunk), chunk)
        else:
            logits = self._text.read(chunk)
        if self._unread.size:
            return
        token = self._sampler.choose(logits)
        self._unread = np.array([token])
        self._ids.append(token)
        self._log_probs.append(float(log_softmax(logits)[token]))
        self._count += 1
        if token in self._ends or self._count == self._most:
            self._finish = "stop" if token in self._ends else "length"
            self._end()

    def _scored(self, logits: NDArray[np.float32], chunk: NDArray[np.int64]) -> NDArray[np.float32]:
        """Add the tokens of a chunk of the prompt with their log-probabilities. Return the logits
        after it.
        """
        logs = log_softmax(logits)
        before = np.zeros_like(logs[:1]) if self._log_before is None else self._log_before[None]
        own = np.concatenate([before, logs[:-1]])[np.arange(chunk.size), chunk]
        self._ids += chunk.tolist()
        self._log_probs += own.tolist()
        self._log_before = logs[-1]
        last: NDArray[np.float32] = logits[-1]
        return last

    def _end(self) -> None:
        self.has_ended, self._text = True, None  # its keys and values are freed
