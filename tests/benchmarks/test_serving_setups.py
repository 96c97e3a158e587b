"""The benchmark of serving on one backend and another: what is compiled, how it is served, and what
becomes of it on the page.
"""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from benchmarks.pages.render import load_results, render
from pipeline.core.artifacts import Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import BackendUnavailable
from pipeline.host.gpu import find_gpus
from pipeline.plan.files import plan_from_document
from service.registry.models import DeploymentOptions

Bench = dict[str, ModuleType]


def test_the_plan_names_the_backend_and_a_gpu_gets_quick_builds(
    bench: Bench, tmp_path: Path
) -> None:
    plan_of = bench["crucible"].plan_of
    cpu, gpu = (
        plan_from_document(
            {**plan_of("cnn", 16, *backend), "model": {"path": "cnn.onnx"}}, tmp_path
        )
        for backend in ((), ("tensorrt",))
    )
    assert [(each.backend, each.precision) for each in cpu.candidates] == [("onnxruntime", "fp32")]
    assert [(each.backend, each.precision) for each in gpu.candidates] == [("tensorrt", "fp32")]
    assert "tensorrt" not in plan_of("cnn", 16)
    assert gpu.tensorrt.optimization_level == 1
    assert cpu.profiles == gpu.profiles
    assert gpu.profiles[0].dims["batch"].model_dump() == {"min": 1, "opt": 8, "max": 16}


def test_each_backend_has_a_setup_of_its_own_that_the_command_line_overrules(bench: Bench) -> None:
    serving, setups = bench["serving"], bench["setups"]
    assert set(setups.SETUPS) == set(setups.BACKENDS)
    cpu = serving.parse_arguments([])
    assert setups.setup_from(cpu) == setups.SETUPS["onnxruntime"]
    assert setups.SETUPS["onnxruntime"].options == DeploymentOptions(instances=1)
    assert cpu.only == list(serving.NAMES)
    gpu = serving.parse_arguments(["--backend", "tensorrt"])
    assert setups.setup_from(gpu) == setups.SETUPS["tensorrt"]
    assert gpu.only == ["Crucible"]
    assert gpu == serving.parse_arguments(["--backend", "tensorrt", "--only", "Crucible"])
    words = [
        "--backend",
        "tensorrt",
        "--cnn",
        "resnet18",
        "--side",
        "32",
        "--enlarged",
        "2",
        "--max-batch",
        "16",
        "--max-delay",
        "0",
        "--instances",
        "2",
    ]
    chosen = setups.setup_from(serving.parse_arguments(words))
    assert chosen.document == "serving_gpu_instances"  # beside the run with one
    expected = {
        "backend": "tensorrt",
        "cnn": "resnet18",
        "side": 32,
        "enlarged": 2,
        "instances": 2,
        "max_batch": 16,
        "max_delay_s": 0,
    }
    assert chosen.described() == expected


def test_batches_on_the_gpu_leave_connections_for_the_next(bench: Bench) -> None:
    assert bench["setups"].SETUPS["tensorrt"].options.max_batch * 2 == bench["rounds"].MANY


