"""One running answer: what the worker says of it, as parts for the one who asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from time import monotonic

from pipeline.errors import CrucibleError
from service.errors import Unavailable, Unprocessable
from service.language.generation import GenerateRequest, Part, ScoredToken
from service.serving.language.messages import Piece
from service.serving.language.stats import AnswerState, LanguageTally


class RunningAnswer:
    """Implements `Answer` of service/language/generation.py, and `Receiver` of the client."""

    def __init__(
        self,
        request: GenerateRequest,
        model: str,
        version: int,
        tally: LanguageTally,
        ended: Callable[[RunningAnswer], None],
    ) -> None:
        self.model, self.version, self.request = model, version, request
        self.prompt_tokens = self.completion_tokens = 0
        self.cached_tokens = 0  # GenAI does not tell
        self.number: int | None = None  # in the worker; None: it is to be sent
        self.has_begun = self.has_ended = False
        self._tally, self._ended = tally, ended
        self._since = self._last = monotonic()
        self._queue_s = 0.0
        self._came = 0  # tokens
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts = asyncio.Queue[tuple[Part, int] | CrucibleError]()  # with its new tokens
        self._is_read = False  # to its end

    async def ready(self) -> None:
        """Wait until the prompt is accepted. Raises what refuses it."""
        await self._ready

    def __aiter__(self) -> AsyncIterator[Part]:
        return self

    async def __anext__(self) -> Part:
        if self._is_read:
            raise StopAsyncIteration
        item = await self._parts.get()
        if isinstance(item, CrucibleError):
            self._is_read = True
            raise item
        part, tokens = item
        self._is_read = part.finish is not None
        self.completion_tokens += tokens
        return part

    # -- the worker's messages

    def accepted(self, prompt_tokens: int) -> None:
        if not self._ready.done():  # a second worker makes the tokens again
            self.prompt_tokens = prompt_tokens
            self._tally.accepted(prompt_tokens)
            self._ready.set_result(None)

    def began(self) -> None:
        self.has_begun = True
        self._queue_s = monotonic() - self._since

    def took(self, piece: Piece) -> None:
        now, tokens = monotonic(), len(piece.ids) - piece.prompt
        if tokens:
            first_s = None if self._came else now - self._since
            self._tally.generated(tokens, first_s, now - self._last)
            self._came, self._last = self._came + tokens, now
        scored = zip(piece.ids, piece.texts, piece.log_probs, strict=True)
        part = Part(piece.text, tuple(ScoredToken(*each) for each in scored), piece.finish)
        if part != Part():
            self._parts.put_nowait((part, tokens))
        if piece.finish is not None:
            self._end(piece.finish)

    def failed(self, error: CrucibleError) -> None:
        self.fail(error, "refused" if isinstance(error, Unprocessable) else "failed")

    def lost(self) -> None:
        """The worker is broken. A request that had not begun waits for the next one."""
        self.number = None
        if self.has_begun and not self.has_ended:
            message = f"the worker of '{self.model}' was lost"
            self.fail(Unavailable(message, "send the request again", 1), "failed")

    # -- the deployment

    def fail(self, error: CrucibleError, state: AnswerState) -> None:
        """End the answer with an error, if it has not ended."""
        if self.has_ended:
            return
        if self._ready.done():
            self._parts.put_nowait(error)
        else:
            self._ready.set_exception(error)
        self._end(state)

    def cancel(self) -> None:
        """End the answer, for which nobody waits any more."""
        if not self.has_ended:
            self._end("cancelled")
        if not self._ready.done():
            self._ready.cancel()

    def _end(self, state: AnswerState) -> None:
        self.has_ended = True
        self._tally.ended(state, monotonic() - self._since, self._queue_s)
        self._ended(self)
