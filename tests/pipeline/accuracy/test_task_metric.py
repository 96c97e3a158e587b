"""The task metric where its scores say nothing; `stages/validate/test_validate.py` has the rest."""

import numpy as np
import pytest

from pipeline.accuracy.metrics.arithmetic import paired_interval
from pipeline.accuracy.metrics.metric import MAX_SHUFFLED, Metric
from pipeline.accuracy.metrics.per_sample import cosine, top_k
from pipeline.accuracy.metrics.user import MetricFunction, metric_of_function
from pipeline.accuracy.shuffle import Drawn
from pipeline.accuracy.task_metric import Limits, TaskMetric
from pipeline.errors import DataError, PlanError


def collector(metric: Metric, output: str = "y") -> TaskMetric:
    return TaskMetric(metric, output, Limits(max_drop=0.1))


def mine(function: MetricFunction) -> Metric:
    return metric_of_function("mine:f", function)


def test_an_output_without_a_row_per_sample_has_no_interval() -> None:
    metric = collector(cosine(), "pooled")
    metric.add(np.ones((1, 4), np.float32), None, np.ones((1, 4), np.float32))
    with pytest.raises(
        DataError, match="1 score for the whole set: output 'pooled' has no row per sample"
    ):
        metric.compared()


def exits(*arguments: object) -> object:
    raise SystemExit(3)


def test_a_users_function_that_returns_nothing_or_ends_the_process_is_named() -> None:
    for function, message in (
        (lambda *arguments: None, "returned None"),
        (exits, "failed: SystemExit: 3"),
    ):
        metric = collector(mine(function))
        metric.add(np.ones((2, 4), np.float32), None, np.ones((2, 4), np.float32))
        with pytest.raises(DataError, match=message):
            metric.compared()


# -- the drop's interval -----------------------------------------------------


@pytest.mark.parametrize("samples", [20, 300, 5000])
def test_where_no_answer_changed_the_interval_is_no_point(samples: int) -> None:
    low, high = paired_interval(0, 0, samples)
    assert high == pytest.approx(
        3.8415 / (samples + 3.8415), rel=1e-3
    )  # the rule of three, 3/n, for both sides
    assert low == pytest.approx(-high)


def test_lost_and_gained_samples_mirror_each_other_and_the_ends_hold() -> None:
    low, high = paired_interval(3, 1, 300)
    assert -low == pytest.approx(paired_interval(1, 3, 300)[1])
    assert low < 2 / 300 < high
    assert paired_interval(20, 0, 20)[1] == pytest.approx(1)


@pytest.mark.parametrize(("lost", "gained"), [(0.002, 0.002), (0.02, 0.005), (0.1, 0.1)])
def test_the_interval_holds_the_true_drop_in_95_of_100_sets(lost: float, gained: float) -> None:
    drawn = np.random.default_rng(3).multinomial(300, [lost, gained, 1 - lost - gained], size=1000)
    intervals = [paired_interval(int(row[0]), int(row[1]), 300) for row in drawn]
    held = sum(low <= lost - gained <= high for low, high in intervals)
    assert 930 <= held <= 995


# -- can the metric tell right from wrong? -----------------------------------


def scored(
    metric: TaskMetric, outputs: np.ndarray, labels: np.ndarray | None, batch: int = 16
) -> list[str]:
    for start in range(0, len(outputs), batch):
        rows = slice(start, start + batch)
        metric.add(outputs[rows], None if labels is None else labels[rows], outputs[rows])
    _, failures = metric.compared()
    chance = metric.chance()
    return [chance, *failures] if chance else failures


def task(samples: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Scores of 4 classes whose largest is the label; sorted by label, so that a shuffle within a
    batch would change nothing.
    """
    labels = np.sort(np.random.default_rng(0).integers(0, 4, samples))
    return np.eye(4, dtype=np.float32)[labels] + np.random.default_rng(1).normal(
        0, 0.1, (samples, 4)
    ).astype(np.float32), labels


def test_labels_that_do_not_belong_to_the_samples_are_chance_and_true_ones_are_not() -> None:
    outputs, labels = task()
    assert scored(collector(top_k("top1", 1, None)), outputs, labels) == []
    (warning,) = scored(
        collector(top_k("top1", 1, None)), outputs, np.random.default_rng(2).permutation(labels)
    )
    assert warning.startswith("the reference itself scores at chance: top1 0.2")


def accuracy(outputs: np.ndarray, labels: np.ndarray | None, reference: np.ndarray) -> float:
    return float((outputs.argmax(axis=1) == labels).mean())


def test_a_metric_of_the_whole_set_is_held_against_chance_too() -> None:
    outputs, labels = task()
    assert scored(collector(mine(accuracy)), outputs, labels) == []
    (warning,) = scored(
        collector(mine(accuracy)),
        outputs,
        np.random.default_rng(2).permutation(labels),
    )
    assert "mine:f 0.2" in warning


BLIND = {
    "of the outputs alone": lambda outputs, labels, reference: outputs.max(axis=1),
    "of the set's outputs alone": lambda outputs, labels, reference: float(np.abs(outputs).mean()),
    "a constant": lambda outputs, labels, reference: np.ones(len(outputs)),
    "the lower the better": lambda outputs, labels, reference: np.abs(outputs - reference).mean(
        axis=1
    ),
}


@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("labelled", [True, False])
def test_a_metric_that_gives_shuffled_outputs_the_same_score_is_an_error(
    name: str, labelled: bool
) -> None:
    outputs, labels = task()
    metric = collector(mine(BLIND[name]))
    if labelled and name == "the lower the better":
        assert scored(metric, outputs, labels)[0].startswith(
            "the reference itself scores at chance"
        )
        return
    with pytest.raises(PlanError, match="'mine:f' cannot tell right answers from wrong ones"):
        scored(metric, outputs, labels if labelled else None)


def test_a_set_with_one_answer_cannot_be_judged() -> None:
    outputs = np.ones((40, 4), np.float32)
    with pytest.raises(
        DataError, match="metric 'cosine' cannot tell right answers from wrong ones"
    ):
        scored(collector(cosine()), outputs, None)


def test_what_is_shuffled_is_drawn_from_the_whole_set_and_bounded() -> None:
    drawn = Drawn()
    for start in range(0, 4 * MAX_SHUFFLED, 64):
        drawn.add(
            np.arange(start, start + 64, dtype=np.float32)[:, None], np.arange(start, start + 64)
        )
    values = np.concatenate(drawn.outputs)
    assert len(values) == MAX_SHUFFLED
    assert values.tolist() == np.stack(drawn.labels).tolist()
    assert np.histogram(values, 4)[0].min() > MAX_SHUFFLED / 5
