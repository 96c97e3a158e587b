"""`crucible inspect`: engines in words, and a backend that this host lacks."""

from __future__ import annotations

from pathlib import Path

from pipeline.core import BuildOptions, Engine, Precision, Profile, Recipe, Target, TensorSpec
from pipeline.inspection import engine_lines
from tests.fixtures_cli import crucible, write_model

X = TensorSpec(name="x", dtype="float32", shape=("batch", 4), kind="dynamic")


def engine(target: Target) -> Engine:
    profiles = BuildOptions(profiles=(Profile.model_validate({"dims": {"batch": [1, 4, 16]}, "values": {"k": [1, 5, 10]}}),)).profiles
    recipe = Recipe(backend=target.backend, precision=Precision.FP16)
    return Engine(
        root=Path(),
        file="e",
        digest="ab" * 32,
        target=target,
        recipe=recipe,
        inputs=(X,),
        outputs=(X,),
        profiles=profiles,
        threads=0,
        size_bytes=2_000_000,
    )


def test_an_engine_says_which_gpu_or_cpu_it_needs() -> None:
    gpu = Target(backend="tensorrt", version="10.6.0", device="NVIDIA H200", compute_capability="9.0", driver="580.159")
    assert "built for: tensorrt 10.6.0 on NVIDIA H200 (compute capability 9.0, driver 580.159)" in engine_lines(engine(gpu))
    any_ampere = Target(backend="tensorrt", version="10.6.0", device="NVIDIA H200", compute_capability="8.0+")
    assert "built for: tensorrt 10.6.0 on NVIDIA H200 (compute capability 8.0+)" in engine_lines(engine(any_ampere))
    cpu = Target(backend="onnxruntime", version="1.31.1", device="AMD EPYC", cpu_flags=("avx", "avx2"))
    assert "built for: onnxruntime 1.31.1 on AMD EPYC avx avx2" in engine_lines(engine(cpu))
    assert "profile 0: batch 1..4..16, k [1]..[5]..[10]" in engine_lines(engine(cpu))


def test_inspecting_for_tensorrt_without_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    write_model(tmp_path / "model.onnx")
    done = crucible("inspect", tmp_path / "model.onnx", "--backend", "tensorrt", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 1
    assert done.out == ""
    assert done.err.startswith("error backend.unavailable TensorRT cannot be used on this host: ")
    assert "next" in done.err
    assert "use onnxruntime or openvino" in done.err
