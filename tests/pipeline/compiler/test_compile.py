"""The story through the real stages: what is read when, what is made again, what each verdict
needs.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.backends import BACKENDS
from pipeline.compiler.candidates.host_recipes import check_candidates
from pipeline.compiler.candidates.stages import QUANTIZERS, WEIGHT_QUANTIZERS
from pipeline.compiler.compile import compile_plan
from pipeline.compiler.context import CompileContext, open_context
from pipeline.compiler.write_up import graph_with_work
from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.data.samples import SampleSet
from pipeline.errors import ChildDied, ChildStopped, CrucibleError, InternalError
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.execution.stage_runner import Run, Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import load_plan
from pipeline.plan.precisions import WEIGHT_QUANTIZERS as WEIGHTS_BY_BACKEND
from pipeline.results.candidates import Origin
from pipeline.results.report import Report
from pipeline.stages.benchmark import benchmark
from tests.builders.cli import FEATURES, answers, write_task
from tests.builders.halves import Halves, run_here


class CountingRun:
    """Runs stages in this process, and counts which engines were given which set."""

    def __init__(self) -> None:
        self.reads: Counter[tuple[str, str]] = Counter()

    def __call__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        name: str,
        log: Path | None = None,
        progress: Progress = silent,
        limit: TimeLimit | None = None,
    ) -> Any:
        for argument in arguments:
            if isinstance(argument, SampleSet):
                self.reads[argument.role, function.__name__] += 1
        return run_here(function, *arguments, name=name, log=log, progress=progress)


def run_untimed(
    function: Callable[..., Any],
    *arguments: Any,
    name: str,
    log: Path | None = None,
    progress: Progress = silent,
    limit: TimeLimit | None = None,
) -> Any:
    """Stages in children, as libraries with a global state need it; latencies are made up."""
    return (run_here if function is benchmark else call_in_child)(
        function, *arguments, name=name, log=log, progress=progress, limit=limit
    )


def compiled(plan: Path, home: Path, run: Run = run_here) -> Report:
    return compile_plan(load_plan(plan), Runner(Store(home), run=run), "crucible compile plan.yaml")


def test_the_plan_limits_the_time_of_each_stage(tmp_path: Path) -> None:
    plan = load_plan(write_task(tmp_path), ["stage_timeout_s=0.001"])
    with pytest.raises(
        ChildDied, match=r"^the stage 'export' took longer than its limit of 0\.001"
    ):
        compile_plan(plan, Runner(Store(tmp_path / "home")), "crucible compile plan.yaml")


def computed(report: Report) -> list[str]:
    return [step.stage for step in report.steps if not step.reused]


def test_the_validation_set_is_read_once_for_the_reference_and_once_for_the_winner(
    tmp_path: Path,
) -> None:
    run = CountingRun()
    report = compiled(write_task(tmp_path), tmp_path / "home", run)
    assert report.verdict == "accepted"
    assert {key: count for key, count in run.reads.items() if key[0] == "validation"} == {
        ("validation", "run_reference"): 1,
        ("validation", "validate"): 1,
    }
    assert run.reads["selection", "validate"] == 2  # each candidate
    assert [candidate.state for candidate in report.candidates] == ["measured", "measured"]
    assert report.validation is not None
    assert report.validation.samples == 220


def test_a_winner_that_fails_on_the_validation_set_is_rejected_with_what_to_try(
    tmp_path: Path,
) -> None:
    candidates = [
        {
            "backend": "onnxruntime",
            "precision": "int8",
            "method": "minmax",
            "weight_bits": 7,
            "placement": {"last_layer": True},
        }
    ]
    top1_only = {
        "metric": "top1",
        "max_drop": 0.03,
        "thresholds": {"min_cosine": None},
    }  # at 7 bits one sample's cosine is 0.977 on every CPU
    plan = write_task(tmp_path, candidates=candidates, accuracy=top1_only)
    far = 40 * np.random.default_rng(9).normal(0, 1, (220, FEATURES)).astype(
        np.float32
    )  # far outside what calibration saw
    np.savez(tmp_path / "validation.npz", x=far, labels=answers(far))
    report = compiled(plan, tmp_path / "home")
    assert report.verdict == "rejected"
    assert report.nearest_miss == report.winner == "onnxruntime int8 minmax u8s7 +last_layer"
    assert any("top1" in reason for reason in report.reasons)
    assert "percentile" in report.next_steps[0]


def test_a_tensorrt_rtx_candidate_is_built_and_says_which_gpu_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    candidates = [
        {"backend": "onnxruntime", "precision": "fp32"},
        {"backend": "tensorrt_rtx", "precision": "fp16", "compute_capability": "8.9"},
        {"backend": "tensorrt_rtx", "precision": "int8", "compute_capability": "8.9"},
    ]
    report = compiled(write_task(tmp_path, candidates=candidates), tmp_path / "home", run_untimed)
    assert report.verdict == "accepted"
    assert [candidate.state for candidate in report.candidates] == ["measured", "built", "built"]
    for candidate in report.candidates[1:]:
        assert candidate.engine is not None
        assert candidate.engine.path.stat().st_size > 1000
        assert "8.9" in candidate.reason


NETWORK = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

def build():
    return Net()
"""


