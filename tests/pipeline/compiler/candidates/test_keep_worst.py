"""`keep_fp32: auto` through whole compiles: a model with one layer that breaks in 8 bits, and one
with one layer that overflows in fp16.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends import BACKENDS
from pipeline.backends.base import Loaded
from pipeline.compiler.compile import compile_plan
from pipeline.compiler.next_steps import KEEP_WORST
from pipeline.core.artifacts import Engine, Target
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.errors import UnsupportedError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.report.markdown import markdown
from pipeline.results.report import Report
from tests.builders.halves import Halves, run_here
from tests.builders.sensitivity import write_broken_task


def compiled(
    folder: Path,
    model: str,
    candidates: Sequence[Mapping[str, object]],
    run: Callable[..., Any] = run_here,
    **changes: Any,
) -> Report:
    """A compile by the real stages; only latencies are made up."""
    plan = write_broken_task(folder, model, candidates=candidates, **changes)
    return compile_plan(
        load_plan(plan), Runner(Store(folder / "home"), run=run), "crucible compile plan.yaml"
    )


def outcomes(report: Report) -> list[tuple[str, str, tuple[str, ...]]]:
    return [
        (str(candidate.recipe.precision), candidate.state, candidate.recipe.keep_fp32)
        for candidate in report.candidates
    ]


def int8(backend: str = "onnxruntime", **more: object) -> dict[str, object]:
    return {"backend": backend, "precision": "int8", "method": "minmax", **more}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_one_layer_that_breaks_in_int8_is_kept_and_the_model_accepted(
    tmp_path: Path, backend: str
) -> None:
    pytest.importorskip(backend)
    report = compiled(tmp_path, "stretched", [int8(backend, keep_fp32="auto")])
    assert outcomes(report) == [("int8", "failed accuracy", ()), ("int8", "measured", ("broken",))]
    assert (report.verdict, report.winner) == ("accepted", report.candidates[1].label)
    assert "top1 drops by" in report.candidates[0].reason
    (rescue,) = report.rescues
    assert [step.label for step in rescue.steps] == [report.winner]
    assert re.fullmatch(r"1 node of \d, 'broken' \(error 1\), kept in fp32", rescue.steps[0].step)
    assert rescue.ranking is not None
    worst, *others = rescue.ranking.nodes
    assert worst.node == "broken"
    assert {each.node for each in others} >= {"first", "third"}
    assert max(each.error for each in others) < 0.1 < worst.error
    assert "## Which layers hurt" in markdown(report)
    assert [step.stage for step in report.steps].count("rank") == 1


def test_one_layer_that_overflows_in_fp16_is_kept_and_the_model_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "halves", Halves())
    report = compiled(tmp_path, "squaring", [{"backend": "halves", "precision": "fp16"}])
    assert outcomes(report)[0] == ("fp16", "failed accuracy", ())
    assert outcomes(report)[-1] == ("fp16", "measured", ("squares",))
    assert (report.verdict, report.winner) == ("accepted", report.candidates[-1].label)
    (rescue,) = report.rescues
    assert rescue.steps[-1].step.startswith(
        "1 node of 2, 'squares' (sums up squares of values up to "
    )
    assert rescue.conclusion.startswith("1 node in fp32 keeps the accuracy, the others stay fp16")


@pytest.mark.parametrize(
    "changes", [{}, {"keep_fp32": "auto", "fallback": False}], ids=["not asked for", "switched off"]
)
def test_int8_fails_where_the_plan_does_not_ask_for_more(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    options = {"keep_fp32": changes.pop("keep_fp32")} if "keep_fp32" in changes else {}
    report = compiled(tmp_path, "stretched", [int8(**options)], **changes)
    assert outcomes(report) == [("int8", "failed accuracy", ())]
    assert (report.verdict, report.rescues) == ("rejected", ())
    assert (KEEP_WORST in report.next_steps) is not bool(
        options
    )  # what the plan says already is no advice


def test_where_fp32_fails_too_no_int8_engine_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    double = Halves(wrong=frozenset({Precision.FP32, Precision.INT8}))
    monkeypatch.setitem(BACKENDS, "halves", double)
    fp32 = {"backend": "halves", "precision": "fp32"}
    report = compiled(tmp_path, "stretched", [int8("halves", keep_fp32="auto"), fp32])
    assert len(double.built) == 2
    assert "int8 is not the cause" in report.rescues[0].conclusion


@pytest.mark.parametrize(("most", "counts"), [(1, [0, 1]), (2, [0, 1, 3])])
def test_no_more_engines_are_built_than_the_plan_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int, counts: list[int]
) -> None:
    monkeypatch.setitem(BACKENDS, "halves", Halves(wrong=frozenset({Precision.INT8})))
    report = compiled(
        tmp_path, "stretched", [int8("halves", keep_fp32="auto")], keep_fp32_builds=most
    )
    assert [len(names) for _, _, names in outcomes(report)] == counts


class FitForMinMax(Halves):
    """A backend whose int8 engines are right with ranges by min-max only."""

    def load(self, engine: Engine, device: str = "") -> Loaded:
        method = engine.recipe.method
        self.wrong = frozenset({Precision.INT8} if method is not CalibrationMethod.MINMAX else {})
        return super().load(engine, device)


def test_where_the_method_is_auto_and_the_first_fails_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "halves", FitForMinMax())
    report = compiled(tmp_path, "squaring", [{"backend": "halves", "precision": "int8"}])
    assert [(candidate.recipe.method, candidate.state) for candidate in report.candidates] == [
        (CalibrationMethod.ENTROPY, "failed accuracy"),
        (CalibrationMethod.MINMAX, "measured"),
    ]
    assert (report.verdict, report.winner) == ("accepted", report.candidates[1].label)
    (rescue,) = report.rescues
    assert [step.step for step in rescue.steps] == ["ranges by minmax"]


def test_a_method_that_the_plan_names_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "halves", FitForMinMax())
    report = compiled(tmp_path, "squaring", [int8("halves", method="percentile")])
    assert [candidate.state for candidate in report.candidates] == ["failed accuracy"]


class Whole(Halves):
    """A backend that runs a whole model in one precision, as OpenVINO does in 16 bits."""

    def check_recipe(self, recipe: Recipe, target: Target) -> None:
        if recipe.keep_fp32:
            raise UnsupportedError("this backend runs the whole model in fp16", "another precision")


def test_where_a_backend_can_keep_no_node_the_step_says_so_and_bf16_comes_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "halves", Whole())
    report = compiled(tmp_path, "squaring", [{"backend": "halves", "precision": "fp16"}])
    skipped, last = report.rescues[0].steps[-2:]
    assert (skipped.label, skipped.outcome) == ("", "this backend runs the whole model in fp16")
    assert last.label == "halves bf16"
    assert "rank" not in [step.stage for step in report.steps]
