"""The worst class: it is reported, may have a limit, and needs enough samples."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.accuracy.metrics.f1 import f1
from pipeline.accuracy.metrics.metric import Metric
from pipeline.accuracy.metrics.per_sample import cosine, top_k
from pipeline.accuracy.metrics.user import metric_of_function
from pipeline.accuracy.task_metric import Limits, TaskMetric
from pipeline.errors import DataError
from pipeline.results.accuracy import MetricResult

LABELS = np.repeat([0, 1, 2], [200, 100, 5])


def logits(classes: np.ndarray) -> np.ndarray:
    return np.take(np.eye(3, dtype=np.float32), classes, axis=0)


def collected(metric: Metric, limits: Limits, wrong: int = 10) -> TaskMetric:
    """The candidate calls `wrong` samples of class 1 a 0, and all of class 2."""
    guesses = LABELS.copy()
    guesses[200 : 200 + wrong] = 0
    guesses[300:] = 0
    collector = TaskMetric(metric, "y", limits)
    for rows in (slice(0, 150), slice(150, None)):
        collector.add(logits(guesses)[rows], LABELS[rows], logits(LABELS)[rows])
    return collector


def compared(metric: Metric, limits: Limits, wrong: int = 10) -> tuple[MetricResult, list[str]]:
    result, failures = collected(metric, limits, wrong).compared()
    assert result is not None
    return result, failures


def per_sample(outputs: np.ndarray, labels: np.ndarray, reference: np.ndarray) -> np.ndarray:
    return np.asarray(outputs.argmax(axis=1) == labels, dtype=float)


def as_classes(outputs: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    return np.asarray(outputs.argmax(axis=1))


METRICS = {
    "top1": top_k("top1", 1, None),
    "mine": metric_of_function("mine:f", per_sample),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", METRICS)
def test_the_worst_class_with_enough_samples_is_found_and_limited(name: str) -> None:
    result, failures = compared(METRICS[name], Limits(max_drop=0.1))
    worst = result.worst_class
    assert worst is not None
    assert (worst.name, worst.samples, worst.reference, worst.candidate) == ("1", 100, 1, 0.9)
    assert worst.drop == pytest.approx(0.1)
    assert worst.interval.low < 0.1 < worst.interval.high
    assert (result.judged_classes, result.small_classes, result.max_class_drop) == (2, 1, None)
    assert (failures, result.passed) == ([], True)
    result, failures = compared(METRICS[name], Limits(max_drop=0.1, max_class_drop=0.1))
    assert (failures, result.passed) == ([], True)
    result, failures = compared(METRICS[name], Limits(max_drop=0.1, max_class_drop=0.09))
    (failure,) = failures
    assert failure.startswith(f"{result.name} of class 1 drops by 0.1000 (1.0000 to 0.9000; 95 %")
    assert failure.endswith("over max_class_drop 0.09")
    assert not result.passed


def test_f1_of_a_class_counts_its_wrong_finds_too() -> None:
    metric = f1(as_classes, of_scores=True)
    result, failures = compared(metric, Limits(max_drop=1, max_class_drop=0.05), wrong=20)
    worst = result.worst_class
    assert worst is not None
    assert (worst.name, worst.reference) == ("1", 1)
    assert worst.candidate == pytest.approx(160 / 180)
    assert worst.interval.low < worst.drop < worst.interval.high
    assert failures[0].startswith("f1 of class 1 drops by 0.1111")


def test_both_limits_are_told_at_once() -> None:
    _, failures = compared(METRICS["top1"], Limits(max_drop=0.01, max_class_drop=0.05))
    assert [failure.rpartition("over ")[2] for failure in failures] == [
        "max_drop 0.01",
        "max_class_drop 0.05",
    ]


def test_on_a_part_of_the_set_only_a_certain_drop_of_a_class_fails() -> None:
    limits = Limits(max_drop=1, max_class_drop=0.09)
    assert collected(METRICS["top1"], limits).compared(certain=True)[1] == []
    assert collected(METRICS["top1"], limits, wrong=50).compared(certain=True)[1] != []
    result, _ = collected(METRICS["top1"], Limits(max_drop=1)).compared(certain=True)
    assert result is not None
    assert result.worst_class is None


def test_a_limit_without_a_class_to_judge_is_an_error() -> None:
    limits = Limits(max_drop=1, max_class_drop=0.1)
    few = TaskMetric(METRICS["top1"], "y", limits)
    few.add(logits(LABELS[190:210]), LABELS[190:210], logits(LABELS[190:210]))
    with pytest.raises(DataError, match="no class has 20 samples; the largest has 10"):
        few.compared()
    assert few.compared(certain=True)[1] == []
    without = TaskMetric(cosine(), "y", limits)
    without.add(logits(LABELS), None, logits(LABELS))
    with pytest.raises(DataError, match="metric cosine has no classes here"):
        without.compared()


def test_a_decoder_hides_no_nan() -> None:
    collector = collected(f1(as_classes, of_scores=True), Limits(max_drop=1))
    broken = logits(LABELS[:3])
    broken[1, 2] = np.nan
    collector.add(broken, LABELS[:3], logits(LABELS[:3]))
    assert collector.compared() == (
        None,
        ["metric f1 is not a number on 1 of 308 samples (first: 306)"],
    )
    collector.add(logits(LABELS[:3]), LABELS[:3], broken)
    with pytest.raises(DataError, match="f1 is not a number on the reference itself"):
        collector.compared()
