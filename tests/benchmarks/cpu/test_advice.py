"""What the benchmark of advice concludes from its rows, and the plans that it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu.advice.advice import CASES, CPU, GPU, Case, plan_of, row_of, targets_of
from pipeline.measurement.statistics import Interval

CASE = Case("adapters", "adapters", (128, 768))
PROMISE = Interval(value=0.10, low=0.08, high=0.12)


@pytest.mark.parametrize(("gain", "held"), [(0.08, True), (0.12, True), (0.07, False)])
def test_a_gain_is_held_against_its_promise(gain: float, held: bool) -> None:
    row = row_of(CASE, "merged_products", PROMISE, Interval(value=gain, low=0.0, high=0.5))
    assert row["in_promise"] is held
    assert row["gain_%"] == pytest.approx(100 * gain)


def test_the_targets_count_what_was_followed() -> None:
    none = row_of(CASE, "none", None, None)
    good = row_of(CASE, "early_rows", PROMISE, PROMISE)
    outside = row_of(CASE, "early_rows", PROMISE, Interval(value=0.2, low=0.19, high=0.21))
    assert list(targets_of([none, good, good, good]).values()) == [True, True]
    assert list(targets_of([none, good, good, outside]).values()) == [False, True]
    assert list(targets_of([none]).values()) == [False, False], "nothing followed proves nothing"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_plan_without_rewrites(case: Case, tmp_path: Path) -> None:
    plan = plan_of(case, tmp_path, CPU, {"budget_s": 9.0, "threads": 1})
    assert plan.simplify.rewrites == ()
    assert (plan.benchmark.budget_s, plan.benchmark.threads) == (9.0, 1)
    assert plan.name == case.name
    (candidate,) = plan_of(case, tmp_path, GPU, {}).candidates
    assert (candidate.backend, candidate.precision) == ("tensorrt", "fp16")
