"""What the width of a profile costs: which engines are built and compared, and what is advised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.benchmark.elimination import Role
from pipeline.compiler.compile import compile_plan
from pipeline.compiler.profile_width import (
    MAX_COST,
    WIDTH,
    advice,
    cost_from_run,
    fixed_profile,
)
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, ValueRange
from pipeline.errors import ModelError
from pipeline.execution.stage_runner import Run, Runner
from pipeline.execution.store import Store
from pipeline.measurement.statistics import Interval
from pipeline.plan.files import load_plan
from pipeline.report.sections import sections
from pipeline.results.benchmarks import BenchmarkFailure, Benchmarks
from pipeline.results.candidates import WidthRow
from pipeline.results.report import Report
from pipeline.stages.benchmark import benchmark
from pipeline.stages.build import build
from tests.builders.cli import write_task
from tests.builders.halves import run_here
from tests.builders.report import benchmark as made_up_benchmark

FP32 = [{"backend": "onnxruntime", "precision": "fp32"}]
WIDE = Profile(dims={"batch": DimRange(min=1, opt=4, max=16)})


def fixed(batch: int) -> Profile:
    return Profile(dims={"batch": DimRange(min=batch, opt=batch, max=batch)})


def compiled(folder: Path, run: Run = run_here, **changes: object) -> Report:
    plan = load_plan(write_task(folder, candidates=FP32, **changes))
    return compile_plan(plan, Runner(Store(folder / "home"), run=run), "crucible compile")


def stages(report: Report) -> list[str]:
    return [step.stage for step in report.steps]


def recording(races: list[Any]) -> Run:
    """Runs stages in this process, and keeps the engines of each race with their roles."""

    def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if function is benchmark:
            races.append([(entry.engine.profiles, entry.role) for entry in arguments[0]])
        return run_here(function, *arguments, **named)

    return run


def test_the_winner_is_compared_with_an_engine_for_the_first_and_the_last_shape(
    tmp_path: Path,
) -> None:
    """The made-up rows are of batch 1 and 8, where the second engine is twice as fast."""
    races: list[Any] = []
    report = compiled(tmp_path, recording(races), measure_profile_width=True)
    assert races[1:] == [
        [((WIDE,), Role.BASELINE), ((fixed(batch),), Role.CANDIDATE)] for batch in (1, 8)
    ]
    width = report.profile_width
    assert width is not None
    assert width.label == "onnxruntime fp32"
    assert [(row.sizes, row.cost and row.cost.value) for row in width.rows] == [
        ({"batch": 1}, 2.0),
        ({"batch": 8}, 2.0),
    ]
    (section,) = (section for section in sections(report) if section.key == "width")
    assert section.paragraphs[1] == width.advice
    assert [row[0] for row in section.tables[0].rows] == ["batch 1", "batch 8"]
    again = compiled(tmp_path, measure_profile_width=True)
    assert again.profile_width == width
    assert all(step.reused for step in again.steps)


def test_without_the_key_nothing_more_is_built(tmp_path: Path) -> None:
    report = compiled(tmp_path)
    assert report.profile_width is None
    assert "width" not in stages(report)


def test_a_plan_without_an_accurate_candidate_has_no_cost(tmp_path: Path) -> None:
    accuracy = {"metric": "top1", "thresholds": {"min_cosine": 1.1}}
    report = compiled(tmp_path, measure_profile_width=True, accuracy=accuracy)
    assert report.profile_width is not None
    assert report.profile_width.rows == ()
    assert "width" not in stages(report)


def test_an_engine_that_cannot_be_built_for_one_shape_is_no_error(tmp_path: Path) -> None:
    def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if function is build and arguments[2].profiles == (fixed(8),):
            raise ModelError("no kernel takes this shape", "another shape")
        return run_here(function, *arguments, **named)

    report = compiled(tmp_path, run, measure_profile_width=True)
    assert report.profile_width is not None
    first, last = report.profile_width.rows
    assert first.cost is not None
    assert last.missing == "the engine for this shape cannot be built: no kernel takes this shape"


def test_a_profile_of_one_shape_and_a_shape_of_size_0_are_not_measured(tmp_path: Path) -> None:
    def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        found = run_here(function, *arguments, **named)
        if function is not benchmark:
            return found
        results = []
        for result in found.results:
            first, last = result.rows
            empty = last.model_copy(update={"sizes": {"batch": 0}})
            results.append(result.model_copy(update={"rows": (first, empty)}))
        return found.model_copy(update={"results": tuple(results)})

    profiles = [{"batch": [1, 1, 1]}]
    report = compiled(tmp_path, run, measure_profile_width=True, profiles=profiles)
    assert report.profile_width is not None
    assert [row.missing for row in report.profile_width.rows] == [
        "the profile holds this shape only",
        "no profile is tuned for a size of 0",
    ]


def test_values_that_decide_a_shape_are_fixed_too() -> None:
    values = {"k": ValueRange(min=(1,), opt=(5,), max=(9,))}
    profile = Profile(dims=WIDE.dims, values=values)
    nine = ValueRange(min=(9,), opt=(9,), max=(9,))
    assert fixed_profile({"batch": 16}, [profile]) == Profile(
        dims=fixed(16).dims, values={"k": nine}
    )


def test_a_busy_host_or_a_failure_gives_a_reason_and_is_not_kept() -> None:
    wide, only = made_up_benchmark("e", 8.0, None), made_up_benchmark("e", 4.0, 8.0)
    row = only.rows[0].model_copy(update={"ratio": None, "ratio_missing": "too busy to tell"})
    busy = only.model_copy(update={"rows": (row,)})
    failure = BenchmarkFailure(label="e", reason="out of memory")
    reasons = []
    for results in ((wide, busy), (failure, only), (wide, failure)):
        found = Benchmarks(created="2026-03-02T10:11:00+00:00", results=results)
        cost, missing = cost_from_run(found)
        assert cost is None
        assert not WIDTH.is_cacheable(found)
        reasons.append(missing)
    assert reasons == ["too busy to tell", "out of memory", "out of memory"]


@pytest.mark.parametrize(
    ("backend", "lows", "message"),
    [
        ("tensorrt", (1.01, 1.03), "At batch 8 an engine for one shape is faster: split"),
        ("tensorrt", (1.03, 1.05), "At batch 1 and at batch 8 "),
        ("openvino", (1.03, None), "compile a plan of its own"),
        ("openvino", (0.97, None), "No cost above 2 % was measured at batch 1: keep the profiles."),
        ("tensorrt", (MAX_COST, 1.0), "No cost above 2 % was measured at batch 1 and at batch 8"),
        ("tensorrt", (None, None), "not measurable: at batch 1, why; at batch 8, why."),
    ],
)
def test_the_advice_follows_from_the_intervals(
    backend: str, lows: tuple[float | None, ...], message: str
) -> None:
    rows = []
    for batch, low in zip((1, 8), lows, strict=True):
        cost = Interval(value=low + 0.02, low=low, high=low + 0.04) if low else None
        rows.append(WidthRow(sizes={"batch": batch}, cost=cost, missing="" if cost else "why"))
    assert message in advice(Recipe(backend=backend, precision=Precision.FP32), rows)
