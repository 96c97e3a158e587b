"""What goes wrong on a real GPU, in real processes: it is said, nothing is left behind, and the
next request works.

Out of memory within one process, damaged and foreign engine files:
tests/pipeline/backends/tensorrt/test_backend.py and test_trt_session_gpu.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline import backends
from pipeline.backends import timing_cache
from pipeline.backends.base import run_session
from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.backends.tensorrt import library as trt_library
from pipeline.compiler.compile import compile_plan
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, TensorRTOptions
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile
from pipeline.execution.child_process import Child, TimeLimit, call_in_child
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.stages.build import build
from tests.builders.cli import FEATURES, Result, answers, crucible, write_task
from tests.builders.nvml import Nvml, NVMLError_LibraryNotFound, write_nvml
from tests.gpu.fixtures.gpu import MIB, SLACK_BYTES, full_gpu, slow_model, used_bytes, wait_for
from tests.pipeline.conformance.models import Case, convolution, two_symbols

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
FP32 = Recipe(backend="tensorrt", precision=Precision.FP32)
TF32 = Recipe(
    backend="tensorrt", precision=Precision.TF32, realised_in="runtime"
)  # of the same graph, with more kernels to time
CONTEXT_BYTES = 300 * MIB  # a process that builds has at least a CUDA context
BUILD_S = 120.0
FULL_BYTES = 300 * MIB  # left by others: not even a CUDA context with TensorRT's kernels fits


def built(case: Case, folder: Path) -> Engine:
    """The engine of a conformance case, built as in every compile: in a process of its own."""
    return call_in_child(build, *arguments(case, folder), name=case.name, limit=TimeLimit(BUILD_S))


def arguments(case: Case, folder: Path) -> tuple[OnnxModel, Recipe, BuildOptions, Path]:
    (folder / "engine").mkdir(parents=True)
    return (
        case.write(folder / "source"),
        FP32,
        BuildOptions(profiles=case.profiles),
        folder / "engine",
    )


def assert_right(engine: Engine, case: Case) -> None:
    """The engine answers as ONNX's reference implementation does."""
    with closing(backends.load(engine)) as loaded, closing(loaded.session()) as session:
        for feeds in case.feeds:
            got = run_session(session, feeds)
            for name, expected in case.expected(feeds).items():
                np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-4)


def compiled(plan: Path, **env: str) -> Result:
    """`crucible compile`, with the packages of this process."""
    return crucible("compile", plan, cwd=plan.parent, env=env)


def fp16_task(folder: Path, **changes: object) -> Path:
    return write_task(
        folder,
        **{
            "candidates": [{"backend": "tensorrt", "precision": "fp16"}],
            "fallback": False,
            **changes,
        },
    )


# -- processes ---------------------------------------------------------------


def test_a_cancelled_build_is_gone_and_its_memory_is_back(tmp_path: Path) -> None:
    model, profile = slow_model(tmp_path / "model")
    options = BuildOptions(profiles=(profile,), tensorrt=TensorRTOptions(optimization_level=5))
    (tmp_path / "engine").mkdir()
    before = used_bytes()
    with Child(
        build, model, TF32, options, tmp_path / "engine", name="slow build", conversation=False
    ) as child:
        wait_for(before + CONTEXT_BYTES, above=True)
        time.sleep(3)  # well into timing kernels
        assert psutil.Process(child.pid).is_running()
        assert used_bytes() > before + CONTEXT_BYTES, (
            "the build ended before it was cancelled: make it longer"
        )
        child.stop()
        assert not psutil.pid_exists(child.pid)
        wait_for(before + SLACK_BYTES, above=False)
    assert_right(built(two_symbols(), tmp_path / "next"), two_symbols())


def test_two_processes_build_on_one_gpu_and_both_end_right(tmp_path: Path) -> None:
    cases = (convolution(), two_symbols())
    with ThreadPoolExecutor() as pool:
        engines = list(pool.map(lambda case: built(case, tmp_path / case.name), cases))
    for case, engine in zip(cases, engines, strict=True):
        assert_right(engine, case)
    again = built(convolution(), tmp_path / "again")
    assert_right(again, convolution())
    assert not any("damaged" in note.text for note in again.notes)
    overloaded = any("other work took" in note.text for note in again.notes)
    assert (
        timing_cache.read(
            timing_cache.CacheScope(tensorrt_.probe(), TensorRTOptions().timing_iterations)
        )
        or overloaded
    )  # this build at least was alone, so its times are kept where the CPUs keep up


# -- memory ------------------------------------------------------------------


def test_a_compile_on_a_full_gpu_says_so_and_the_next_one_works(tmp_path: Path) -> None:
    plan = fp16_task(tmp_path)
    with full_gpu(FULL_BYTES):
        result = compiled(plan)
    assert result.code in (1, 2), result.out + result.err
    assert "memory" in result.out + result.err
    assert "Traceback" not in result.err
    assert compiled(plan).summary["winner"] == "tensorrt fp16"


