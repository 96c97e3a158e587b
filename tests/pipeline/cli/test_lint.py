"""`crucible lint` and the compile of models that bring their own Q/DQ."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from pipeline.cli.inspect import model_lines, quantised_lines
from pipeline.cli.lint import (
    ALL,
    finding_lines,
    findings_of,
    fix_model,
    fixed_lines,
    gain_lines,
    measure_fixes,
)
from pipeline.compiler.candidates.prepare import lint_notes
from pipeline.compiler.compile import compile_plan
from pipeline.core.artifacts import NoteCode, Target
from pipeline.core.recipe import CalibrationMethod, Placement, Precision, Recipe
from pipeline.core.shapes import Profile
from pipeline.errors import ModelError, PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import load_plan, plan_from_model
from pipeline.quantization.existing_qdq import lost_scales
from pipeline.results.report import Report
from pipeline.stages.calibrate import calibrate
from pipeline.stages.convert import convert
from tests.builders.cli import crucible, write_model, write_task
from tests.builders.convert import table_of
from tests.builders.halves import run_here
from tests.builders.qat import CONSTANTS, GAINS, NORMED, PLAIN, quantised

PROFILES = (Profile.model_validate({"dims": {"N": [1, 2, 4]}}),)


@pytest.fixture
def normed(tmp_path: Path) -> Path:
    onnx.save(quantised(NORMED, constants=CONSTANTS + GAINS), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_the_mended_file_answers_as_the_given_one_and_has_fewer_findings(
    normed: Path, tmp_path: Path
) -> None:
    fixed = fix_model(normed, tmp_path / "fixed.onnx", "openvino", PROFILES)
    assert dict(fixed.applied) == {"weight-in-floats": 2, "norm-after": 1}
    assert fixed.difference < 1e-5
    assert "weight-in-floats 2, norm-after 1" in fixed_lines(fixed)[0]
    assert len(finding_lines(findings_of(fixed.path, "openvino"))) < len(
        finding_lines(findings_of(normed, "openvino"))
    )
    again = fix_model(fixed.path, tmp_path / "again.onnx", "openvino", PROFILES)
    assert "no finding can be fixed" in fixed_lines(again)[0]


def test_a_finding_of_several_backends_is_told_once(normed: Path) -> None:
    (line,) = [
        line for line in finding_lines(findings_of(normed, None)) if line.startswith("norm-after")
    ]
    assert line.startswith(
        "norm-after [onnxruntime, openvino, tensorrt, tensorrt_rtx] at conv, undo, bias, norm: "
    )
    assert line.endswith("; --fix fixes it")


def test_inspect_tells_the_findings_of_a_quantised_model_only(normed: Path, tmp_path: Path) -> None:
    assert any(
        line.startswith("quantised to int8: 3 DequantizeLinear") for line in model_lines(normed)
    )
    assert any("norm-after" in line for line in quantised_lines(normed, "tensorrt"))
    write_model(tmp_path / "plain.onnx")
    assert quantised_lines(tmp_path / "plain.onnx") == []


def test_each_fix_is_measured_alone_and_all_together(normed: Path, tmp_path: Path) -> None:
    plan = plan_from_model(normed, ["profiles=[{N: [1, 2, 4]}]"])
    gains = measure_fixes(plan, "onnxruntime", tmp_path, Runner(store(tmp_path), run=run_here))
    assert [gain.what for gain in gains] == ["weight-in-floats", "norm-after", ALL]
    assert all(gain.ratio is not None for gain in gains)
    lines = gain_lines(gains, findings_of(normed, "onnxruntime")["onnxruntime"])
    assert "times as fast (95 %" in lines[0]


def store(folder: Path):  # type: ignore[no-untyped-def]
    from pipeline.execution.store import Store

    return Store(folder / "home")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plain.onnx",), "quantises no activation"),
        (("plain.onnx", "--backend", "pytorch"), "no rules for the backend 'pytorch'"),
        (("model.onnx", "--fix", "out.onnx"), "--fix and --measure need --backend"),
        (("model.onnx", "--backend", "openvino", "--fix", "out.onnx"), "has no range in the plan"),
        (
            ("model.onnx", "--backend", "openvino", "--fix", "model.onnx", "--profile", "N=1"),
            "would overwrite",
        ),
        (("gone.onnx",), "no model at"),
    ],
)
def test_bad_input_is_refused_with_a_next_step(
    normed: Path, arguments: tuple[str, ...], words: str
) -> None:
    write_model(normed.parent / "plain.onnx")
    result = crucible("lint", *arguments, cwd=normed.parent)
    assert result.code == 1
    assert words in result.err
    assert "next" in result.err
    assert not (normed.parent / "out.onnx").exists()


def test_lint_as_json(normed: Path) -> None:
    result = crucible("lint", normed, "--backend", "openvino", "--json")
    assert result.code == 0, result.err
    assert {finding["rule"] for finding in json.loads(result.out)["openvino"]} >= {
        "norm-after",
        "weight-in-floats",
    }


# --- compile ---


def quantised_task(folder: Path, **changes: object) -> Path:
    """The tiny task whose model brings its own Q/DQ; its plan has no calibration data."""
    data = {role: f"{role}.npz" for role in ("selection", "validation")}
    plan = write_task(
        folder,
        **{
            "candidates": [{"backend": "onnxruntime", "precision": "int8"}],
            "data": data,
            **changes,
        },
    )
    recipe = Recipe(
        backend="onnxruntime",
        precision=Precision.INT8,
        method=CalibrationMethod.MINMAX,
        activation="uint8",
        weight_bits=7,
        placement=Placement(last_layer=True),
    )
    (folder / "made").mkdir()
    convert(
        onnx_model(folder, "model.onnx"),
        recipe,
        table_of({"x": (-4.0, 4.0), "r": (0.0, 6.0)}),
        (),
        folder / "made",
    )
    (folder / "made" / "model.onnx").rename(folder / "model.onnx")
    return plan


def compiled(plan: Path) -> Report:
    return compile_plan(
        load_plan(plan), Runner(store(plan.parent), run=run_here), "crucible compile plan.yaml"
    )


def test_a_model_with_its_own_scales_is_compiled_without_calibration(tmp_path: Path) -> None:
    report = compiled(quantised_task(tmp_path))
    assert report.verdict == "accepted"
    assert [candidate.label for candidate in report.candidates] == ["onnxruntime int8 given"]
    assert report.baseline is not None
    assert report.baseline.label == "onnxruntime as given int8"
    assert report.reference == "ONNX Runtime fp32, the file as given, its Q/DQ computed as written"
    assert {step.stage for step in report.steps}.isdisjoint({"calibrate", "cover"})
    assert heavy_precisions(report) == {Precision.INT8}
    engine = report.candidates[0].engine
    assert engine is not None
    assert lost_scales(onnx.load(tmp_path / "model.onnx").graph, onnx.load(engine.path).graph) == ""
    assert all(
        "crucible lint" in note.text for note in report.candidates[0].notes if note.stage == "lint"
    )


def heavy_precisions(report: Report) -> set[str]:
    """What the layers that multiply really ran in."""
    table = report.candidates[0].layers
    assert table is not None
    return {str(layer.precision) for layer in table.layers if layer.heavy}


def test_a_model_that_would_run_in_floats_is_repaired_and_runs_in_8_bits(tmp_path: Path) -> None:
    rounded = NORMED.replace(
        "y = Relu(n)",
        "r = Relu(n) [q2] rq = QuantizeLinear(r, t, u0) [dq2] y = DequantizeLinear(rq, t, u0)",
    )
    onnx.save(quantised(rounded, constants=CONSTANTS + GAINS), tmp_path / "model.onnx")
    overrides = [
        "profiles=[{N: [1, 2, 4]}]",
        "candidates=[{backend: onnxruntime, precision: int8}]",
    ]
    runner = Runner(store(tmp_path), run=run_here)
    report = compile_plan(
        plan_from_model(tmp_path / "model.onnx", overrides), runner, "crucible compile model.onnx"
    )
    assert report.candidates[0].state == "measured"
    assert heavy_precisions(report) == {Precision.INT8}
    repairs = [note.text for note in report.candidates[0].notes if note.stage == "convert"]
    assert len(repairs) == 1
    assert "repairs that do not change the arithmetic: " in repairs[0]
    assert "norm-after 1x" in repairs[0]
    fixed = fix_model(tmp_path / "model.onnx", tmp_path / "fixed.onnx", "onnxruntime", PROFILES)
    assert all(f"{rule} {count}x" in repairs[0] for rule, count in fixed.applied.items())


@pytest.mark.parametrize(("flags", "warned"), [(("avx2",), True), (("avx2", "avx_vnni"), False)])
def test_only_a_cpu_that_saturates_is_said_to(
    tmp_path: Path, flags: tuple[str, ...], warned: bool
) -> None:
    onnx.save(
        quantised(PLAIN, constants=CONSTANTS.replace("ws = {0.01, 0.02", "ws = {0.0001, 0.0001")),
        tmp_path / "wide.onnx",
    )
    wide, target = (
        onnx_model(tmp_path, "wide.onnx"),
        Target(backend="openvino", version="1", device="CPU", cpu_flags=flags),
    )
    recipe = Recipe(backend="openvino", precision=Precision.INT8, quantizer="given")
    codes = [note.code for note in lint_notes(wide, recipe, target)]
    assert (NoteCode.SATURATES in codes) is warned
    assert lint_notes(wide, recipe.model_copy(update={"quantizer": "crucible"}), target) == ()


def test_what_such_a_model_does_not_need_is_said_and_not_done(tmp_path: Path) -> None:
    report = compiled(
        quantised_task(
            tmp_path,
            data={role: f"{role}.npz" for role in ("calibration", "selection")},
            ablate=True,
        )
    )
    texts = {note.text for note in report.notes if note.stage == "calibrate"}
    own = "the model brings its own Q/DQ"
    assert texts == {
        f"calibration data is not needed: {own}",
        f"`ablate` has no switches to reverse: {own}",
    }
    assert calibrate.__name__ not in {step.stage for step in report.steps}
    assert len(report.candidates) == 1


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        ({"precision": "fp32"}, "it would run int8 under the name of fp32"),
        ({"precision": "int8", "method": "entropy"}, "which decide `method`"),
        ({"precision": "int8", "placement": {"last_layer": True}}, "which decide `placement`"),
        ({"precision": "int8", "keep_fp32": ["hidden"]}, "which decide `keep_fp32`"),
    ],
)
def test_a_candidate_by_another_name_is_refused_before_anything_starts(
    tmp_path: Path, candidate: dict[str, object], words: str
) -> None:
    plan = quantised_task(tmp_path, candidates=[{"backend": "onnxruntime", **candidate}])
    with pytest.raises(PlanError, match=words):
        compiled(plan)
    assert not list((tmp_path / "home").glob("artifacts/*"))


def test_lint_of_a_plain_model_says_what_to_do_instead(tmp_path: Path) -> None:
    write_model(tmp_path / "plain.onnx")
    with pytest.raises(ModelError, match="quantises no activation"):
        findings_of(tmp_path / "plain.onnx", None)
