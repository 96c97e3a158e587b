"""The task metric as the gate: its drop, its interval, and metrics of the user's own."""

from __future__ import annotations

import pytest

from pipeline.accuracy.metrics.from_plan import check_labels
from pipeline.data.samples import SelectionSet, ValidationSet, open_set
from pipeline.errors import DataError, PlanError
from pipeline.plan.schema import AccuracyConfig, GeneratedData
from tests.builders.validate import BOTH, LENIENT, PROFILES, SAME, TWO, Bench, labelled


def test_the_drop_is_a_gate_on_its_point_estimate_and_the_limit_itself_passes(bench: Bench) -> None:
    x, labels = labelled(300)
    x[:3] = -x[
        :3
        # the candidate takes the absolute value: three answers turn right for it, and wrong for the
        # reference
    ]
    samples = bench.samples(x, labels, ValidationSet)
    absolute = bench.engine((("Abs", ["x"], "logits"),))
    exact = AccuracyConfig(max_drop=0.01, thresholds=LENIENT)
    passed = bench.validate(bench.engine(SAME), samples, exact, reference=absolute)
    assert passed.metric is not None
    assert passed.metric.drop == pytest.approx(3 / 300)
    assert passed.passed
    assert passed.metric.interval.low <= passed.metric.drop <= passed.metric.interval.high
    assert passed.metric.interval.low < passed.metric.interval.high
    assert passed.notes == ()
    failed = bench.validate(
        bench.engine(SAME),
        samples,
        AccuracyConfig(max_drop=0.009, thresholds=LENIENT),
        reference=absolute,
    )
    assert failed.failures == (
        "top1 drops by 0.0100 (1.0000 to 0.9900; 95 % -0.0028 to +0.0290), over max_drop 0.009",
    )


def test_few_samples_are_a_warning_and_one_is_an_error(bench: Bench) -> None:
    x, labels = labelled(20)
    report = bench.validate(bench.engine(SAME), bench.samples(x, labels))
    assert [note.text for note in report.notes] == [
        "selection: 20 samples leave the drop uncertain (95 % -0.1611 to +0.1611); 200 or more"
        " narrow its interval"
    ]
    with pytest.raises(DataError, match="expected at least 2 samples in the"):
        bench.validate(bench.engine(SAME), bench.samples(x[:1], labels[:1]))


def test_few_samples_are_enough_if_the_whole_interval_is_within_the_limit(bench: Bench) -> None:
    report = bench.validate(bench.engine(SAME), bench.samples(labelled(20)[0]))
    assert report.metric is not None
    assert report.metric.interval.high < report.metric.max_drop
    assert report.notes == ()


def test_without_labels_auto_is_cosine_and_top1_is_refused(bench: Bench) -> None:
    samples = bench.samples(labelled()[0])
    report = bench.validate(bench.engine(SAME), samples)
    assert report.metric is not None
    assert (report.metric.name, report.metric.reference, report.metric.max_drop) == (
        "cosine",
        1,
        0.01,
    )
    with pytest.raises(DataError) as raised:
        bench.validate(bench.engine(SAME), samples, AccuracyConfig(metric="top5"))
    assert raised.value.message == "accuracy.metric is top5, but the set has no labels"
    assert "`labels`" in raised.value.next_step


def test_a_set_without_labels_is_named() -> None:
    with pytest.raises(DataError, match="but the selection set has no labels"):
        check_labels(AccuracyConfig(metric="top1"), None, "selection")
    check_labels(AccuracyConfig(metric="top1"), "numbers", "selection")


def test_on_generated_inputs_there_are_tensor_errors_and_no_metric(bench: Bench) -> None:
    nothing = GeneratedData(generate="random", samples=8, because="a test")
    samples = open_set(SelectionSet, nothing, bench.engine(SAME).inputs, PROFILES)
    report = bench.validate(
        bench.engine((("Add", ["x", "0.001"], "logits"),)), samples, AccuracyConfig(metric="top1")
    )
    assert (report.role, report.metric, report.notes) == ("generated", None, ())
    assert report.outputs[0].max_abs == pytest.approx(0.001, rel=1e-2)


