"""Figures of a report's parts, for the live plot."""

import math

import pytest

from pipeline.core.progress import MAX_DROP, AccuracyFigures, CandidateFigures
from pipeline.core.recipe import Precision
from pipeline.measurement.statistics import Interval
from pipeline.results.accuracy import MetricResult, ValidationReport
from tests.builders.report import benchmark, sample_report


def validation(drop: float, cosine: float = 0.9, metric: bool = True) -> ValidationReport:
    """The winner's report of the sample, with this drop and this cosine."""
    candidate = next(each for each in sample_report().candidates if each.selection)
    assert candidate.selection is not None
    result = MetricResult(
        name="top1",
        reference=0.9,
        candidate=0.9 - drop,
        drop=drop,
        interval=Interval(value=drop, low=drop - 0.01, high=drop + 0.01),
        max_drop=0.1,
        passed=True,
    )
    outputs = tuple(
        each.model_copy(update={"cosine": cosine}) for each in candidate.selection.outputs
    )
    changes = {"metric": result if metric else None, "outputs": outputs, "failures": ()}
    return candidate.selection.model_copy(update=changes)


def test_the_drop_of_the_metric_counts_and_else_that_of_the_cosine() -> None:
    assert validation(0.02).figures == AccuracyFigures("top1", 0.02, 0.01, 0.03, True)
    by_cosine = validation(0.02, cosine=0.75, metric=False)
    assert by_cosine.figures == AccuracyFigures("", 0.25, 0.25, 0.25, True)
    failed = by_cosine.model_copy(update={"failures": ("too far",)})
    assert failed.figures == AccuracyFigures("", 0.25, 0.25, 0.25, False)
    assert by_cosine.model_copy(update={"outputs": ()}).figures is None


@pytest.mark.parametrize("drop", [math.nan, math.inf, -math.inf, 2 * MAX_DROP])
def test_a_drop_that_no_plot_can_show_is_no_figure(drop: float) -> None:
    assert validation(drop).figures is None
    if math.isnan(drop):
        assert validation(0.0, cosine=drop, metric=False).figures is None


def test_the_latency_at_the_first_shape_counts() -> None:
    report = benchmark("eager", 4.0, None)
    figures = report.figures(Precision.FP32, is_baseline=True)
    assert (figures.label, figures.is_baseline, figures.accuracy) == ("eager", True, None)
    assert figures.latency is not None
    assert figures.latency.median_s == report.rows[0].end_to_end.median_s
    assert not figures.latency.is_eliminated
    slow = report.model_copy(update={"stopped": "stopped after 1 process: it cannot win"})
    latency = slow.figures(Precision.FP32, is_baseline=False).latency
    assert latency is not None
    assert latency.is_eliminated
    nothing = report.model_copy(update={"rows": ()})
    assert nothing.figures(Precision.FP32, False) == CandidateFigures("eager", Precision.FP32)
