"""TensorRT's own calibration: which samples it gets, how they reach it, what is kept; on a GPU,
that engines come of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.backends.tensorrt.calibrator import (
    CACHE,
    Feeder,
    calibrate_with_tensorrt,
    calibrator_from_cache,
    choose,
    note_on,
    profiles_of,
)
from pipeline.core.artifacts import BuildOptions, OnnxModel
from pipeline.core.progress import silent
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.errors import BackendUnavailable, DataError, UnsupportedError
from pipeline.host.gpu import find_gpus
from pipeline.onnx_graph.compare import open_reference
from pipeline.plan.schema import CalibrationConfig
from tests.builders.convert import RESIDUAL, images, model_from_text
from tests.pipeline.backends.cuda_double import CudaDouble

X = TensorSpec(name="x", dtype="float32", shape=("N", "T"), kind="dynamic")
MASK = TensorSpec(name="mask", dtype="int64", shape=("N", "T"), kind="dynamic")
PROFILES = (Profile(dims={"N": [1, 4, 8], "T": [1, 4, 64]}),)


def texts(folder: Path, **lengths: int) -> CalibrationSet:
    """One file per length: `_16=10` is ten samples of 16."""
    paths = []
    for name, count in lengths.items():
        length, path = int(name.strip("_")), folder / f"{name}.npz"
        values = np.arange(count * length, dtype=np.float32).reshape(count, length) + length
        np.savez(path, x=values, mask=np.ones((count, length), np.int64))
        paths.append(path)
    return open_set(CalibrationSet, tuple(paths), (X, MASK), PROFILES)


# --- which samples ---


def test_the_shape_of_most_samples_is_taken_and_a_short_batch_left_out(tmp_path: Path) -> None:
    samples = texts(tmp_path, _16=11, _32=7, _48=5)
    chosen = choose(samples, CalibrationConfig(batch=4))
    assert dict(chosen.shapes) == {"x": (4, 16), "mask": (4, 16)}
    assert (chosen.batches, chosen.samples, chosen.requested) == (2, 8, 23)


def test_a_batch_is_no_larger_than_the_profile_and_the_plan_allow(tmp_path: Path) -> None:
    samples = texts(tmp_path, _16=40)
    assert choose(samples, CalibrationConfig(batch=32)).rows == 8  # the profile's max
    assert choose(samples, CalibrationConfig(batch=8, samples=20)).samples == 24  # whole batches
    assert choose(samples, CalibrationConfig(batch=8, samples=3)).samples == 3


def test_the_calibration_profile_is_the_batch(tmp_path: Path) -> None:
    chosen = choose(texts(tmp_path, _16=8), CalibrationConfig(batch=4))
    (profile,) = profiles_of((X, MASK), chosen.shapes)
    assert {name: (dim.min, dim.opt, dim.max) for name, dim in profile.dims.items()} == {
        "N": (4, 4, 4),
        "T": (16, 16, 16),
    }
    fixed = tuple(spec.model_copy(update={"shape": (4, 16)}) for spec in (X, MASK))
    assert profiles_of(fixed, chosen.shapes) == ()


def test_the_note_names_the_profile_and_warns_if_half_of_the_samples_are_unused(
    tmp_path: Path,
) -> None:
    samples = texts(tmp_path, _16=160, _32=120, _48=100)
    note = note_on(
        choose(samples, CalibrationConfig(batch=8)), samples.samples, CalibrationMethod.MINMAX
    )
    assert (note.level, note.stage) == ("warning", "calibrate")
    assert (
        "minmax calibrator took 160 of 380 samples, 20 batches of the calibration profile x [8,"
        " 16], mask [8, 16]; " in note.text
    )
    uniform = texts(tmp_path, _16=160)
    assert (
        note_on(choose(uniform, CalibrationConfig()), 160, CalibrationMethod.ENTROPY).level
        == "info"
    )
    assert "pad all samples" in note.text


def test_a_short_last_batch_is_not_blamed_on_lengths(tmp_path: Path) -> None:
    samples = texts(tmp_path, _16=163)
    note = note_on(
        choose(samples, CalibrationConfig(batch=8)), samples.samples, CalibrationMethod.ENTROPY
    )
    assert note.level == "info"
    assert note.text.endswith("mask [8, 16]; the other 3 fill no batch of this shape")


# --- how they reach it ---


def at(address: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(ctypes.string_at(address, like.nbytes), like.dtype).reshape(like.shape)


def test_every_batch_lies_at_the_addresses_that_are_given_and_memory_comes_back(
    tmp_path: Path,
) -> None:
    samples, rt = texts(tmp_path, _16=9, _32=6), CudaDouble()
    chosen = choose(samples, CalibrationConfig(batch=4))
    fractions: list[float | None] = []
    with closing(
        Feeder(rt, samples, chosen, lambda fraction, text, figures=None: fractions.append(fraction))
    ) as feeder:
        batches = [
            (
                feeds["x"],
                at(feeds["x"], np.empty((4, 16), np.float32)),
                at(feeds["mask"], np.empty((4, 16), np.int64)),
            )
            for feeds in feeder
        ]
    assert len({address for address, _, _ in batches}) == 1  # one buffer, filled again
    np.testing.assert_array_equal(
        np.concatenate([x for _, x, _ in batches]).reshape(-1), np.arange(8 * 16) + 16
    )
    assert all((mask == 1).all() for _, _, mask in batches)
    assert fractions == [0.0, 0.45]
    assert not rt.device
    assert not rt.pinned


def test_what_goes_wrong_while_tensorrt_asks_ends_the_data_and_is_raised_afterwards(
    tmp_path: Path,
) -> None:
    samples = texts(tmp_path, _16=8)
    with closing(
        Feeder(CudaDouble(), samples, choose(samples, CalibrationConfig(batch=4)), silent)
    ) as feeder:
        feeder.check()
        (tmp_path / "_16.npz").unlink()
        assert list(feeder) == []
        with pytest.raises(DataError, match="_16"):
            feeder.check()


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is None, reason="needs the library tensorrt"
)
@pytest.mark.parametrize("base", ["IInt8EntropyCalibrator2", "IInt8MinMaxCalibrator"])
def test_polygraphy_hands_the_addresses_on_until_the_batches_end(tmp_path: Path, base: str) -> None:
    import tensorrt
    from polygraphy.backend.trt import Calibrator

    samples = texts(tmp_path, _16=9)
    with closing(
        Feeder(CudaDouble(), samples, choose(samples, CalibrationConfig(batch=4)), silent)
    ) as feeder:
        calibrator = Calibrator(feeder, BaseClass=getattr(tensorrt, base))
        first = calibrator.get_batch(["mask", "x"])
        assert at(first[1], np.empty((4, 16), np.float32)).reshape(-1)[:2].tolist() == [16, 17]
        assert calibrator.get_batch(["mask", "x"]) == first
        assert calibrator.get_batch(["mask", "x"]) is None
        calibrator.write_calibration_cache(memoryview(b"TRT-100600"))
        assert (calibrator.cache_contents, calibrator.num_batches) == (b"TRT-100600", 2)


# --- what is kept ---


class Base:
    """Stands for TensorRT's calibrator classes, which must be initialised."""

    ready = False

    def __init__(self) -> None:
        self.ready = True