def test_the_metric_reads_the_output_it_is_told_to(bench: Bench) -> None:
    x, labels = labelled()
    both = bench.engine(BOTH, TWO)
    report = bench.validate(both, bench.samples(x, labels), AccuracyConfig(output="b"), both)
    assert report.metric is not None
    assert report.metric.reference < 0.5  # b is -x


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            AccuracyConfig(output="nope"),
            "accuracy.output names 'nope', which is no output; the model has logits",
        ),
        (AccuracyConfig(per_output={"nope": LENIENT}), "accuracy.per_output names 'nope'"),
        (
            AccuracyConfig(metric="no_such_module:f"),
            "accuracy.metric 'no_such_module:f' cannot be imported",
        ),
    ],
)
def test_a_plan_that_names_what_is_not_there(
    bench: Bench, options: AccuracyConfig, message: str
) -> None:
    x, labels = labelled()
    with pytest.raises(PlanError) as raised:
        bench.validate(bench.engine(SAME), bench.samples(x, labels), options)
    assert message in raised.value.message
    assert raised.value.next_step


USER_METRICS = """
import numpy as np

def per_sample(outputs, labels, reference):
    return (outputs.argmax(1) == labels).astype(float)

def for_the_set(outputs, labels, reference):
    return float((outputs.argmax(1) == labels).mean())

def without_labels(outputs, labels, reference):
    assert labels is None
    return -np.abs(outputs - reference).mean(axis=1)

def nan(outputs, labels, reference):
    return np.where(outputs[:, 0] == reference[:, 0], 1.0, np.nan)

def nan_for_the_set(outputs, labels, reference):
    return float(nan(outputs, labels, reference).mean())

def wrong_shape(outputs, labels, reference):
    return np.zeros((2, 2))

def raises(outputs, labels, reference):
    return 1 / 0

number = 3
"""


def user_options(bench: Bench, function: str, max_drop: float = 0.3) -> AccuracyConfig:
    # a module is imported once per process
    name = f"user_metric_{bench.folder.name.replace('-', '_')}"
    (bench.folder / f"{name}.py").write_text(USER_METRICS)
    return AccuracyConfig(
        metric=f"{name}:{function}", python_path=bench.folder, max_drop=max_drop, thresholds=LENIENT
    )


def test_a_users_metric_gives_scores_per_sample_or_one_number(bench: Bench) -> None:
    x, labels = labelled(40)
    x[:10] = -x[:10]
    samples, absolute = bench.samples(x, labels), bench.engine((("Abs", ["x"], "logits"),))
    results = [
        bench.validate(
            bench.engine(SAME), samples, user_options(bench, name), absolute, batch=7
        ).metric
        for name in ("per_sample", "for_the_set")
    ]
    for result in results:
        assert result is not None
        assert (result.reference, result.candidate, result.drop) == (1, 0.75, 0.25)
        assert 0.05 < result.interval.low < 0.25 < result.interval.high < 0.45
    no_labels = bench.validate(
        bench.engine(SAME), bench.samples(x), user_options(bench, "without_labels", 0), absolute
    )
    assert no_labels.metric is not None
    assert no_labels.metric.reference == 0
    assert not no_labels.passed


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nan", "is not a number on 40 of 40 samples"),
        ("nan_for_the_set", "is nan where the reference has 1.0"),
    ],
)
def test_a_users_metric_that_is_nan_fails(bench: Bench, function: str, message: str) -> None:
    x, labels = labelled(40)
    shifted = bench.engine((("Add", ["x", "1.0"], "logits"),))
    report = bench.validate(shifted, bench.samples(x, labels), user_options(bench, function))
    assert report.metric is None
    assert any(message in failure for failure in report.failures)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("wrong_shape", DataError, "returned shape (2, 2) for 20 samples"),
        ("raises", DataError, "failed: ZeroDivisionError: division by zero"),
        ("missing", PlanError, "cannot be imported"),
        ("number", PlanError, "is a int, expected a function"),
    ],
)
def test_a_users_metric_that_cannot_be_used_is_named(
    bench: Bench, function: str, error: type[Exception], message: str
) -> None:
    x, labels = labelled()
    with pytest.raises(error) as raised:
        bench.validate(bench.engine(SAME), bench.samples(x, labels), user_options(bench, function))
    assert message in str(raised.value)
    assert "next:" in str(raised.value)
