"""The whole line with images that the engine preprocesses: from bytes to a delivered engine."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.compiler.baselines import build_reference
from pipeline.compiler.compile import compile_plan
from pipeline.compiler.context import open_context
from pipeline.compiler.graph import export_model
from pipeline.core.artifacts import Artifact
from pipeline.errors import DataError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.plan.schema import Plan
from pipeline.report.markdown import markdown
from tests.builders.cli import ONE_PROCESS
from tests.builders.convert import RESIDUAL, model_from_text
from tests.builders.halves import run_here

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def written_plan(folder: Path) -> Plan:
    model_from_text(folder, RESIDUAL)
    random = np.random.default_rng(0)
    for role, count in {"calibration": 40, "selection": 30, "validation": 30}.items():
        x = random.integers(0, 256, (count, 9, 7, 3)).astype(np.uint8)
        np.savez(folder / f"{role}.npz", x=x)
    plan = {
        "model": {"path": "source.onnx"},
        "profiles": [{"N": [1, 2, 4]}],
        "preprocess": {
            "x": {
                "mean": MEAN,
                "std": STD,
                "resize": {"source": [9, 7], "target": [8, 8], "filter": "linear"},
            }
        },
        "data": {role: f"{role}.npz" for role in ("calibration", "selection", "validation")},
        "accuracy": {"metric": "cosine", "thresholds": {"min_cosine": 0.9}},
        "candidates": [
            {"backend": backend, "precision": precision}
            for backend in ("onnxruntime", "openvino")
            for precision in ("fp32", "int8")
        ],
        "benchmark": ONE_PROCESS,
        "serving": {"image": {"input": "x", "size": [9, 7]}},
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return load_plan(folder / "plan.yaml")


def test_engines_take_bytes_and_are_compared_with_the_model_behind_numpy(tmp_path: Path) -> None:
    plan = written_plan(tmp_path)
    runner = Runner(Store(tmp_path / "home"), run=run_here)
    report = compile_plan(plan, runner, "crucible compile plan.yaml")
    assert report.verdict == "accepted", report.reasons
    for candidate in report.candidates:
        assert candidate.engine is not None, candidate.reason
        (spec,) = candidate.engine.inputs
        assert (spec.dtype, spec.shape) == ("uint8", ("N", 9, 7, 3))
        assert candidate.selection is not None
        assert candidate.selection.passed
        if candidate.recipe.precision == "fp32":
            (error,) = candidate.selection.outputs
            assert error.cosine > 0.99999
    context = open_context(plan, runner)
    reference = build_reference(context, export_model(context))
    assert isinstance(reference, Artifact)
    assert reference.inputs[0].dtype == "float32"  # the model as it was given
    text = markdown(report)
    assert "## Preprocessing inside the engine" in text
    assert "resize from 9 x 7 to 8 x 8 (linear, not antialiased)" in text
    assert "resizes them to 9 x 7 outside the engine" in text
    assert "| 189 B | 768 B |" in text


def test_a_set_of_values_is_refused_before_anything_runs(tmp_path: Path) -> None:
    plan = written_plan(tmp_path)
    np.savez(tmp_path / "validation.npz", x=np.zeros((4, 3, 8, 8), np.float32))
    with pytest.raises(DataError, match=r"'x' is float32 \[4, 3, 8, 8\]"):
        open_context(plan, Runner(Store(tmp_path / "home"), run=run_here))
