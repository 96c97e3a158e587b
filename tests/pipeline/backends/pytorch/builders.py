"""What the tests of the PyTorch baselines share: sources made of the modules of tests, engines,
runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.backends.pytorch import backend as pytorch_
from pipeline.core.artifacts import BuildOptions, Engine, ModelSource, OnnxModel
from pipeline.core.recipe import CompileMode, Precision, Recipe
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.plan.source import digest_of_source
from pipeline.preprocess import raw_specs

BUILDERS = Path(__file__).parents[3] / "builders"
IMAGE = TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8), kind="dynamic")
CLASSES = TensorSpec(name="classes", dtype="float32", shape=("batch", 10), kind="dynamic")
IDS = TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence"), kind="dynamic")
MASK = IDS.model_copy(update={"name": "mask"})
EMBEDDING = TensorSpec(name="embedding", dtype="float32", shape=("batch", 16), kind="dynamic")
TOKENS = TensorSpec(name="tokens", dtype="float32", shape=("batch", "sequence", 16), kind="dynamic")
PROFILE = Profile.model_validate({"dims": {"batch": [1, 2, 5], "sequence": [1, 4, 9]}})


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those marked gpu, which run in children: a process in which CUDA once saw no GPU
    never sees one.
    """
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def source_of(
    function: str,
    *inputs: TensorSpec,
    outputs: tuple[str, ...] = (),
    weights: Path | None = None,
    folder: Path = BUILDERS,
) -> ModelSource:
    """Source of a module of tests/builders/models.py, or of `module:function` in `folder`."""
    entrypoint = function if ":" in function else f"models:{function}"
    source = ModelSource(
        entrypoint=entrypoint, python_path=folder, inputs=inputs, outputs=outputs, weights=weights
    )
    return source.model_copy(update={"digest": digest_of_source(source)})


def model_of(source: ModelSource, outputs: tuple[TensorSpec, ...], out: Path) -> OnnxModel:
    """A graph with the interface of a source; there is no file."""
    return OnnxModel(
        root=out,
        file="model.onnx",
        digest="d",
        opset=20,
        inputs=raw_specs(source.inputs, source.preprocess),
        outputs=outputs,
    )


def engine_of(
    source: ModelSource,
    outputs: tuple[TensorSpec, ...],
    variant: str,
    out: Path,
    precision: Precision = Precision.FP32,
    mode: CompileMode | None = None,
) -> Engine:
    """Build a baseline of one profile."""
    model = model_of(source, outputs, out)
    recipe = Recipe(backend="pytorch", precision=precision, variant=variant, mode=mode)
    return pytorch_.build_baseline(
        source, model, recipe, BuildOptions(profiles=(PROFILE,), threads=1), out
    )


def run(engine: Engine, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Load the engine and run it once."""
    loaded = pytorch_.load(engine)
    session = loaded.session()
    session.bind(feeds)
    for step in (session.upload, session.execute, session.download, session.synchronize):
        step()
    outputs = dict(session.fetch())
    session.close()
    loaded.close()
    return outputs


COMPILE = pytest.param("compile", marks=[pytest.mark.slow, pytest.mark.filterwarnings("default")])