DOUBLE = SimpleNamespace(
    IInt8EntropyCalibrator2=Base, IInt8MinMaxCalibrator=type("MinMax", (Base,), {})
)


def test_a_calibrator_from_a_cache_has_the_cache_and_no_batches() -> None:
    calibrator = calibrator_from_cache(DOUBLE, b"scales", CalibrationMethod.MINMAX)
    assert isinstance(calibrator, DOUBLE.IInt8MinMaxCalibrator)
    assert calibrator.ready
    assert calibrator.read_calibration_cache() == b"scales"
    assert calibrator.get_batch(["x"]) is None
    calibrator.write_calibration_cache(b"other")
    assert (calibrator.read_calibration_cache(), calibrator.get_batch_size()) == (b"scales", 1)
    assert type(calibrator_from_cache(DOUBLE, b"", CalibrationMethod.ENTROPY)).__mro__[1] is Base


def test_a_method_that_tensorrt_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="entropy or minmax, not by percentile"):
        calibrator_from_cache(DOUBLE, b"", CalibrationMethod.PERCENTILE)


RECIPE = Recipe(
    backend="tensorrt",
    precision=Precision.INT8,
    realised_in="flags",
    method=CalibrationMethod.ENTROPY,
    rest=Precision.FP16,
)
ROWS = (Profile(dims={"N": [1, 4, 8]}),)


