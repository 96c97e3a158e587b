"""The steps before a PyTorch module, in baselines and in programs, against those in numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.backends.base import run_session
from pipeline.backends.pytorch import programs
from pipeline.backends.pytorch.module import in_precision
from pipeline.backends.pytorch.preprocessing import with_preprocessing
from pipeline.core.artifacts import BuildOptions, ModelSource
from pipeline.core.processing import ImageResize, Preprocess
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import TensorSpec
from pipeline.preprocess import preprocessed
from tests.pipeline.backends.pytorch.builders import (
    CLASSES,
    IMAGE,
    PROFILE,
    engine_of,
    model_of,
    run,
    source_of,
)

GREY = Preprocess(mean=(0.3,), std=(0.2,))
RESIZED = GREY.model_copy(
    update={"resize": ImageResize(source=(11, 5), target=(8, 8), filter="linear")}
)


def raw_source(step: Preprocess) -> ModelSource:
    source = source_of("ResidualCnn", IMAGE, outputs=("classes",))
    return source.model_copy(update={"preprocess": {"image": step}})


def pixels(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_module_gets_the_values_of_numpy(layout: str) -> None:
    step = Preprocess.model_validate(
        {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "layout": layout}
    ).model_copy(update={"resize": RESIZED.resize})
    ids = TensorSpec(name="ids", dtype="int64", shape=("batch",))
    source = ModelSource(inputs=(IMAGE, ids), preprocess={"image": step})

    class Same(torch.nn.Module):
        def forward(self, image: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return image + ids

    raw = pixels((2, 11, 5, 3))
    values = with_preprocessing(Same(), source)(torch.from_numpy(raw), torch.tensor(0))
    expected = preprocessed({"image": raw}, {"image": step})["image"]
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_module_in_16_bits_still_gets_values_that_were_computed_in_fp32() -> None:
    class Same(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image

    raw = pixels((1, 8, 8, 1))
    source = ModelSource(inputs=(IMAGE,), preprocess={"image": GREY})
    same = in_precision(Same(), Precision.BF16, (IMAGE,))
    (values,) = with_preprocessing(same, source)(torch.from_numpy(raw))
    expected = torch.from_numpy(preprocessed({"image": raw}, {"image": GREY})["image"])
    assert torch.equal(values, expected.to(torch.bfloat16).float())


@pytest.mark.parametrize("variant", ["eager", "traced"])
def test_a_baseline_takes_bytes_and_answers_as_behind_numpy(tmp_path: Path, variant: str) -> None:
    source = raw_source(RESIZED)
    raw = pixels((2, 11, 5, 1))
    (tmp_path / "raw").mkdir()
    (tmp_path / "plain").mkdir()
    plain = source.model_copy(update={"preprocess": {}})
    reference = engine_of(plain, (CLASSES,), "eager", tmp_path / "plain")
    expected = run(reference, dict(preprocessed({"image": raw}, source.preprocess)))["classes"]
    baseline = engine_of(source, (CLASSES,), variant, tmp_path / "raw")
    np.testing.assert_allclose(run(baseline, {"image": raw})["classes"], expected, atol=1e-5)


def test_a_program_takes_bytes_without_the_code_of_the_steps(tmp_path: Path) -> None:
    source = raw_source(RESIZED)
    model = model_of(source, (CLASSES,), tmp_path)
    recipe = Recipe(backend="torch", precision=Precision.FP32, form="exported")
    options = BuildOptions(profiles=(PROFILE,), threads=1, source=source)
    engine = programs.build(model, recipe, options, tmp_path)
    session = programs.load(engine).session()
    raw = pixels((3, 11, 5, 1))
    outputs = run_session(session, {"image": raw})
    plain = source.model_copy(update={"preprocess": {}})
    (tmp_path / "plain").mkdir()
    reference = engine_of(plain, (CLASSES,), "eager", tmp_path / "plain")
    expected = run(reference, dict(preprocessed({"image": raw}, source.preprocess)))["classes"]
    np.testing.assert_allclose(np.asarray(outputs["classes"], np.float32), expected, atol=1e-5)
