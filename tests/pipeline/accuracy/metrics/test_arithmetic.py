"""Accuracy arithmetic against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.accuracy.metrics.arithmetic import (
    SNR_LIMIT_DB,
    by_sample,
    cosine_per_sample,
    index_agreement,
    mask_nonfinite,
    rows,
    snr_db,
    topk_hits,
)
from pipeline.errors import DataError


def floats(*values: float) -> np.ndarray:
    return np.array([values], dtype=np.float64)


def test_rows_are_samples_and_an_output_without_sample_axis_is_one_row() -> None:
    assert rows(np.zeros((3, 2, 4), np.float16), 3).shape == (3, 8)
    assert rows(np.zeros((5,), np.int64), 3).shape == (1, 5)
    assert rows(np.array(7), 3).tolist() == [[7.0]]
    assert by_sample(np.zeros((5,)), 1).shape == (1, 5)
    assert by_sample(np.zeros((1, 5)), 1).shape == (1, 5)
    assert by_sample(np.zeros((1, 5)), 1, whole=True).shape == (1, 1, 5)


def test_cosine_of_known_angles() -> None:
    candidate = np.array([[1.0, 0.0], [1.0, 1.0], [-2.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    reference = np.array([[2.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert cosine_per_sample(candidate, reference) == pytest.approx(
        [1.0, math.sqrt(0.5), -1.0, 1.0, 0.0]
    )


def test_cosine_ignores_infinities_on_which_both_agree_and_keeps_other_faults() -> None:
    agree = cosine_per_sample(floats(1.0, -math.inf), floats(2.0, -math.inf))
    differ = cosine_per_sample(floats(1.0, -math.inf), floats(2.0, 3.0))
    broken = cosine_per_sample(floats(1.0, math.nan), floats(2.0, 3.0))
    assert agree.tolist() == [1.0]
    assert np.isnan(differ).all()
    assert np.isnan(broken).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_cosine_with_itself_is_one(values: list[float]) -> None:
    row = floats(*values)
    if np.linalg.norm(row) ** 2 == 0 and row.any():  # squares below the smallest float
        return
    assert cosine_per_sample(row, row) == pytest.approx([1.0])


def test_snr_in_decibels_with_limits_in_place_of_infinity() -> None:
    assert snr_db(100.0, 1.0) == pytest.approx(20.0)
    assert snr_db(1.0, 0.0) == SNR_LIMIT_DB
    assert snr_db(0.0, 0.0) == SNR_LIMIT_DB
    assert snr_db(0.0, 1.0) == -SNR_LIMIT_DB


def test_nonfinite_values_are_masked_and_counted_only_where_the_sides_differ() -> None:
    nan, inf = math.nan, math.inf
    candidate, reference, nans, infs = mask_nonfinite(
        floats(1, nan, nan, inf, -inf, inf, 2), floats(1, nan, 5, inf, inf, 3, inf)
    )
    assert (nans, infs) == (1, 3)  # NaN against 5; -inf against inf, inf against 3, 2 against inf
    assert candidate.tolist() == [[1, 0, 0, 0, 0, 0, 0]]
    assert reference.tolist() == [[1, 0, 0, 0, 0, 0, 0]]


def test_topk_counts_ties_for_the_lower_class_as_argmax_does() -> None:
    outputs = np.array([[3, 3, 1], [3, 3, 1], [0, 1, 2]], dtype=np.int8)
    assert topk_hits(outputs, np.array([0, 1, 2]), 1).tolist() == [1, 0, 1]
    assert topk_hits(outputs, np.array([0, 1, 0]), 2).tolist() == [1, 1, 0]
    assert np.array_equal(
        np.argmax(outputs, axis=1) == [0, 1, 2], topk_hits(outputs, np.array([0, 1, 2]), 1) == 1
    )


def test_topk_of_an_output_with_more_places_is_the_share_that_is_right() -> None:
    scores = np.eye(4)[[[0, 1, 2], [3, 3, 3]]]  # [samples, time, classes]
    labels = np.array([[0, 1, 0], [3, 3, 3]])
    assert topk_hits(scores, labels, 1).tolist() == [pytest.approx(2 / 3), 1]
    feed = scores[:1, :, np.newaxis]  # a whole feed of [time, batch, classes], its batch 1
    assert (
        topk_hits(feed, labels[:1], 1).tolist()
        == topk_hits(feed, labels[:1, :, np.newaxis], 1).tolist()
        == [pytest.approx(2 / 3)]
    )
    assert topk_hits(feed[:, :1], np.array([0]), 1).tolist() == [
        1
    ]  # logits [1, classes] and one label


def test_topk_of_a_row_with_nan_is_nan_never_a_hit() -> None:
    outputs = np.array([[math.nan, 0.0], [1.0, 0.0]])
    hits = topk_hits(outputs, np.array([0, 0]), 1)
    assert np.isnan(hits[0])
    assert hits[1] == 1


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (np.zeros((2, 3, 4)), np.array([0, 1]), "got (2, 3, 4) with labels of shape (2,)"),
        (
            np.zeros((2, 3, 4)),
            np.zeros((2, 4), np.int64),
            "got (2, 3, 4) with labels of shape (2, 4)",
        ),
        (np.zeros((2, 3)), np.array([0.0, 1.0]), "expected 2 integer labels, got float64"),
        (np.zeros((2, 3)), np.array([0, 1, 2]), "shape (3,)"),
        (
            np.zeros((2, 3)),
            np.array([0, 3]),
            "labels run from 0 to 3, but the output has 3 classes",
        ),
        (np.zeros((2, 3)), np.array([-1, 2]), "labels run from -1 to 2"),
    ],
)
def test_topk_says_what_does_not_fit(outputs: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(DataError) as raised:
        topk_hits(outputs, labels, 1)
    assert message in raised.value.message
    assert "accuracy.metric: cosine" in raised.value.next_step


@pytest.mark.parametrize("mask", [-1e4, -1e9, float(np.finfo(np.float32).min), -np.inf])
def test_an_index_is_worth_what_the_reference_scores_it(mask: float) -> None:
    """Two classes are equal, and most are masked."""
    scores = np.array([[8, 8, 7.9, 0, 4] + [mask] * 20], np.float32)
    expected = np.array([[0]])
    worth = {
        index: float(index_agreement(np.array([[index]]), expected, scores)[0, 0])
        for index in (0, 1, 2, 3, 5)
    }
    assert worth[0] == worth[1] == 1
    assert 0.9 < worth[2] < 1
    assert worth[3] == worth[5] == 0
    twice = index_agreement(np.array([[0, 0]]), np.array([[0, 4]]), scores)
    assert twice[0].tolist()[0] == 1
    assert twice[0].tolist()[1] < 0.5
