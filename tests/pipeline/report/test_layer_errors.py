"""Which layers hurt: the table and the figure, and the example of the docs."""

from pathlib import Path

import pytest

from pipeline.core.recipe import CalibrationMethod
from pipeline.report.figures import plots
from pipeline.report.files import load_report, write_report
from pipeline.report.layer_errors import (
    LAYER_ERRORS,
    error_text,
    layer_error_section,
    layer_error_table,
)
from pipeline.report.markdown import markdown
from pipeline.results.candidates import NodeHarm, NodeRanking, RescueStep
from pipeline.results.report import Report
from pipeline.stages.sensitivity import MAX_ERROR
from tests.builders.report import EVIL, proven_report, without_graph
from tests.builders.sensitivity import write_broken_task
from tests.pipeline.stages.test_sensitivity import ONNXRUNTIME, ranked

LOST = NodeHarm(
    node=EVIL,
    operator="MatMul",
    largest=3.1e5,
    overflows=True,
    error=MAX_ERROR,
    accumulated=MAX_ERROR,
)
OTHERS = tuple(
    NodeHarm(
        node=f"/layer.{number}/MatMul",
        operator="MatMul",
        largest=4.0,
        error=0.3 / number,
        accumulated=0.5,
    )
    for number in range(1, 30)
)


def report_of(state: str = "measured") -> Report:
    """A report whose rescue ranked 30 nodes and kept two of them at last."""
    report = proven_report()
    first = report.candidates[2]
    recipe = first.recipe.model_copy(
        update={"keep_fp32": ("[<]script*", "/layer.1/MatMul"), "variant": "rescued"}
    )
    fallback = first.model_copy(update={"recipe": recipe, "label": "the last", "state": state})
    step = RescueStep(step="2 nodes kept", label="the last", outcome="passed")
    rescue = report.rescues[0].model_copy(
        update={"steps": (step,), "ranking": NodeRanking(nodes=(LOST, *OTHERS), samples=128)}
    )
    return report.model_copy(
        update={"candidates": (*report.candidates, fallback), "rescues": (rescue,)}
    )


def test_the_worst_ten_nodes_are_told_with_what_was_kept_at_last() -> None:
    (table,) = layer_error_section(report_of()).tables
    assert table.headings[0] == "of 30 nodes of tensorrt fp16 flags"
    assert len(table.rows) == 10
    assert table.rows[0] == (
        EVIL,
        "MatMul",
        "all is lost",
        "all is lost",
        "3.1e+05 (overflows)",
        "fp32",
    )
    assert table.rows[1] == ("/layer.1/MatMul", "MatMul", "0.3 (10 dB)", "0.5 (6 dB)", "4", "fp32")
    assert {row[-1] for row in table.rows[2:]} == {""}


def test_nothing_is_called_kept_where_no_engine_passed() -> None:
    (table,) = layer_error_section(report_of("failed accuracy")).tables
    assert {row[-1] for row in table.rows} == {""}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (0.0, "0"),
        (1.0, "1 (0 dB)"),
        (0.0158, "0.016 (36 dB)"),
        (9.9, "9.9 (-20 dB)"),
        (MAX_ERROR, "all is lost"),
    ],
)
def test_an_error_is_told_as_share_and_as_signal_to_noise(error: float, text: str) -> None:
    assert error_text(error) == text


def test_the_section_and_its_figure_follow_the_rescue_and_the_report_reads_back(
    tmp_path: Path,
) -> None:
    report = report_of()
    files = write_report(report, tmp_path)
    assert load_report(tmp_path).rescues == report.rescues
    titles = [line for line in markdown(report).splitlines() if line.startswith("## ")]
    assert titles[titles.index("## Fallback") + 1] == "## Which layers hurt"
    assert "<script" not in without_graph(files.html_file.read_text())
    drawn = (tmp_path / "figures" / "layer-errors-1.svg").read_text()
    assert all(
        text in drawn
        for text in (
            "own error, kept in fp32 in the end",
            "accumulated",
            "/layer.9/MatMul",
            "0.001",
        )
    )
    assert "mathdefault" not in drawn
    (plot,) = (plot for plot in plots(report) if plot.section == LAYER_ERRORS)
    assert "The worst 24 of 30 nodes" in plot.caption


def test_without_a_ranking_there_is_no_section_and_no_figure() -> None:
    assert layer_error_section(proven_report()).tables == ()
    assert all(plot.section != LAYER_ERRORS for plot in plots(proven_report()))
    assert "Which layers hurt" not in markdown(proven_report())


def test_the_example_of_the_docs_is_what_the_ranking_says(tmp_path: Path) -> None:
    recipe = ONNXRUNTIME.model_copy(update={"method": CalibrationMethod.MINMAX})
    table = layer_error_table(
        recipe.label,
        ranked(tmp_path, write_broken_task(tmp_path, "stretched"), recipe),
        ("broken",),
    )
    text = (Path(__file__).parents[3] / "docs" / "howto" / "fix-accuracy.md").read_text()
    for row in (table.headings, *table.rows):
        assert f"| {' | '.join(row)} |".replace("|  |", "| |") in text
