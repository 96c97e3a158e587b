"""/v1: language models over OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from service.context import Service
from service.errors import Unprocessable
from service.http.error_responses import answer_error
from service.http.openai.answers import (
    ChatCompletion,
    Completion,
    usage_of,
)
from service.http.openai.errors import ROOT, BadParameter
from service.http.openai.forms import ChatForm, CompletionForm, Form, Head
from service.http.openai.models import REFUSALS, find
from service.http.openai.requests import ChatRequest, CompletionRequest
from service.http.openai.running import joined, running
from service.http.openai.sse import AnswerStream
from service.http.routers.dependencies import CurrentCaller, CurrentService
from service.http.routers.inference_io import while_connected
from service.language.generation import GenerateRequest, Part, ServedLanguage

EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "event": {"type": "string", "const": "error"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
router = APIRouter(prefix=ROOT, tags=["language models"], responses=REFUSALS)


def _streams(whole: type[Completion | ChatCompletion]) -> dict[int | str, Any]:
    return {
        200: {
            "model": whole,
            "content": {"text/event-stream": {"itemSchema": EVENT}},
            "description": "The answer; with `stream`, an event for each part, and then `[DONE]`",
        }
    }


@router.post("/completions", response_model=Completion, responses=_streams(Completion))
async def complete(
    body: CompletionRequest, request: Request, caller: CurrentCaller, service: CurrentService
) -> Response:
    """Continue one or several prompts, each as a choice of its own."""
    caller.require("infer")
    body.check()
    served = find(service, caller, body.model)
    requests = [
        GenerateRequest(
            caller,
            served.model,
            prompt,
            body.sampling(body.token_limit),
            served.version,
            log_probs=body.logprobs is not None,
            echo=bool(body.echo),
            id=request.state.request_id,
        )
        for prompt in body.prompt
    ]
    form = CompletionForm(_head(request, served), body.logprobs, body.takes_likeliest)
    return await _answer(service, request, served, requests, body, form, "prompt")


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses=_streams(ChatCompletion),
)
async def chat(
    body: ChatRequest, request: Request, caller: CurrentCaller, service: CurrentService
) -> Response:
    """Answer a chat, in the form of the model's chat template."""
    caller.require("infer")
    body.check()
    served = find(service, caller, body.model)
    messages = [message.for_template for message in body.messages]
    try:
        prompt = await service.chat_templates.prompt(served, messages)
    except Unprocessable as error:
        raise BadParameter(error.message, error.next_step, "messages") from error
    generate = GenerateRequest(
        caller,
        served.model,
        prompt,
        body.sampling(body.token_limit),
        served.version,
        special_tokens=False,
        log_probs=bool(body.logprobs),
        id=request.state.request_id,
    )
    form = ChatForm(_head(request, served), bool(body.logprobs), bool(body.top_logprobs))
    return await _answer(service, request, served, [generate], body, form, "messages")


async def _answer(
    service: Service,
    request: Request,
    served: ServedLanguage,
    requests: Sequence[GenerateRequest],
    body: CompletionRequest | ChatRequest,
    form: Form,
    param: str,
) -> Response:
    run = partial(running, service, served, requests, param)
    if body.stream:
        to_answer = partial(
            answer_error, request_id=request.state.request_id, folders=service.folders
        )
        return AnswerStream(run, form, body.includes_usage, to_answer)

    async def whole() -> Response:
        texts: list[list[Part]] = [[] for _ in requests]
        async with run() as answers:
            while (item := await answers.next()) is not None:
                texts[item[0]].append(item[1])
            usage = usage_of(answers.answers)
        complete = form.whole([joined(parts) for parts in texts], usage)
        return Response(complete.model_dump_json(), media_type="application/json")

    return await while_connected(whole(), request.receive)


def _head(request: Request, served: ServedLanguage) -> Head:
    model = f"{served.model}@{served.version}"
    return Head(request.state.request_id, int(time.time()), model)
