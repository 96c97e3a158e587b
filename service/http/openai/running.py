"""The running answers of one request, one for each prompt, as one sequence of parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from service.context import Service
from service.errors import Unprocessable
from service.http.openai.errors import BadParameter
from service.language.generation import Answer, GenerateRequest, Part, ServedLanguage

AHEAD = 16  # parts that wait for a slow client, before the answers are read no further


@dataclass(frozen=True, slots=True)
class _End:
    """An answer has ended; with the error that ended it."""

    error: BaseException | None


class RunningAnswers:
    """The answers to all prompts of a request. Iterate it once."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self._parts: asyncio.Queue[tuple[int, Part] | _End] = asyncio.Queue(AHEAD)
        self._left = len(answers)

    async def next(self) -> tuple[int, Part] | None:
        """Return the next part and the index of its prompt; None at the end. Raises what an answer
        raises. May be cancelled and called again.
        """
        while self._left:
            item = await self._parts.get()
            if not isinstance(item, _End):
                return item
            if item.error is not None:
                raise item.error
            self._left -= 1
        return None

    async def read(self, index: int, answer: Answer) -> None:
        """Put the parts of one answer beside those of the others."""
        error: Exception | None = None
        try:
            async for part in answer:
                await self._parts.put((index, part))
        except Exception as raised:  # noqa: BLE001  `next` raises it
            error = raised
        await self._parts.put(_End(error))


def joined(parts: Sequence[Part]) -> Part:
    """Return the parts of one answer as one part."""
    return Part(
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.tokens),
        parts[-1].finish if parts else None,
    )


@asynccontextmanager
async def running(
    service: Service, served: ServedLanguage, requests: Sequence[GenerateRequest], param: str
) -> AsyncIterator[RunningAnswers]:
    """Run requests until the block is left, which cancels what is not complete.

    BadParameter about `param` if a prompt does not fit; TooMany if a queue is full, or the key has
    no tokens left; Unavailable if the model is not ready.
    """
    caller = requests[0].caller
    await service.limits.check_tokens(caller.key)
    async with AsyncExitStack() as stack:
        answers = []
        for request in requests:
            try:
                answer = await stack.enter_async_context(service.generating.generate(request))
            except Unprocessable as error:
                raise BadParameter(error.message, error.next_step, param) from error
            answers.append(answer)
        most = sum(map(partial(_most_tokens, served), requests, answers))
        used = partial(_used_tokens, answers)
        await stack.enter_async_context(service.limits.tokens(caller.key, most, used))
        together = RunningAnswers(answers)
        tasks = [
            asyncio.create_task(together.read(index, answer))
            for index, answer in enumerate(answers)
        ]
        try:
            yield together
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _most_tokens(served: ServedLanguage, request: GenerateRequest, answer: Answer) -> int:
    """Return how many tokens of prompt and answer a request may use."""
    limit = request.sampling.max_tokens
    room = served.context - answer.prompt_tokens
    return answer.prompt_tokens + (room if limit is None else min(limit, room))


def _used_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.prompt_tokens + answer.completion_tokens for answer in answers)
