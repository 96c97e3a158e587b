"""The interface of deployed language models, shared by the routes under /v1 and the web page.

    async with serving.generate(GenerateRequest(caller, "smollm2", "Once upon")) as answer:
        async for part in answer:
            part.text

Leaving the block cancels what has not been generated. Greedy (`temperature` 0) unless the request
says otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from service.auth import Caller
from service.inference import ModelState, ServedDevice

Finish = Literal["stop", "length"]
"""`stop`: the model ended its answer, or a stop text came; `length`: the limit was reached."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and when the answer ends."""

    max_tokens: int | None = None  # None: as many as the context has room for
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0
    top_k: int | None = None  # None: all
    seed: int | None = None  # None: another one for each request
    stop: tuple[str, ...] = ()  # texts that end the answer, and are not part of it
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for one answer."""

    caller: Caller
    model: str | None  # None: the only language model that is deployed
    prompt: str | tuple[int, ...]  # text, or tokens
    sampling: Sampling = Sampling()
    version: int | None = None  # None: the current one
    special_tokens: bool = True  # add those that begin a text; a chat template has its own
    log_probs: bool = False  # of each token that is generated
    echo: bool = False  # begin with the prompt: its text, and its log-probabilities if wanted
    timeout_s: float | None = None  # for the whole answer; None: the deployment's
    id: str = ""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the answer, or of the prompt if it is echoed."""

    id: int
    text: str  # decoded alone: of a part of a character, the replacement character
    log_prob: float | None  # natural; None: of the first token of a prompt, or not asked for


@dataclass(frozen=True, slots=True)
class Part:
    """What has come since the last part. The last one has `finish`."""

    text: str = ""  # whole characters only; what may begin a stop text is held back
    tokens: tuple[ScoredToken, ...] = ()
    finish: Finish | None = None


class Answer(Protocol):
    """A running answer. Iterating raises TimedOut, or Unavailable if the worker was lost."""

    model: str
    version: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache; 0 if that is not known
    completion_tokens: int  # so far

    def __aiter__(self) -> AsyncIterator[Part]: ...


@dataclass(frozen=True, slots=True)
class ServedLanguage:
    """One deployed version of a language model, as clients see it."""

    model: str
    version: int
    owner: str
    created_s: int  # of the version; UTC, since 1970
    label: str  # of the winner, such as "int8 kv-f16"
    context: int  # tokens of prompt and answer together, at most
    vocabulary: int  # number of tokens
    devices: tuple[ServedDevice, ...]
    state: ModelState
    reason: str = ""  # of `failed`
    chat_template: str = ""  # Jinja, untrusted; empty: the model has none
    special_tokens: tuple[tuple[str, str], ...] = ()  # ("bos_token", "<s>"), ..., for the template


class Generating(Protocol):
    """All deployed language models. Implemented beside `Serving`."""

    def languages(self, caller: Caller) -> tuple[ServedLanguage, ...]:
        """The language models that this caller may see, by name."""
        ...

    def find_language(
        self, caller: Caller, model: str | None, version: int | None = None
    ) -> ServedLanguage:
        """Find a deployed language model, or the only one if `model` is None.

        NotFound: it is not deployed, or belongs to another owner. Unprocessable: it is no language
        model, or `model` is None and several are deployed.
        """
        ...

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[Answer]:
        """Answer a request.

        At entry, before the first token: Unprocessable: the prompt is empty, has unknown tokens or
        is longer than the context; TooMany: the queue is full; Unavailable: not ready.
        """
        ...
