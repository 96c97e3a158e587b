"""What a user has today, as engines that are measured, and as engines that can be delivered."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends import BACKENDS
from pipeline.backends.pytorch.findings import examine_module
from pipeline.benchmark.elimination import Role
from pipeline.compiler.baselines import (
    build_baselines,
    build_reference,
    check_baselines,
    deliverable_candidate,
    examine_code,
)
from pipeline.compiler.candidates.host_recipes import check_candidates
from pipeline.compiler.candidates.stages import reference_outputs
from pipeline.compiler.compile import compile_plan, publish_report
from pipeline.compiler.context import CompileContext, open_context
from pipeline.compiler.graph import export_model
from pipeline.compiler.measure import call_of_fastest
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import ChildDied, ChildStopped, PlanError
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.execution.stage_runner import Run, Runner
from pipeline.execution.store import Store
from pipeline.host.environment import cpu_flags
from pipeline.plan.files import load_plan
from pipeline.results.benchmarks import BenchmarkReport, Benchmarks
from pipeline.results.candidates import Origin
from pipeline.results.module_findings import ModuleFindings
from pipeline.results.report import Report
from pipeline.stages.benchmark import benchmark
from tests.builders.cli import write_task
from tests.builders.halves import Halves, run_here
from tests.builders.report import benchmark as made_up
from tests.pipeline.backends.onnxruntime.onnxruntime_double import OnnxRuntimeDouble, pretend_gpu
from tests.pipeline.compiler.test_compile import NETWORK, run_untimed

HAS_BF16 = bool({"avx512_bf16", "amx_bf16"} & set(cpu_flags()))
INPUTS = [{"name": "x", "dtype": "float32", "shape": ["batch", 16]}]
MODEL = {"weights_from": "random: a test", "inputs": INPUTS}
FP32 = [{"backend": "onnxruntime", "precision": "fp32"}]


def opened(plan: Path, run: Run = run_here) -> tuple[CompileContext, OnnxModel]:
    context = open_context(load_plan(plan), Runner(Store(plan.parent / "home"), run=run))
    return context, export_model(context)


def pytorch_task(folder: Path, *baselines: str, forward: str = "x") -> Path:
    """A plan of a small module, in a file of its own name: Python imports each name once."""
    name = f"net_{abs(hash(folder))}"
    plan = write_task(
        folder,
        model={**MODEL, "entrypoint": f"{name}:build"},
        data={},
        candidates=FP32,
        benchmark={"duration_s": 0.3, "warmup_s": 0.05, "baselines": [*baselines]},
    )
    text = NETWORK.replace("self.first(x)", f"self.first({forward})")
    (folder / f"{name}.py").write_text(text)
    return plan


def labels(engines: list[Engine]) -> list[str]:
    return [engine.recipe.label for engine in engines]


# --- of a PyTorch model ---


def test_every_baseline_that_the_plan_names_is_built_and_the_first_is_the_reference(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    context, exported = opened(pytorch_task(tmp_path, "traced", "eager bf16"))
    engines = build_baselines(context, exported)
    assert labels(engines) == ["pytorch eager fp32", "pytorch traced fp32", "pytorch eager bf16"]
    assert engines[0].digest == build_reference(context, exported).digest


def test_a_baseline_that_this_host_cannot_have_is_refused_before_the_export(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plan = pytorch_task(tmp_path, "eager tf32")
    context = open_context(load_plan(plan), Runner(Store(tmp_path / "home"), run=run_here))
    with pytest.raises(PlanError, match="'eager tf32' needs an NVIDIA GPU"):
        check_candidates(context)


def test_what_cannot_be_built_is_left_out_with_a_note(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("CXX", "no-such-compiler")
    context, exported = opened(pytorch_task(tmp_path, "compile"))
    (engine,) = build_baselines(context, exported)
    (note,) = engine.notes
    assert note.text.startswith(
        "pytorch compile fp32 is left out: torch.compile needs a C++ compiler",
    )


def test_a_baseline_in_lower_precision_counts_only_if_it_keeps_the_accuracy(tmp_path: Path) -> None:
    """The second layer subtracts nearly equal numbers: bf16 leaves nothing of the answer."""
    pytest.importorskip("torch")
    forward = "(x + 1000.0) - 1000.0"
    context, exported = opened(
        pytorch_task(tmp_path, "traced", "eager bf16", forward=forward),
        call_in_child,
    )
    engines, reference = build_baselines(context, exported), build_reference(context, exported)
    expected = reference_outputs(context, reference, context.data.selection)
    eager, traced, low = check_baselines(context, engines, reference, expected)
    assert (eager.state, eager.selection) == (
        "measured",
        None,
    )  # it is what the others are held against
    assert traced.state == "measured"
    assert traced.selection is not None
    assert traced.selection.passed
    assert low.state == "failed accuracy"
    assert "cosine" in low.reason
    assert low.engine is not None


def test_a_baseline_that_fails_when_it_runs_says_why(tmp_path: Path) -> None:
    """A constant of the code stays fp32 where the module is cast."""
    pytest.importorskip("torch")
    forward = "torch.nn.functional.linear(x, torch.eye(16))"
    context, exported = opened(pytorch_task(tmp_path, "eager bf16", forward=forward))
    engines, reference = build_baselines(context, exported), build_reference(context, exported)
    expected = reference_outputs(context, reference, context.data.selection)
    _, low = check_baselines(context, engines, reference, expected)
    assert low.state == "failed"
    assert "dtype" in low.reason


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiling_is_a_step_of_its_own_that_is_not_done_twice(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plan = pytorch_task(tmp_path, "compile")

    def steps() -> list[tuple[str, bool]]:
        runner = Runner(Store(tmp_path / "home"), run=run_untimed)
        report = compile_plan(load_plan(plan), runner, "crucible compile plan.yaml")
        assert [baseline.label for baseline in report.baselines] == ["pytorch compile fp32"]
        events = [step for step in report.steps if step.stage == "torch.compile"]
        return [(step.subject, step.reused) for step in events]

    assert steps() == [("pytorch compile fp32", False)]
    assert steps() == [("pytorch compile fp32", True)]


def test_a_baseline_is_delivered_as_a_program_of_its_precision(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    names = ("traced", "eager bf16") if HAS_BF16 else ("traced",)
    context, exported = opened(pytorch_task(tmp_path, *names))
    expected = reference_outputs(
        context, build_reference(context, exported), context.data.selection
    )
    for baseline in build_baselines(context, exported):
        candidate = deliverable_candidate(context, exported, baseline, expected)
        engine = candidate.engine
        assert engine is not None, candidate.reason
        assert candidate.selection is not None
        assert candidate.selection.sizes
        precision = baseline.recipe.precision
        assert engine.recipe.label == f"torch exported {precision}"
        assert (engine.outputs, engine.target.backend) == (exported.outputs, "torch")


def test_a_baseline_that_torch_export_refuses_is_not_delivered_and_says_why(tmp_path: Path) -> None:
    """TorchScript's exporter follows it, torch.export does not."""
    pytest.importorskip("torch")
    forward = "x * float(torch.tensor(2.0).numpy())"
    context, exported = opened(pytorch_task(tmp_path, forward=forward))
    (eager,) = build_baselines(context, exported)
    expected = reference_outputs(
        context, build_reference(context, exported), context.data.selection
    )
    candidate = deliverable_candidate(context, exported, eager, expected)
    assert (candidate.state, candidate.engine) == ("failed", None)
    assert "torch.export cannot capture this model" in candidate.reason


