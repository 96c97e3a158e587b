"""The verdict by throughput, from made-up points, and one compile that measures them."""

from pathlib import Path

import pytest

from pipeline.compiler.compile import compile_plan, publish_report
from pipeline.compiler.decision import MEASURE_LOAD_AGAIN, Baseline, Decision, choose, decide
from pipeline.compiler.next_steps import RAISE_LIMIT
from pipeline.compiler.objective import after_load, limit_of, shorter
from pipeline.compiler.speed import speed_ratio
from pipeline.core.recipe import Precision, Recipe
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.plan.schema import BenchmarkConfig, LatencyLimit
from pipeline.report.files import load_report
from pipeline.results.benchmarks import BenchmarkFailure, LoadCurve, LoadRun
from pipeline.results.candidates import Candidate
from tests.builders.cli import write_task
from tests.builders.report import benchmark, load_curve, selection

LIMIT_S = 0.02
ENGINE = "onnxruntime fp32"


def candidate(curve: LoadCurve | None = None, median_ms: float = 1.0) -> Candidate:
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
    measured = benchmark(recipe.label, median_ms, 8.0).model_copy(update={"load": curve})
    return Candidate(
        label=recipe.label,
        recipe=recipe,
        state="measured",
        selection=selection(0.0, 0.999),
        benchmark=measured,
    )


def over_limit(curve: LoadCurve) -> Candidate:
    """A candidate whose points are all over the limit."""
    run = LoadRun(created="", curves=(curve,))
    return after_load(candidate(curve), run)


def decided(found: Candidate, baseline: LoadCurve) -> Decision:
    proven = selection(0.001, 0.999, role="validation")
    return decide([found], choose([found]), proven, Baseline("eager", load=baseline))


def test_throughput_decides_and_the_reasons_name_the_best_points() -> None:
    slow_by_latency = candidate(load_curve(ENGINE, 900.0, 3.0), median_ms=100.0)
    decision = decided(slow_by_latency, load_curve("eager", 300.0))
    assert decision.verdict == "accepted"
    assert decision.reasons[1:] == (
        "3.00 times the throughput of the baseline (95 % 2.96 to 3.04)",
        "best point: batch 8 with 2 sessions: 900 samples/s, p99 22.2 ms",
        "not tried: 4 sessions: the time was over",
        "best point of eager: batch 8 with 2 sessions: 300 samples/s, p99 66.7 ms",
    )


def test_an_engine_without_a_higher_throughput_is_not_delivered() -> None:
    decision = decided(candidate(load_curve(ENGINE, 300.0, 1.0)), load_curve("eager", 300.0))
    assert decision.verdict == "keep"
    assert "not measurably faster: 1.00 times the throughput" in decision.reasons[1]


def test_a_limit_that_no_point_meets_is_rejected_with_the_nearest_point() -> None:
    decision = decided(
        over_limit(load_curve(ENGINE, 100.0, limit_s=LIMIT_S)),
        load_curve("eager", 50.0, limit_s=LIMIT_S),
    )
    assert decision.verdict == "rejected"
    assert decision.reasons == (
        "onnxruntime fp32: over the limit: no point has its p99 within 20.0 ms; the nearest is"
        " batch 1 with 1 session: 25.0 samples/s, p99 50.0 ms",
    )
    assert decision.next_steps == (RAISE_LIMIT,)
    assert decision.nearest_miss is not None


def test_a_baseline_that_alone_is_within_the_limit_is_kept() -> None:
    decision = decided(
        over_limit(load_curve(ENGINE, 100.0, limit_s=LIMIT_S)),
        load_curve("eager", 900.0, limit_s=LIMIT_S),
    )
    assert (decision.verdict, decision.winner) == ("keep", None)
    assert decision.reasons[0].startswith("only eager is within the limit: batch 1 with 2 sessions")