def test_a_session_on_a_full_gpu_says_so_and_the_next_one_works(tmp_path: Path) -> None:
    engine = built(convolution(), tmp_path)
    with (
        full_gpu(FULL_BYTES),
        Child(answer_once, engine, name="session", conversation=False) as child,
    ):
        with pytest.raises(Exception, match="memory") as error:
            child.result(TimeLimit(BUILD_S))
        assert type(error.value).__name__ in ("OutOfDeviceMemory", "CudaError"), error.value
    assert call_in_child(answer_once, engine, name="session") == len(convolution().feeds)


def answer_once(engine: Engine, progress: object = None) -> int:
    """Runs in a child: load an engine and check its answers."""
    assert_right(engine, convolution())
    return len(convolution().feeds)


# -- what cannot be had ------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (
            {"precision": "fp16", "version_compatible": True},
            "version compatibility needs the lean runtime",
        ),
        (
            {"precision": "int8", "precision_from": "flags", "method": "percentile"},
            "by entropy or minmax, not by percentile",
        ),
        (
            {"precision": "tf32", "precision_from": "flags"},
            "tf32 is the fp32 graph with one builder flag set",
        ),
        (
            {"precision": "fp16", "compute_capability": "8.6"},
            "builds only for the GPU that is here",
        ),
    ],
)
def test_a_plan_that_asks_for_what_is_lacking_is_refused_by_name(
    tmp_path: Path, candidate: dict[str, object], message: str
) -> None:
    if candidate.get("version_compatible") and not trt_library.missing_lean(
        trt_library.numbers(tensorrt_.probe().version)[0]
    ):
        pytest.skip("this host has the lean runtime")
    result = compiled(fp16_task(tmp_path, candidates=[{"backend": "tensorrt", **candidate}]))
    assert result.code == 1
    assert message in result.err
    assert "\nnext " in result.err  # what to take instead


def test_without_the_library_the_message_says_how_to_install_it(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("tensorrt")
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin).parents[1]
    if (place / "pydantic").exists():
        pytest.skip(f"TensorRT lies in {place} among the packages that Crucible needs")
    result = compiled(
        fp16_task(tmp_path),
        PYTHONPATH=os.pathsep.join(path for path in sys.path if path and Path(path) != place),
    )
    assert result.code == 1
    assert "`tensorrt` is not installed" in result.err
    assert "pip install -e '.[tensorrt]'" in result.err


def test_without_its_shared_libraries_the_message_names_one(tmp_path: Path) -> None:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    others = [
        folder for folder in folders if folder and not list(Path(folder).glob("libnvinfer.so*"))
    ]
    result = compiled(fp16_task(tmp_path), LD_LIBRARY_PATH=os.pathsep.join(others))
    if result.code == 0:
        pytest.skip("TensorRT's libraries are found without LD_LIBRARY_PATH")
    assert "libnvinfer" in result.out + result.err
    assert "Traceback" not in result.err


def test_a_hidden_gpu_is_named_with_what_hides_it(tmp_path: Path) -> None:
    result = compiled(fp16_task(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert result.code == 1
    assert "CUDA_VISIBLE_DEVICES=''" in result.err


def test_without_nvml_the_message_names_what_is_missing(tmp_path: Path) -> None:
    write_nvml(tmp_path / "nvml", Nvml(failure=NVMLError_LibraryNotFound()))
    path = os.pathsep.join((str(tmp_path / "nvml"), *filter(None, sys.path)))
    result = compiled(fp16_task(tmp_path), PYTHONPATH=path)
    assert result.code == 1
    assert "libnvidia-ml.so.1" in result.err
    assert "\nnext " in result.err


# -- values ------------------------------------------------------------------


def test_nan_in_an_fp16_engine_is_a_failed_candidate_and_no_crash(tmp_path: Path) -> None:
    plan = fp16_task(tmp_path)
    large = 1e5 * np.random.default_rng(5).normal(0, 1, (220, FEATURES)).astype(
        np.float32
    )  # far beyond fp16; calibration saw nothing of it
    np.savez(tmp_path / "selection.npz", x=large, labels=answers(large))
    report = compile_plan(
        load_plan(plan), Runner(Store(tmp_path / "home")), "crucible compile plan.yaml"
    )
    (candidate,) = report.candidates
    assert (report.verdict, candidate.state) == ("rejected", "failed accuracy")
    assert candidate.selection is not None
    assert candidate.selection.outputs[0].nan > 0
    assert "NaN" in candidate.reason


def test_a_profile_that_the_feeds_leave_is_an_error_that_prints_it(tmp_path: Path) -> None:
    case = convolution()
    engine = built(case, tmp_path)
    assert engine.profiles == (Profile(dims={"batch": [1, 4, 8]}),)
    with closing(backends.load(engine)) as loaded, closing(loaded.session()) as session:
        with pytest.raises(Exception, match="batch from 1 to 8"):
            session.bind({"image": np.zeros((9, 3, 8, 8), np.float32)})
        assert run_session(session, case.feeds[0])["logits"].shape == (1, 5)
