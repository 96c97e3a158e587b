"""The graph takes bytes and computes what the model computes on the values of numpy."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.processing import ImageResize, Preprocess
from pipeline.core.progress import silent
from pipeline.core.recipe import CalibrationMethod, Placement, Precision, Recipe
from pipeline.core.shapes import DimRange, Profile
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.onnx_graph.compare import compare_graphs, open_reference
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import kept_nodes
from pipeline.plan.schema import CalibrationConfig, SimplifyConfig
from pipeline.preprocess import preprocessed, raw_specs
from pipeline.stages.calibrate import calibrate
from pipeline.stages.convert import convert
from pipeline.stages.preprocess import preprocess
from pipeline.stages.simplify import simplify
from tests.builders.convert import RESIDUAL, model_from_text

SIZES = ("N", "x_2", "x_3")  # sizes without a name are named by their axis
PROFILES = (Profile(dims=dict.fromkeys(SIZES, DimRange(min=1, opt=2, max=3))),)
COLOURS = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
RESIZE = ImageResize(source=(9, 7), target=(8, 8), filter="linear")

CHANNELS_LAST = """
<ir_version: 8, opset_import: ["" : 10]>
net (float[N, 8, 8, 3] x, float[N] other) => (float[N, 3] y, float[N] z)
{
    y = ReduceMax <axes = [1, 2], keepdims = 0> (x)
    z = Neg (other)
}
"""
NAMELESS = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[N, 3, ?, ?] x) => (float[N, 3] y) { y = ReduceMax <axes = [2, 3], keepdims = 0> (x) }
"""
IN_BRANCH = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[N, 3, 8, 8] x, bool yes) => (float[N, 3, 8, 8] y)
{
    y = If (yes) <
        then_branch = a () => (float[N, 3, 8, 8] t) { t = Relu(x) },
        else_branch = b () => (float[N, 3, 8, 8] e) { e = Neg(x) }
    >
}
"""


@pytest.mark.parametrize(
    ("graph", "step"),
    [
        (RESIDUAL, COLOURS),
        (RESIDUAL, Preprocess(scale=1, mean=(127,), std=(64,))),
        (RESIDUAL, COLOURS.model_copy(update={"resize": RESIZE})),
        (CHANNELS_LAST, COLOURS.model_copy(update={"resize": RESIZE, "layout": "NHWC"})),
        (CHANNELS_LAST, COLOURS.model_copy(update={"layout": "NHWC"})),
        (NAMELESS, COLOURS),
        (IN_BRANCH, COLOURS),
    ],
    ids=["colours", "one number", "resized", "resized NHWC", "NHWC", "free sizes", "in a branch"],
)
def test_the_graph_takes_bytes_and_computes_the_same_as_numpy(
    tmp_path: Path, graph: str, step: Preprocess
) -> None:
    model, out = model_from_text(tmp_path, graph), tmp_path / "out"
    out.mkdir()
    after = preprocess(model, PROFILES, {"x": step}, (), out)
    assert after.inputs == raw_specs(model.inputs, {"x": step})
    assert after.inputs[0].dtype == "uint8"
    assert [spec.shape for spec in after.outputs] == [spec.shape for spec in model.outputs]
    (note,) = after.notes
    assert "its preprocessing in the graph computes the same as in numpy" in note.text


def test_other_steps_than_those_of_the_graph_are_a_difference(tmp_path: Path) -> None:
    model, out = model_from_text(tmp_path, RESIDUAL), tmp_path / "out"
    out.mkdir()
    after = preprocess(model, PROFILES, {"x": COLOURS}, (), out)
    raw = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    wrong = {"x": COLOURS.model_copy(update={"mean": (0.4, 0.4, 0.4)})}
    fault = compare_graphs(
        model.path,
        after.path,
        [{"x": raw}],
        prepare=lambda raw_feeds: preprocessed(raw_feeds, wrong),
    )
    assert "output 'y' differs by" in fault


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(backend="onnxruntime", precision=Precision.INT8, activation="uint8"),
        Recipe(
            backend="onnxruntime",
            precision=Precision.INT8,
            placement=Placement(first_layer=False, last_layer=True),
        ),
        Recipe(backend="openvino", precision=Precision.INT8, activation="uint8"),
        Recipe(backend="tensorrt", precision=Precision.INT8, rest=Precision.FP16),
        Recipe(backend="tensorrt", precision=Precision.FP16),
    ],
    ids=lambda recipe: recipe.label,
)
def test_quantisation_and_casts_leave_the_steps_in_fp32(tmp_path: Path, recipe: Recipe) -> None:
    model = model_from_text(tmp_path, RESIDUAL)
    steps = {"x": COLOURS.model_copy(update={"resize": RESIZE})}
    raw = np.random.default_rng(0).integers(0, 256, (32, 9, 7, 3)).astype(np.uint8)
    np.savez(tmp_path / "set.npz", x=raw)
    samples = open_set(
        CalibrationSet, (tmp_path / "set.npz",), raw_specs(model.inputs, steps), PROFILES
    )
    folders = [tmp_path / name for name in ("preprocess", "simplify", "calibrate", "convert")]
    for folder in folders:
        folder.mkdir()
    inside = preprocess(model, PROFILES, steps, samples.first(2), folders[0])
    simple = simplify(inside, PROFILES, SimplifyConfig(), samples.first(2), folders[1], silent)
    table = calibrate(simple, samples, CalibrationMethod.MINMAX, CalibrationConfig(), folders[2])
    converted = convert(simple, recipe, table, samples.first(2), folders[3])

    before, graph_after = read_proto(simple.path).graph, read_proto(converted.path).graph
    names = kept_nodes(before, ())
    assert len(names) == 5  # Cast, Transpose, Resize, Mul, Add
    own = {node.name: node for node in graph_after.node if node.name in names}
    for node in before.node:
        if node.name in names:
            assert list(own[node.name].input) == list(node.input)
            assert list(own[node.name].output) == list(node.output)
    feeds = {"x": raw[:3]}
    expected = open_reference(model.path)(preprocessed(feeds, steps))["y"]
    actual = open_reference(converted.path)(feeds)["y"]
    assert np.abs(actual - expected).max() < 0.05 * np.abs(expected).max()
