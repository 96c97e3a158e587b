"""/v1/completions of a real server, with a double for its language models."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.http.openai.streams import events_of, fault_of, post
from tests.service.integration.test_server import Server, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_models(tmp_path_factory.mktemp("home"), models="add") as server:
        yield server


@pytest.fixture(scope="module", params=[1, 2])
def connected(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with so many processes for HTTP."""
    home = tmp_path_factory.mktemp("home")
    with serving_models(home, models="add", http_processes=request.param) as server:
        yield server
        assert server.end() == 0


def test_models_are_listed_and_found_by_name_and_version(server: Server) -> None:
    url = f"{server.url}/v1/models"
    listed = httpx.get(url).json()
    assert listed["object"] == "list"
    assert {"capitals", "plain"} <= {each["id"] for each in listed["data"]}
    (capitals,) = [each for each in listed["data"] if each["id"] == "capitals"]
    assert capitals == {
        "id": "capitals",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "local",
    }
    for name in ("capitals", "capitals@1", "capitals@3"):
        assert httpx.get(f"{url}/{name}").json() == {**capitals, "id": name}
    for name in ("capitals@2", "capitals@03", "none"):
        status, fault = fault_of(httpx.get(f"{url}/{name}"))
        assert (status, fault["code"], fault["param"]) == (404, "model_not_found", "model")