def test_an_engine_that_waited_for_a_cpu_is_not_rejected_by_its_p99() -> None:
    curve = load_curve(ENGINE, 100.0, limit_s=LIMIT_S)
    waited = tuple(point.model_copy(update={"waiting": 0.5}) for point in curve.points)
    busy = curve.model_copy(update={"points": waited})
    decision = decided(over_limit(busy), load_curve("eager", 900.0, limit_s=LIMIT_S))
    assert (decision.verdict, decision.winner) == ("unproven", None)
    assert not LoadRun(created="", curves=(curve,)).provisional
    assert LoadRun(created="", curves=(busy,)).provisional  # the next compile measures again
    assert "waiting for a CPU for 50% of its time" in decision.reasons[0]
    assert decision.next_steps == (MEASURE_LOAD_AGAIN,)


def test_an_engine_that_alone_is_within_the_limit_is_accepted_without_a_ratio() -> None:
    decision = decided(
        candidate(load_curve(ENGINE, 900.0, limit_s=LIMIT_S)),
        load_curve("eager", 50.0, limit_s=LIMIT_S),
    )
    assert decision.verdict == "accepted"
    assert decision.reasons[-1].startswith("eager: no point has its p99 within 20.0 ms")


def test_a_p99_that_is_over_the_limit_in_other_processes_is_unproven() -> None:
    curve = load_curve(ENGINE, 900.0, 3.0, limit_s=LIMIT_S).model_copy(update={"p99_s": 0.021})
    decision = decided(candidate(curve), load_curve("eager", 600.0, limit_s=LIMIT_S))
    assert decision.verdict == "unproven"
    assert decision.reasons[0] == (
        "over all processes the p99 is 21.0 ms, over the limit of 20.0 ms"
    )
    assert decision.next_steps == (MEASURE_LOAD_AGAIN,)


def test_a_latency_is_not_compared_with_a_throughput() -> None:
    by_load, by_latency = candidate(load_curve(ENGINE, 900.0)), candidate()
    assert speed_ratio(by_load, by_latency) is None
    assert speed_ratio(by_load, by_load) is not None


def test_a_candidate_that_fails_under_load_has_failed() -> None:
    failure = BenchmarkFailure(label=ENGINE, reason="no memory")
    lost = after_load(candidate(), LoadRun(created="", curves=(failure,)))
    assert (lost.state, lost.reason) == ("failed", "under load: no memory")
    assert choose([lost]) is None


def test_latencies_take_less_of_the_budget_where_they_decide_nothing() -> None:
    options = BenchmarkConfig(budget_s=60)
    assert shorter(options, "latency") is options
    assert shorter(options, "throughput").budget_s == 15
    assert limit_of("throughput") is None
    assert limit_of(LatencyLimit(max_latency_ms=20)) == LIMIT_S


@pytest.mark.timeout(300)
def test_a_compile_for_throughput_delivers_its_best_point(tmp_path: Path) -> None:
    """From the plan to report.json, with real engines; the figures are this host's."""
    plan = write_task(
        tmp_path,
        objective="throughput",
        candidates=[{"backend": "onnxruntime", "precision": "int8"}],
        benchmark={"duration_s": 0.06, "budget_s": 2, "warmup_s": 0.01, "warmup_runs": 2},
    )
    runner = Runner(Store(tmp_path / "home"))
    report = compile_plan(load_plan(plan), runner, "crucible compile plan.yaml")
    assert [step.stage for step in report.steps].count("throughput") == 1
    assert report.baseline is not None
    assert set(report.curves) == {
        report.baseline.label,
        *(each.label for each in report.candidates if each.state == "measured"),
    }
    for curve in report.curves.values():
        assert curve.best in curve.points
    assert report.best_point == report.curves[report.winner or ""].best
    publish_report(report, tmp_path / "out")
    assert load_report(tmp_path / "out").best_point == report.best_point
    assert "## Throughput" in (tmp_path / "out" / "report.md").read_text()
