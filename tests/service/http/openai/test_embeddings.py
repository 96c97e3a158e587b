"""OpenAI's own client makes embeddings with a tiny encoder behind a real server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest

from service.client import Client
from service.http.openai.embeddings import MAX_INPUTS
from service.registry.models import DeploymentOptions
from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.builders.tensors import key_of
from tests.service.http.openai.encoders import (
    CLS,
    HIDDEN,
    SEP,
    SPECIAL,
    WORDS,
    TinyEncoder,
    promotable,
    tiny_encoder,
)
from tests.service.integration.test_server import serving

CAT = "the cat sleeps"
TEXTS = (CAT, "A dog runs fast on the sofa", "the", "cat cat unknown dog slowly", "a " * 14)
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Embedder:
    """A client of a server that serves an encoder as `tiny`."""

    client: Any
    encoder: TinyEncoder

    def vectors(self, inputs: object, **options: Any) -> Any:
        answer = self.client.embeddings.create(model="tiny", input=inputs, **options)
        assert [each.index for each in answer.data] == list(range(len(answer.data)))
        return np.array([each.embedding for each in answer.data])

    def refusal(self, kind: type[Exception] = openai.BadRequestError, **options: Any) -> Any:
        with pytest.raises(kind) as error:
            self.client.embeddings.create(**{"model": "tiny", "input": CAT, **options})
        return error.value


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    pytest.importorskip("transformers", reason="encoders: no transformers")
    encoder, home = tiny_encoder(), tmp_path_factory.mktemp("home") / "home"
    job = promotable(home, encoder, tmp_path_factory.mktemp("model"))
    with serving(home) as server, Client(server.url) as client:
        promoted = client.promote("tiny", job)
        assert promoted.current.text is not None
        assert promoted.current.text.recipe.output == "hidden"
        client.load("tiny", DeploymentOptions(max_delay_s=0.05))
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S
        ) as user:
            yield Embedder(user, encoder)


def test_a_vector_is_that_of_the_module_and_shorter_texts_are_filled_up(tiny: Embedder) -> None:
    expected = np.stack([tiny.encoder.reference(text) for text in TEXTS])
    assert np.abs(expected[0] - expected[1]).max() > 1000 * TOLERANCE  # known by their vectors
    as_base64, as_floats = tiny.vectors(TEXTS), tiny.vectors(TEXTS, encoding_format="float")
    assert as_base64.shape == (len(TEXTS), HIDDEN)
    np.testing.assert_allclose(as_base64, expected, atol=TOLERANCE)
    np.testing.assert_allclose(as_floats, expected, atol=TOLERANCE)
    one = tiny.vectors(CAT, dimensions=HIDDEN, user="me")
    np.testing.assert_allclose(one, expected[:1], atol=TOLERANCE)


def test_tokens_are_taken_as_they_are(tiny: Embedder) -> None:
    ids = [CLS, *(len(SPECIAL) + WORDS.index(word) for word in CAT.split()), SEP]
    expected = tiny.encoder.reference(CAT)
    np.testing.assert_allclose(tiny.vectors(ids)[0], expected, atol=TOLERANCE)
    both = tiny.vectors([ids, ids])
    np.testing.assert_allclose(both, np.stack([expected, expected]), atol=TOLERANCE)


def test_usage_and_models_name_the_encoder(tiny: Embedder) -> None:
    answer = tiny.client.embeddings.create(model="tiny@1", input=[CAT, "the"])
    assert (answer.model, answer.object) == ("tiny@1", "list")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5 + 3, 5 + 3)
    (model,) = tiny.client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "local")
    assert model.created > 0
    assert tiny.client.models.retrieve("tiny@1").id == "tiny@1"
    with pytest.raises(openai.NotFoundError):
        tiny.client.models.retrieve("tiny@2")


def test_more_texts_than_the_queue_holds_are_answered(tiny: Embedder) -> None:
    texts = [" ".join(WORDS[: 1 + number % 10]) for number in range(400)]
    references = [tiny.encoder.reference(text) for text in texts[:10]]
    expected = np.stack([references[number % 10] for number in range(400)])
    with ThreadPoolExecutor(3) as pool:
        for vectors in pool.map(tiny.vectors, [texts] * 3):
            np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


REFUSALS: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({"input": "a " * 15}, "input", "invalid_value", "input 0 has 17 tokens, this model takes at"),
    ({"input": ["a", ""]}, "input", "invalid_value", "got none in input 1"),
    ({"input": [[1], []]}, "input", "invalid_value", "got none in input 1"),
    ({"input": []}, "input", "invalid_value", "expected a text"),
    ({"input": ["a", 1]}, "input", "invalid_value", "texts and lists of tokens"),
    ({"input": [-1]}, "input", "invalid_value", "texts and lists of tokens"),
    ({"input": [4, 99]}, "input", "invalid_value", "has the token 99, this model has 14 tokens"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "invalid_value", "at most 2048, got 2049"),
    ({"dimensions": 8}, "dimensions", "invalid_value", "expected `dimensions` of 16"),
    ({"dimensions": 0}, "dimensions", "invalid_value", "greater than or equal to 1"),
    ({"extra_body": {"truncate": True}}, "truncate", "unknown_parameter", "no parameter"),
    ({"encoding_format": "int8"}, "encoding_format", "invalid_value", "'base64'"),
)


@pytest.mark.parametrize(("options", "param", "code", "message"), REFUSALS)
def test_what_the_encoder_cannot_do_is_refused(
    tiny: Embedder, options: dict[str, Any], param: str, code: str, message: str
) -> None:
    refused = tiny.refusal(**options)
    assert (refused.param, refused.code) == (param, code)
    assert message in refused.body["message"]


def test_another_model_is_refused(tiny: Embedder) -> None:
    assert tiny.refusal(openai.NotFoundError, model="none").code == "model_not_found"


def test_models_that_are_no_encoders_and_keys_without_the_scope(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home = tmp_path_factory.mktemp("home")
    with serving_models(home, models="add", keys_required="true") as server:
        for scope, model, kind in (
            ("infer", "add", openai.BadRequestError),
            ("infer", "none", openai.NotFoundError),
            ("compile", "add", openai.PermissionDeniedError),
        ):
            key = key_of(home, scope, owner="local")
            with (
                openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
                pytest.raises(kind) as error,
            ):
                client.embeddings.create(model=model, input="a")
            if kind is openai.BadRequestError:
                assert "takes tensors, and no text" in str(error.value)
