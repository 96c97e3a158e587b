"""A plan with targets on this host: each that it has is compiled, and all are side by side."""

import json
from pathlib import Path

import pytest

from pipeline.compiler.targets import device_of, only
from pipeline.errors import PlanError
from pipeline.host.gpu import VISIBLE
from pipeline.plan.files import load_plan
from pipeline.plan.sections.targets import TargetConfig
from pipeline.report.files import load_report, write_targets
from pipeline.results.targets import OUTCOMES, TargetResult, TargetsSummary, exit_code, worst
from tests.builders.cli import CANDIDATES, ONE_PROCESS, crucible, write_task

GPU = {"gpu:0": {"name": "NVIDIA L4"}, "gpu:1": {"name": "NVIDIA H200"}, "cpu": {"name": "EPYC"}}


@pytest.mark.slow
def test_targets_are_compiled_one_after_another(tmp_path: Path) -> None:
    targets = ["cpu, onnxruntime>=1", {"device": "cpu", "threads": 1}, "gpu:No Such"]
    plan = write_task(tmp_path, targets=targets, candidates=CANDIDATES[:1], benchmark=ONE_PROCESS)
    out, home = tmp_path / "out", {"CRUCIBLE_HOME": str(tmp_path / "home")}
    result = crucible("compile", plan, "--out", out, env=home)
    assert result.code == 1, result.err
    summary = TargetsSummary.model_validate(result.summary)
    first, second, absent = summary.targets
    assert [first.name, second.name, absent.name] == [
        "cpu-onnxruntime-1",
        "cpu-1-thread",
        "gpu-No-Such",
    ]
    assert (absent.outcome, absent.report) == ("unavailable", None)
    assert absent.reason.startswith("this host lacks 'gpu:No Such'; it has cpu (")
    for target, threads in ((first, 0), (second, 1)):
        assert target.outcome == "unproven"
        report = load_report(out / target.name)
        assert report.plan.benchmark.threads == target.threads == threads
        assert (out / target.name / "engine").is_dir()
        assert target.report == f"{target.name}/report.html"
        assert f'href="{target.report}"' in (out / "targets.html").read_text()
        assert target.name in result.out
    assert json.loads((out / "targets.json").read_text()) == result.summary


def test_a_host_without_the_targets_delivers_none(tmp_path: Path) -> None:
    plan = write_task(tmp_path, targets=["gpu:No Such"])
    result = crucible("compile", plan, "--out", tmp_path / "out", "--json")
    assert (result.code, [each["outcome"] for each in result.summary["targets"]]) == (
        1,
        ["unavailable"],
    )


def test_python_takes_no_plan_with_targets(tmp_path: Path) -> None:
    from pipeline.api import compile

    plan = load_plan(write_task(tmp_path, targets=["cpu"]))
    with pytest.raises(PlanError, match="one with `targets`"):
        compile(plan, tmp_path / "out")


@pytest.mark.parametrize(
    ("device", "found"),
    [("cpu", "cpu"), ("gpu", "gpu:0"), ("gpu:h200", "gpu:1"), ("gpu:7", None)],
)
def test_a_target_takes_the_first_device_that_fits(device: str, found: str | None) -> None:
    assert device_of(TargetConfig(device=device), GPU) == found


@pytest.mark.parametrize(
    ("before", "device", "within"),
    [(None, "cpu", ""), ("2,3", "cpu", ""), (None, "gpu:1", "1"), ("2,3", "gpu:1", "3")],
)
def test_only_the_device_of_the_target_is_visible(
    monkeypatch: pytest.MonkeyPatch, before: str | None, device: str, within: str
) -> None:
    import os

    monkeypatch.delenv(VISIBLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VISIBLE, before)
    with only(device):
        assert os.environ[VISIBLE] == within
    assert os.environ.get(VISIBLE) == before


def test_the_worst_outcome_decides_the_exit_code() -> None:
    assert worst(["accepted", "unavailable", "rejected"]) == "unavailable"
    assert worst(["keep", "accepted"]) == "keep"
    assert [exit_code(outcome) for outcome in OUTCOMES] == [0, 0, 0, 2, 1, 1, 1]


def test_texts_in_the_page_of_targets_are_escaped(tmp_path: Path) -> None:
    failed = TargetResult(name="cpu", target="cpu", outcome="failed", reason="<script>no")
    write_targets(
        TargetsSummary(name="<b>", created="2026-01-31T12:00:00", targets=(failed,)), tmp_path
    )
    text = (tmp_path / "targets.html").read_text()
    assert "&lt;script&gt;no" in text
    assert "<script" not in text
    assert "<b>" not in text
