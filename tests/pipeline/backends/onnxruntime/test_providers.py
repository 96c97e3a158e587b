"""The GPU's providers of ONNX Runtime, on a double: there is no build with them here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.backends.base import run_session
from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.recipe import OrtProvider, Precision, Recipe
from pipeline.errors import BackendUnavailable, UnsupportedError
from tests.pipeline.backends.onnxruntime.onnxruntime_double import OnnxRuntimeDouble, pretend_gpu
from tests.pipeline.conformance.models import convolution

CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"
CASE = convolution()


def recipe_of(provider: OrtProvider, precision: Precision = Precision.FP32) -> Recipe:
    return Recipe(backend="onnxruntime", precision=precision, provider=provider)


def build(recipe: Recipe, folder: Path) -> Engine:
    out = folder / "engine"
    out.mkdir()
    model = CASE.write(folder / "source")
    return onnxruntime_.build(model, recipe, BuildOptions(profiles=CASE.profiles, threads=1), out)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnnxRuntimeDouble:
    pretend_gpu(tmp_path / "bin", monkeypatch)
    double = OnnxRuntimeDouble(CUDA, TENSORRT)
    double.install(monkeypatch)
    return double


def test_the_providers_of_the_build_are_found_by_name(
    library: OnnxRuntimeDouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert onnxruntime_.gpu_providers() == ("cuda", "tensorrt")
    OnnxRuntimeDouble(TENSORRT).install(monkeypatch)
    assert onnxruntime_.gpu_providers() == ("tensorrt",)
    OnnxRuntimeDouble().install(monkeypatch)
    assert onnxruntime_.gpu_providers() == ()


def test_a_provider_that_the_build_lacks_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    OnnxRuntimeDouble(CUDA).install(monkeypatch)
    onnxruntime_.check_recipe(recipe_of("cuda", Precision.FP16), onnxruntime_.probe())
    words = f"no {TENSORRT}: it has {CUDA}, {CPU}"
    with pytest.raises(UnsupportedError, match=words) as error:
        onnxruntime_.check_recipe(recipe_of("tensorrt"), onnxruntime_.probe())
    assert "onnxruntime-gpu" in error.value.next_step


@pytest.mark.parametrize(("precision", "tf32"), [(Precision.FP32, "0"), (Precision.TF32, "1")])
def test_cuda_comes_before_the_cpu_and_is_told_whether_tf32_may_be_used(
    library: OnnxRuntimeDouble, tmp_path: Path, precision: Precision, tf32: str
) -> None:
    engine = build(recipe_of("cuda", precision), tmp_path)
    assert (engine.target.device, engine.target.compute_capability) == ("NVIDIA Double", "9.0")
    assert engine.target.cpu_flags == ()
    session = onnxruntime_.load(engine).session()
    feeds = CASE.feeds[0]
    np.testing.assert_allclose(
        run_session(session, feeds)["logits"],
        CASE.expected(feeds)["logits"],
        rtol=1e-4,
    )
    at_build, at_load = library.opened
    assert at_build == at_load == [(CUDA, {"use_tf32": tf32}), (CPU, {})]
    assert onnxruntime_.layers(engine, feeds) is None  # no evidence of what ran


def test_tensorrt_is_told_the_shapes_of_the_profiles(
    library: OnnxRuntimeDouble,
    tmp_path: Path,
) -> None:
    build(recipe_of("tensorrt", Precision.TF32), tmp_path)
    (providers,) = library.opened
    assert [name for name, _ in providers] == [TENSORRT, CUDA, CPU]
    assert providers[0][1] == {
        "trt_fp16_enable": "0",
        "trt_profile_min_shapes": "image:1x3x8x8",
        "trt_profile_opt_shapes": "image:4x3x8x8",
        "trt_profile_max_shapes": "image:8x3x8x8",
    }


def test_a_library_that_falls_back_to_the_cpu_without_a_word_is_found_out(
    library: OnnxRuntimeDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(recipe_of("cuda"), tmp_path)
    OnnxRuntimeDouble(CUDA, broken=(CUDA,)).install(monkeypatch)
    with pytest.raises(BackendUnavailable, match=f"cannot load {CUDA} and would run on {CPU}"):
        onnxruntime_.load(engine)


def test_an_engine_of_a_provider_needs_its_gpu(
    library: OnnxRuntimeDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build(recipe_of("cuda"), tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BackendUnavailable, match="GPU providers need a GPU"):
        onnxruntime_.load(engine)
