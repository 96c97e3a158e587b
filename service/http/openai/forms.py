"""How the parts of answers become the bodies and events of each path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel

from service.http.openai.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    Usage,
    chat_logprobs,
    completion_logprobs,
)
from service.language.generation import Part


@dataclass(frozen=True, slots=True)
class Head:
    """What all events of an answer share."""

    id: str
    created: int  # s since 1970
    model: str  # NAME@VERSION


class Form(Protocol):
    """The form of one path. Each request has one of its own."""

    def begin(self, count: int) -> Sequence[BaseModel]:
        """Return the events before the first part of `count` answers."""

    def piece(self, index: int, part: Part) -> BaseModel | None:
        """Return the event of a part; None if it tells nothing, as one whose text is held back.
        Only the fields that are set are sent.
        """

    def usage(self, usage: Usage) -> BaseModel:
        """Return the event of the usage."""

    def whole(self, parts: Sequence[Part], usage: Usage) -> BaseModel:
        """Return the body of complete answers, each of which is one part."""


class CompletionForm:
    """Of /v1/completions."""

    def __init__(self, head: Head, logprobs: int | None, are_likeliest: bool) -> None:
        """`logprobs` is that of the request. `are_likeliest`: each token is the likeliest one."""
        self._head, self._logprobs = head, logprobs
        self._are_likeliest = are_likeliest if logprobs else None
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def begin(self, count: int) -> Sequence[BaseModel]:
        return ()

    def piece(self, index: int, part: Part) -> Completion | None:
        if _is_silent(part) and self._logprobs is None:
            return None
        return self._completion(self._choice(index, part))

    def usage(self, usage: Usage) -> Completion:
        return self._completion().model_copy(update={"usage": usage})

    def whole(self, parts: Sequence[Part], usage: Usage) -> Completion:
        choices = [self._choice(index, part) for index, part in enumerate(parts)]
        return self._completion(*choices).model_copy(update={"usage": usage})

    def _completion(self, *choices: CompletionChoice) -> Completion:
        head = self._head
        return Completion(
            id=f"cmpl-{head.id}",
            object="text_completion",
            created=head.created,
            model=head.model,
            choices=choices,
        )

    def _choice(self, index: int, part: Part) -> CompletionChoice:
        logprobs = None
        if self._logprobs is not None:
            logprobs = completion_logprobs(part.tokens, self._offsets[index], self._are_likeliest)
            self._offsets[index] += sum(len(token.text) for token in part.tokens)
        return CompletionChoice(
            text=part.text, index=index, logprobs=logprobs, finish_reason=part.finish
        )


class ChatForm:
    """Of /v1/chat/completions."""

    def __init__(self, head: Head, logprobs: bool, with_likeliest: bool = False) -> None:
        """`with_likeliest`: each token is the likeliest one, and the answer says so."""
        self._head, self._logprobs, self._with_likeliest = head, logprobs, with_likeliest

    def begin(self, count: int) -> Sequence[BaseModel]:
        first = Delta(role="assistant", content="")
        return [
            self._chunk(ChunkChoice(index=index, delta=first, logprobs=None, finish_reason=None))
            for index in range(count)
        ]

    def piece(self, index: int, part: Part) -> ChatChunk | None:
        if _is_silent(part) and not self._logprobs:
            return None
        return self._chunk(
            ChunkChoice(
                index=index,
                delta=Delta(content=part.text) if part.text else Delta(),
                logprobs=self._logprobs_of(part),
                finish_reason=part.finish,
            )
        )

    def usage(self, usage: Usage) -> ChatChunk:
        return self._chunk().model_copy(update={"usage": usage})

    def whole(self, parts: Sequence[Part], usage: Usage) -> ChatCompletion:
        choices = tuple(
            ChatChoice(
                index=index,
                message=AssistantMessage(content=part.text),
                logprobs=self._logprobs_of(part),
                finish_reason=part.finish or "stop",
            )
            for index, part in enumerate(parts)
        )
        head = self._head
        return ChatCompletion(
            id=f"chatcmpl-{head.id}",
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs_of(self, part: Part) -> ChatLogprobs | None:
        return chat_logprobs(part.tokens, self._with_likeliest) if self._logprobs else None

    def _chunk(self, *choices: ChunkChoice) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=f"chatcmpl-{head.id}",
            object="chat.completion.chunk",
            created=head.created,
            model=head.model,
            choices=choices,
        )


def _is_silent(part: Part) -> bool:
    return not part.text and part.finish is None