def test_a_prompt_is_continued(server: Server) -> None:
    answer = post(server, prompt="hello").json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "capitals@3"
    assert answer["choices"] == [
        {"text": "HELLO", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 6,  # one is the beginning of a text
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    older = post(server, model="capitals@1", prompt=[104, 105], max_tokens=1).json()
    assert older["model"] == "capitals@1"
    assert older["choices"][0]["text"] == "H"
    assert older["choices"][0]["finish_reason"] == "length"
    assert older["usage"]["prompt_tokens"] == 2


def test_a_stream_has_each_part_as_an_event(connected: Server) -> None:
    *events, end = events_of(connected, prompt="hey")
    assert end == ("message", "[DONE]")
    assert [data["choices"][0]["text"] for _, data in events] == ["H", "E", "Y", ""]
    finishes = [data["choices"][0]["finish_reason"] for _, data in events]
    assert finishes == [None, None, None, "stop"]
    assert len({data["id"] for _, data in events}) == 1
    assert all("usage" not in data for _, data in events)

    *events, (_, last), _ = events_of(
        connected, prompt="hey", stream_options={"include_usage": True}
    )
    assert {data["usage"] for _, data in events} == {None}
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_cancels_its_answer(connected: Server, streamed: bool) -> None:
    begins, ends = (f'{{"answer": "{event}", "model": "hangs"}}' for event in ("begins", "ends"))
    before = connected.log().count(ends)
    body = orjson.dumps({"model": "hangs", "prompt": "hello", "stream": streamed})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(connected.address, WITHIN_S) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: connected.log().count(begins) == before + 1)
        assert connected.log().count(ends) == before
    until(lambda: connected.log().count(ends) == before + 1)


def test_several_prompts_are_several_choices(server: Server) -> None:
    answer = post(server, prompt=["ab", [99, 100], "e"]).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [
        (0, "AB"),
        (1, "CD"),
        (2, "E"),
    ]
    assert answer["usage"]["completion_tokens"] == 5
    texts = {0: "", 1: ""}
    finishes = dict[int, str | None]()
    for _, data in events_of(server, prompt=["ab", "cd"])[:-1]:
        (choice,) = data["choices"]
        texts[choice["index"]] += choice["text"]
        finishes[choice["index"]] = choice["finish_reason"]
    assert (texts, finishes) == ({0: "AB", 1: "CD"}, {0: "stop", 1: "stop"})


def test_the_end_of_an_answer_follows_from_stop_and_length(server: Server) -> None:
    long = "a" * 40
    for more, expected in (
        ({}, ("A" * 16, "length")),  # OpenAI's default
        ({"stop": "EN"}, ("A" * 16, "length")),
        ({"max_tokens": 50}, ("A" * 40, "stop")),
    ):
        (choice,) = post(server, prompt=long, **more).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == expected
    for stop in ("LL", ["X", "LL"]):
        (choice,) = post(server, prompt="hello", stop=stop).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("HE", "stop")


def test_log_probabilities_and_echo(server: Server) -> None:
    def logprobs(**more: Any) -> tuple[str, Any]:
        (choice,) = post(server, prompt="ab", **more).json()["choices"]
        return choice["text"], choice["logprobs"]

    assert logprobs() == ("AB", None)
    assert logprobs(echo=True, max_tokens=0, logprobs=0) == (
        "ab",
        {
            "tokens": ["a", "b"],
            "token_logprobs": [None, -0.5],
            "top_logprobs": None,
            "text_offset": [0, 1],
        },
    )
    text, greedy = logprobs(logprobs=1, temperature=0)
    assert text == "AB"
    assert greedy["top_logprobs"] == [{"A": -0.5}, {"B": -0.5}]
    assert logprobs(logprobs=1)[1]["top_logprobs"] == [None, None]
    penalized = logprobs(logprobs=1, temperature=0, presence_penalty=1)[1]
    assert penalized["top_logprobs"] == [None, None]
    text, echoed = logprobs(logprobs=1, temperature=0, echo=True)
    assert (text, echoed["text_offset"]) == ("abAB", [0, 1, 2, 3])
    assert echoed["top_logprobs"] == [None] * 4, "which token is likeliest is not known"
    streamed = events_of(server, prompt="ab", logprobs=0, echo=True)[:-1]
    assert [data["choices"][0]["logprobs"]["text_offset"] for _, data in streamed] == [
        [0, 1],
        [2],
        [3],
        [],
    ]


def test_an_error_before_the_first_part_has_a_status_and_a_later_one_is_an_event(
    server: Server,
) -> None:
    for streamed in (False, True):
        full = post(server, model="full", prompt="hello", stream=streamed)
        assert fault_of(full)[0] == 429
        assert full.headers["Retry-After"] == "1"
        assert fault_of(full)[1]["code"] == "rate_limit_exceeded"
        status, fault = fault_of(post(server, prompt=[[]], stream=streamed))
        assert (status, fault["param"]) == (400, "prompt")
        unknown = fault_of(post(server, prompt=[2**31 - 1], stream=streamed))[1]
        assert unknown["param"] == "prompt"
        status, fault = fault_of(post(server, prompt="a" * 100, stream=streamed))
        assert (status, fault["param"]) == (400, "prompt")
        assert "expected a prompt of 1 to 99 tokens, got 101. Shorten it" in fault["message"]
    lost = post(server, model="lost", prompt="hello")
    assert (fault_of(lost)[0], lost.headers["Retry-After"]) == (503, "1")
    for model, code in (("lost", "service.unavailable"), ("fails", "internal")):
        *parts, (kind, refusal) = events_of(server, model=model, prompt="hello")
        assert [data["choices"][0]["text"] for _, data in parts] == ["H", "E"]
        assert kind == "error"
        assert (refusal["error"]["type"], refusal["error"]["code"]) == ("server_error", code)
        assert "a fault of the service" not in refusal["error"]["message"]


@pytest.mark.parametrize(
    ("parameter", "value", "name"),
    [
        ("n", 2, ""),
        ("best_of", 2, ""),
        ("suffix", "end", ""),
        ("logit_bias", {"50256": -100}, ""),
        ("logprobs", 2, ""),
        ("logprobs", True, ""),
        ("temperature", 2.5, ""),
        ("temperature", "1", ""),
        ("top_p", 0, ""),
        ("seed", 2**63, ""),
        ("max_tokens", 0, ""),
        ("max_tokens", -1, ""),
        ("presence_penalty", 3, ""),
        ("stop", ["a", "b", "c", "d", "e"], ""),
        ("stop", "", "stop[0]"),
        ("prompt", [], ""),
        ("prompt", [[1], [True]], ""),
        ("prompt", ["a"] * 65, ""),
        ("prompt", [-1], ""),
        ("prompt", [2**31], ""),
        ("stream_options", {}, ""),
        ("messages", [], ""),
        ("top_k", 4, ""),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: Server, parameter: str, value: object, name: str
) -> None:
    body: dict[str, Any] = {"prompt": "hello", parameter: value}
    status, fault = fault_of(post(server, **body))
    assert (status, fault["type"]) == (400, "invalid_request_error")
    assert fault["param"] == (name or parameter)
    assert f"`{name or parameter}`" in fault["message"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (r'"prompt": "\ud800"', "prompt"),
        (r'"prompt": ["a", "\ud800"]', "prompt"),
        (r'"prompt": "a", "stop": "\ud800"', "stop[0]"),
        (r'"prompt": "a", "temperature": NaN', "temperature"),
        ('"prompt": "a", "seed": ' + "9" * 4000, "seed"),
        ('"prompt": "a", "n": ' + "[" * 900 + "]" * 900, "n"),
        ('"prompt": "a", "' + "x" * 1000 + '": 1', "x" * 80),
        (r'"model": "\ud800", "prompt": "a"', "model"),
    ],
)
def test_strange_json_is_refused_by_name_and_briefly(server: Server, text: str, name: str) -> None:
    body = '{"model": "capitals", ' + text + "}"
    head = {"Content-Type": "application/json"}
    refusal = httpx.post(f"{server.url}/v1/completions", content=body, headers=head)
    status, fault = fault_of(refusal)
    assert (status, fault["param"]) == (400, name)
    assert len(fault["message"]) < 300


def test_parameters_without_a_meaning_here_are_taken(server: Server) -> None:
    more: dict[str, Any] = {
        "n": 1,
        "best_of": None,
        "logit_bias": {},
        "user": "me",
        "seed": -1,
        "stop": None,
    }
    assert post(server, prompt="hello", **more).json()["choices"][0]["text"] == "HELLO"


def test_other_refusals_have_the_same_form(server: Server) -> None:
    url = f"{server.url}/v1/completions"
    head = {"Content-Type": "application/json"}
    for content, code in ((b"{", "invalid_json"), (b"[]", "invalid_value")):
        status, fault = fault_of(httpx.post(url, content=content, headers=head))
        assert (status, fault["param"], fault["code"]) == (400, None, code)
    assert fault_of(httpx.post(url, json={}))[1]["code"] == "missing_required_parameter"
    assert fault_of(httpx.get(url))[0] == 405
    assert fault_of(httpx.get(f"{server.url}/v1/files"))[0] == 404
    assert fault_of(post(server, model="add", prompt="hello"))[1]["param"] == "model"
    status, fault = fault_of(post(server, prompt="a" * 2**20))
    assert (status, fault["code"]) == (413, "service.too_large")
