"""Every proposed change is built, checked and measured beside the engine, or the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from pipeline.benchmark.elimination import Role
from pipeline.cli.advise import advice_lines
from pipeline.compiler.advice.again import advise_again
from pipeline.compiler.compile import compile_plan
from pipeline.errors import ModelError
from pipeline.execution.stage_runner import Run, Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.report.sections import sections
from pipeline.results.advice import Advice, Attempt, Outcome
from pipeline.results.benchmarks import BenchmarkFailure
from pipeline.results.report import Report
from pipeline.stages.benchmark import benchmark
from pipeline.stages.build import build
from tests.builders.cli import crucible, write_task
from tests.builders.halves import run_here
from tests.pipeline.onnx_graph.rewrites.graphs import model

FP32 = [{"backend": "onnxruntime", "precision": "fp32"}]
ADAPTER = """g (float[batch, 16] x) => (float[batch, 4] y)
  { m = MatMul(x, w)  d = MatMul(x, lora_a)  u = MatMul(d, lora_b)  h = Add(m, u)  r = Relu(h)
    y = MatMul(r, v) }"""
WEIGHTS = {"w": (16, 32), "lora_a": (16, 2), "lora_b": (2, 32), "v": (32, 4)}


def plan_of(folder: Path, **changes: object) -> Path:
    """Write a model with an adapter, without data."""
    path = write_task(
        folder, **{"candidates": FP32, "data": {}, "accuracy": {}, "advise": True, **changes}
    )
    onnx.save(model(ADAPTER, WEIGHTS), folder / "model.onnx")
    return path


def compiled(folder: Path, run: Run = run_here, **changes: object) -> Report:
    plan = load_plan(plan_of(folder, **changes))
    return compile_plan(plan, Runner(Store(folder / "home"), run=run), "crucible compile")


def advice_of(report: Report) -> Advice:
    assert report.advice is not None
    return report.advice


def by_rule(advice: Advice) -> dict[str, Attempt]:
    return {attempt.rule: attempt for attempt in advice.attempts}


def test_a_plan_with_advise_gets_the_gain_of_each_change(tmp_path: Path) -> None:
    """The made-up engine takes 8 ms, and each alternative 4 ms."""
    races: list[list[tuple[str, Role]]] = []

    def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if function is benchmark:
            races.append([(entry.engine.recipe.label, entry.role) for entry in arguments[0]])
        return run_here(function, *arguments, **named)

    report = compiled(tmp_path, run)
    advice = advice_of(report)
    assert (advice.label, advice.sizes) == ("onnxruntime fp32", {"batch": 1})
    attempts = by_rule(advice)
    assert attempts["merged_products"].outcome is Outcome.ADVISED
    gain = attempts["merged_products"].gain
    assert gain is not None
    assert gain.low < 0.5 < gain.high
    assert {"m", "d", "u", "h"} <= set(attempts["merged_products"].nodes)
    alone, race = races[-2:]
    assert [role for _, role in alone] == [Role.BASELINE], "the batches"
    assert race[0] == ("onnxruntime fp32", Role.BASELINE)
    assert {role for _, role in race[1:]} == {Role.CHANGE}
    (section,) = (section for section in sections(report) if section.key == "advice")
    assert 'simplify.rewrites=["early_rows", "merged_products"]' in {
        row[-1] for row in section.tables[0].rows
    }
    assert advice.conclusion in section.paragraphs
    assert "crucible doctor --measure" in advice.note, "its budget leaves no time for the peaks"


def test_following_the_advice_removes_the_flaw(tmp_path: Path) -> None:
    report = compiled(tmp_path, simplify={"rewrites": ["merged_products"]})
    assert "merged_products" not in by_rule(advice_of(report))
    assert sum(node.operator == "MatMul" for node in report.graph) == 2
    notes = [note.text for note in report.notes]
    assert any("the rewrite merged_products changed 4 nodes" in text for text in notes)


def test_without_the_key_nothing_more_is_built(tmp_path: Path) -> None:
    report = compiled(tmp_path, advise=False)
    assert report.advice is None
    assert "advise" not in {step.stage for step in report.steps}
    assert "advice" not in {section.key for section in sections(report)}


def test_an_alternative_that_cannot_be_built_or_measured_is_listed(tmp_path: Path) -> None:
    def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if function is build and arguments[2].profiles[0].dims["batch"].max == 1:
            raise ModelError("no kernel takes this shape", "another shape")
        found = run_here(function, *arguments, **named)
        if function is benchmark and len(arguments[0]) > 1:
            *others, last = found.results
            lost = BenchmarkFailure(label=last.label, reason="its process ended")
            if "merged_products" in last.label:
                return found.model_copy(update={"results": (*others, lost)})
        return found

    attempts = by_rule(advice_of(compiled(tmp_path, run)))
    assert attempts["one_shape"].outcome is Outcome.FAILED
    assert attempts["one_shape"].detail == "no kernel takes this shape"
    assert attempts["merged_products"].outcome is Outcome.UNMEASURED
    assert attempts["merged_products"].detail == "its process ended"


def test_beside_an_own_model_the_best_candidate_is_changed(tmp_path: Path) -> None:
    """With the verdict `keep` the delivered engine is the user's own."""
    report = compiled(tmp_path)
    engine = report.engine_delivered
    assert engine is not None
    own = engine.model_copy(
        update={"recipe": engine.recipe.model_copy(update={"variant": "as given"})}
    )
    runner = Runner(Store(tmp_path / "home"), run=run_here)
    only = ["merged_products"]
    kept = report.model_copy(update={"winner": own.recipe.label})
    found = advise_again(kept, report.plan, own, runner, only)
    assert found.label == engine.recipe.label
    assert found.note.startswith("onnxruntime as given fp32 is delivered, which advice does not")
    assert "onnxruntime fp32 took " in found.note
    assert next(iter(advice_lines(found))) == found.note
    first = advise_again(report, report.plan, engine, runner, only)
    assert [attempt.rule for attempt in first.attempts] == only
    assert first.note == ""


