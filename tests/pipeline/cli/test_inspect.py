"""`crucible inspect`: engines in words, and a backend that this host lacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends import BACKENDS
from pipeline.backends.tensorrt import library as trt_library
from pipeline.cli.inspect import engine_lines, find_unsupported, plugin_libraries, read_model
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Refusal, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import PlanError
from tests.builders.cli import crucible, write_model

X = TensorSpec(name="x", dtype="float32", shape=("batch", 4), kind="dynamic")


def engine(target: Target) -> Engine:
    profiles = BuildOptions(
        profiles=(
            Profile.model_validate({"dims": {"batch": [1, 4, 16]}, "values": {"k": [1, 5, 10]}}),
        )
    ).profiles
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
    gpu = Target(
        backend="tensorrt",
        version="10.6.0",
        device="NVIDIA H200",
        compute_capability="9.0",
        driver="580.159",
    )
    assert (
        "built for: tensorrt 10.6.0 on NVIDIA H200 (compute capability 9.0, driver 580.159)"
        in engine_lines(engine(gpu))
    )
    any_ampere = Target(
        backend="tensorrt", version="10.6.0", device="NVIDIA H200", compute_capability="8.0+"
    )
    assert "built for: tensorrt 10.6.0 on NVIDIA H200 (compute capability 8.0+)" in engine_lines(
        engine(any_ampere)
    )
    cpu = Target(
        backend="onnxruntime", version="1.31.1", device="AMD EPYC", cpu_flags=("avx", "avx2")
    )
    assert "built for: onnxruntime 1.31.1 on AMD EPYC avx avx2" in engine_lines(engine(cpu))
    assert "profile 0: batch 1..4..16, k [1]..[5]..[10]" in engine_lines(engine(cpu))


def test_inspecting_for_tensorrt_without_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    write_model(tmp_path / "model.onnx")
    result = crucible(
        "inspect",
        tmp_path / "model.onnx",
        "--backend",
        "tensorrt",
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.code == 1
    assert result.out == ""
    assert result.err.startswith("error backend.unavailable TensorRT cannot be used on this host: ")
    assert "next" in result.err
    assert "use onnxruntime or openvino" in result.err


# -- plugin libraries --------------------------------------------------------


@dataclass
class WithPlugins:
    """A backend that knows what its plugins bring."""

    loaded: list[Path] = field(default_factory=list)

    def probe(self) -> Target:
        return Target(
            backend="tensorrt", version="10.6.0", device="NVIDIA H200", compute_capability="9.0"
        )

    def unsupported(
        self, model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
    ) -> tuple[Refusal, ...]:
        self.loaded += plugins
        return ()


def test_plugin_libraries_reach_the_backend_by_their_full_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model.onnx")
    names = ["libz.so", "liba.so"]
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    backend: Any = WithPlugins()
    monkeypatch.setitem(BACKENDS, "tensorrt", backend)
    assert (
        find_unsupported(
            read_model(Path("model.onnx")),
            "tensorrt",
            plugin_libraries([Path(name) for name in names], "tensorrt"),
        )
        == ()
    )
    assert backend.loaded == [tmp_path / name for name in names]


def test_a_plugin_library_is_loaded_into_the_parsers_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TensorRT-RTX's parser, which is nearly the same and needs no GPU."""
    library = pytest.importorskip("tensorrt_rtx")
    write_model(tmp_path / "model.onnx")
    (tmp_path / "libplugin.so").write_bytes(b"no library")
    monkeypatch.setattr(trt_library, "library", lambda: library)
    backend: Any = WithPlugins()
    monkeypatch.setattr("pipeline.backends.tensorrt.backend.probe", backend.probe)
    with pytest.raises(
        PlanError,
        match=(
            r"the plugin library '.*libplugin.so' cannot be loaded: .*(file too short|invalid ELF"
            r" header)"
        ),
    ):
        find_unsupported(
            read_model(tmp_path / "model.onnx"), "tensorrt", (tmp_path / "libplugin.so",)
        )


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("tensorrt", "--plugin: no file at 'none.so'"),
        ("onnxruntime", "only TensorRT loads plugin libraries"),
        (None, "only TensorRT loads plugin"),
    ],
)
def test_plugin_libraries_that_are_given_in_vain_are_refused(
    backend: str | None, message: str
) -> None:
    with pytest.raises(PlanError) as error:
        plugin_libraries([Path("none.so")], backend)
    assert message in error.value.message
    assert error.value.next_step
    assert plugin_libraries([], backend) == ()


def test_the_command_takes_plugin_libraries(tmp_path: Path) -> None:
    write_model(tmp_path / "model.onnx")
    result = crucible(
        "inspect",
        tmp_path / "model.onnx",
        "--backend",
        "tensorrt",
        "--plugin",
        "liba.so",
        "--plugin",
        "libb.so",
        cwd=tmp_path,
    )
    assert result.code == 1
    assert "--plugin: no file at 'liba.so'" in result.err
