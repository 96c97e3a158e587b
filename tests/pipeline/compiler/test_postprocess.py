"""The whole line with outputs that the engine reduces: from a plan to a delivered engine."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.compiler.baselines import build_reference
from pipeline.compiler.compile import compile_plan
from pipeline.compiler.context import open_context
from pipeline.compiler.graph import export_model
from pipeline.compiler.remeasure import validate_again
from pipeline.errors import PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.plan.schema import Plan
from pipeline.report.markdown import markdown
from tests.builders.cli import ONE_PROCESS
from tests.builders.convert import RESIDUAL, model_from_text
from tests.builders.halves import run_here


def written_plan(folder: Path, step: dict[str, object], **accuracy: object) -> Plan:
    model_from_text(folder, RESIDUAL)
    random = np.random.default_rng(0)
    for role, count in {"calibration": 40, "selection": 30, "validation": 30}.items():
        x = random.standard_normal((count, 3, 8, 8)) * random.uniform(0.1, 4, (count, 3, 1, 1))
        np.savez(folder / f"{role}.npz", x=x.astype(np.float32))
    plan = {
        "model": {"path": "source.onnx"},
        "profiles": [{"N": [1, 2, 4]}],
        "postprocess": {"y": step},
        "data": {role: f"{role}.npz" for role in ("calibration", "selection", "validation")},
        "accuracy": {"max_drop": 0.2, "thresholds": {"min_agreement": 0.8}, **accuracy},
        "candidates": [
            {"backend": backend, "precision": precision}
            for backend in ("onnxruntime", "openvino")
            for precision in ("fp32", "int8")
        ],
        "benchmark": ONE_PROCESS,
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return load_plan(folder / "plan.yaml")


def test_engines_give_small_outputs_and_are_compared_with_the_whole_ones(tmp_path: Path) -> None:
    step: dict[str, object] = {"top_k": 3, "softmax": True}
    # the indices are the same for all samples: the weights are random
    plan = written_plan(tmp_path, step, metric="cosine", output="y_values")
    runner = Runner(Store(tmp_path / "home"), run=run_here)
    report = compile_plan(plan, runner, "crucible compile plan.yaml")
    assert report.verdict == "accepted", report.reasons
    for candidate in report.candidates:
        assert candidate.engine is not None, candidate.reason
        assert [(spec.name, spec.dtype, spec.shape) for spec in candidate.engine.outputs] == [
            ("y_indices", "int64", ("N", 3)),
            ("y_values", "float32", ("N", 3)),
        ]
        assert candidate.selection is not None
        indices, values = candidate.selection.outputs
        assert candidate.selection.passed
        assert indices.agreement is not None
        if candidate.recipe.precision == "fp32":
            assert indices.agreement > 0.9999
            assert values.cosine > 0.99999
    assert report.baseline is not None
    context = open_context(plan, runner)
    reference = build_reference(context, export_model(context))
    assert [spec.name for spec in reference.outputs] == ["y"]  # the model as it was given
    text = markdown(report)
    assert "## Postprocessing inside the engine" in text
    assert "the 3 highest probabilities (softmax) of axis -1, and their indices" in text
    assert report.delivered is not None
    again = validate_again(report, plan, report.delivered, runner)
    assert again.passed, again.failures


def test_an_impossible_plan_ends_before_an_engine_is_built(tmp_path: Path) -> None:
    runner = Runner(Store(tmp_path / "home"), run=run_here)
    too_many = written_plan(tmp_path, {"top_k": 6})
    with pytest.raises(PlanError, match=r"postprocess\.y\.top_k is 6"):
        compile_plan(too_many, runner, "crucible compile plan.yaml")
    no_cosine = written_plan(tmp_path, {"argmax": True}, metric="cosine")
    with pytest.raises(PlanError, match="'y_indices' holds indices"):
        compile_plan(no_cosine, runner, "crucible compile plan.yaml")
    assert {step.stage for step in runner.steps} == {"export"}
