"""From a plan with images to a TensorRT engine that takes bytes, and is best at throughput."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

import pipeline
from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.report.bundle import load_engine
from tests.builders.convert import RESIDUAL, model_from_text

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PLAN = {
    "model": {"path": "source.onnx"},
    "profiles": [{"N": [1, 2, 16]}],
    "preprocess": {"x": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}},
    "data": {role: f"{role}.npz" for role in ("calibration", "selection", "validation")},
    "accuracy": {"metric": "cosine", "thresholds": {"min_cosine": 0.9}},
    "candidates": [
        {"backend": "tensorrt", "precision": precision} for precision in ("fp32", "fp16", "int8")
    ],
    "objective": "throughput",
    "benchmark": {"budget_s": 40, "duration_s": 1},
}


def test_an_engine_of_bytes_is_served_as_it_was_measured_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path / "home"))
    model_from_text(tmp_path, RESIDUAL)
    random = np.random.default_rng(0)
    for role in ("calibration", "selection", "validation"):
        images = random.integers(0, 256, (40, 8, 8, 3)).astype(np.uint8)
        np.savez(tmp_path / f"{role}.npz", x=images)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    report = pipeline.compile(tmp_path / "plan.yaml", tmp_path / "out")
    for candidate in report.candidates:
        assert candidate.engine is not None, candidate.reason
        assert candidate.engine.inputs[0].dtype == "uint8"
        assert candidate.selection is not None
        assert candidate.selection.passed, candidate.label
        if candidate.state == "mislabelled":  # TensorRT may find fp32 kernels faster
            continue
        assert candidate.benchmark is not None, candidate.reason
        assert candidate.benchmark.load is not None
        tried = {(point.batch, point.sessions) for point in candidate.benchmark.load.points}
        assert {(1, 1), (16, 1)} <= tried
    # which of them is fastest is measured, and no part of this test
    assert report.verdict in ("accepted", "keep", "unproven"), report.reasons
    if report.verdict == "keep":
        return
    best = report.best_point
    assert best is not None
    x = images[: best.batch]
    loaded = backends.load(load_engine(tmp_path / "out"))
    sessions = [loaded.session() for _ in range(best.sessions)]
    answers = [run_session(session, {"x": x})["y"] for session in sessions]
    for session in sessions:
        session.close()
    loaded.close()
    with pipeline.open_engine(tmp_path / "out") as engine:
        buffer = engine.input_buffer("x", x.shape)
        buffer[...] = x
        expected = engine.run({"x": buffer})["y"]
    for answer in answers:
        np.testing.assert_array_equal(answer, expected)
