"""Steps of `preprocess` that no model could take are errors of the plan."""

import re
from pathlib import Path

import pytest

from pipeline.errors import PlanError
from pipeline.plan.files import plan_from_document

MODEL = {"model": {"path": "m.onnx"}}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"std": 0}, "preprocess.x.std: expected numbers above 0"),
        ({"std": [0.2, 0.0, 0.2]}, "preprocess.x.std: expected numbers above 0"),
        ({"mean": []}, "preprocess.x.mean"),
        ({"mean": [float("nan")]}, "preprocess.x.mean.0: Input should be a finite number"),
        ({"scale": 0}, "preprocess.x.scale: Input should be greater than 0"),
        ({"layout": "HWC"}, "preprocess.x.layout: Input should be 'NCHW' or 'NHWC'"),
        ({"men": 0.5}, "unknown key 'preprocess.x.men': did you mean 'mean'?"),
        (
            {"resize": {"source": [9, 9], "target": [8, 8], "filter": "lanczos"}},
            "preprocess.x.resize.filter: expected filter linear",
        ),
        (
            {"resize": {"source": [9, 0], "target": [8, 8], "filter": "linear"}},
            "preprocess.x.resize.source.1: Input should be greater than 0",
        ),
    ],
)
def test_impossible_steps_are_errors_of_the_plan(step: object, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_from_document({**MODEL, "preprocess": {"x": step}}, Path())
