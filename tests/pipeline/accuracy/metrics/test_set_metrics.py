"""Metrics of a whole set: known values, resamples, and labels that do not fit."""

from __future__ import annotations

import contextlib
import io
import math
from dataclasses import dataclass

import jiwer
import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from sklearn.metrics import f1_score

from pipeline.accuracy.metrics.detection import mean_average_precision
from pipeline.accuracy.metrics.f1 import check_classes, f1
from pipeline.accuracy.metrics.metric import Evaluation, Metric, SampleScores
from pipeline.accuracy.metrics.per_sample import top_k
from pipeline.accuracy.metrics.perplexity import perplexity
from pipeline.accuracy.metrics.ranks import similarity, spearman
from pipeline.accuracy.metrics.user import object_array
from pipeline.accuracy.metrics.word_errors import word_error_rate
from pipeline.data.label_file import Boxes
from pipeline.errors import DataError

Array = np.ndarray
SAMPLES = 30


def as_they_are(outputs: Array, mask: Array | None) -> Array:
    return outputs


def evaluated(metric: Metric, outputs: Array, labels: Array) -> Evaluation:
    records = metric.record(outputs, labels, outputs)
    return metric.evaluate([records], [labels], [records])


def score(metric: Metric, outputs: Array, labels: Array) -> float:
    evaluation = evaluated(metric, outputs, labels)
    return metric.shown(evaluation.score(np.arange(evaluation.units)))


# -- one property for all ----------------------------------------------------


@dataclass(frozen=True)
class Case:
    metric: Metric
    outputs: Array  # decoded
    labels: Array


