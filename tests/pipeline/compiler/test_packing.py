"""A plan that declares packing: what the report says of it, and what is refused."""

from pathlib import Path

import pytest

from pipeline.compiler.compile import compile_plan
from pipeline.compiler.context import open_context
from pipeline.compiler.write_up import check_packing
from pipeline.errors import PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.schema import DataConfig
from pipeline.report.markdown import markdown
from tests.builders.halves import run_here
from tests.pipeline.benchmark.encoder import MEAN, POOLED, SCORES, encoder_engine, encoder_plan


def test_the_report_says_whether_packing_is_on(tmp_path: Path) -> None:
    runner = Runner(Store(tmp_path / "store"), run=run_here)
    report = compile_plan(encoder_plan(tmp_path), runner, "crucible compile plan.yaml")
    assert report.has_engine, report.reasons
    assert report.packing is not None
    assert report.packing.reason == ""
    assert "Packing is on: 7 sequences of the selection set had the same" in markdown(report)
    leak = check_packing(
        open_context(encoder_plan(tmp_path / "leak", hidden=MEAN), runner),
        encoder_engine(encoder_plan(tmp_path / "leak", hidden=MEAN), tmp_path / "leak"),
    )
    off = markdown(report.model_copy(update={"packing": leak}))
    assert "Packing is off, so each row holds one sequence: a sequence of 64 tokens" in off


def test_generated_samples_prove_nothing(tmp_path: Path) -> None:
    plan = encoder_plan(tmp_path)
    context = open_context(
        plan.model_copy(update={"data": DataConfig()}), Runner(Store(tmp_path / "store"))
    )
    proof = check_packing(context, encoder_engine(plan, tmp_path))
    assert proof is not None
    assert proof.reason == "the selection set is generated, so it proves nothing"


def test_a_pooled_output_is_refused(tmp_path: Path) -> None:
    runner = Runner(Store(tmp_path / "store"), run=run_here)
    with pytest.raises(PlanError, match=r"output 'last_hidden_state' is \['batch', 16\], expected"):
        compile_plan(encoder_plan(tmp_path, SCORES, POOLED), runner, "")
