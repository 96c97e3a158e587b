"""The work of the graph's nodes in a report: counted in a child, and never a reason to fail."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.compiler.compile import graph_with_work
from pipeline.compiler.context import CompileContext, open_context
from pipeline.core import OnnxModel
from pipeline.errors import ChildDied, ChildStopped, CrucibleError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import load_plan
from tests.builders.cli import write_task
from tests.builders.halves import run_here


def opened(folder: Path, error: CrucibleError | None = None) -> tuple[CompileContext, OnnxModel]:
    """The context of a plan and its model; counting fails with this error."""

    def run(function: Any, *arguments: Any, name: str, **options: Any) -> Any:
        if error is not None:
            raise error
        return run_here(function, *arguments, name=name)

    plan = load_plan(write_task(folder))
    runner = Runner(Store(folder / "home"), run=run)
    return open_context(plan, runner), onnx_model(folder, "model.onnx")


def test_work_is_counted_at_the_opt_sizes_of_the_first_profile(tmp_path: Path) -> None:
    context, model = opened(tmp_path)
    graph, notes = graph_with_work(context, model)
    assert notes == ()
    assert graph.sizes == {"batch": 4}
    image = graph.nodes[0]
    assert image.work is not None
    columns = image.work.written_bytes // (4 * 4)
    products = [node.work for node in graph.nodes if node.operator in ("MatMul", "Gemm")]
    first = products[0]
    assert first is not None
    assert first.flops == 2 * 4 * columns * (first.written_bytes // (4 * 4))


def test_a_report_has_its_graph_if_counting_fails(tmp_path: Path) -> None:
    context, model = opened(tmp_path, ChildDied("a signal ended it"))
    graph, (note,) = graph_with_work(context, model)
    assert graph.sizes is None
    assert len(graph.nodes) > 2
    assert [node for node in graph.nodes if node.work] == []
    assert (note.stage, note.level) == ("graph", "warning")
    assert "were not counted: a signal ended it" in note.text


def test_a_stop_is_no_failure_to_count(tmp_path: Path) -> None:
    context, model = opened(tmp_path, ChildStopped("the run ends"))
    with pytest.raises(ChildStopped):
        graph_with_work(context, model)
