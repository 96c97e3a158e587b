"""/ui/models/NAME/try of a language model: a text or a chat, and the answer as it comes.

Without script the form is answered with the page and the whole answer. The script sends the same
form to `/try/stream`, which answers with the events of /v1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, Json, TypeAdapter, ValidationError

from pipeline.core.frozen import Frozen
from service.auth import Caller
from service.context import Service
from service.errors import ServiceError, Unprocessable
from service.http.error_responses import answer_error
from service.http.openai.answers import Usage, usage_of
from service.http.openai.forms import ChatForm, CompletionForm, Head
from service.http.openai.running import joined, running
from service.http.openai.sse import AnswerStream
from service.http.routers.dependencies import CurrentService
from service.http.routers.inference_io import while_connected
from service.http.routers.models import Name
from service.language.generation import GenerateRequest, Part, Sampling, ServedLanguage
from service.pages.access import MAX_TEXT_BYTES, Author
from service.pages.rendering import page

router = APIRouter(include_in_schema=False)
MAX_TURNS = 200
TOKENS = 200  # of an answer, unless the form says otherwise


class Turn(Frozen):
    """One message of a chat."""

    role: Literal["user", "assistant"]
    content: str


class TryForm(Frozen):
    """What the form holds."""

    text: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] = TOKENS
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    is_chat: bool = False
    chat: Json[Annotated[tuple[Turn, ...], Field(max_length=MAX_TURNS)]] = ()  # so far


@dataclass(frozen=True, slots=True)
class Told:
    """A complete answer."""

    part: Part
    usage: Usage
    first_s: float  # to its first part
    rest_s: float  # from there to the end

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first, per second; None if there are too few to say."""
        count = self.usage.completion_tokens - 1
        return count / self.rest_s if count > 0 and self.rest_s > 0 else None


def language_of(service: Service, caller: Caller, name: str) -> ServedLanguage | None:
    """Return the language model of this name, or None if it is another kind of model."""
    found = [each for each in service.generating.languages(caller) if each.model == name]
    return found[-1] if found else None


def language_page(request: Request, served: ServedLanguage) -> Response:
    """Show the empty form of a language model."""
    form = {"is_chat": "on"} if served.chat_template else {}
    return _page(request, served, form)


async def try_language(
    request: Request, service: Service, caller: Caller, served: ServedLanguage
) -> Response:
    """Answer the form with the page and the whole answer."""
    given = await _given(request)
    try:
        form = _form_from(given)
    except ValidationError as error:
        faults = {str(fault["loc"][0]): fault["msg"] for fault in error.errors()}
        return _page(request, served, given, status=422, faults=faults)
    turns = form.chat
    try:
        generate = await _request_from(request, service, caller, served, form)
        told = await while_connected(_told(service, served, generate), request.receive)
    except Unprocessable as error:
        return _page(request, served, given, turns, status=422, refusal=error)
    if form.is_chat:
        user = Turn(role="user", content=form.text)
        turns = (*turns, user, Turn(role="assistant", content=told.part.text))
        given = given | {"text": ""}
    return _page(request, served, given, turns, told=told)


@router.post("/ui/models/{name}/try/stream")
async def stream_language(
    request: Request, name: Name, caller: Author, service: CurrentService
) -> Response:
    """Answer the form with the events of /v1."""
    caller.require("infer")
    served = service.generating.find_language(caller, name)
    try:
        form = _form_from(await _given(request))
    except ValidationError as error:
        fault = error.errors()[0]
        raise Unprocessable(f"{fault['loc'][0]}: {fault['msg']}", "correct the form") from None
    generate = await _request_from(request, service, caller, served, form)
    head = Head(generate.id, int(time.time()), served.model)
    to_answer = partial(answer_error, request_id=generate.id, folders=service.folders)
    return AnswerStream(
        partial(running, service, served, [generate], "text"),
        ChatForm(head, logprobs=False) if form.is_chat else CompletionForm(head, None, False),
        True,
        to_answer,
    )


async def _given(request: Request) -> dict[str, str]:
    async with request.form(max_part_size=MAX_TEXT_BYTES) as form:
        return {name: str(value) for name, value in form.items() if name in TryForm.model_fields}


def _form_from(given: dict[str, str]) -> TryForm:
    return TryForm.model_validate({name: text for name, text in given.items() if text})


async def _request_from(
    request: Request, service: Service, caller: Caller, served: ServedLanguage, form: TryForm
) -> GenerateRequest:
    """Return the request of a form. Unprocessable if the chat template refuses the chat."""
    prompt = form.text
    if form.is_chat:
        messages = [turn.model_dump() for turn in form.chat]
        messages.append({"role": "user", "content": form.text})
        prompt = await service.chat_templates.prompt(served, messages)
    return GenerateRequest(
        caller,
        served.model,
        prompt,
        Sampling(max_tokens=form.max_tokens, temperature=form.temperature),
        served.version,
        special_tokens=not form.is_chat,
        id=request.state.request_id,
    )


async def _told(service: Service, served: ServedLanguage, generate: GenerateRequest) -> Told:
    begin_s = first_s = time.perf_counter()
    parts: list[Part] = []
    async with running(service, served, [generate], "text") as answers:
        while (item := await answers.next()) is not None:
            if not parts:
                first_s = time.perf_counter()
            parts.append(item[1])
        end_s = time.perf_counter()
        usage = usage_of(answers.answers)
    return Told(joined(parts), usage, first_s - begin_s, end_s - first_s)


def _page(
    request: Request,
    served: ServedLanguage,
    form: Mapping[str, str],
    turns: tuple[Turn, ...] = (),
    status: int = 200,
    faults: Mapping[str, str] | None = None,
    refusal: ServiceError | None = None,
    told: Told | None = None,
) -> Response:
    defaults = {"text": "", "max_tokens": str(TOKENS), "temperature": "1", "is_chat": ""}
    return page(
        request,
        "try_language.html",
        status,
        served=served,
        form=defaults | dict(form),
        turns=turns,
        chat=TypeAdapter(tuple[Turn, ...]).dump_json(turns).decode(),
        faults=faults or {},
        refusal=refusal,
        told=told,
    )
