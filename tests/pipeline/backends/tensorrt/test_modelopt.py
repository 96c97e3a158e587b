"""ModelOpt for TensorRT: what it is given, and, where it is installed, what comes of it. It changes
onnxruntime, so it runs in a child.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from pipeline.backends.tensorrt.modelopt import (
    Reader,
    check_scales,
    masked,
    method_of,
    quantize_with_modelopt,
)
from pipeline.core.artifacts import BuildOptions, OnnxModel
from pipeline.core.progress import silent
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Profile
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.errors import BackendUnavailable, UnsupportedError
from pipeline.onnx_graph.activations import Bounds
from pipeline.onnx_graph.compare import open_reference
from pipeline.plan.schema import CalibrationConfig
from tests.builders.convert import ATTENTION, RESIDUAL, images, model_from_text, proto_from_text

HERE = importlib.util.find_spec("modelopt") is not None
installed = pytest.mark.skipif(not HERE, reason="needs the package nvidia-modelopt")
PROFILES = (Profile(dims={"N": [1, 4, 8]}),)
ALLOWED = BuildOptions(profiles=PROFILES)
INT8 = Recipe(
    backend="tensorrt",
    precision=Precision.INT8,
    method=CalibrationMethod.ENTROPY,
    quantizer="modelopt",
    rest=Precision.FP16,
)
FP8 = INT8.model_copy(update={"precision": Precision.FP8})

WIDE = """
<ir_version: 9, opset_import: ["" : 18]>
net (float[N, 3, 8, 8] x) => (float[N, 5] y)
<float[32, 3, 3, 3] w1, float[32] b1, float[32, 32, 3, 3] w2, float[32] b2, float[32, 32, 3, 3] w3,
  float[32, 5] w4, float big = {1000.0},
 float small = {0.000001}>
{
    [conv1] c1 = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    [relu1] r1 = Relu (c1)
    [conv2] c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2, b2)
    [add] s = Add (c2, r1)
    [relu2] r2 = Relu (s)
    [conv3] c3 = Conv <pads = [1, 1, 1, 1]> (r2, w3)
    [up] u = Mul (c3, big)
    [square] q = Mul (u, u)
    [down] d = Mul (q, small)
    [pool] p = GlobalAveragePool (d)
    [flat] f = Flatten (p)
    [fc] y = Gemm (f, w4)
}
"""
"""ModelOpt leaves convolutions of fewer than 16 channels alone; the square overflows fp16."""


def photos(folder: Path, model: OnnxModel, count: int = 24) -> CalibrationSet:
    np.savez(folder / "photos.npz", **images(count))  # type: ignore[arg-type]
    return open_set(CalibrationSet, (folder / "photos.npz",), model.inputs, PROFILES)


# --- what it is given ---


def test_the_reader_gives_every_batch_once_and_again_after_a_rewind(tmp_path: Path) -> None:
    samples = photos(tmp_path, model_from_text(tmp_path, RESIDUAL), 10)
    fractions: list[float | None] = []
    reader = Reader(samples, 4, 6, lambda fraction, text, figures=None: fractions.append(fraction))
    first = reader.get_first()["x"]
    batches = [reader.get_next(), reader.get_next(), reader.get_next()]
    np.testing.assert_array_equal(batches[0]["x"], first)  # type: ignore[index]
    assert [None if feeds is None else len(feeds["x"]) for feeds in batches] == [
        4,
        4,
        None,
    ]  # six samples, in whole batches
    reader.rewind()
    assert reader.get_next() is not None
    assert (reader.most, max(fraction or 0 for fraction in fractions)) == (8, 0.8)


def test_methods_have_other_names_and_fp8_only_one() -> None:
    assert [
        method_of(INT8.model_copy(update={"method": method})) for method in ("entropy", "minmax")
    ] == ["entropy", "max"]
    assert method_of(FP8) == "max"
    with pytest.raises(UnsupportedError, match="entropy or minmax, not by percentile"):
        method_of(INT8.model_copy(update={"method": CalibrationMethod.PERCENTILE}))


def test_what_reads_a_mask_is_named() -> None:
    """0 and -inf have no scale; ModelOpt would give one of inf."""
    graph = proto_from_text(ATTENTION).graph
    bounds = dict.fromkeys(("x", "q", "a", "m"), Bounds(-5.0, 5.0, 10, 0))
    assert masked(graph, bounds) == frozenset()
    assert masked(graph, bounds | {"mask": Bounds(0.0, 0.0, 10, 3)}) == {"masked"}
    assert masked(
        graph, bounds | {"mask": Bounds(-3e38, 0.0, 10, 0), "m": Bounds(-3e38, 5.0, 10, 0)}
    ) == {"masked", "softmax"}


@pytest.mark.parametrize("scale", [np.inf, np.nan, 0.0])
def test_a_scale_that_is_no_number_is_refused_by_name(scale: float) -> None:
    text = """<ir_version: 9, opset_import: ["" : 19]> net (float[N, 4] x) => (int8[N, 4] y)
      <float s = {1.0}, int8 z = {0}>
    { y = QuantizeLinear (x, s, z) }"""
    graph = proto_from_text(text).graph
    check_scales(graph)
    next(tensor for tensor in graph.initializer if tensor.name == "s").CopyFrom(
        numpy_helper.from_array(np.float32(scale), "s")
    )
    with pytest.raises(UnsupportedError, match=f"'x' the scale {scale:g}"):
        check_scales(graph)


@pytest.mark.skipif(HERE, reason="nvidia-modelopt is installed")
def test_without_modelopt_the_extra_is_named(tmp_path: Path) -> None:
    model = model_from_text(tmp_path / "source", RESIDUAL)
    with pytest.raises(BackendUnavailable, match="nvidia-modelopt") as error:
        quantize_with_modelopt(
            model, photos(tmp_path, model), INT8, CalibrationConfig(), ALLOWED, tmp_path
        )
    assert "[modelopt]" in error.value.next_step


# --- what comes of it ---


def quantised(
    folder: Path, text: str, recipe: Recipe
) -> tuple[OnnxModel, OnnxModel, onnx.GraphProto]:
    """The source, the quantised model and its graph, made in a child."""
    model = model_from_text(folder / "source", text)
    out = folder / "out"
    out.mkdir()
    arguments = (
        model,
        photos(folder, model),
        recipe,
        CalibrationConfig(batch=8),
        ALLOWED,
        out,
        silent,
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(quantize_with_modelopt, *arguments).result()
    assert [file.name for file in out.iterdir()] == ["model.onnx"]
    return model, result, onnx.load(str(result.path)).graph


def makers(graph: onnx.GraphProto, name: str) -> list[str]:
    made_by = {output: node.op_type for node in graph.node for output in node.output}
    return [
        made_by.get(tensor, "") for node in graph.node if node.name == name for tensor in node.input
    ]


@installed
@pytest.mark.parametrize(
    "recipe",
    [INT8, INT8.model_copy(update={"method": CalibrationMethod.MINMAX}), FP8],
    ids=["entropy", "minmax", "fp8"],
)
def test_the_graph_keeps_its_interface_and_stays_close(tmp_path: Path, recipe: Recipe) -> None:
    model, result, graph = quantised(tmp_path, WIDE, recipe)
    assert (result.inputs, result.outputs, result.precision) == (
        model.inputs,
        model.outputs,
        recipe.precision,
    )
    assert "24 of 24 calibration samples" in result.notes[0].text
    assert makers(graph, "conv2")[:2] == ["DequantizeLinear"] * 2
    assert makers(graph, "add") == [
        "Conv",
        "DequantizeLinear",
    ]  # its rule for residuals is ours too
    zeros = Counter(tensor.data_type for tensor in graph.initializer if "zero_point" in tensor.name)
    assert set(zeros) == {TensorProto.FLOAT8E4M3FN if recipe is FP8 else TensorProto.INT8}
    expected, got = (open_reference(each.path)(images(8, seed=3))["y"] for each in (model, result))
    assert np.abs(np.subtract(got, expected)).max() < 0.15 * np.abs(expected).max()


@installed
def test_what_fp16_cannot_hold_and_what_the_recipe_keeps_stay_in_fp32(tmp_path: Path) -> None:
    _, result, graph = quantised(tmp_path, WIDE, INT8.model_copy(update={"keep_fp32": ("conv2",)}))
    by_name = {node.name: node for node in graph.node}
    assert "'square'" in result.notes[1].text
    assert by_name["square"].output[0] == by_name["down"].input[0] == "q"
    assert "DequantizeLinear" not in makers(graph, "conv2")
    weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert weights[by_name["conv2"].input[1]] == TensorProto.FLOAT
    assert makers(graph, "conv3")[1] == "DequantizeLinear"


@installed
def test_a_graph_in_which_nothing_can_be_quantised_is_refused(tmp_path: Path) -> None:
    text = (
        '<ir_version: 9, opset_import: ["" : 20]> net (float[N, 3, 8, 8] x) => (float[N, 3, 8, 8]'
        " y) { [r] t = Relu (x) [e] y = Exp (t) }"
    )
    with pytest.raises(UnsupportedError, match="only the label would be"):
        quantised(tmp_path, text, INT8)
    assert list((tmp_path / "out").iterdir()) == []


@installed
def test_a_model_with_pairs_of_its_own_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]> net (float[N, 3, 8, 8] x)
      => (float[N, 3, 8, 8] y) <float s = {0.1}, int8 z = {0}>
    { q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = Relu (d) }"""
    with pytest.raises(UnsupportedError, match="Q/DQ pairs already"):
        quantised(tmp_path, text, INT8)
