"""Engines of TensorRT from their files, on doubles: what is read, and what is refused with what was
expected and found.
"""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.backends.tensorrt.session import ordinal_of
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import TensorSpec
from pipeline.errors import BackendUnavailable, StoreError, UnsupportedError
from tests.pipeline.backends.tensorrt.builders import DOUBLE, FLAG, Bench, X, Y


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_file_that_tensorrt_cannot_read(bench: Bench) -> None:
    engine = bench.engine()
    engine.path.write_text("half")
    with pytest.raises(StoreError, match=r"engine\.plan.*plan->header\.size == blobSize failed\n"):
        bench.load(engine)
    engine.path.unlink()
    with pytest.raises(StoreError, match=r"engine\.plan.*No such file"):
        bench.load(engine)


def test_a_damaged_file_that_tensorrt_reads_all_the_same(bench: Bench) -> None:
    engine = bench.engine().model_copy(update={"digest": "of other bytes"})
    with pytest.raises(
        StoreError, match=r"engine\.plan.*its sha256 is not that of the engine that was built"
    ):
        bench.load(engine)
    gc.collect()
    assert bench.cuda.used == 0


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ((X,), (Y,), "expected inputs and outputs x, y, found x, flag, y"),
        (
            (X, FLAG),
            (Y, Y.model_copy(update={"name": "z"})),
            "expected inputs and outputs x, flag, y, z, found x, flag, y",
        ),
        (
            (X.model_copy(update={"dtype": "float16"}), FLAG),
            (Y,),
            "expected 'x' as float16, found FLOAT",
        ),
    ],
)
def test_the_engine_of_another_model(
    bench: Bench, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        bench.load(bench.engine(DOUBLE, inputs, outputs))
    gc.collect()
    assert bench.cuda.used == 0


def test_plugin_libraries_beside_the_engine_are_loaded_first(bench: Bench) -> None:
    engine = bench.engine()
    (bench.folder / "plugins").mkdir()
    for name in ("b.so", "a.so", "readme.txt"):
        (bench.folder / "plugins" / name).touch()
    bench.load(engine).close()
    assert bench.trt.loaded_libraries == [
        str(bench.folder / "plugins" / name) for name in ("a.so", "b.so")
    ]


def test_code_in_a_version_compatible_engine_runs_only_if_allowed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(backend="tensorrt", precision=Precision.FP32, version_compatible=True)
    engine = bench.engine(recipe=recipe)
    with pytest.raises(BackendUnavailable, match=r"engine\.plan.*runs code of that file") as error:
        bench.load(engine)
    assert "CRUCIBLE_ALLOW_HOST_CODE=1" in error.value.next_step
    monkeypatch.setenv("CRUCIBLE_ALLOW_HOST_CODE", "1")
    with closing(bench.load(engine)) as loaded:
        assert loaded.cuda_engine.runtime.engine_host_code_allowed


@pytest.mark.parametrize(("device", "ordinal"), [("", 0), ("cuda:0", 0), ("cuda:12", 12)])
def test_devices(device: str, ordinal: int) -> None:
    assert ordinal_of(device) == ordinal


@pytest.mark.parametrize("device", ["tpu:0", "cuda", "cuda:", "cuda:-1", "cpu", "CUDA:0"])
def test_other_devices_are_refused_by_name(device: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{device}'"):
        ordinal_of(device)


def test_a_gpu_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(
        UnsupportedError, match="there is no device 'cuda:1': this host has 1 GPU\n"
    ):
        bench.load(bench.engine(), "cuda:1")
