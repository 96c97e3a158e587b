"""The answers of /v1, whole and in pieces, with OpenAI's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pipeline.core.frozen import Frozen
from service.language.generation import Answer, Finish, ScoredToken

UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class ModelObject(Frozen):
    """A language model that is deployed."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(Frozen):
    """All language models that are deployed."""

    object: Literal["list"] = "list"
    data: tuple[ModelObject, ...]


class PromptDetails(Frozen):
    """Of the tokens of the prompt."""

    cached_tokens: int


class Usage(Frozen):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(Frozen):
    """Log-probabilities of /v1/completions, by token. Offsets count characters of `tokens`."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...] | None
    text_offset: tuple[int, ...]


class CompletionChoice(Frozen):
    """The answer to one prompt, or a piece of it."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(Frozen):
    """The answer of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None


class TopLogprob(Frozen):
    """The log-probability of one of the likeliest tokens."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogprob(TopLogprob):
    """The log-probability of one token, and of the likeliest ones in its place."""

    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(Frozen):
    """Log-probabilities of an answer."""

    content: tuple[TokenLogprob, ...]
    refusal: None = None


class AssistantMessage(Frozen):
    """The answer to a chat."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Frozen):
    """The only answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Frozen):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage


class Delta(Frozen):
    """A piece of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(Frozen):
    """A piece of the only answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Frozen):
    """An event of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | None = None


class Fault(Frozen):
    """Why a request was refused."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIRefusal(Frozen):
    """The body of every unsuccessful answer of /v1."""

    error: Fault


def usage_of(answers: Sequence[Answer]) -> Usage:
    """Return the tokens of all prompts of a request together."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
    )


def completion_logprobs(
    tokens: Iterable[ScoredToken], offset: int, are_likeliest: bool | None
) -> CompletionLogprobs:
    """Return the log-probabilities of tokens whose text begins at `offset`.

    `are_likeliest`: each token is the likeliest one. False: that is not known. None: the likeliest
    were not asked for.
    """
    chosen = tuple(tokens)
    offsets = []
    for token in chosen:
        offsets.append(offset)
        offset += len(token.text)
    likeliest = tuple(
        {token.text: token.log_prob} if are_likeliest and token.log_prob is not None else None
        for token in chosen
    )
    return CompletionLogprobs(
        tokens=tuple(token.text for token in chosen),
        token_logprobs=tuple(token.log_prob for token in chosen),
        top_logprobs=None if are_likeliest is None else likeliest,
        text_offset=tuple(offsets),
    )


def chat_logprobs(tokens: Iterable[ScoredToken], with_likeliest: bool) -> ChatLogprobs:
    """Return the log-probabilities of tokens. `with_likeliest`: each is the likeliest one, and is
    listed as such, too.
    """
    chosen = [
        _top_logprob(token.text, token.log_prob) for token in tokens if token.log_prob is not None
    ]
    return ChatLogprobs(
        content=tuple(
            TokenLogprob(**dict(each), top_logprobs=(each,) if with_likeliest else ())
            for each in chosen
        )
    )


def _top_logprob(text: str, log_prob: float) -> TopLogprob:
    """A part of a character has no bytes."""
    is_whole = UNKNOWN_CHARACTER not in text
    content = tuple(text.encode("utf-8", "replace")) if is_whole else None
    return TopLogprob(token=text, logprob=log_prob, bytes=content)