INT8 = [{"backend": "onnxruntime", "precision": "int8"}]
FP32 = [{"backend": "onnxruntime", "precision": "fp32"}]
WRONG = [
    {"backend": "onnxruntime", "precision": "int8", "quantizer": "nncf"}
]  # with calibration data or without


@pytest.mark.parametrize(
    ("forward", "candidates", "looked", "refused"),
    [
        ("x", INT8, 1, "needs calibration data"),
        ("torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)", INT8, 1, ""),
        ("x", FP32, 0, ""),
        ("x", WRONG, 0, "for openvino only"),
    ],
)
def test_a_torch_model_is_looked_into_before_the_export_where_that_decides(
    tmp_path: Path, forward: str, candidates: list[dict[str, str]], looked: int, refused: str
) -> None:
    pytest.importorskip("torch")
    model = {
        "entrypoint": "net:build",
        "weights_from": "random: a test",
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 16]}],
    }
    plan = load_plan(write_task(tmp_path, model=model, candidates=candidates, data={}))
    (tmp_path / "net.py").write_text(NETWORK.replace("self.first(x)", f"self.first({forward})"))
    names: list[str] = []

    def run(
        function: Callable[..., Any],
        *arguments: Any,
        name: str,
        log: Path | None = None,
        progress: Progress = silent,
        limit: TimeLimit | None = None,
    ) -> Any:
        names.append(name)
        return call_in_child(
            function, *arguments, name=name, log=log, progress=progress, limit=limit
        )

    context = open_context(plan, Runner(Store(tmp_path / "home"), run=run))
    with pytest.raises(CrucibleError, match=refused) if refused else contextlib.nullcontext():
        check_candidates(context)
    assert len(names) == looked


def test_editing_one_line_of_the_model_exports_again_and_nothing_else_does(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = {
        "entrypoint": "net:build",
        "weights_from": "random: a test",
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 16]}],
    }
    fp32 = [{"backend": "onnxruntime", "precision": "fp32"}]
    plan = write_task(tmp_path, model=model, candidates=fp32, data={})
    (tmp_path / "net.py").write_text(NETWORK)
    first = compiled(plan, tmp_path / "home", run_untimed)
    assert first.verdict == "unproven"
    assert first.reference.startswith("PyTorch eager fp32")
    assert first.baseline is not None
    assert first.baseline.label == "pytorch eager fp32"
    assert "export" in computed(first)
    assert computed(compiled(plan, tmp_path / "home", run_untimed)) == []
    (tmp_path / "net.py").write_text(NETWORK.replace("torch.relu", "torch.tanh"))
    assert "export" in computed(compiled(plan, tmp_path / "home", run_untimed))