def test_without_a_candidate_of_the_graph_there_is_no_advice(tmp_path: Path) -> None:
    report = compiled(tmp_path)
    engine = report.engine_delivered
    assert engine is not None
    torch = engine.recipe.model_copy(update={"backend": "pytorch"})
    candidates = tuple(
        each.model_copy(update={"recipe": torch, "label": torch.label})
        for each in report.candidates
    )
    others = report.model_copy(update={"candidates": candidates})
    runner = Runner(Store(tmp_path / "home"), run=run_here)
    delivered = engine.model_copy(update={"recipe": torch})
    with pytest.raises(ModelError, match="no accurate candidate is made from the ONNX graph"):
        advise_again(others, report.plan, delivered, runner)


def test_a_report_without_an_engine_says_why_it_has_no_advice(tmp_path: Path) -> None:
    accuracy = {"thresholds": {"min_cosine": 1.1}}
    report = compiled(tmp_path, accuracy=accuracy)
    assert report.advice is None
    assert "there is no advice: no engine is delivered" in {note.text for note in report.notes}


def test_the_command_lists_every_attempt(tmp_path: Path) -> None:
    """In one process each, nothing can be compared: that is no gain of 0."""
    out = tmp_path / "out"
    done = crucible("compile", plan_of(tmp_path, advise=False), "--out", out, "--json")
    assert done.code == 0, done.err
    result = crucible("advise", out, "--rule", "merged_products")
    assert result.code == 0, result.err
    assert [each["rule"] for each in result.summary["attempts"]] == ["merged_products"]
    assert "not advised merged_products: " in result.out
    assert "could not be measured" in result.out
    wrong = crucible("advise", out, "--rule", "speed")
    assert wrong.code == 1
    assert "expected --rule" in wrong.err
