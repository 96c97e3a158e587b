"""ONNX Runtime's profile has a clock of its own, in whole microseconds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.backends.onnxruntime.tracing import activity_from_profile
from pipeline.errors import InternalError
from tests.pipeline.benchmark.timeline import ends_of, run_from

SECOND = 1_000_000


def event(name: str, start: int, seconds: int, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "ts": start * SECOND, "dur": seconds * SECOND, "args": arguments}


def profile(*events: dict[str, Any]) -> str:
    loading = {"name": "model_loading_array", "ts": 1, "dur": 3, "args": {}}
    return json.dumps([loading, *events])


def kernel(name: str, start: int, seconds: int) -> dict[str, Any]:
    shapes = {"input_type_shape": [{"float": [2, 3]}, {"int64": [1]}], "output_type_shape": []}
    return event(f"{name}_kernel_time", start, seconds, op_name="Gather", **shapes)


def test_the_last_runs_of_the_profile_are_those_of_the_timeline() -> None:
    warm_up = (event("model_run", 500, 8), kernel("table", 501, 7))
    traced = (event("model_run", 600, 8), kernel("table", 601, 2), kernel("next", 603, 4))
    activity = activity_from_profile(profile(*warm_up, *traced), [run_from(0.0)])
    # the run of 8 s lies in a call from 2 to 12: its start is between 2 and 4
    assert activity.clock_error_s == pytest.approx(1.0)
    table, behind = activity.spans
    assert (table.name, behind.name) == ("table", "next")
    assert ends_of(table) == pytest.approx([4.0, 6.0])
    assert ends_of(behind) == pytest.approx([6.0, 10.0])
    assert dict(table.detail) == {
        "operator": "Gather",
        "inputs": "float[2, 3], int64[1]",
        "outputs": "",
    }


@pytest.mark.parametrize("text", ["no JSON", "[]"])
def test_a_profile_without_the_runs_is_our_bug(text: str) -> None:
    with pytest.raises(InternalError):
        activity_from_profile(text, [run_from(0.0)])