def test_peers_are_refused_on_a_gpu(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench["serving"].parse_arguments(["--backend", "tensorrt", "--only", "Crucible", "mosec"])
    assert (
        "takes --only Crucible, got mosec: the peers run on the CPU; leave --only out"
        in capsys.readouterr().err
    )


@pytest.mark.skipif(bool(find_gpus().devices), reason="this host has a GPU")
def test_a_host_without_a_gpu_says_so(bench: Bench) -> None:
    setups = bench["setups"]
    setups.refuse_other_hosts(setups.SETUPS["onnxruntime"])
    with pytest.raises(
        BackendUnavailable, match=r"cannot be used on this host: no NVIDIA driver[\s\S]*next: "
    ):
        setups.refuse_other_hosts(setups.SETUPS["tensorrt"])


def test_a_network_may_enlarge_its_image_first(bench: Bench, tmp_path: Path) -> None:
    models, rounds = bench["models"], bench["rounds"]
    original, small = (
        models.write_cnn(tmp_path / "whole.onnx", "squeezenet1_1", 64),
        models.write_cnn(tmp_path / "small.onnx", "squeezenet1_1", 32, 2),
    )
    large = models.image(32).repeat(2, axis=2).repeat(2, axis=3)
    (expected,) = onnxruntime.InferenceSession(
        str(original), providers=["CPUExecutionProvider"]
    ).run(None, {models.INPUT: large})
    answer = rounds.expected_of(small, 32)
    assert np.frombuffer(answer, np.float32) == pytest.approx(np.ravel(expected), abs=1e-5)
    assert (
        0
        < rounds.tolerance_of(answer)
        == pytest.approx(rounds.TOLERANCE * np.abs(expected).max(), rel=1e-3)
    )
    (other,) = onnxruntime.InferenceSession(str(original), providers=["CPUExecutionProvider"]).run(
        None, {models.INPUT: large[:, :, ::-1].copy()}
    )
    assert np.abs(other - expected).max() > rounds.tolerance_of(answer)


def test_an_engine_says_where_it_ran(bench: Bench) -> None:
    target = Target(backend="tensorrt", version="10.6.0", device="NVIDIA H200", driver="580")
    engine = SimpleNamespace(
        target=target, recipe=Recipe(backend="tensorrt", precision=Precision.FP32)
    )
    assert bench["setups"].ran_on(engine) == "tensorrt 10.6.0 fp32 on NVIDIA H200"


# -- rows and the page -------------------------------------------------------


def rows(
    bench: Bench, ran: str | None = "tensorrt 10.14.1 fp32 on NVIDIA H200"
) -> list[dict[str, object]]:
    """An engine of 300 rows/s that serves 291/s."""
    serving, rounds = bench["serving"], bench["rounds"]
    cpu = bench["processes"].Cpu(api_s=0.5, rest_s=1.0)
    stages = {"queue": 0.1, "copy_in": 0.2, "compute": 4.0, "copy_out": 0.05}
    turns = {
        ("CNN", "Crucible"): [
            rounds.Turn((0.0045,) * 1000, stages, {}, 291.0, 1164, 0.2, 0.1, cpu, ())
        ]
    }
    engine = {"latencies_s": [0.004] * 1000, "per_s": {"1": 250.0, "8": 300.0}, "wall_s": 1.0}
    load = rounds.Load("CNN", "cnn.onnx", 128, b"", 0.0)
    return list(serving.placed(serving.rows_from(turns, {}, [engine], ["Crucible"]), [load], ran))


def test_rows_say_where_the_cnn_ran_and_others_do_not(bench: Bench) -> None:
    serving, entries = bench["serving"], rows(bench)
    assert [(row["server"], row["ran_on"]) for row in entries] == [
        (name, "tensorrt 10.14.1 fp32 on NVIDIA H200") for name in ("direct Session", "Crucible")
    ]
    load = bench["rounds"].Load("CNN", "cnn.onnx", 128, b"", 0.0)
    peers = serving.placed(serving.rows_from({}, {}, [], ["FastAPI", "Crucible"]), [load], "x")
    assert [(row["load"], row["server"], row["ran_on"]) for row in peers] == [
        ("CNN", "Crucible", "x"),
        ("CNN", "FastAPI", None),
    ]
    assert set(entries[0]) == set(entries[1]) == set(bench["figures"].COLUMNS)


def test_targets_are_about_an_engine_that_is_slow_enough(bench: Bench) -> None:
    figures = bench["figures"]
    targets = figures.targets_of(rows(bench), figures.Wanted.on(16)) | figures.engine_target(
        rows(bench), 500.0
    )
    assert targets == {
        "CNN, 16 connections: at least 95% of the engine's best (got 97%)": True,
        "CNN, 1 connection: p99 at most 1 ms over the engine's (got +0.50 ms)": True,
        "CNN: an engine of at most 500 rows/s (got 300)": True,
    }
    assert figures.engine_target(rows(bench), 299.0) == {
        "CNN: an engine of at most 299 rows/s (got 300)": False
    }
    assert list(figures.engine_target([], 500.0).values()) == [False]


def test_the_page_has_a_section_for_the_gpu_where_there_is_a_result(
    bench: Bench, tmp_path: Path
) -> None:
    setup = bench["setups"].SETUPS["tensorrt"]
    bench["common"].publish(
        setup.document,
        rows(bench),
        {"a target": True},
        tmp_path,
        {"rounds": 3, "seconds": 4.0, **setup.described()},
    )
    result = load_results(tmp_path)["serving_gpu"]
    assert result["run"]["backend"] == "tensorrt"
    results = {"serving_gpu": result, "serving_gpu_instances": result}
    text = render("sections/serving_gpu.md.j2", results)
    assert "## Serving from a GPU" in text
    assert "| Crucible" in text
    assert "| direct Session batch 8 |" in text
    assert "- met: a target" in text
    assert "Crucible's p99 on one connection is 0.50 ms over the engine's median." in text
    assert (
        "on one connection, ms: queue 0.100, copy in 0.200, compute 4.000, copy out 0.050; the"
        " other 0.150 are HTTP on both sides." in text
    )
    message = (
        "tensorrt 10.14.1 fp32 on NVIDIA H200: resnet50 on [1, 3, 128, 128] float32, which it first"
        " enlarges 7 times; "
    )
    assert (
        f"{message}at most 8 rows together, a batch held open for 50 ms, 1 at a time. 3 rounds,"
        " 4 s of each measured stretch." in text
    )