def test_another_threshold_checks_again_but_builds_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    compiled(write_task(tmp_path), home)
    again = compiled(write_task(tmp_path, accuracy={"metric": "top1", "max_drop": 0.04}), home)
    assert set(computed(again)) == {"validate"}


def test_one_candidate_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    plan = write_task(tmp_path, accuracy={"metric": "top1", "thresholds": {"max_abs": 1e-3}})
    report = compiled(plan, tmp_path / "home")
    assert [candidate.state for candidate in report.candidates] == ["measured", "failed accuracy"]
    assert (
        report.candidates[1].benchmark is not None
    )  # measured all the same: the plot shows what the loss would have bought
    assert report.winner == "onnxruntime fp32"


def test_another_plugin_at_the_same_place_builds_again_and_for_tensorrt_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    doubles = {name: Halves(name) for name in ("tensorrt", "halves")}
    for name, double in doubles.items():
        monkeypatch.setitem(BACKENDS, name, double)
    candidates = [{"backend": name, "precision": "fp32"} for name in doubles]
    plan = write_task(
        tmp_path,
        candidates=candidates,
        tensorrt={"plugins": ["plugin.so"]},
        simplify={"enabled": False},
    )
    for content in (b"first", b"first", b"second"):
        (tmp_path / "plugin.so").write_bytes(content)
        compile_plan(
            load_plan(plan),
            Runner(Store(tmp_path / "home"), run=run_here),
            "crucible compile plan.yaml",
        )
    assert {name: len(double.built) for name, double in doubles.items()} == {
        "tensorrt": 2,
        "halves": 1,
    }


def test_every_quantizer_that_a_recipe_can_name_is_there_and_called_alike() -> None:
    assert set(QUANTIZERS) == {"nncf", "modelopt", "tensorrt"}
    calls = {tuple(inspect.signature(quantize).parameters) for _, quantize in QUANTIZERS.values()}
    assert calls == {("model", "samples", "recipe", "options", "allowed", "out", "progress")}
    assert set(WEIGHT_QUANTIZERS) == set(WEIGHTS_BY_BACKEND.values())
    assert {
        tuple(inspect.signature(compress).parameters) for _, compress in WEIGHT_QUANTIZERS.values()
    } == {("model", "recipe", "out", "progress")}


def test_a_bug_that_stops_every_candidate_is_a_bug_and_not_a_verdict(tmp_path: Path) -> None:
    def run(
        function: Callable[..., Any],
        *arguments: Any,
        name: str,
        log: Path | None = None,
        progress: Progress = silent,
        limit: TimeLimit | None = None,
    ) -> Any:
        if function.__name__ == "convert":
            raise InternalError("KeyError: planted")
        return run_here(function, *arguments, name=name, log=log, progress=progress)

    int8 = [{"backend": "onnxruntime", "precision": "int8"}]
    with pytest.raises(InternalError, match="planted"):
        compile_plan(
            load_plan(write_task(tmp_path, candidates=int8)),
            Runner(Store(tmp_path / "home"), run=run),
            "crucible compile plan.yaml",
        )


def test_switches_reversed_are_built_checked_and_measured_like_any_candidate(
    tmp_path: Path,
) -> None:
    int8 = {
        "backend": "onnxruntime",
        "precision": "int8",
        "method": "minmax",
        "placement": {"per_channel": [True, False]},
    }
    report = compiled(
        write_task(tmp_path, ablate=True, candidates=[int8]), tmp_path / "home", run_untimed
    )
    labels = [candidate.label for candidate in report.candidates]
    assert report.ablation is not None
    assert report.ablation.label in labels[:2]
    rows = {row.switch: row for row in report.ablation.rows}
    assert rows["per_channel"].label in labels[:2]  # the plan has it: not built again
    assert [rows[switch].label for switch in ("first_layer", "last_layer")] == labels[2:]
    assert (
        rows["first_layer"].state == "refused"
    )  # two layers, and the last one is left out already
    assert "nothing can be quantised" in rows["first_layer"].reason
    assert [rows[switch].state for switch in ("residual_add", "matmul_activations")] == [
        None,
        None,
    ]  # this graph has neither
    for row in (rows["per_channel"], rows["last_layer"]):
        assert row.ratio is not None
        assert row.drop_change is not None
    origins = [candidate.origin for candidate in report.candidates]
    assert origins == [Origin.PLAN] * 2 + [Origin.ABLATION] * 2
    reversal = report.candidates[3]
    assert reversal.recipe.placement.last_layer
    assert reversal.benchmark is not None


