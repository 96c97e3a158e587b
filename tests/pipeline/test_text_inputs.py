"""Texts as inputs of an encoder, and vectors from its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.errors import PlanError
from pipeline.text_inputs import (
    TextConfig,
    TextRecipe,
    check_text,
    check_tokenizer,
    inputs_from_tokens,
    length_for,
    lengths_of,
    vector_from_output,
)

IDS = TensorSpec(name="input_ids", dtype="int64", shape=("batch", "tokens"))
MASK = TensorSpec(name="attention_mask", dtype="int32", shape=("batch", "tokens"))
TYPES = TensorSpec(name="token_type_ids", dtype="int64", shape=("batch", "tokens"))
VECTOR = TensorSpec(name="vector", dtype="float32", shape=("batch", 4))
HIDDEN = TensorSpec(name="hidden", dtype="float32", shape=("batch", "tokens", 4))
TOKENS = np.array([2, 7, 3], np.int32)


def spec(name: str, dtype: str = "int64", shape: tuple[Any, ...] = ("batch", "tokens")) -> Any:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def test_what_an_encoder_has_is_accepted() -> None:
    check_text(TextRecipe(), [IDS], [VECTOR])
    check_text(TextRecipe(pooling="mean"), [IDS, MASK, TYPES], [HIDDEN])
    check_text(TextRecipe(pooling="cls", output="hidden"), [IDS], [HIDDEN, VECTOR])
    check_text(TextRecipe(input="x", mask="m"), [spec("x"), spec("m")], [VECTOR])


@pytest.mark.parametrize(
    ("recipe", "inputs", "outputs", "message"),
    [
        ({"input": "x"}, [IDS], [VECTOR], "input names 'x', which is no input; the model has"),
        ({}, [IDS, spec("position_ids")], [VECTOR], "also has the input 'position_ids'"),
        ({}, [spec("input_ids", "float32")], [VECTOR], "'input_ids' is float32 [batch, tokens]"),
        ({}, [IDS, spec("attention_mask", shape=("batch", 1))], [VECTOR], "'attention_mask' is"),
        ({}, [IDS], [VECTOR, HIDDEN], "output is not given; the model has vector, hidden"),
        ({"output": "z"}, [IDS], [VECTOR], "output names 'z', which is no output"),
        ({}, [IDS], [HIDDEN], "'hidden' is float32 [batch, tokens, 4] and pooling is not given"),
        ({"pooling": "cls"}, [IDS], [VECTOR], "'vector' is float32 [batch, 4] and pooling is cls"),
        ({"pooling": "mean"}, [IDS], [spec("h", "float32", ("batch", 9, 4))], "'h' is"),
    ],
)
def test_what_no_text_gives_is_refused(
    recipe: dict[str, Any],
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
    message: str,
) -> None:
    with pytest.raises(PlanError) as error:
        check_text(TextRecipe(**recipe), inputs, outputs)
    assert message in error.value.message
    assert error.value.next_step


def test_a_tokenizer_is_read_before_anything_is_built(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="encoders: no tokenizers")
    with pytest.raises(PlanError, match="has no tokenizer"):
        assert TextConfig().file
    with pytest.raises(PlanError, match="no file at") as error:
        check_tokenizer(TextConfig(tokenizer=tmp_path / "none").file)
    assert "save_pretrained" in error.value.next_step
    file = TextConfig(tokenizer=tmp_path).file  # of the folder
    for content in (b"{}", b"\xff", b"[]"):
        file.write_bytes(content)
        with pytest.raises(PlanError, match="is no tokenizer"):
            check_tokenizer(file)


def profile(**dims: tuple[int, int]) -> Profile:
    return Profile(
        dims={name: DimRange(min=low, opt=low, max=high) for name, (low, high) in dims.items()}
    )


def test_the_shortest_length_of_all_profiles_holds_a_text() -> None:
    lengths = lengths_of(IDS, [profile(tokens=(4, 16)), profile(batch=(1, 2), tokens=(32, 64))])
    assert lengths == ((4, 16), (32, 64))
    expected = {1: 4, 4: 4, 9: 9, 16: 16, 17: 32, 40: 40, 64: 64, 65: None}
    assert {tokens: length_for(tokens, lengths) for tokens in expected} == expected
    assert lengths_of(spec("x", shape=("batch", 8)), [profile(batch=(1, 2))]) == ((8, 8),)
    assert length_for(10**6, lengths_of(IDS, [])) == 10**6


def test_inputs_are_filled_up_behind_the_tokens() -> None:
    made = inputs_from_tokens(TOKENS, [IDS, MASK, TYPES], TextRecipe(), 5, padding=1)
    assert {name: array.tolist() for name, array in made.items()} == {
        "input_ids": [[2, 7, 3, 1, 1]],
        "attention_mask": [[1, 1, 1, 0, 0]],
        "token_type_ids": [[0] * 5],
    }
    assert [array.dtype for array in made.values()] == [np.int64, np.int32, np.int64]


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_padding_is_no_part_of_a_mean(dtype: str) -> None:
    hidden = np.array([[[1, 0], [3, 4], [99, 99]]], dtype)
    before = hidden.copy()

    def vector(**recipe: Any) -> Any:
        return vector_from_output(hidden, 2, TextRecipe(**recipe))

    assert vector(pooling="mean", normalize=False).tolist() == [2, 2]
    np.testing.assert_allclose(vector(pooling="mean"), [0.5**0.5] * 2, rtol=1e-6)
    assert vector(pooling="cls").tolist() == [1, 0]
    flat = vector_from_output(np.array([[3, 4]], dtype), 2, TextRecipe())
    np.testing.assert_allclose(flat, [0.6, 0.8], rtol=1e-6)
    assert flat.dtype == np.float32
    assert vector_from_output(np.zeros((1, 2), dtype), 2, TextRecipe()).tolist() == [0, 0]
    assert np.array_equal(hidden, before)
