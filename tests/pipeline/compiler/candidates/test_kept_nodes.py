"""Nodes that fp16 cannot hold stay in fp32: such an engine is called so, timed, and may win; one
that is not what it is called by may not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.backends import BACKENDS
from pipeline.cli.terminal import candidate_table, console, verdict_lines
from pipeline.compiler.compile import compile_plan
from pipeline.core.artifacts import KeptNode
from pipeline.core.recipe import Precision
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.report.files import load_report, write_report
from pipeline.report.html import page
from pipeline.report.markdown import markdown
from pipeline.results.precision_audit import forced_share, mislabelled, precision_notes
from pipeline.results.report import Report
from tests.builders.cli import overflowing_task
from tests.builders.halves import TellingHalves, run_here
from tests.builders.layers import layer, table

LARGE = KeptNode(node="up", operator="MatMul", reason="values up to 1e+06 in 'x'")
TITLE = "halves fp16 keep norm, 3 nodes in fp32"
LOOP = KeptNode(node="gru", operator="GRU", reason="with sequence_lens", unnamed=True)


def test_a_node_that_was_left_in_fp32_counts_neither_way() -> None:
    mixed = table(layer("fp32", 4.0, nodes=("up", "bias")), layer("fp16", nodes=("stem",)))
    assert "20 % fp16, 80 % fp32" in mislabelled(Precision.FP16, mixed)
    assert mislabelled(Precision.FP16, mixed, forced=[LARGE]) == ""
    assert forced_share(mixed, [LARGE]) == pytest.approx(0.8)
    (note,) = precision_notes(mixed, Precision.FP16, forced=[LARGE])
    assert (note.level, note.text) == ("info", "1 node that stays in fp32: 80 % of the time")


def test_a_node_that_was_left_in_fp32_excuses_no_other() -> None:
    mixed = table(
        layer("fp32", 4.0, nodes=("up",)),
        layer("fp32", 2.0, nodes=("stem",)),
        layer("fp16", nodes=("head",)),
    )
    assert "33 % fp16, 67 % fp32" in mislabelled(Precision.FP16, mixed, forced=[LARGE])
    lower = table(layer("bf16", 4.0, nodes=("up",)), layer("fp16", nodes=("head",)))
    assert (
        mislabelled(Precision.FP16, lower, forced=[LARGE]) != ""
    )  # left in fp32, and yet not run so


def test_an_engine_with_all_heavy_layers_in_fp32_gets_a_warning() -> None:
    full = table(layer("fp32", nodes=("up",)), layer("fp16", 0.25, heavy=False))
    assert mislabelled(Precision.FP16, full, forced=[LARGE]) == ""
    (note,) = precision_notes(full, Precision.FP16, forced=[LARGE])
    assert note.level == "warning"
    assert note.text.endswith("every heavy layer is one of them, so no product runs in fp16")
    assert (
        mislabelled(Precision.FP16, full, ("up",), forced=[LARGE]) != ""
    )  # of a recipe that names every node


def test_the_kernels_of_a_loop_carry_no_names() -> None:
    inside = table(layer("fp32", 4.0), layer("fp16", nodes=("head",)))
    assert mislabelled(Precision.FP16, inside, forced=[LARGE]) != ""
    assert mislabelled(Precision.FP16, inside, forced=[LOOP]) == ""
    cast = table(
        layer("fp32", 4.0, nodes=("x_to_fp32",), operators=("Cast",)),
        layer("fp16", nodes=("head",)),
    )
    assert mislabelled(Precision.FP16, cast, forced=[LOOP]) == ""
    other = table(
        layer("fp32", 4.0, nodes=("stem",), operators=("MatMul",)), layer("fp16", nodes=("head",))
    )
    assert mislabelled(Precision.FP16, other, forced=[LOOP]) != ""


# --- a whole compile ---


def compiled(monkeypatch: pytest.MonkeyPatch, folder: Path, double: TellingHalves) -> Report:
    monkeypatch.setitem(BACKENDS, "halves", double)
    fp16 = {
        "precision": "fp16",
        "keep_fp32": ["norm"],
    }  # of which the double sums up squares in fp16
    candidates = [{"backend": "halves", "precision": "fp32"}, {"backend": "halves", **fp16}]
    plan = overflowing_task(
        folder, calibrated=True, candidates=candidates, simplify={"enabled": False}
    )
    return compile_plan(
        load_plan(plan), Runner(Store(folder / "home"), run=run_here), "crucible compile plan.yaml"
    )


def test_a_model_with_large_activations_keeps_its_accurate_fp16_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = compiled(monkeypatch, tmp_path, TellingHalves())
    _, fp16 = report.candidates
    assert (fp16.state, report.verdict, report.winner) == (
        "measured",
        "accepted",
        "halves fp16 keep norm",
    )
    assert fp16.benchmark is not None
    assert [node.node for node in fp16.kept_fp32] == ["up", "wide_relu", "down"]
    assert all("values up to" in node.reason for node in fp16.kept_fp32)
    assert fp16.title == report.title_of(fp16.label) == TITLE
    assert report.rescues == ()

    monkeypatch.setenv("COLUMNS", "200")
    console().print(candidate_table(report))
    shown = capsys.readouterr().out
    assert TITLE in shown
    assert "nodes in fp32 67 %" in shown  # two products in fp32, four in fp16
    assert TITLE in verdict_lines(report)[0]
    for text in (markdown(report), page(report)):
        assert TITLE in text
        assert "3: 67 % of the time" in text
    write_report(report, tmp_path / "out")
    assert load_report(tmp_path / "out").candidates[1].kept_fp32 == fp16.kept_fp32


def test_an_engine_that_runs_more_in_fp32_than_that_is_mislabelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = compiled(monkeypatch, tmp_path, TellingHalves(as_called=False))
    fp16 = report.candidates[1]
    assert (fp16.state, fp16.benchmark) == ("mislabelled", None)
    assert fp16.reason.startswith("called fp16, but its heavy layers run 0 % fp16, 100 % fp32")
    assert report.winner == "halves fp32"


@pytest.mark.gpu
def test_on_a_gpu_a_model_with_large_activations_keeps_its_accurate_fp16_engine(
    tmp_path: Path,
) -> None:
    fp16 = {"backend": "tensorrt", "precision": "fp16", "keep_fp32": ["norm"]}
    candidates = [fp16, {"backend": "tensorrt", "precision": "fp32"}]
    plan = overflowing_task(tmp_path, calibrated=True, candidates=candidates)
    report = compile_plan(
        load_plan(plan), Runner(Store(tmp_path / "home")), "crucible compile plan.yaml"
    )
    candidate = report.candidates[0]
    assert candidate.state == "measured", candidate.reason
    assert candidate.benchmark is not None
    assert {"up", "down"} <= {node.node for node in candidate.kept_fp32}
    assert candidate.title.endswith("nodes in fp32")
    assert candidate.layers is not None
    assert 0 < forced_share(candidate.layers, candidate.kept_fp32) < 1, candidate.layers
    assert any(
        note.text.startswith(f"{len(candidate.kept_fp32)} nodes that stay")
        for note in candidate.notes
    )
