"""A PyTorch program from the command line: compiled, checked, measured again; not for Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.artifacts import Engine, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import UnsupportedError
from pipeline.report.triton import ModelVersion, check_target
from tests.builders.cli import ONE_PROCESS, crucible
from tests.pipeline.compiler.test_baselines import pytorch_task

PROGRAM = (
    "--set=candidates=[{backend: torch, precision: fp32, form: exported}]",
    f"--set=benchmark.budget_s={ONE_PROCESS['budget_s']}",
)
"""One candidate, and no ratio to the baseline: whichever is faster, the candidate is chosen."""


@pytest.mark.slow
def test_a_program_is_delivered_validated_and_measured_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plan, out = pytorch_task(tmp_path), tmp_path / "out"
    result = crucible("compile", plan, *PROGRAM, "--out", out)
    assert (result.code, result.summary["verdict"]) == (0, "unproven"), result.err
    assert result.summary["winner"] == "torch exported fp32"
    assert (out / "engine" / "program.pt2").is_file()
    assert crucible("validate", out).code == 0
    measured = crucible("bench", out)
    assert measured.code == 0, measured.err
    assert "torch exported fp32" in measured.out
    assert "torch exported fp32" in crucible("inspect", out).out
    refused = crucible("export", "--triton", "net/1", tmp_path / "models", "--from", out)
    assert refused.code == 1
    assert "a PyTorch backend of Triton's" in refused.err


def test_triton_is_not_given_a_program(tmp_path: Path) -> None:
    target = Target(backend="torch", version="2", device="cpu")
    recipe = Recipe(backend="torch", precision=Precision.FP32, form="aoti")
    engine = Engine(
        root=tmp_path,
        file="program.pt2",
        digest="d",
        target=target,
        recipe=recipe,
        inputs=(),
        outputs=(),
        profiles=(),
        threads=0,
        size_bytes=0,
    )
    with pytest.raises(UnsupportedError, match=r"\.pt2 packages, which was never tried") as caught:
        check_target(engine, ModelVersion("net", 1), tmp_path)
    assert "crucible promote" in caught.value.next_step