def cases() -> dict[str, Case]:
    random = np.random.default_rng(0)
    classes = random.integers(0, 3, (SAMPLES, 2))
    guesses = np.where(random.random(classes.shape) < 0.7, classes, 0)
    logits = random.normal(size=(SAMPLES, 4, 5))
    tokens = random.integers(0, 5, (SAMPLES, 4))
    tokens[:, 3] = -100
    words = [" ".join(random.choice(list("abc"), 4)) for _ in range(SAMPLES)]
    heard = [" ".join(random.choice(list("abc"), 4)) for _ in range(SAMPLES)]
    numbers = random.normal(size=SAMPLES)
    found, truth = [], []
    for _ in range(SAMPLES):
        corners = random.uniform(0, 50, (3, 2))
        sizes = random.uniform(5, 20, (3, 2))
        kinds = random.integers(0, 2, 3)
        truth.append(
            Boxes(tuple(map(tuple, np.hstack([corners, sizes]))), tuple(kinds), (False,) * 3)
        )
        moved = corners + random.normal(0, 0.7, (3, 2))
        rows = np.hstack([moved, moved + sizes, random.random((3, 1)), kinds[:, None]])
        found.append(rows[: random.integers(1, 4)])
    vectors = np.repeat(random.normal(size=(SAMPLES // 2, 8)), 2, axis=0)
    vectors += random.normal(size=vectors.shape)
    return {
        "f1": Case(f1(as_they_are, of_scores=False), guesses, classes),
        "map": Case(
            mean_average_precision(as_they_are, ("a", "b")),
            object_array(found),
            object_array(truth),
        ),
        "wer": Case(word_error_rate(as_they_are), object_array(heard), object_array(words)),
        "spearman": Case(spearman(as_they_are), numbers, numbers + random.normal(size=SAMPLES)),
        "sts": Case(
            similarity(as_they_are), vectors, np.repeat(random.normal(size=SAMPLES // 2), 2)
        ),
        "perplexity": Case(perplexity(), logits, tokens),
        "top1": Case(top_k("top1", 1, None), logits[:, 0], tokens[:, 0]),
    }


@pytest.mark.parametrize("name", cases())
def test_a_resample_scores_as_a_set_of_its_samples_does(name: str) -> None:
    case = cases()[name]
    evaluation = evaluated(case.metric, case.outputs, case.labels)
    unit = case.metric.unit
    assert evaluation.units == SAMPLES // unit
    for seed in range(3):
        picks = np.random.default_rng(seed).integers(0, evaluation.units, evaluation.units)
        rows = (picks[:, None] * unit + np.arange(unit)).ravel()
        alone = evaluated(case.metric, case.outputs[rows], case.labels[rows])
        everything = np.arange(alone.units)
        assert evaluation.score(picks) == pytest.approx(alone.score(everything), abs=1e-12)
        numbers = list(evaluation.classes)
        if numbers:
            expected = alone.class_scores(numbers, everything)
            assert evaluation.class_scores(numbers, picks) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("name", ["wer", "spearman", "sts", "perplexity"])
def test_metrics_without_classes_have_none(name: str) -> None:
    case = cases()[name]
    evaluation = evaluated(case.metric, case.outputs, case.labels)
    assert evaluation.classes == {}
    with pytest.raises(NotImplementedError):
        evaluation.class_scores([0], np.arange(3))


# -- F1 ----------------------------------------------------------------------


def test_f1_is_the_mean_over_the_classes_of_the_labels() -> None:
    case = cases()["f1"]
    expected = f1_score(case.labels.ravel(), case.outputs.ravel(), average="macro")
    assert score(case.metric, case.outputs, case.labels) == pytest.approx(expected)
    evaluation = evaluated(case.metric, case.outputs, case.labels)
    assert sum(evaluation.classes.values()) <= SAMPLES * 2
    assert evaluation.classes[0] == (case.labels == 0).any(axis=1).sum()


def test_ignored_places_do_not_count() -> None:
    metric = f1(as_they_are, of_scores=False)
    labels = np.array([[0, 1, -100], [1, 0, -100]])
    guesses = np.array([[0, 1, 7], [1, 0, 0]])
    assert score(metric, guesses, labels) == 1
    with pytest.raises(DataError, match="every label is -100"):
        score(metric, guesses, np.full((2, 3), -100))


def test_samples_of_several_lengths_have_one_f1() -> None:
    metric = f1(as_they_are, of_scores=False)
    outputs = [np.array([[0, 1]]), np.array([[1, 1, 0]])]
    labels = [np.array([[0, 1]]), np.array([[1, 0, 0]])]
    evaluation = metric.evaluate(outputs, labels, outputs)
    expected = f1_score([0, 1, 1, 0, 0], [0, 1, 1, 1, 0], average="macro")
    assert evaluation.score(np.arange(2)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (np.zeros((2, 3), int), np.zeros((2, 2), int), "sample 0 has 2 labels of int64, and 3"),
        (np.zeros(2, int), np.zeros(2), "sample 0 has 1 labels of float64"),
        (np.zeros(2), np.zeros(2, int), "f1 needs integer classes, and the decoder gives float64"),
    ],
)
def test_labels_that_f1_cannot_compare(outputs: Array, labels: Array, message: str) -> None:
    with pytest.raises(DataError) as raised:
        score(f1(as_they_are, of_scores=False), outputs, labels)
    assert message in raised.value.message


@pytest.mark.parametrize("foreign", [5, -1])
def test_a_foreign_class_is_an_error(foreign: int) -> None:
    check_classes(np.zeros((2, 3)), np.array([2, -100]))
    with pytest.raises(DataError, match="but the output has 3 classes"):
        check_classes(np.zeros((2, 3)), np.array([0, foreign]))


# -- boxes -------------------------------------------------------------------


TWO = Boxes(((0, 0, 10, 10), (20, 20, 10, 10)), (0, 1), (False, False))
RIGHT = [[0, 0, 10, 10, 0.9, 0], [20, 20, 30, 30, 0.8, 1]]


def average_precision(rows: list[list[float]], *images: Boxes) -> float:
    outputs = object_array([np.array(rows, float).reshape(-1, 6) for _ in images])
    return score(mean_average_precision(as_they_are, ("a", "b")), outputs, object_array([*images]))


def test_the_precision_is_that_of_pycocotools() -> None:
    case = cases()["map"]
    truth = [
        {"image_id": image, "category_id": number, "bbox": [*box], "area": box[2] * box[3]}
        for image, boxes in enumerate(case.labels)
        for box, number in zip(boxes.boxes, boxes.classes, strict=True)
    ]
    results = [
        {
            "image_id": image,
            "category_id": int(number),
            "bbox": [left, top, right - left, bottom - top],
            "score": found,
        }
        for image, rows in enumerate(case.outputs)
        for left, top, right, bottom, found, number in rows
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        side = COCO()
        side.dataset = {
            "info": {},
            "images": [{"id": image} for image in range(SAMPLES)],
            "categories": [{"id": 0}, {"id": 1}],
            "annotations": [
                {**box, "id": number, "iscrowd": 0} for number, box in enumerate(truth, 1)
            ],
        }
        side.createIndex()
        evaluation = COCOeval(side, side.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert 0.1 < evaluation.stats[0] < 0.9
    assert score(case.metric, case.outputs, case.labels) == pytest.approx(evaluation.stats[0])


def test_boxes_are_right_by_place_and_class() -> None:
    assert average_precision(RIGHT, TWO, TWO) == pytest.approx(1)
    assert average_precision(RIGHT[:1], TWO, TWO) == pytest.approx(0.5)
    assert average_precision([[*RIGHT[0][:5], 1]], TWO, TWO) == 0
    assert average_precision([], TWO, TWO) == 0
    # IoU 0.8: right at 7 of the 10 thresholds from 0.5 to 0.95
    assert average_precision([[0, 0, 10, 8, 0.9, 0], RIGHT[1]], TWO) == pytest.approx(0.85)


def test_a_better_scored_wrong_box_halves_the_precision_and_a_worse_one_does_not() -> None:
    wrong = [40, 40, 50, 50, 0.95, 0]
    assert average_precision([*RIGHT, wrong], TWO) == pytest.approx(0.75)
    assert average_precision([*RIGHT, [*wrong[:4], 0.1, 0]], TWO) == pytest.approx(1)


def test_crowds_count_neither_for_nor_against() -> None:
    crowd = Boxes((*TWO.boxes, (40, 40, 20, 20)), (0, 1, 0), (False, False, True))
    inside = [42, 42, 50, 50, 0.95, 0]
    assert average_precision([*RIGHT, inside], crowd) == pytest.approx(1)
    evaluation = evaluated(
        mean_average_precision(as_they_are, ("a", "b")),
        object_array([np.array(RIGHT)]),
        object_array([Boxes(((0, 0, 1, 1),), (0,), (True,))]),
    )
    assert evaluation.classes == {}


def test_a_class_that_the_labels_do_not_have_is_an_error_of_the_reference_alone() -> None:
    metric = mean_average_precision(as_they_are, ("a", "b"))
    foreign = object_array([np.array([[0, 0, 10, 10, 0.9, 2]])])
    own, labels = object_array([np.array(RIGHT)]), object_array([TWO])
    with pytest.raises(DataError, match="finds boxes of class 2, and the labels have 2 categories"):
        metric.evaluate([foreign], [labels], [foreign])
    assert metric.evaluate([foreign], [labels], [own]).score(np.arange(1)) == 0


def test_a_users_decoder_must_give_boxes() -> None:
    metric = mean_average_precision(as_they_are, ("a",))
    with pytest.raises(DataError, match=r"map needs boxes of shape \[found, 6\] per image"):
        metric.record(object_array([np.zeros((2, 5))]), None, object_array([]))


# -- words -------------------------------------------------------------------


def test_the_rate_is_that_of_all_words_together() -> None:
    case = cases()["wer"]
    expected = jiwer.wer(case.labels.tolist(), case.outputs.tolist())
    assert score(case.metric, case.outputs, case.labels) == pytest.approx(expected)
    texts = object_array(["the cat sat", ""])
    assert score(case.metric, texts, object_array(["the cat sat down", "hi"])) == pytest.approx(0.4)
    with pytest.raises(DataError, match="wer needs texts, and the decoder gives int"):
        score(case.metric, object_array([1]), object_array(["a"]))


# -- ranks -------------------------------------------------------------------


def test_ranks_are_compared_whatever_their_scale() -> None:
    metric = spearman(as_they_are)
    labels = np.arange(6.0)
    assert score(metric, np.exp(labels)[:, None], labels) == pytest.approx(1)
    assert score(metric, -labels, labels) == pytest.approx(-1)
    assert math.isnan(score(metric, np.ones(6), labels))
    with pytest.raises(DataError, match=r"one number per sample, got an output of shape \(6, 2\)"):
        score(metric, np.ones((6, 2)), labels)
    with pytest.raises(DataError, match=r"one number per sample as label, got int64 of shape"):
        score(metric, labels, np.ones((6, 2), np.int64))
    with pytest.raises(DataError, match="spearman needs numbers"):
        score(metric, object_array(["a"] * 6), labels)


def test_pairs_have_both_samples_and_one_label() -> None:
    metric = similarity(as_they_are)
    vectors = np.array([[1, 0], [1, 0], [1, 0], [1, 1], [1, 0], [-1, 0]], np.float32)
    labels = np.array([5, 5, 3, 3, 0, 0])
    assert score(metric, vectors, labels) == pytest.approx(1)
    with pytest.raises(DataError, match="compares samples in pairs, and the set has 5"):
        score(metric, vectors[:5], labels[:5])
    with pytest.raises(DataError, match="samples 2 and 3 are a pair, and have the labels 3 and 1"):
        score(metric, vectors, np.array([5, 5, 3, 1, 0, 0]))
    with pytest.raises(DataError) as raised:
        score(metric, np.ones((6, 4, 2)), labels)
    assert "decode: mean_pool" in raised.value.next_step


# -- likelihoods -------------------------------------------------------------


def test_equal_logits_are_as_perplexing_as_there_are_classes() -> None:
    logits = np.zeros((2, 3, 7))
    labels = np.array([[1, 2, -100], [3, -100, -100]])
    assert score(perplexity(), logits, labels) == pytest.approx(7)
    logits[0, 0, 1] = math.log(6)  # half of all: 6 of 6 + 6
    assert score(perplexity(), logits, labels) == pytest.approx((2 * 7 * 7) ** (1 / 3))
    assert score(perplexity(), logits[:, 0], labels[:, 0]) == pytest.approx(math.sqrt(14))


def test_an_impossible_label_is_no_infinity_and_nan_stays_nan() -> None:
    logits = np.zeros((2, 7))
    logits[0, 1] = -np.inf
    assert 1e300 < score(perplexity(), logits, np.array([1, 1])) < np.inf
    assert score(perplexity(), logits, np.array([2, 2])) == pytest.approx(math.sqrt(42))
    logits[1] = np.nan
    assert math.isnan(score(perplexity(), logits, np.array([2, 2])))


def test_tokens_beyond_the_vocabulary_are_an_error() -> None:
    with pytest.raises(DataError, match="labels run from 0 to 7, but the output has 7 classes"):
        score(perplexity(), np.zeros((2, 7)), np.array([0, 7]))


def test_scores_per_sample_have_the_classes_of_their_labels() -> None:
    evaluation = SampleScores(np.array([1.0, 0, 1]), np.array([4, 4, 5]))
    assert evaluation.classes == {4: 2, 5: 1}
    assert evaluation.class_scores([4, 5], np.arange(3)).tolist() == [0.5, 1]
    assert math.isnan(evaluation.class_scores([4], np.array([2]))[0])
