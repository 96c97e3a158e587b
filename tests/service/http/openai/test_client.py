"""OpenAI's own client, unmodified, against a real server with a double for its language models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.builders.tensors import key_of
from tests.service.integration.test_server import Server

CHAT = [{"role": "user", "content": "hi"}]
ANSWER = "<S><USER>HI<ASSISTANT>"  # of the double


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    with serving_models(home, models="add", keys_required="true") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    key = key_of(server.home, "infer", owner="local")
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=WITHIN_S
    ) as client:
        yield client


def test_models(client: Any) -> None:
    names = [model.id for model in client.models.list()]
    assert "capitals" in names
    assert client.models.retrieve("capitals@1").owned_by == "local"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("none")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_a_completion_whole_and_streamed(client: Any) -> None:
    options = {"model": "capitals", "prompt": "hello", "seed": 1, "logprobs": 1, "stop": ["X"]}
    whole = client.completions.create(**options, temperature=0)
    assert whole.choices[0].text == "HELLO"
    assert whole.choices[0].logprobs.top_logprobs[0] == {"H": -0.5}
    assert whole.usage.completion_tokens == 5
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "HELLO"


def test_a_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(model="capitals", messages=CHAT, logprobs=True)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.logprobs.content[0].bytes == [60]
    longer = [*CHAT, choice.message.model_dump(), *CHAT]
    assert client.chat.completions.create(model="capitals", messages=longer, max_tokens=1)

    chunks = list(
        client.chat.completions.create(
            model="capitals", messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == 2 * len(ANSWER)

    with client.chat.completions.stream(model="capitals", messages=CHAT) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == ANSWER


def test_errors_have_their_classes(server: Server, client: Any) -> None:
    def error_of(kind: type[Exception], **options: Any) -> Any:
        with pytest.raises(kind) as error:
            client.completions.create(**{"model": "capitals", "prompt": "hello", **options})
        return error.value

    refused = error_of(openai.BadRequestError, n=2)
    assert (refused.param, refused.code) == ("n", "unsupported_parameter")
    assert "`n`" in refused.body["message"]
    assert error_of(openai.NotFoundError, model="none").code == "model_not_found"
    limited = error_of(openai.RateLimitError, model="full")
    assert limited.response.headers["Retry-After"] == "1"
    assert error_of(openai.InternalServerError, model="lost").status_code == 503
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    deaf = openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key_of(server.home, "compile", owner="local"),
        max_retries=0,
    )
    with deaf, pytest.raises(openai.PermissionDeniedError, match="--scope infer"):
        deaf.models.list()


def test_an_error_within_a_stream_is_raised(client: Any) -> None:
    received = list[str]()
    stream = client.completions.create(model="lost", prompt="hello", stream=True)

    def receive() -> None:
        received.extend(chunk.choices[0].text for chunk in stream)

    with pytest.raises(openai.APIError, match="the worker of this request was lost"):
        receive()
    assert received == ["H", "E"]
