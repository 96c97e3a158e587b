"""The metric of each engine: reference, engine, drop and the worst class."""

from __future__ import annotations

import pytest

from pipeline.measurement.statistics import Interval
from pipeline.report.accuracy_sections import metric_section, validation_section
from pipeline.report.entries import entries
from pipeline.report.figures.speed import pareto
from pipeline.results.accuracy import ClassDrop, MetricResult, ValidationReport
from pipeline.results.report import Report

WORST = ClassDrop(
    name="cat",
    samples=31,
    reference=0.9,
    candidate=0.85,
    drop=0.05,
    interval=Interval(value=0.05, low=-0.01, high=0.11),
)


def with_metric(report: Report, **changes: object) -> Report:
    """Return the report with these changes of every metric."""

    def changed(checked: ValidationReport | None) -> ValidationReport | None:
        if checked is None or checked.metric is None:
            return checked
        document = {**dict(checked.metric), **changes}
        return checked.model_copy(update={"metric": MetricResult.model_validate(document)})

    candidates = tuple(
        candidate.model_copy(update={"selection": changed(candidate.selection)})
        for candidate in report.candidates
    )
    update = {"candidates": candidates, "validation": changed(report.validation)}
    return report.model_copy(update=update)


def test_each_engine_has_its_metric(report: Report) -> None:
    section = metric_section(report)
    (table,) = section.tables
    assert table.headings == ("#", "engine", "reference", "engine", "drop")
    assert {len(row) for row in table.rows} == {5}
    assert section.paragraphs[0].startswith("top1 on the selection set; higher is better, and the")
    assert metric_section(report.model_copy(update={"candidates": ()})).is_empty


def test_the_worst_class_and_the_small_ones_are_shown(report: Report) -> None:
    changed = with_metric(
        report, worst_class=WORST, judged_classes=2, small_classes=3, max_class_drop=0.04
    )
    section = metric_section(changed)
    (table,) = section.tables
    assert table.rows[0][-5:-1] == ("cat", "31", "0.9000", "0.8500")
    assert "and that of a class 0.04. Intervals" in section.paragraphs[0]
    assert section.paragraphs[0].endswith("with fewer than 20 samples: 3 of 5 classes.")
    _, metric, classes = validation_section(changed).paragraphs
    assert metric.startswith("top1 (higher is better): ")
    assert classes.startswith("Worst of 2 classes: cat, with 31 samples, 0.9000 (reference), 0.85")
    assert "over the allowed 0.04. Not judged, with fewer than 20 samples: 3." in classes


def test_without_a_judged_class_the_report_says_so(report: Report) -> None:
    changed = with_metric(report, small_classes=4)
    last = validation_section(changed).paragraphs[-1]
    assert last == "No class is judged by itself: all 4 have fewer than 20 samples."


@pytest.mark.parametrize(("lower", "words"), [(True, "lower is better"), (False, "higher is")])
def test_an_error_rate_is_shown_as_one(report: Report, lower: bool, words: str) -> None:
    changed = with_metric(report, name="wer", lower_is_better=lower)
    assert f"wer on the selection set; {words}" in metric_section(changed).paragraphs[0]
    plot = pareto(changed, entries(changed))
    assert plot is not None
    (data,) = plot.figure.args
    metric = next(c.selection.metric for c in changed.candidates if c.selection is not None)
    assert metric is not None
    sign = 1 if lower else -1
    assert data.limit[0] == pytest.approx(metric.reference + sign * metric.max_drop)
    assert data.ylabel.startswith(f"wer ({words}")
    bars = [point.bar for point in data.points if point.bar is not None]
    assert bars[0][0] < bars[0][1]