def test_weights_alone_go_through_the_whole_line_without_calibration_data(tmp_path: Path) -> None:
    recipes = [
        {"precision": "int4", "keep_fp32": ["classifier"]},
        {"precision": "int8", "weight_only": True, "activation": "int8"},
    ]
    data = {role: f"{role}.npz" for role in ("selection", "validation")}
    plan = write_task(
        tmp_path, candidates=[{"backend": "onnxruntime", **recipe} for recipe in recipes], data=data
    )
    report = compile_plan(
        load_plan(plan),
        Runner(Store(tmp_path / "home"), run=run_here),
        "crucible compile plan.yaml",
    )
    states = {candidate.label: candidate.state for candidate in report.candidates}
    assert list(states) == [
        "onnxruntime int4 weight-only b32 keep classifier",
        "onnxruntime int8 weight-only b32 a8",
    ]
    assert states["onnxruntime int8 weight-only b32 a8"] == "measured"
    partial, full = (candidate.notes[0].text for candidate in report.candidates)
    assert partial.startswith(
        "1 of 2 linear layers hold their weights in 4 bits; as they were: classifier; all constants"
        " together: "
    )
    assert full.startswith(
        "2 of 2 linear layers hold their weights in 8 bits; all constants together: "
    )
    assert {step.stage for step in report.steps} & {"calibrate", "cover"} == set()
    assert report.verdict == "accepted"


def test_a_model_with_8_bit_operators_of_its_own_is_not_called_by_a_wrong_name(
    tmp_path: Path,
) -> None:
    from onnxruntime.quantization import quantize_dynamic

    plan = write_task(tmp_path, candidates=[{"backend": "onnxruntime", "precision": "fp32"}])
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "dynamic.onnx")
    (tmp_path / "dynamic.onnx").replace(tmp_path / "model.onnx")
    (candidate,) = compiled(plan, tmp_path / "home").candidates
    assert candidate.state == "measured", candidate.reason
    assert any(
        "8-bit operators of its own (DynamicQuantizeLinear, MatMulInteger)" in note.text
        for note in candidate.notes
    )


def context_and_model(
    folder: Path, error: CrucibleError | None = None
) -> tuple[CompileContext, OnnxModel]:
    """The context of a plan and its model. With an error, every stage fails with it."""

    def run(function: Any, *arguments: Any, name: str, **options: Any) -> Any:
        if error is not None:
            raise error
        return run_here(function, *arguments, name=name)

    plan = load_plan(write_task(folder))
    runner = Runner(Store(folder / "home"), run=run)
    return open_context(plan, runner), onnx_model(folder, "model.onnx")


def test_work_is_counted_at_the_opt_sizes_of_the_first_profile(tmp_path: Path) -> None:
    context, model = context_and_model(tmp_path)
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
    context, model = context_and_model(tmp_path, ChildDied("a signal ended it"))
    graph, (note,) = graph_with_work(context, model)
    assert graph.sizes is None
    assert len(graph.nodes) > 2
    assert [node for node in graph.nodes if node.work] == []
    assert (note.stage, note.level) == ("graph", "warning")
    assert "were not counted: a signal ended it" in note.text


def test_a_stop_is_no_failure_to_count(tmp_path: Path) -> None:
    context, model = context_and_model(tmp_path, ChildStopped("the run ends"))
    with pytest.raises(ChildStopped):
        graph_with_work(context, model)
