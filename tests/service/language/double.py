"""A double for Generating: it answers in capitals, one character for each token.

A token is the number of its character. Models differ in what goes wrong; see LANGUAGES.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

from service.auth import Caller
from service.errors import NotFound, TooMany, Unavailable, Unprocessable
from service.inference import ServedDevice
from service.language.generation import (
    Finish,
    GenerateRequest,
    Part,
    ScoredToken,
    ServedLanguage,
)

CONTEXT = 100
VOCABULARY = 0x110000
LOG_PROB = -0.5  # of each token but the first of a prompt
AFTER = 2  # tokens until a model of WRONG does what it does
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

Wrong = Literal["", "hangs", "is lost", "fails", "is full"]


@dataclass(frozen=True, slots=True)
class Language:
    """One model of the double."""

    wrong: Wrong = ""
    owner: str = "local"
    versions: tuple[int, ...] = (1,)  # the last one is the current
    chat_template: str = CHAT_TEMPLATE

    def served(self, name: str, version: int) -> ServedLanguage:
        return ServedLanguage(
            name,
            version,
            self.owner,
            1_700_000_000,
            "int8 kv-f16",
            CONTEXT,
            VOCABULARY,
            (ServedDevice(device="cpu", state="ready"),),
            "ready",
            chat_template=self.chat_template,
            special_tokens=(("bos_token", "<s>"), ("eos_token", "</s>")),
        )


LANGUAGES: Mapping[str, Language] = {
    "capitals": Language(versions=(1, 3)),
    "plain": Language(chat_template=""),
    "hangs": Language("hangs"),
    "lost": Language("is lost"),
    "fails": Language("fails"),
    "full": Language("is full"),
    "foreign": Language(owner="somebody"),
    "endless": Language(
        chat_template="{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}"
    ),
}
ENGINES = ("add",)  # deployed models that are no language models


class DoubleAnswer:
    """A running answer. Greedy or not, it is the prompt in capitals, as often as wanted."""

    cached_tokens = 0

    def __init__(self, request: GenerateRequest, served: ServedLanguage, wrong: Wrong) -> None:
        self.model, self.version = served.model, served.version
        prompt = request.prompt
        self._prompt = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        self.prompt_tokens = len(self._prompt) + (
            isinstance(prompt, str) and request.special_tokens
        )
        self.completion_tokens = 0
        self._request, self._wrong = request, wrong
        self._room = served.context - self.prompt_tokens

    async def __aiter__(self) -> AsyncIterator[Part]:
        if self._request.echo:
            yield Part(self._prompt, self._tokens(self._prompt, is_first=True))
        text, finish = self._text()
        for character in text:
            await asyncio.sleep(0)
            if self.completion_tokens == AFTER:
                await self._go_wrong()
            self.completion_tokens += 1
            yield Part(character, self._tokens(character))
        yield Part(finish=finish)

    def _text(self) -> tuple[str, Finish]:
        sampling = self._request.sampling
        most = self._room if sampling.max_tokens is None else min(sampling.max_tokens, self._room)
        text = self._prompt.upper()
        finish: Finish = "stop" if len(text) <= most else "length"
        text = text[:most]
        places = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        return (text[: min(places)], "stop") if places else (text, finish)

    def _tokens(self, text: str, is_first: bool = False) -> tuple[ScoredToken, ...]:
        if not self._request.log_probs:
            return ()
        return tuple(
            ScoredToken(ord(each), each, None if is_first and not number else LOG_PROB)
            for number, each in enumerate(text)
        )

    async def _go_wrong(self) -> None:
        if self._wrong == "hangs":
            await asyncio.get_running_loop().create_future()
        if self._wrong == "is lost":
            raise Unavailable("the worker of this request was lost", "send the request again", 1)
        if self._wrong == "fails":
            raise RuntimeError("a fault of the service")


class DoubleGenerating:
    """Generating, of LANGUAGES. It writes down when answers begin and end."""

    def __init__(self, languages: Mapping[str, Language] = LANGUAGES) -> None:
        self._languages = languages
        self.requests: list[GenerateRequest] = []

    def languages(self, caller: Caller) -> tuple[ServedLanguage, ...]:
        return tuple(
            language.served(name, version)
            for name, language in sorted(self._languages.items())
            for version in language.versions
            if caller.sees in (None, language.owner)
        )

    def find_language(
        self, caller: Caller, model: str | None, version: int | None = None
    ) -> ServedLanguage:
        if model in ENGINES:
            raise Unprocessable(f"'{model}' is no language model", "POST /models/NAME/infer")
        found = [
            each
            for each in self.languages(caller)
            if each.model == model and version in (None, each.version)
        ]
        if not found:
            raise NotFound(f"no language model '{model}' is deployed", "GET /v1/models lists them")
        return found[-1]

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[DoubleAnswer]:
        served = self.find_language(request.caller, request.model, request.version)
        wrong = self._languages[served.model].wrong
        if not isinstance(request.prompt, str) and max(request.prompt, default=0) >= VOCABULARY:
            raise Unprocessable("the prompt has unknown tokens", "send tokens of this model")
        if wrong == "is full":
            raise TooMany(f"the queue of '{served.model}' is full", "try again in a moment", 1)
        answer = DoubleAnswer(request, served, wrong)
        if not 0 < answer.prompt_tokens < served.context:
            raise Unprocessable(
                f"expected a prompt of 1 to {served.context - 1} tokens, got"
                f" {answer.prompt_tokens}",
                "shorten it",
            )
        self.requests.append(replace(request, prompt=answer._prompt))
        _log("begins", served.model)
        try:
            yield answer
        finally:
            _log("ends", served.model)


def _log(event: str, model: str) -> None:
    print(json.dumps({"answer": event, "model": model}), file=sys.stderr, flush=True)