def report_of(plan: Path) -> Report:
    """A compile whose only candidate is slower than what the user has; latencies are made up."""

    def run(
        function: Callable[..., Any],
        *arguments: Any,
        name: str,
        log: Path | None = None,
        progress: Progress = silent,
        limit: TimeLimit | None = None,
    ) -> Any:
        if function is not benchmark:
            return run_here(function, *arguments, name=name, log=log, progress=progress)
        results = tuple(slower(entry.engine.recipe.label, entry.role) for entry in arguments[0])
        first = arguments[0][0].engine.recipe.label
        return Benchmarks(created="2026-03-02T10:11:00+00:00", results=results, baseline=first)

    runner = Runner(Store(plan.parent / "home"), run=run)
    report = compile_plan(load_plan(plan), runner, "crucible compile plan.yaml")
    publish_report(report, plan.parent / "out")
    return report


def slower(label: str, role: Role) -> BenchmarkReport:
    return made_up(label, 4.0, None) if role is Role.BASELINE else made_up(label, 8.0, 4.0)


def test_where_nothing_is_faster_the_users_module_is_delivered_as_a_program(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = report_of(pytorch_task(tmp_path))
    assert (report.verdict, report.winner) == ("keep", "pytorch eager fp32")
    assert report.delivered is not None
    assert report.delivered.recipe.label == "torch exported fp32"
    assert report.reasons[2] == "pytorch eager fp32 is the call `module(...)`"
    assert [(candidate.label, candidate.state) for candidate in report.candidates] == [
        ("onnxruntime fp32", "measured"),
        ("torch exported fp32", "built"),
    ]
    assert (tmp_path / "out" / "engine" / "program.pt2").is_file()


def test_where_it_cannot_be_delivered_the_report_says_why(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = report_of(pytorch_task(tmp_path, forward="x * float(torch.tensor(2.0).numpy())"))
    assert (report.verdict, report.delivered) == ("keep", None)
    assert "because torch exported fp32 failed: torch.export cannot" in report.reasons[-1]
    program = report.candidates[-1]
    assert (program.label, program.state) == ("torch exported fp32", "failed")
    assert "torch.export cannot capture this model" in program.reason
    assert not (tmp_path / "out" / "engine").exists()


def test_the_call_of_the_fastest_baseline_is_named_and_none_of_an_onnx_file(tmp_path: Path) -> None:
    """A compile is pretended, as it takes a minute: only the recipe decides how it is called."""
    fields = {"backend": "pytorch", "precision": Precision.FP16, "variant": "compile"}
    compiled = Recipe.model_validate({**fields, "mode": "max-autotune"})
    context, exported = opened(write_task(tmp_path, simplify={"enabled": False}))
    (file,) = build_baselines(context, exported)
    module = file.model_copy(update={"recipe": compiled})
    call = 'torch.compile(module.half(), mode="max-autotune")'
    for engine, expected in ((module, call), (file, "")):
        benchmarks = Benchmarks(created="", results=(), baseline=engine.recipe.label)
        assert call_of_fastest(benchmarks, [file, module]) == expected


def test_a_baseline_that_loses_the_accuracy_is_neither_measured_nor_delivered(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    plan = pytorch_task(tmp_path, "eager bf16", forward="(x + 1000.0) - 1000.0")
    report = report_of(plan)
    assert report.baselines == ()
    (note,) = [note.text for note in report.notes if note.stage == "baseline"]
    assert note.startswith("pytorch eager bf16 is left out: output 'output_0': smallest cosine")


# --- of an ONNX file ---


def test_on_a_cpu_an_onnx_file_is_its_own_baseline_and_can_be_delivered(tmp_path: Path) -> None:
    context, exported = opened(write_task(tmp_path, simplify={"enabled": False}))
    (baseline,) = build_baselines(context, exported)
    assert baseline.recipe.label == "onnxruntime as given fp32"
    assert build_reference(context, exported) == baseline
    expected = reference_outputs(context, baseline, context.data.selection)
    candidate = deliverable_candidate(context, exported, baseline, expected)
    assert (candidate.engine, candidate.origin) == (baseline, Origin.BASELINE)


def test_on_a_gpu_the_baseline_runs_there_and_the_cpu_is_only_the_reference(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(tmp_path / "bin", monkeypatch)
    OnnxRuntimeDouble("CUDAExecutionProvider").install(monkeypatch)
    monkeypatch.setitem(BACKENDS, "tensorrt", Halves("tensorrt"))
    context, exported = opened(write_task(tmp_path))
    baselines, reference = build_baselines(context, exported), build_reference(context, exported)
    assert labels(baselines) == ["tensorrt as given fp32", "onnxruntime cuda as given tf32"]
    assert reference.recipe.label == "onnxruntime as given fp32"
    checked = check_baselines(
        context,
        baselines,
        reference,
        reference_outputs(context, reference, context.data.selection),
    )
    assert [(candidate.state, candidate.selection is not None) for candidate in checked] == [
        ("measured", True),
    ] * 2


def test_where_the_gpu_can_make_nothing_of_it_the_cpu_is_the_baseline_after_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(tmp_path / "bin", monkeypatch)
    OnnxRuntimeDouble().install(monkeypatch)
    monkeypatch.setitem(
        BACKENDS,
        "tensorrt",
        Halves("tensorrt", refused=frozenset({Precision.FP32})),
    )
    context, exported = opened(write_task(tmp_path))
    (baseline,) = build_baselines(context, exported)
    assert baseline.recipe.label == "onnxruntime as given fp32"
    assert [note.text for note in baseline.notes] == [
        "tensorrt as given fp32 is left out: no fp32 here",
    ]


# --- what the module's code does ---


def findings_of(plan: Path, run: Run = run_here) -> ModuleFindings | None:
    context, exported = opened(plan, run)
    return examine_code(context, exported)


def test_a_call_of_the_module_that_waits_is_in_the_report(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    waiting = "x if torch.compiler.is_exporting() else x * max(1.0, min(1.0, x.sum().item()))"
    plan = pytorch_task(tmp_path, forward=waiting)
    calls: list[str] = []

    def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        calls.append(function.__name__)
        return run_here(function, *arguments, **options)

    (wait,) = (findings := findings_of(plan, run) or ModuleFindings()).waits
    assert wait.call == ".item()"
    assert wait.where.startswith(f"net_{abs(hash(tmp_path))}.py:")
    assert findings.graphs is None, "the plan has no baseline with torch.compile"
    assert calls.count("examine_module") == 1
    assert findings_of(plan, run) == findings
    assert calls.count("examine_module") == 1, "the second comes from the store"


@pytest.mark.filterwarnings("default")
def test_with_a_compiled_baseline_the_graphs_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    findings = findings_of(pytorch_task(tmp_path, "compile"))
    assert findings is not None
    assert findings.graphs is not None
    assert (findings.graphs.graphs, findings.graphs.breaks) == (1, 0)


def test_a_module_that_cannot_be_examined_stops_no_compile(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def crash(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if function is examine_module:
            raise ChildDied("the process of 'module' died")
        return run_here(function, *arguments, **options)

    findings = findings_of(pytorch_task(tmp_path), crash)
    assert findings == ModuleFindings(failure="the process of 'module' died")


def test_an_interrupted_examination_ends_the_compile(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def stop(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if function is examine_module:
            raise ChildStopped("stopped")
        return run_here(function, *arguments, **options)

    with pytest.raises(ChildStopped):
        findings_of(pytorch_task(tmp_path), stop)


def test_an_onnx_file_has_no_code_to_examine(tmp_path: Path) -> None:
    assert findings_of(write_task(tmp_path, candidates=FP32)) is None
