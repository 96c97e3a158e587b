"""The layer table with the operator of every node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from pipeline.core.artifacts import BuildOptions
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile
from pipeline.stages.build import build
from pipeline.stages.inspect_layers import operators_of, prove, with_operators
from tests.builders.convert import RESIDUAL, model_from_text
from tests.builders.layers import layer, table

BRANCHES = """
<ir_version: 9, opset_import: ["" : 20]>
net (bool c, float[2] x) => (float[2] z)
{
    y = Relu (x)
    [choice] z = If <then_branch = yes () => (float[2] a) { [inner] a = Neg (y) },
      else_branch = no () => (float[2] b) { b = Abs (y) }> (c)
}
"""


def test_each_node_has_its_operator_and_those_without_a_name_go_by_their_output(
    tmp_path: Path,
) -> None:
    onnx.save_model(onnx.parser.parse_model(BRANCHES), str(tmp_path / "m.onnx"))
    assert operators_of(tmp_path / "m.onnx") == {
        "y": "Relu",
        "choice": "If",
        "inner": "Neg",
        "b": "Abs",
    }


def test_operators_stand_beside_their_nodes() -> None:
    layers = table(layer("fp16", nodes=("conv1", "relu1", "made by the library")), layer("fp16"))
    first, second = with_operators(layers, {"conv1": "Conv", "relu1": "Relu"}).layers
    assert first.operators == ("Conv", "Relu", "")
    assert second.operators == ()


def test_a_backend_without_evidence_proves_nothing(tmp_path: Path) -> None:
    model = model_from_text(tmp_path / "model", RESIDUAL)
    out = tmp_path / "engine"
    out.mkdir()
    profile = Profile.model_validate({"dims": {"N": [1, 2, 4]}})
    engine = build(
        model,
        Recipe(backend="onnxruntime", precision=Precision.FP32),
        BuildOptions(profiles=(profile,)),
        out,
    )
    silent = engine.model_copy(
        update={"target": engine.target.model_copy(update={"backend": "tensorrt_rtx"})}
    )
    assert prove(silent, {"x": np.zeros((2, 3, 8, 8), np.float32)}, model).table is None
