"""Steps of `postprocess` that no model could give are errors of the plan."""

import re
from pathlib import Path

import pytest

from pipeline.errors import PlanError
from pipeline.plan.files import load_plan, plan_from_document

MODEL = {"model": {"path": "model.onnx"}}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({}, "postprocess.y: expected exactly one of `top_k: k` and `argmax: true`"),
        ({"top_k": 5, "argmax": True}, "expected exactly one of"),
        ({"top_k": 0}, "postprocess.y.top_k: Input should be greater than 0"),
        ({"argmax": True, "softmax": True}, "expected `softmax` with `top_k` only"),
        ({"top_k": 5, "axes": 1}, "unknown key 'postprocess.y.axes': did you mean 'axis'?"),
    ],
)
def test_impossible_steps_are_errors(step: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_from_document({**MODEL, "postprocess": {"y": step}}, Path())


def test_an_output_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("model: {path: m.onnx}\npostprocess:\n  y: {top_k: 1}\n  y: {argmax: true}\n")
    with pytest.raises(PlanError, match="duplicate key 'y'"):
        load_plan(path)
