"""OpenVINO counts means of all runs: the traced ones are what the others leave over."""

from __future__ import annotations

import pytest

from pipeline.backends.openvino.tracing import MEANS, activity_from_means, mean_seconds
from pipeline.results.timeline import Window
from tests.pipeline.benchmark.timeline import run_from


def test_the_means_of_the_warm_up_are_taken_away() -> None:
    before, after = {"a": 100, "b": 50}, {"a": 30, "b": 50, "new": 7}
    seconds = mean_seconds(before, 2, after, 8)
    # a: 10 runs of 30 us without 2 of 100 us, over 8 runs
    assert seconds == pytest.approx({"a": 12.5e-6, "b": 50e-6, "new": 8.75e-6})


def test_rounded_means_give_no_negative_time() -> None:
    assert mean_seconds({"a": 9}, 5, {"a": 4}, 5) == {"a": 0.0}


def test_each_run_shows_the_layers_in_their_order_and_unknown_ones_last() -> None:
    seconds = {"unknown": 1.0, "second": 2.0, "first": 3.0}
    activity = activity_from_means(
        seconds, ["first", "fused away", "second"], [run_from(0.0), run_from(100.0)]
    )
    assert [span.name for span in activity.spans] == ["first", "second", "unknown"] * 2
    assert activity.spans[3].window == Window(102.0, 105.0)
    assert activity.starts == "in order"
    assert activity.notes == (MEANS,)
