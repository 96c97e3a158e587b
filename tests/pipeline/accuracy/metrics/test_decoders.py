"""Decoders against values worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.accuracy.metrics.decoders import argmax, boxes_xyxy, ctc_greedy, mean_pool
from pipeline.accuracy.metrics.metric import Decode
from pipeline.accuracy.metrics.user import decoder_of_function
from pipeline.errors import DataError
from pipeline.postprocess import IndexOutput

TOKENS = ("", "a", "b", " ")
BEST = IndexOutput("i", "logits", -1, None)
TOP = IndexOutput("i", "logits", -1, 2)


def scores(*classes: int) -> np.ndarray:
    return np.eye(len(TOKENS), dtype=np.float32)[list(classes)]


def test_runs_of_a_class_are_one_letter_and_the_blank_parts_equal_ones() -> None:
    decode = ctc_greedy(TOKENS, None)
    outputs = np.stack(
        [scores(1, 1, 0, 1, 3, 2), scores(0, 0, 0, 0, 0, 0), scores(2, 2, 2, 2, 2, 1)]
    )
    assert decode(outputs, None).tolist() == ["aa b", "", "ba"]
    whole_feed = outputs[:1, :, np.newaxis]  # [1, time, batch of 1, classes]
    assert decode(whole_feed, None).tolist() == ["aa b"]


@pytest.mark.parametrize(
    ("index", "outputs"),
    [(BEST, np.array([[1, 1, 0, 2]])), (TOP, np.array([[[1, 0], [1, 2], [0, 1], [2, 3]]]))],
)
def test_indices_from_the_engine_are_decoded_too(index: IndexOutput, outputs: np.ndarray) -> None:
    assert ctc_greedy(TOKENS, index)(outputs, None).tolist() == ["ab"]
    assert argmax(index)(outputs, None).tolist() == [[1, 1, 0, 2]]


def test_argmax_takes_the_last_axis() -> None:
    assert argmax(None)(np.array([[[0.1, 0.9], [0.8, 0.2]]]), None).tolist() == [[1, 0]]


def test_filling_is_no_box() -> None:
    found = [0, 0, 2, 2, 0.5, 1]
    outputs = np.array([[found, [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0.5, -1]], [[0] * 6] * 3])
    first, second = boxes_xyxy(outputs, None)
    assert first.tolist() == [found]
    assert second.shape == (0, 6)


def test_a_mean_counts_what_the_mask_counts_whatever_lies_elsewhere() -> None:
    outputs = np.array([[[1.0, 2], [3, 4], [np.nan, 9]], [[5, 6], [7, 8], [9, 10]]])
    mask = np.array([[1, 1, 0], [0, 0, 0]])
    assert mean_pool(outputs, mask).tolist() == [[2, 3], [0, 0]]
    assert mean_pool(outputs[1:], None).tolist() == [[7, 8]]
    assert mean_pool(outputs[:1, np.newaxis], mask[:1, np.newaxis]).tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("decode", "outputs", "message"),
    [
        (argmax(None), np.zeros(3), "argmax needs an output of shape [samples, ..., classes]"),
        (ctc_greedy(TOKENS, None), np.zeros((2, 5, 3)), "has 3 classes, and accuracy.tokens has 4"),
        (ctc_greedy(TOKENS, None), np.zeros((2, 5, 5, 4)), "ctc_greedy needs an output of shape"),
        (ctc_greedy(TOKENS, BEST), np.full((2, 5), 4), "classes from 4 to 4, and accuracy.tokens"),
        (boxes_xyxy, np.zeros((2, 5, 7)), "boxes_xyxy needs an output of shape"),
        (boxes_xyxy, np.zeros((2, 5, 5, 6)), "got (2, 5, 5, 6)"),
        (mean_pool, np.zeros((2, 5)), "mean_pool needs an output of shape"),
        (mean_pool, np.zeros((2, 5, 5, 3)), "mean_pool needs an output of shape"),
    ],
)
def test_outputs_of_another_shape(decode: Decode, outputs: np.ndarray, message: str) -> None:
    with pytest.raises(DataError) as raised:
        decode(outputs, None)
    assert message in raised.value.message
    assert raised.value.next_step


def test_a_mask_of_other_positions() -> None:
    with pytest.raises(DataError, match=r"accuracy.mask has the shape \(2, 4\), and the output"):
        mean_pool(np.zeros((2, 5, 3)), np.ones((2, 4)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda outputs: 1 / 0, "decoder 'mine:f' failed: ZeroDivisionError"),
        (lambda outputs: None, "failed: TypeError"),
        (lambda outputs: [1], "returned 1 entries for 2 samples"),
    ],
)
def test_a_users_decoder_that_fails(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        decoder_of_function("mine:f", function)(np.zeros((2, 3)), None)


def test_a_users_decoder_gives_one_entry_per_sample() -> None:
    decode = decoder_of_function("mine:f", lambda outputs: [row[row > 0] for row in outputs])
    first, second = decode(np.array([[1, 0], [2, 3]]), None)
    assert (first.tolist(), second.tolist()) == ([1], [2, 3])
