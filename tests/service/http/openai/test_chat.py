"""/v1/chat/completions of a real server, with a double for its language models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service.builders.serving import serving_models
from tests.service.http.openai.streams import events_of, fault_of, post
from tests.service.integration.test_server import Server

PATH = "chat/completions"
HELLO = {"role": "user", "content": "hi"}
ANSWER = "<S><USER>HI<ASSISTANT>"  # of the double


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_models(tmp_path_factory.mktemp("home"), models="add") as server:
        yield server


def test_a_chat_is_answered_in_the_form_of_its_template(server: Server) -> None:
    answer = post(server, PATH, messages=[HELLO]).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    # the template writes the beginning of the text itself
    assert answer["usage"]["prompt_tokens"] == len(ANSWER)


def test_an_answer_may_be_sent_back_and_content_may_have_parts(server: Server) -> None:
    (first,) = post(server, PATH, messages=[HELLO]).json()["choices"]
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    chat = [
        {"role": "developer", "content": "Be", "name": "me"},
        {**first["message"], "content": "ok", "tool_calls": None, "annotations": []},
        {"role": "user", "content": parts},
    ]
    (choice,) = post(server, PATH, messages=chat).json()["choices"]
    assert choice["message"]["content"] == "<S><SYSTEM>BE<ASSISTANT>OK<USER>A\nB<ASSISTANT>"


def test_a_stream_begins_with_the_role(server: Server) -> None:
    *events, end = events_of(server, PATH, messages=[HELLO], max_completion_tokens=2)
    assert end == ("message", "[DONE]")
    assert [data["choices"][0]["delta"] for _, data in events] == [
        {"role": "assistant", "content": ""},
        {"content": "<"},
        {"content": "S"},
        {},
    ]
    assert events[-1][1]["choices"][0]["finish_reason"] == "length"
    assert {data["object"] for _, data in events} == {"chat.completion.chunk"}
    *_, (_, last), _ = events_of(
        server, PATH, messages=[HELLO], stream_options={"include_usage": True}
    )
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ANSWER)


def test_log_probabilities_have_the_bytes_of_each_token(server: Server) -> None:
    chat = [{"role": "user", "content": "é"}]
    more: dict[str, Any] = {"messages": chat, "logprobs": True, "top_logprobs": 0}
    (choice,) = post(server, PATH, **more).json()["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert tokens[9] == {"token": "É", "logprob": -0.5, "bytes": [195, 137], "top_logprobs": []}
    streamed = [
        each
        for _, data in events_of(server, PATH, **more)[:-1]
        if (logprobs := data["choices"][0]["logprobs"])
        for each in logprobs["content"]
    ]
    assert streamed == tokens


def test_the_likeliest_token_is_told_where_it_is_the_one_that_comes(server: Server) -> None:
    more: dict[str, Any] = {"messages": [HELLO], "logprobs": True, "top_logprobs": 1}
    (choice,) = post(server, PATH, temperature=0, **more).json()["choices"]
    (*_, token) = choice["logprobs"]["content"]
    assert token["top_logprobs"] == [{key: token[key] for key in ("token", "logprob", "bytes")}]
    for changes, code, message in (
        ({"temperature": 0, "top_logprobs": 2}, "unsupported_parameter", "`top_logprobs` of 2"),
        ({}, "unsupported_parameter", "`temperature` 0"),
        ({"temperature": 0, "presence_penalty": 1}, "unsupported_parameter", "without penalties"),
        ({"temperature": 0, "logprobs": False}, "invalid_value", "only with `logprobs`"),
    ):
        status, fault = fault_of(post(server, PATH, **(more | changes)))
        assert (status, fault["param"], fault["code"]) == (400, "top_logprobs", code)
        assert message in fault["message"]


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("n", 2),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"1": 1}),
        ("top_logprobs", 21),
        ("audio", {"voice": "a"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("store", True),
        ("logprobs", 1),
        ("max_tokens", 0),
        ("prompt", "hello"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: Server, parameter: str, value: object
) -> None:
    body: dict[str, Any] = {"messages": [HELLO], parameter: value}
    status, fault = fault_of(post(server, PATH, **body))
    assert (status, fault["type"], fault["param"]) == (400, "invalid_request_error", parameter)
    assert f"`{parameter}`" in fault["message"]


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "user", "content": 4}, "content"),
        ({"role": "user", "content": [{"type": "text"}]}, "content"),
    ],
)
def test_a_message_that_is_no_text_is_refused_by_name(
    server: Server, message: object, name: str
) -> None:
    status, fault = fault_of(post(server, PATH, messages=[HELLO, message]))
    assert (status, fault["param"]) == (400, f"messages[1].{name}")


def test_a_message_of_half_a_character_is_refused(server: Server) -> None:
    body = r'{"model": "capitals", "messages": [{"role": "user", "content": "\ud800"}]}'
    head = {"Content-Type": "application/json"}
    refusal = httpx.post(f"{server.url}/v1/{PATH}", content=body, headers=head)
    status, fault = fault_of(refusal)
    assert (status, fault["param"]) == (400, "messages[0].content")


def test_defaults_may_be_said(server: Server) -> None:
    more: dict[str, Any] = {
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "stream_options": None,
    }
    assert post(server, PATH, messages=[HELLO], **more).status_code == 200


def test_without_a_usable_template_a_chat_is_refused_and_others_are_answered(
    server: Server,
) -> None:
    for model, reason in (("plain", "/v1/completions"), ("endless", "took more than 1 s")):
        for streamed in (False, True):
            refusal = post(server, PATH, model=model, messages=[HELLO], stream=streamed)
            status, fault = fault_of(refusal)
            assert (status, fault["param"]) == (400, "messages")
            assert reason in fault["message"]
    assert post(server, PATH, messages=[HELLO]).status_code == 200
    both: dict[str, Any] = {"max_tokens": 1, "max_completion_tokens": 1}
    assert fault_of(post(server, PATH, messages=[HELLO], **both))[1]["param"] == "max_tokens"
    assert fault_of(post(server, PATH, messages=[]))[1]["param"] == "messages"
