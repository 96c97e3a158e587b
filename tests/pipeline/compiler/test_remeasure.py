"""A compile's report with the figures of a new run: nothing in it rests on latencies that are
gone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from pipeline.benchmark.trace import trace_engine
from pipeline.cli.terminal import console, print_latency
from pipeline.compiler.compile import compile_plan
from pipeline.compiler.decision import DELIVER_BASELINE, OTHER_CANDIDATES
from pipeline.compiler.remeasure import (
    REMEASURED,
    RaceRecord,
    Remeasured,
    benchmark_again,
    trace_engines,
    with_figures,
)
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import ChildDied
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import load_plan
from pipeline.plan.schema import BenchmarkConfig
from pipeline.report.files import load_report, write_report
from pipeline.report.sections import sections
from pipeline.results.benchmarks import Benchmarks
from pipeline.results.candidates import Ablation, AblationRow, Candidate
from pipeline.results.report import Report, Step
from pipeline.results.timeline import EngineTrace, TraceFailure
from pipeline.stages.benchmark import ENOUGH_RUNS
from pipeline.stages.benchmark import benchmark as measure
from tests.builders.cli import write_task
from tests.builders.halves import run_here
from tests.builders.report import benchmark, sample_report, throughput_report
from tests.pipeline.benchmark.timeline import run_from, trace_of

WINNER = "openvino int8 nncf u8s8"
RAN = Step(
    stage="benchmark",
    subject=WINNER,
    seconds=3.0,
    reused=False,
    created="2026-05-05T00:00:00+00:00",
    digest="",
)


def renewed(report: Report, median_ms: float = 4.0, baseline: Candidate | None = None) -> Report:
    """Half as fast as its baseline's 8 ms now, where it was six times as fast before."""
    engine = next(candidate.engine for candidate in report.candidates if candidate.label == WINNER)
    assert engine is not None
    results = (
        benchmark("pytorch eager fp32", 8.0, None),
        benchmark("pytorch traced fp32", 9.0, 8.0),
        benchmark(WINNER, median_ms, 8.0),
    )
    benchmarks = Benchmarks(
        created="2026-05-05T00:00:00+00:00", results=results, baseline="pytorch eager fp32"
    )
    return with_figures(report, Remeasured(engine, benchmarks, baseline), [RAN])


def test_by_another_objective_the_verdict_and_the_points_stay() -> None:
    old = throughput_report()
    report = renewed(old, median_ms=16.0)  # twice as slow as the baseline by latency
    kept = ("verdict", "winner", "ratio", "best_point", "reasons", "curves")
    assert [getattr(report, name) for name in kept] == [getattr(old, name) for name in kept]
    assert set(report.curves) == {WINNER, "pytorch eager fp32"}
    assert report.benchmarked == "2026-05-05T00:00:00+00:00"


def test_the_winner_and_the_baselines_have_the_new_figures_and_no_other_has_any() -> None:
    old = sample_report()
    report = renewed(old)
    winner = next(candidate for candidate in report.candidates if candidate.label == WINNER)
    assert report.baseline is not None
    assert old.baseline is not None
    assert winner.benchmark is not None
    assert report.ratio is not None
    assert [report.baseline.label, *(baseline.label for baseline in report.baselines)] == [
        "pytorch eager fp32",
        "pytorch traced fp32",
    ]
    assert (
        report.baseline.rows[0].end_to_end.median_s
        < 0.009
        < old.baseline.rows[0].end_to_end.median_s
    )
    assert 1.9 < report.ratio.value < 2.1
    assert [candidate.label for candidate in report.candidates if candidate.benchmark] == [WINNER]
    assert [each.label for each in report.candidates] == [each.label for each in old.candidates]
    assert [candidate.selection for candidate in report.candidates] == [
        candidate.selection for candidate in old.candidates
    ]
    assert (report.validation, report.verdict, report.benchmarked) == (
        old.validation,
        "accepted",
        "2026-05-05T00:00:00+00:00",
    )


def test_the_reasons_speak_of_the_new_figures() -> None:
    faster, slower = renewed(sample_report()), renewed(sample_report(), 16.0)
    assert any(reason.startswith("2.00 times as fast as the baseline") for reason in faster.reasons)
    assert not any("6.0" in reason for reason in faster.reasons)
    assert faster.next_steps == ()
    assert (slower.verdict, slower.winner, slower.delivered) == ("keep", "pytorch eager fp32", None)
    assert (
        slower.reasons[0] == "no candidate that kept its accuracy is faster than pytorch eager fp32"
    )


def test_a_baseline_that_cannot_be_delivered_says_why() -> None:
    recipe = Recipe(backend="torch", precision=Precision.FP32)
    lost = Candidate(label="torch", recipe=recipe, state="failed", reason="it was not exported")
    report = renewed(sample_report(), 16.0, lost)
    assert (report.verdict, report.delivered, report.candidates[-1]) == ("keep", None, lost)
    assert report.reasons[-1] == (
        "the baseline could not be delivered as an engine, because torch failed: it was not"
        " exported"
    )
    assert report.next_steps == (DELIVER_BASELINE, OTHER_CANDIDATES)


