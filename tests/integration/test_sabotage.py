"""Each fault that a compile must not let through, planted in the real story: the verdict is
`rejected`, exit code 2, for the right reason.

Every plan allows one candidate, and none is rescued. The first tests show that without a fault the
same plans are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli.running import exit_code
from pipeline.cli.terminal import ran_text
from pipeline.compiler.compile import compile_plan
from pipeline.compiler.next_steps import FIX_CALIBRATION, FIX_LABELS
from pipeline.errors import DataError, PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.report.markdown import markdown
from pipeline.results.report import Report
from tests.builders.cli import FEATURES, answers, crucible, write_task
from tests.builders.halves import run_here
from tests.integration.sabotage import (
    FP32,
    INT8,
    QUICK,
    Fault,
    another_model,
    classes_permuted,
    compiled,
    engine_of,
    never_quantised,
    one_scale_times_8,
    one_value,
    one_weight_scale_times_8,
    output_renamed,
    samples_permuted,
    write_sabotaged,
)


def rejected(report: Report, message: str) -> None:
    assert (report.verdict, report.winner, len(report.candidates)) == ("rejected", None, 1)
    assert exit_code(report.verdict) == 2  # what `crucible compile` ends with
    assert message in report.reasons[0]
    assert report.next_steps


@pytest.mark.parametrize("candidates", [FP32, INT8])
def test_without_a_fault_the_candidate_is_accepted(
    tmp_path: Path, candidates: list[dict[str, Any]]
) -> None:
    report = compiled(tmp_path, candidates)
    assert (report.verdict, exit_code(report.verdict)) == ("accepted", 0)
    assert [
        note.text for note in report.candidates[0].notes if "ranges do not fit" in note.text
    ] == []
    assert report.validation is not None
    assert report.validation.metric is not None
    interval = report.validation.metric.interval
    assert interval.low < 0 < interval.high  # even where no answer changed
    table = report.candidates[0].layers
    assert table is not None
    assert {layer.precision for layer in table.layers if layer.heavy} == {
        candidates[0]["precision"]
    }
    assert ran_text(table).startswith(candidates[0]["precision"])
    assert "## What really ran" in markdown(report)


@pytest.mark.parametrize("fault", [one_scale_times_8, one_weight_scale_times_8])
def test_a_quantisation_scale_times_8(tmp_path: Path, fault: Fault) -> None:
    report = compiled(tmp_path, INT8, after_convert=fault)
    rejected(report, "output 'y': smallest cosine")
    assert engine_of(report).recipe.precision == "int8"


@pytest.mark.parametrize(
    ("backend", "state", "message"),
    [
        (
            "onnxruntime",
            "mislabelled",
            "called int8, but its heavy layers run 0 % int8, 100 % fp32 by time; slowest: ",
        ),
        (
            "openvino",
            "refused",
            "OpenVINO would only pretend to run int8: its 2 heavy layers run in f32",
        ),
    ],
)
def test_an_fp32_graph_that_is_called_int8(
    tmp_path: Path, backend: str, state: str, message: str
) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
    report = compiled(tmp_path, [{**INT8[0], "backend": backend}], after_convert=never_quantised)
    rejected(report, f"{state}: {message}")
    (candidate,) = report.candidates
    assert (candidate.state, candidate.benchmark) == (state, None)
    assert (candidate.selection is not None) is (
        state == "mislabelled"
    )  # its answers are told all the same
    if candidate.selection:
        assert candidate.selection.metric is not None
        assert candidate.selection.passed


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (classes_permuted, "top1 drops by"),
        (samples_permuted, "top1 drops by"),
        (another_model, "top1 drops by"),
        (
            output_renamed,
            (
                "output 'y' is missing; the engine has logits; output 'logits' is not an output of"
                " the reference, which has y"
            ),
        ),
    ],
)
def test_an_engine_that_answers_otherwise(tmp_path: Path, fault: Fault, message: str) -> None:
    report = compiled(tmp_path, FP32, before_build=fault)
    rejected(report, message)
    assert report.candidates[0].state == "failed accuracy"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "1 values are NaN on one side only"),
        (np.inf, "1 values are infinite on one side only"),
    ],
)
def test_one_value_of_one_sample_that_is_not_finite(
    tmp_path: Path, value: float, message: str
) -> None:
    write_sabotaged(tmp_path, FP32)
    with np.load(tmp_path / "selection.npz") as archive:
        sample = archive["x"][137]
    report = compiled(tmp_path, FP32, before_build=one_value(value, sample))
    rejected(report, message)
    assert report.candidates[0].selection is not None
    assert report.candidates[0].selection.outputs[0].worst_sample == 137


# -- faults in the data ------------------------------------------------------


def resave(file: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    with np.load(file) as archive:
        arrays = dict(archive)
    change(arrays)
    np.savez(file, **arrays)


def shuffle_labels(arrays: dict[str, np.ndarray]) -> None:
    arrays["labels"] = np.random.default_rng(5).permutation(arrays["labels"])


def test_shuffled_labels_end_in_exit_code_2_with_a_reference_at_chance(tmp_path: Path) -> None:
    plan = write_sabotaged(tmp_path, FP32)
    for role in ("selection", "validation"):
        resave(tmp_path / f"{role}.npz", shuffle_labels)
    result = crucible(
        "compile", plan, "--out", tmp_path / "out", env={"CRUCIBLE_HOME": str(tmp_path / "home")}
    )
    assert result.code == 2
    assert result.summary["verdict"] == "rejected"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "failed accuracy: the reference itself scores at chance: top1 0." in report["reasons"][0]
    assert report["next_steps"] == [FIX_LABELS]


def test_labels_shuffled_in_the_validation_set_only_are_found_there(tmp_path: Path) -> None:
    write_sabotaged(tmp_path, FP32)
    resave(tmp_path / "validation.npz", shuffle_labels)
    report = compiled(tmp_path, FP32)
    assert (report.verdict, exit_code(report.verdict)) == ("rejected", 2)
    assert "validation: the reference itself scores at chance" in report.reasons[0]
    assert report.next_steps[0] == FIX_LABELS


@pytest.mark.parametrize(
    ("scale", "message"),
    [(0.05, "lies outside -0.1"), (100.0, "which leaves most of the 8 bits unused")],
    ids=["too narrow", "too wide"],
)
def test_calibration_on_another_domain_says_that_its_ranges_do_not_fit(
    tmp_path: Path, scale: float, message: str
) -> None:
    write_sabotaged(tmp_path, INT8)
    resave(
        tmp_path / "calibration.npz",
        lambda arrays: arrays.update(x=arrays["x"] * np.float32(scale)),
    )
    report = compiled(tmp_path, INT8)
    rejected(report, "the calibration set's ranges do not fit the selection set: ")
    assert message in report.reasons[0]
    assert "top1 drops by" in report.reasons[0]
    assert report.next_steps[0] == FIX_CALIBRATION


def test_samples_that_two_sets_share_are_found_under_any_name_and_at_any_place(
    tmp_path: Path,
) -> None:
    plan = write_sabotaged(tmp_path, FP32)
    with np.load(tmp_path / "calibration.npz") as archive:
        known = archive["x"][[7, 60]]

    def mix(arrays: dict[str, np.ndarray]) -> None:
        arrays["x"][[3, 200]] = known
        arrays["labels"] = answers(arrays["x"])

    resave(tmp_path / "validation.npz", mix)
    with pytest.raises(
        DataError,
        match=(
            "calibration and validation share 2 samples: calibration 7 = validation 3, calibration"
            " 60 = validation 200"
        ),
    ):
        compile_plan(
            load_plan(plan),
            Runner(Store(tmp_path / "home"), run=run_here),
            "crucible compile plan.yaml",
        )


def test_a_small_set_prints_the_interval_of_the_drop_and_warns(tmp_path: Path) -> None:
    write_sabotaged(tmp_path, FP32)
    x = np.random.default_rng(77).normal(0, 1, (40, FEATURES)).astype(np.float32)
    np.savez(tmp_path / "validation.npz", x=x, labels=answers(x))
    report = compiled(tmp_path, FP32)
    assert report.verdict == "accepted"
    assert "on 40 validation samples: drop +0.0000 (95 % -0.0876 to +0.0876)" in report.reasons[0]
    notes = [note.text for label, note in report.every_note() if label == ""]
    assert (
        "validation: 40 samples leave the drop uncertain (95 % -0.0876 to +0.0876); 200 or more"
        " narrow its interval" in notes
    )


def test_a_metric_that_cannot_tell_samples_apart_ends_the_compile(tmp_path: Path) -> None:
    (tmp_path / "blind_metric.py").write_text(
        "def confidence(outputs, labels, reference):\n    return outputs.max(axis=1)\n"
    )
    accuracy = {"metric": "blind_metric:confidence", "max_drop": 0.03}
    plan = write_task(tmp_path, candidates=FP32, benchmark=QUICK, accuracy=accuracy)
    with pytest.raises(
        PlanError,
        match="metric 'blind_metric:confidence' cannot tell right answers from wrong ones",
    ):
        compile_plan(
            load_plan(plan),
            Runner(Store(tmp_path / "home"), run=run_here),
            "crucible compile plan.yaml",
        )