def photos(folder: Path, model: OnnxModel, count: int) -> CalibrationSet:
    np.savez(folder / "photos.npz", **images(count))  # type: ignore[arg-type]
    return open_set(CalibrationSet, (folder / "photos.npz",), model.inputs, ROWS)


@pytest.mark.skipif(bool(find_gpus().devices), reason="this host has a GPU")
def test_without_a_gpu_it_says_so_before_it_reads_anything(tmp_path: Path) -> None:
    model = model_from_text(tmp_path / "source", RESIDUAL)
    with pytest.raises(BackendUnavailable, match="TensorRT cannot be used on this host"):
        calibrate_with_tensorrt(
            model,
            photos(tmp_path, model, 4),
            RECIPE,
            CalibrationConfig(),
            BuildOptions(profiles=ROWS),
            tmp_path,
        )
    assert not (tmp_path / CACHE).exists()


# --- on a GPU ---

Calibrated = Callable[[CalibrationMethod], OnnxModel]


@pytest.fixture
def calibrated(tmp_path: Path) -> Calibrated:
    model = model_from_text(tmp_path / "source", RESIDUAL)

    def make(method: CalibrationMethod) -> OnnxModel:
        out = tmp_path / method
        out.mkdir()
        recipe = RECIPE.model_copy(update={"method": method})
        options = CalibrationConfig(batch=4)
        return calibrate_with_tensorrt(
            model, photos(tmp_path, model, 18), recipe, options, BuildOptions(profiles=ROWS), out
        )

    return make


@pytest.mark.gpu
def test_the_cache_holds_a_scale_per_tensor_and_the_digest_tells_algorithms_apart(
    tmp_path: Path, calibrated: Calibrated
) -> None:
    models = {
        method: calibrated(method)
        for method in (CalibrationMethod.ENTROPY, CalibrationMethod.MINMAX)
    }
    heads = [(model.root / CACHE).read_text().splitlines()[0] for model in models.values()]
    assert ["Entropy" in heads[0], "MinMax" in heads[1]] == [True, True]
    for model in models.values():
        tensors = {line.split(":")[0] for line in (model.root / CACHE).read_text().splitlines()[1:]}
        assert {"x", "r1", "c2", "r2"} <= tensors
        assert model.precision is Precision.INT8
        assert "16 of 18 samples" in model.notes[0].text
    digests = {model.digest for model in models.values()} | {
        model_from_text(tmp_path / "again", RESIDUAL).digest
    }
    assert len(digests) == 3


@pytest.mark.gpu
def test_an_engine_comes_of_the_cache_and_stays_close(
    tmp_path: Path, calibrated: Calibrated
) -> None:
    model = calibrated(CalibrationMethod.MINMAX)
    out = tmp_path / "engine"
    out.mkdir()
    backend = backends.backend("tensorrt")
    recipe = RECIPE.model_copy(update={"method": CalibrationMethod.MINMAX})
    engine = backend.build(model, recipe, BuildOptions(profiles=ROWS), out, silent)
    with closing(backend.load(engine)) as loaded, closing(loaded.session()) as session:
        got = run_session(session, images(5, seed=3))["y"]
    expected = open_reference(model.path)(images(5, seed=3))["y"]
    assert np.abs(np.subtract(got, expected)).max() < 0.1 * np.abs(expected).max()
