"""The steps behind a PyTorch module, in baselines and in programs, against those in numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.backends.base import run_session
from pipeline.backends.pytorch import programs
from pipeline.backends.pytorch.module import in_precision
from pipeline.backends.pytorch.postprocessing import with_postprocessing
from pipeline.core.artifacts import BuildOptions, ModelSource
from pipeline.core.processing import Postprocess
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import TensorSpec
from pipeline.postprocess import postprocessed, reduced_specs
from tests.pipeline.backends.pytorch.builders import (
    CLASSES,
    IMAGE,
    PROFILE,
    engine_of,
    model_of,
    run,
    source_of,
)

SHARES = {"classes": Postprocess(top_k=3, softmax=True)}
BEST = {"classes": Postprocess(argmax=True)}


def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)


@pytest.mark.parametrize("variant", ["eager", "traced"])
@pytest.mark.parametrize("steps", [SHARES, BEST], ids=["top-k", "argmax"])
def test_a_baseline_gives_small_outputs(
    tmp_path: Path, variant: str, steps: dict[str, Postprocess]
) -> None:
    source = source_of("ResidualCnn", IMAGE, outputs=("classes",))
    for name in ("plain", "reduced"):
        (tmp_path / name).mkdir()
    feeds = {"image": images()}
    plain = run(engine_of(source, (CLASSES,), "eager", tmp_path / "plain"), feeds)
    baseline = engine_of(
        source.model_copy(update={"postprocess": steps}),
        reduced_specs((CLASSES,), steps),
        variant,
        tmp_path / "reduced",
    )
    expected, outputs = postprocessed(plain, steps), run(baseline, feeds)
    assert list(outputs) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(outputs[name], array, atol=1e-5)


def test_a_module_in_16_bits_gives_values_that_were_chosen_in_fp32() -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"twice": 2 * x, "scores": x}

    spec = TensorSpec(name="twice", dtype="float32", shape=("batch", 4))
    outputs = (
        spec,
        *reduced_specs(
            (spec.model_copy(update={"name": "scores"}),), {"scores": Postprocess(top_k=2)}
        ),
    )
    source = ModelSource(postprocess={"scores": Postprocess(top_k=2)})
    module = in_precision(with_postprocessing(Two(), source, outputs), Precision.BF16, outputs)
    x = torch.tensor([[1.0, 3.0, 4.0, 2.0]])
    twice, indices, values = module(x)
    assert torch.equal(twice, 2 * x)
    assert indices.tolist() == [[2, 1]]
    assert torch.equal(values, torch.tensor([[4.0, 3.0]]))
    assert values.dtype is torch.float32


def test_a_program_gives_small_outputs(tmp_path: Path) -> None:
    source = source_of("ResidualCnn", IMAGE, outputs=("classes",))
    reduced = source.model_copy(update={"postprocess": SHARES})
    model = model_of(reduced, reduced_specs((CLASSES,), SHARES), tmp_path)
    recipe = Recipe(backend="torch", precision=Precision.FP32, form="exported")
    options = BuildOptions(profiles=(PROFILE,), threads=1, source=reduced)
    session = programs.load(programs.build(model, recipe, options, tmp_path)).session()
    outputs = run_session(session, {"image": images()})
    (tmp_path / "plain").mkdir()
    plain = run(engine_of(source, (CLASSES,), "eager", tmp_path / "plain"), {"image": images()})
    for name, array in postprocessed(plain, SHARES).items():
        np.testing.assert_allclose(np.asarray(outputs[name]), array, atol=1e-5)