def test_a_baseline_that_was_kept_is_measured_again_as_what_it_is() -> None:
    old = sample_report()
    engine = next(candidate.engine for candidate in old.candidates if candidate.label == WINNER)
    assert engine is not None
    label = "pytorch eager fp32"
    baseline = engine.model_copy(
        update={
            "recipe": engine.recipe.model_copy(update={"backend": "pytorch", "variant": "eager"})
        }
    )
    report = old.model_copy(update={"verdict": "keep", "winner": label, "delivered": None})
    benchmarks = Benchmarks(
        created="2026-05-05T00:00:00+00:00", results=(benchmark(label, 7.0, None),), baseline=label
    )
    renewed = with_figures(report, Remeasured(baseline, benchmarks, kept=None), [RAN])
    assert (renewed.verdict, renewed.winner, renewed.delivered) == ("keep", label, baseline)
    assert renewed.baseline is not None
    assert renewed.baseline.rows[0].end_to_end.median_s < 0.0075
    assert [candidate.label for candidate in renewed.candidates if candidate.benchmark] == []


def test_steps_before_are_told_as_earlier_ones_and_a_note_says_it_once() -> None:
    report = renewed(renewed(sample_report()))
    assert [step.stage for step in report.steps if not step.reused] == ["benchmark"]
    assert report.steps[-1] == RAN
    assert [step.stage for step in report.steps[:-1]] == [
        step.stage for step in sample_report().steps[:-1]
    ]
    assert report.notes.count(REMEASURED) == 1


def test_what_a_switch_did_to_the_speed_is_left_out() -> None:
    interval = sample_report().ratio
    row = AblationRow(switch="bias", before=True, after=False, drop=0.1, ratio=interval)
    report = renewed(
        sample_report().model_copy(update={"ablation": Ablation(label=WINNER, rows=(row,))})
    )
    assert report.ablation == Ablation(label=WINNER, rows=(row.model_copy(update={"ratio": None}),))


def test_it_is_written_read_and_printed_as_every_report(tmp_path: Path) -> None:
    report = renewed(sample_report())
    write_report(report, tmp_path)
    assert load_report(tmp_path).reasons == report.reasons
    (latency,) = (section for section in sections(report) if section.key == "latency")
    assert {len(table.rows) for table in latency.tables} == {3}
    assert "Measured 2026-05-05" in latency.paragraphs[1]
    shown = console()
    with shown.capture() as printed:
        print_latency(shown, report)
    assert WINNER in printed.get()
    assert "onnxruntime int8" not in printed.get()


def test_a_compile_may_end_blocks_early_and_a_bench_never(tmp_path: Path) -> None:
    """`bench` prints percentiles far out, which need all runs."""
    enough: list[int | None] = []

    def run(function: Callable[..., Any], *arguments: Any, **others: Any) -> Any:
        if function is measure:
            enough.append(arguments[-1])
        return run_here(function, *arguments, **others)

    plan = load_plan(
        write_task(tmp_path, candidates=[{"backend": "onnxruntime", "precision": "fp32"}])
    )
    runner = Runner(Store(tmp_path / "home"), run=run)
    report = compile_plan(plan, runner, "crucible compile plan.yaml")
    assert report.delivered is not None
    benchmark_again(report, plan, report.delivered, runner)
    assert enough == [ENOUGH_RUNS, None]


def test_engines_are_traced_after_the_measurement_and_a_failure_spares_the_others(
    tmp_path: Path,
) -> None:
    """The double of stages runs no engine: what matters is what is called, and in which order."""
    report = sample_report()
    first, second, *_ = (each.engine for each in report.candidates if each.engine)
    calls: list[str] = []

    def run(function: Callable[..., Any], *arguments: Any, name: str, **options: Any) -> Any:
        engine, workload = arguments
        calls.append(engine.recipe.label)
        assert function is trace_engine
        assert engine.threads == 3
        assert workload.sizes == {"batch": 2}, "the first shape alone"
        if engine.recipe.label == first.recipe.label:
            raise ChildDied("the process of 'trace' died")
        return trace_of(run_from(0.0))

    relu = '<ir_version: 10, opset_import: ["": 20]> g (float[batch, 3] x) => (float[batch, 3] y)'
    onnx.save(onnx.parser.parse_model(relu + " { y = Relu(x) }"), tmp_path / "model.onnx")
    model = onnx_model(tmp_path, "model.onnx")
    engines = tuple(
        engine.model_copy(update={"inputs": model.inputs, "profiles": ()})
        for engine in (first, second)
    )
    options = BenchmarkConfig(sizes=({"batch": 2}, {"batch": 4}), threads=3)
    benchmarks = Benchmarks(created="2026-05-05T00:00:00+00:00", results=())
    runner = Runner(Store(tmp_path / "home"), run=run)
    failure, trace = trace_engines(RaceRecord(engines, model, options, benchmarks), runner)
    assert failure == TraceFailure(first.recipe.label, "the process of 'trace' died")
    assert isinstance(trace, EngineTrace)
    assert calls == [first.recipe.label, second.recipe.label]
    assert [step.stage for step in runner.steps] == ["trace"]
