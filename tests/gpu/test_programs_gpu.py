"""PyTorch programs on a real GPU.

Every form in every precision against eager fp32, in the race, in a worker, and in whole compiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.backends.base import run_session
from pipeline.backends.pytorch import programs as torch_programs
from pipeline.backends.pytorch.module import load_module, run_module
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.baselines import (
    build_baselines,
    build_reference,
    check_baselines,
    deliverable_candidate,
)
from pipeline.compiler.candidates.stages import reference_outputs
from pipeline.compiler.compile import compile_plan, publish_report
from pipeline.compiler.context import open_context
from pipeline.compiler.graph import export_model
from pipeline.core.artifacts import BuildOptions, Engine, ModelSource, OnnxModel
from pipeline.core.progress import Progress
from pipeline.core.recipe import CompileMode, Precision, ProgramForm, Recipe
from pipeline.errors import LoadCrashed
from pipeline.execution.child_process import call_in_child
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.plan.files import load_plan
from pipeline.plan.schema import BenchmarkConfig, ExportConfig
from pipeline.report.bundle import seal
from pipeline.results.benchmarks import BenchmarkReport
from pipeline.results.report import Report
from pipeline.serving_inputs import BatchSpec
from pipeline.stages.benchmark import benchmark
from pipeline.stages.export import export
from tests.builders.cli import crucible, write_task
from tests.gpu.fixtures.gpu import check_cost
from tests.gpu.fixtures.programs import MODELS, profile_of, skipped_if_packages_crash
from tests.pipeline.backends.pytorch.builders import CLASSES, IMAGE, engine_of, source_of
from tests.pipeline.compiler.test_compile import NETWORK
from tests.service.serving.engines import asking, deployed, play

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

FLOATS = (Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16)
MAX_ERROR = {  # of the largest value of the reference
    Precision.FP32: 1e-4,
    Precision.TF32: 5e-3,
    Precision.FP16: 1e-2,
    Precision.BF16: 5e-2,
}
Case = tuple[ProgramForm, Precision, CompileMode | None]
COMPILED: dict[str, tuple[Case, ...]] = {  # one mode each: compiling takes long
    "residual_cnn": (("compile", Precision.TF32, None),),
    "recurrent": (("compile", Precision.FP16, "reduce-overhead"),),
    "block": (("compile", Precision.BF16, "max-autotune"), ("compile", Precision.FP32, None)),
}


@pytest.fixture(scope="module")
def package_crash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why PyTorch's packages cannot be had on this host; empty where they can."""
    out = tmp_path_factory.mktemp("package")
    try:
        call_in_child(build, "residual_cnn", ("aoti", Precision.FP16, None), out, name="package")
    except LoadCrashed as error:
        return error.message
    return ""


def source_and_model(name: str, out: Path) -> tuple[ModelSource, OnnxModel]:
    """The source, and what of its export a program needs."""
    input_spec, returned = MODELS[name]
    source = source_of(name, input_spec)
    return source, OnnxModel(
        root=out,
        file="model.onnx",
        digest=name,
        opset=20,
        inputs=(input_spec,),
        outputs=(returned,),
    )


def build(name: str, case: Case, out: Path, progress: Progress) -> Engine:
    out.mkdir(parents=True, exist_ok=True)
    source, model = source_and_model(name, out)
    form, precision, mode = case
    fields = {"backend": "torch", "precision": precision, "form": form, "mode": mode}
    recipe = Recipe.model_validate({**fields, "realised_in": "runtime"})
    return torch_programs.build(
        model,
        recipe,
        BuildOptions(profiles=(profile_of(name),), source=source),
        out,
    )


def errors(name: str, cases: Sequence[Case], out: Path, progress: Progress) -> list[float]:
    """Of every case the largest error at min, opt, max and an odd size, of the largest value."""
    source, _ = source_and_model(name, out)
    profile = profile_of(name)
    points = [*(profile.sizes(point) for point in ("opt", "min", "max")), profile.odd_sizes()]
    feeds = [draw_feeds(source.inputs, sizes, seed) for seed, sizes in enumerate(points)]
    module = load_module(source, "cuda")
    expected = [run_module(module, source, feed, "cuda")["output_0"] for feed in feeds]
    maxima = []
    for number, case in enumerate(cases):
        engine = build(name, case, out / str(number), progress)
        assert engine.target.compute_capability
        loaded = torch_programs.load(engine)
        session = loaded.session()
        got = [run_session(session, feed)["output_0"] for feed in feeds]
        maxima.append(max(map(relative_error, got, expected)))
        session.close()
        loaded.close()
    return maxima


