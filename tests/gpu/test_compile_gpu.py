"""Whole compiles on a real GPU: the digits of the demo, with the candidates that Crucible chooses
by itself, and what is delivered of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.backends.tensorrt import library as trt_library
from pipeline.compiler.compile import compile_plan, publish_report
from pipeline.core.recipe import Precision
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.results.candidates import Candidate
from pipeline.results.precision_audit import time_by_precision
from pipeline.results.report import Report
from tests.builders.cli import crucible

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SHORT = (
    "benchmark.duration_s=0.2",
    "benchmark.sizes=[{batch: 1}]",
    "tensorrt.optimization_level=1",
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """The demo's report and the folder it was delivered to; nothing in it names a backend."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRUCIBLE_HOME", str(folder / "home"))  # the timing cache's
        report = compile_plan(
            load_plan(ROOT / "configs" / "digits.yaml", SHORT),
            Runner(Store(folder / "home")),
            "crucible compile digits.yaml",
        )
        publish_report(report, folder / "out")
    return report, folder / "out"


@pytest.fixture(scope="module")
def candidates(compiled: tuple[Report, Path]) -> dict[str, Candidate]:
    return {candidate.label: candidate for candidate in compiled[0].candidates}


def expected_labels() -> set[str]:
    """What Crucible tries by itself with calibration data and so small a model: no AOTInductor
    package.

    TensorRT 11 knows no implicit int8.
    """
    target = tensorrt_.probe()
    floats = ["fp32", "fp16"]
    if trt_library.numbers(target.compute_capability or "") >= (8, 0):
        floats += ["tf32", "bf16"]
    labels = {*(f"tensorrt {precision}" for precision in floats), "tensorrt int8 entropy s8s8"}
    return labels | (
        {"tensorrt int8 implicit entropy"} if trt_library.numbers(target.version) < (11,) else set()
    )


def test_the_digits_end_with_an_accurate_engine_of_the_gpu(compiled: tuple[Report, Path]) -> None:
    """Whether it is proved faster depends on what else runs on the host."""
    report, folder = compiled
    if report.ratio is None:
        assert report.verdict == "unproven", report.reasons
    else:
        assert report.verdict == ("accepted" if report.ratio.low > 1 else "keep"), report.reasons
    assert (report.winner or "").startswith("tensorrt ")
    assert report.validation is not None
    assert report.validation.metric is not None
    assert report.validation.metric.drop <= 0.01
    assert report.environment.gpus
    for file in ("report.json", "report.md", "report.html"):
        assert (folder / file).stat().st_size > 1000


def test_crucible_tries_all_floats_and_int8_by_itself(candidates: dict[str, Candidate]) -> None:
    assert set(candidates) == expected_labels()
    for label, candidate in candidates.items():
        assert candidate.selection is not None, f"{label}: {candidate.reason}"
        assert candidate.selection.metric is not None
        assert candidate.selection.metric.drop <= 0.01, label
        if may_be_mislabelled(candidate) and candidate.state == "mislabelled":
            continue
        assert candidate.state == "measured", f"{label}: {candidate.reason}"
        assert candidate.benchmark is not None


def may_be_mislabelled(candidate: Candidate) -> bool:
    """TF32 is allowed too, not ordered: fp32 kernels may be faster for small layers."""
    return is_left_to_tensorrt(candidate) or candidate.recipe.precision is Precision.TF32


def is_left_to_tensorrt(candidate: Candidate) -> bool:
    """Flags allow int8, they do not order it: at level 1 TensorRT may time so few int8 kernels that
    the digits' small layers all run fp16.
    """
    return candidate.recipe.realised_in == "flags" and candidate.recipe.precision is Precision.INT8


def test_every_engine_shows_what_it_really_runs(candidates: dict[str, Candidate]) -> None:
    for label, candidate in candidates.items():
        if candidate.recipe.backend == "torch":
            continue  # no layer table
        assert candidate.layers is not None, label
        shares = time_by_precision(candidate.layers)
        called_so = candidate.state != "mislabelled"
        assert called_so or may_be_mislabelled(candidate), f"{label}: {shares}"
        runs_so = shares.get(candidate.recipe.precision, 0.0) > 0
        if candidate.recipe.precision is not Precision.TF32:  # there half of the time counts
            assert runs_so is called_so, f"{label}: {shares}"
        assert shares.get("unknown", 0.0) < 0.1, f"{label}: {shares}"
        if candidate.recipe.precision is Precision.FP16:
            assert shares.get("fp32", 0.0) < 0.5, f"{label}: {shares}"


def test_the_delivered_engine_proves_itself_again(
    compiled: tuple[Report, Path], tmp_path: Path
) -> None:
    result = crucible("validate", compiled[1], cwd=tmp_path)
    assert result.code == 0, result.err
    assert result.summary["role"] == "validation"


def test_doctor_names_the_gpu_and_what_tensorrt_can_do_on_it() -> None:
    result = crucible("doctor")
    target = tensorrt_.probe()
    assert result.code == 0, result.err
    assert target.device in result.out
    assert target.version in result.out
