"""The graph gives what numpy makes of the model's outputs."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.processing import Postprocess
from pipeline.core.recipe import CalibrationMethod, Placement, Precision, Recipe
from pipeline.core.shapes import DimRange, Profile
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.onnx_graph.compare import compare_graphs, open_reference
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import kept_nodes
from pipeline.plan.schema import CalibrationConfig
from pipeline.postprocess import NODE_PREFIX, postprocessed, reduced_specs
from pipeline.stages.calibrate import calibrate
from pipeline.stages.convert import convert
from pipeline.stages.postprocess import postprocess
from tests.builders.convert import RESIDUAL, model_from_text

PROFILES = (Profile(dims={"N": DimRange(min=1, opt=2, max=3)}),)
TOP = Postprocess(top_k=3)
SHARES = Postprocess(top_k=3, softmax=True)
BEST = Postprocess(argmax=True)

READ_INSIDE = """
<ir_version: 8, opset_import: ["" : 10]>
net (float[N, 3, 4] x) => (float[N, 3, 4] z, float[N, 3, 4] y) { y = Relu (x)  z = Neg (y) }
"""
HALVES = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[N, 5] x) => (float16[N, 5] y) { y = Cast <to = 10> (x) }
"""


@pytest.mark.parametrize(
    ("graph", "step"),
    [
        (RESIDUAL, TOP),
        (RESIDUAL, SHARES),
        (RESIDUAL, BEST),
        (READ_INSIDE, TOP),  # Relu makes equal scores
        (READ_INSIDE, Postprocess(top_k=2, axis=1, softmax=True)),
        (READ_INSIDE, Postprocess(argmax=True, axis=1)),
        (HALVES, TOP),
        (HALVES, BEST),
    ],
    ids=str,
)
def test_the_graph_gives_the_same_as_numpy(tmp_path: Path, graph: str, step: Postprocess) -> None:
    model, out = model_from_text(tmp_path, graph), tmp_path / "out"
    out.mkdir()
    after = postprocess(model, PROFILES, {"y": step}, (), out)
    assert after.inputs == model.inputs
    assert after.outputs == reduced_specs(model.outputs, {"y": step})


def test_other_steps_than_those_of_the_graph_are_a_difference(tmp_path: Path) -> None:
    model, out = model_from_text(tmp_path, RESIDUAL), tmp_path / "out"
    out.mkdir()
    after = postprocess(model, PROFILES, {"y": TOP}, (), out)
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    finish = partial(postprocessed, steps={"y": SHARES})
    fault = compare_graphs(model.path, after.path, [{"x": x}], finish=finish)
    assert "output 'y_values' differs by" in fault


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(backend="onnxruntime", precision=Precision.INT8, activation="uint8"),
        Recipe(backend="openvino", precision=Precision.INT8, placement=Placement(last_layer=True)),
        Recipe(backend="tensorrt", precision=Precision.INT8, rest=Precision.FP16),
        Recipe(backend="tensorrt", precision=Precision.FP16),
    ],
    ids=lambda recipe: recipe.label,
)
def test_quantisation_and_casts_leave_the_steps_in_fp32(tmp_path: Path, recipe: Recipe) -> None:
    model = model_from_text(tmp_path, RESIDUAL)
    x = np.random.default_rng(0).standard_normal((32, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "set.npz", x=x)
    samples = open_set(CalibrationSet, (tmp_path / "set.npz",), model.inputs, PROFILES)
    folders = [tmp_path / name for name in ("postprocess", "calibrate", "convert")]
    for folder in folders:
        folder.mkdir()
    inside = postprocess(model, PROFILES, {"y": SHARES}, samples.first(2), folders[0])
    table = calibrate(inside, samples, CalibrationMethod.MINMAX, CalibrationConfig(), folders[1])
    converted = convert(inside, recipe, table, samples.first(2), folders[2])
    before, graph = read_proto(inside.path).graph, read_proto(converted.path).graph
    assert len(kept_nodes(before, ())) == 3  # TopK, Softmax, GatherElements
    own = {node.name: node for node in graph.node}
    for node in before.node:
        if node.name.startswith(NODE_PREFIX):
            assert list(own[node.name].input) == list(node.input)
            assert list(own[node.name].output) == list(node.output)
    readers = [name for node in graph.node if "Linear" in node.op_type for name in node.input]
    assert not set(readers) & {name for node in before.node[-3:] for name in node.output}
    values = open_reference(converted.path)({"x": x[:3]})["y_values"]
    expected = open_reference(inside.path)({"x": x[:3]})["y_values"]
    assert np.abs(values - expected).max() < 0.05