def relative_error(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("form", ["exported", "aoti", "compile"])
@pytest.mark.parametrize("name", MODELS)
def test_every_form_answers_as_eager_fp32_within_its_precision(
    tmp_path: Path,
    name: str,
    form: ProgramForm,
) -> None:
    plain: tuple[Case, ...] = tuple((form, precision, None) for precision in FLOATS)
    cases = COMPILED[name] if form == "compile" else plain
    with skipped_if_packages_crash():
        measured = call_in_child(errors, name, cases, tmp_path, name=f"{name} {form}")
    for (_, precision, mode), error in zip(cases, measured, strict=True):
        assert error <= MAX_ERROR[precision], f"{name} {form} {mode} {precision}: {error}"
        if precision in (Precision.FP16, Precision.BF16):
            assert error > 1e-6, f"{name} {form} {precision} answers exactly: it runs in fp32"


def baseline_in_child(
    source: ModelSource,
    precision: Precision,
    variant: str,
    mode: CompileMode | None,
    out: Path,
    progress: Progress,
) -> Engine:
    out.mkdir()
    return engine_of(source, (CLASSES,), variant, out, precision, mode)


def test_programs_and_baselines_are_timed_in_one_race(tmp_path: Path, package_crash: str) -> None:
    """Without the package where packages crash: the other forms are timed all the same."""
    (tmp_path / "export").mkdir()
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    profiles = (profile_of("residual_cnn"),)
    model = call_in_child(
        export,
        source,
        profiles,
        ExportConfig(),
        (),
        tmp_path / "export",
        name="export",
    )
    baselines: list[tuple[str, Precision, CompileMode | None]] = [
        ("eager", Precision.FP32, None),
        ("eager", Precision.FP16, None),
        ("compile", Precision.FP16, "reduce-overhead"),
    ]
    engines = []
    for number, (variant, precision, mode) in enumerate(baselines):
        place = tmp_path / f"baseline-{number}"
        arguments = (source, precision, variant, mode, place)
        engines.append(call_in_child(baseline_in_child, *arguments, name=variant))
    packages: list[Case] = [] if package_crash else [("aoti", Precision.FP16, None)]
    cases: list[Case] = [
        *packages,
        ("exported", Precision.FP16, None),
        ("compile", Precision.FP16, "reduce-overhead"),
    ]
    for number, case in enumerate(cases):
        place = tmp_path / f"program-{number}"
        engine = call_in_child(build, "residual_cnn", case, place, name=case[0])
        engines.append(engine.model_copy(update={"outputs": (CLASSES,)}))
    engines = [engine.model_copy(update={"profiles": profiles}) for engine in engines]
    roles = [*[Role.BASELINE] * len(baselines), *[Role.CANDIDATE] * len(cases)]
    entries = list(map(RaceEntry, engines, roles))
    options = BenchmarkConfig(duration_s=0.3, sizes=({"batch": 2},))
    report = benchmark(entries, model, options)
    for engine, result in zip(engines, report.results, strict=True):
        assert isinstance(result, BenchmarkReport), f"{engine.recipe.label}: {result}"
        assert 0 < result.rows[0].end_to_end.median_s < math.inf
        cost = result.rows[0].gpu
        assert cost is not None
        check_cost(cost, weights_known=engine.recipe.form != "aoti")


@pytest.mark.parametrize(
    "case",
    [("aoti", Precision.FP16, None), ("compile", Precision.FP16, "reduce-overhead")],
    ids=["aoti", "cuda graphs"],
)
def test_a_worker_serves_programs_from_the_gpu(tmp_path: Path, case: Case) -> None:
    with skipped_if_packages_crash():
        engine = call_in_child(build, "residual_cnn", case, tmp_path / "engine", name=case[0])
    seal(engine.root, engine)  # as a delivered engine is
    source, _ = source_and_model("residual_cnn", tmp_path)
    module = load_module(source)
    batches = (1, 4, 2, 16, 3, 1)
    feeds = [draw_feeds((IMAGE,), {"batch": batch}, batch) for batch in batches]
    by_row = BatchSpec(axes={"image": 0, "output_0": 0}, maximum=16, proved=True)

    async def story() -> None:
        async with deployed(tmp_path, engine, by_row, device="gpu:0", load_s=300.0) as bench:
            for feed in feeds:
                answer = await bench.deployment.infer(asking(feed))
                want = run_module(module, source, feed)["output_0"]
                assert relative_error(answer.outputs["output_0"], want) <= MAX_ERROR[case[1]]

    play(story)


# --- whole compiles of a two-layer perceptron, with what Crucible chooses by itself ---

MODES, FAST = ("", " reduce-overhead", " max-autotune"), ("tf32", "fp16", "bf16")
BEST = {f"pytorch compile{mode} {precision}" for mode in MODES for precision in FAST}


def perceptron(folder: Path, **benchmark: object) -> Path:
    inputs = [{"name": "x", "dtype": "float32", "shape": ["batch", 16]}]
    model = {"entrypoint": "net:build", "weights_from": "random: a test", "inputs": inputs}
    data = {role: f"{role}.npz" for role in ("selection", "validation")}
    plan = write_task(
        folder,
        model=model,
        data=data,
        candidates=[],
        accuracy={"metric": "cosine", "max_drop": 0.01},
        benchmark={"duration_s": 0.3, "warmup_s": 0.05, **benchmark},
        tensorrt={"optimization_level": 1},
    )
    (folder / "net.py").write_text(NETWORK)
    for role in ("selection", "validation"):  # without labels: they are those of another model
        x = np.random.default_rng(len(role)).normal(0, 1, (220, 16)).astype(np.float32)
        np.savez(folder / f"{role}.npz", x=x)
    return plan


def compiled(plan: Path) -> Report:
    runner = Runner(Store(plan.parent / "home"))
    report = compile_plan(load_plan(plan), runner, "crucible compile plan.yaml")
    publish_report(report, plan.parent / "out")
    return report


def test_default_candidates_and_the_best_baselines_end_with_a_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is too small for packages of AOTInductor beside TensorRT."""
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path / "home"))
    plan = perceptron(tmp_path, baselines="best")
    first = compiled(plan)
    candidates = {each.label: each for each in first.candidates}
    assert set(candidates) >= {f"tensorrt {precision}" for precision in FLOATS}
    assert not any(each.recipe.form == "aoti" for each in candidates.values())
    for label, candidate in candidates.items():
        message = f"{label}: {candidate.state}: {candidate.reason}"
        more = {
            "tensorrt": {"mislabelled"},  # it may find fp32 kernels faster
            "torch": {"built"},  # with `keep`: the baseline as a program
        }.get(candidate.recipe.backend, set())
        assert candidate.state in {"measured"} | more, message
    notes = [note.text for note in first.notes]
    assert {baseline.label for baseline in first.baselines} >= BEST | {"pytorch eager tf32"}, notes
    steps = {step.subject: step for step in first.steps if step.stage == "torch.compile"}
    assert set(steps) == BEST
    assert all(step.seconds > 0 and not step.reused for step in steps.values())
    assert first.verdict in ("accepted", "keep", "unproven"), first.reasons
    if first.verdict == "keep":
        assert first.delivered is not None, candidates
    again = [step for step in compiled(plan).steps if step.stage == "torch.compile"]
    assert len(again) == len(BEST)
    assert all(step.reused for step in again)


def test_packages_that_a_plan_names_are_measured_unless_they_crash_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package_crash: str,
) -> None:
    """After a crash the other precision is not built."""
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path / "home"))
    plan = perceptron(tmp_path)
    document = yaml.safe_load(plan.read_text())
    named = [{"backend": "torch", "precision": precision} for precision in ("fp32", "fp16")]
    tensorrt = {"backend": "tensorrt", "precision": "fp32"}
    plan.write_text(yaml.safe_dump({**document, "candidates": [*named, tensorrt]}))
    report = compiled(plan)
    candidates = {candidate.label: candidate for candidate in report.candidates}
    states = [candidates[f"torch aoti {precision}"].state for precision in ("fp32", "fp16")]
    expected = ["failed", "refused"] if package_crash else ["measured", "measured"]
    assert states == expected, [candidate.reason for candidate in report.candidates]
    assert candidates["tensorrt fp32"].state == "measured", candidates["tensorrt fp32"].reason


def test_baselines_of_the_gpu_are_checked_and_delivered(tmp_path: Path) -> None:
    context = open_context(load_plan(perceptron(tmp_path)), Runner(Store(tmp_path / "home")))
    exported = export_model(context)
    baselines, reference = build_baselines(context, exported), build_reference(context, exported)
    labels = [engine.recipe.label for engine in baselines]
    assert labels == ["pytorch eager fp32", "pytorch eager tf32", "pytorch eager fp16"]
    expected = reference_outputs(context, reference, context.data.selection)
    for candidate in check_baselines(context, baselines, reference, expected):
        assert candidate.state == "measured", candidate.reason
    for baseline in baselines:
        engine = deliverable_candidate(context, exported, baseline, expected).engine
        assert engine is not None
        assert engine.target.compute_capability


def test_the_baseline_of_an_onnx_file_runs_on_the_gpu(tmp_path: Path) -> None:
    plan = write_task(tmp_path, tensorrt={"optimization_level": 1})
    context = open_context(load_plan(plan), Runner(Store(tmp_path / "home")))
    exported = export_model(context)
    first, *_ = build_baselines(context, exported)
    assert first.recipe.label == "tensorrt as given tf32"
    reference = build_reference(context, exported)
    assert reference.target.compute_capability is None
    expected = reference_outputs(context, reference, context.data.selection)
    (checked, *_) = check_baselines(context, [first], reference, expected)
    assert checked.state == "measured", checked.reason
    assert deliverable_candidate(context, exported, first, expected).engine == first


def test_a_delivered_program_is_validated_and_measured_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package_crash: str,
) -> None:
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path / "home"))
    plan = perceptron(tmp_path)
    form = "exported" if package_crash else "aoti"
    only = f"candidates=[{{backend: torch, precision: fp16, form: {form}}}]"
    result = crucible("compile", plan, "--set", only, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert (tmp_path / "out" / "engine" / "program.pt2").is_file()
    for command in ("validate", "bench"):
        result = crucible(command, tmp_path / "out")
        assert result.code == 0, f"{command}: {result.err}"
    result = crucible(
        "export", "--triton", "net/1", tmp_path / "models", "--from", tmp_path / "out"
    )
    assert result.code == 1
    assert "a PyTorch backend of Triton's" in result.err
