"""Weights in 4 or 8 bits by ONNX Runtime: which layers, what they compute, what they weigh, and
what is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from pipeline.backends.base import run_session
from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.backends.onnxruntime.weight_only import compress_with_onnxruntime, split_gemms
from pipeline.core.artifacts import BuildOptions, OnnxModel
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.errors import PlanError, UnsupportedError
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import read_proto
from pipeline.quantization.half_precision import flatten
from pipeline.results.precision_audit import mislabelled
from tests.builders.convert import (
    ATTENTION,
    RESIDUAL,
    error_of,
    model_from_text,
    operators,
    proto_from_text,
)

INT4 = Recipe(
    backend="onnxruntime",
    precision=Precision.INT4,
    quantizer="onnxruntime",
    weight_only=True,
    block_size=32,
    activation="float",
)
INT8 = INT4.model_copy(update={"precision": Precision.INT8})

LINEAR = """
<ir_version: 9, opset_import: ["" : 17]>
net (float[N, 48] x, float[N, 40] z) => (float[N, 40] y, float[40, 40] m)
<float[48, 64] w1, float[40, 64] w2, float[40] b2, float[64, 40] w3, float[40, 1] b3,
  float[40, 40] w4, float[40, 40] w5>
{
    [up] a = MatMul (x, w1)
    [turned] b = Gemm <transB = 1> (a, w2, b2)
    [bare] c = Gemm (a, w3)
    [twice] d = Gemm <alpha = 2.0> (c, w4, b2)
    e = MatMul (b, w4)
    f = MatMul (c, w4)
    [left] g = MatMul (w5, w4)
    s1 = Add (d, e)
    s2 = Add (s1, f)
    y = Add (s2, z)
    m = Identity (g)
}
"""
FEEDS = {
    "x": np.random.default_rng(1).standard_normal((6, 48)).astype(np.float32),
    "z": np.random.default_rng(2).standard_normal((6, 40)).astype(np.float32),
}


def linear(folder: Path) -> OnnxModel:
    return model_from_text(folder / "source", LINEAR)


def compressed(model: OnnxModel, recipe: Recipe, folder: Path) -> tuple[OnnxModel, onnx.GraphProto]:
    folder.mkdir()
    result = compress_with_onnxruntime(model, recipe, folder)
    return result, read_proto(result.path).graph


def answers(model: OnnxModel, recipe: Recipe, folder: Path, feeds: Tensors) -> Tensors:
    folder.mkdir()
    loaded = onnxruntime_.load(onnxruntime_.build(model, recipe, BuildOptions(profiles=()), folder))
    return run_session(loaded.session(), feeds)


@pytest.mark.parametrize(("recipe", "least", "most"), [(INT8, 1e-4, 0.02), (INT4, 0.005, 0.3)])
def test_every_linear_layer_holds_few_bits_and_answers_nearly_alike(
    recipe: Recipe, least: float, most: float, tmp_path: Path
) -> None:
    model = linear(tmp_path)
    result, graph = compressed(model, recipe, tmp_path / "out")
    assert operators(graph)["MatMulNBits"] == 5
    assert operators(graph)["Gemm"] == 1  # its alpha is not 1
    bits = {
        attribute.i
        for node in graph.node
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    assert bits == {int(recipe.precision.removeprefix("int"))}
    assert (result.inputs, result.outputs, result.precision) == (
        model.inputs,
        model.outputs,
        recipe.precision,
    )
    expected, got = (
        open_reference(model.path)(FEEDS),
        answers(result, recipe, tmp_path / "engine", FEEDS),
    )
    error = np.abs(got["y"] - expected["y"]).max() / np.abs(expected["y"]).max()
    assert least < error < most
    np.testing.assert_array_equal(got["m"], expected["m"])


def test_the_note_counts_layers_and_bytes(tmp_path: Path) -> None:
    result, graph = compressed(linear(tmp_path), INT4, tmp_path / "out")
    (note,) = result.notes
    assert note.text.startswith(
        "5 of 6 linear layers hold their weights in 4 bits; as they were: twice; all constants"
        " together: "
    )
    assert len([tensor.name for tensor in graph.initializer]) == len(
        {tensor.name for tensor in graph.initializer}
    )  # two layers share w4


def test_only_what_is_not_kept_is_changed(tmp_path: Path) -> None:
    model = linear(tmp_path)
    _, graph = compressed(
        model, INT4.model_copy(update={"keep_fp32": ("turned", "up")}), tmp_path / "out"
    )
    assert {"up", "turned"} <= {node.name for node in graph.node}
    assert operators(graph)["MatMulNBits"] == 3
    with pytest.raises(PlanError, match="no node matches 'downn'"):
        compress_with_onnxruntime(
            model, INT4.model_copy(update={"keep_fp32": ("downn",)}), tmp_path
        )


def test_blocks_share_a_scale(tmp_path: Path) -> None:
    model = linear(tmp_path)
    sizes = {}
    for block in (32, 64):
        _, graph = compressed(
            model, INT4.model_copy(update={"block_size": block}), tmp_path / f"b{block}"
        )
        sizes[block] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert sizes[32]["w1_scales"] == [64, 2]  # 48 inputs are a block and a half
    assert sizes[64]["w1_scales"] == [64, 1]


def test_activations_become_int8_only_where_the_recipe_says_so(tmp_path: Path) -> None:
    """Then by the kernel, block by block: an answer of more error than that of the weights
    alone.
    """
    model = linear(tmp_path)
    expected = open_reference(model.path)(FEEDS)["y"]
    errors, levels = {}, {}
    for activation in ("float", "int8"):
        recipe = INT8.model_copy(update={"activation": activation})
        result, graph = compressed(model, recipe, tmp_path / activation)
        levels[activation] = {
            attribute.i
            for node in graph.node
            for attribute in node.attribute
            if attribute.name == "accuracy_level"
        }
        errors[activation] = np.abs(
            answers(result, recipe, tmp_path / f"{activation}_engine", FEEDS)["y"] - expected
        ).max()
    assert levels == {"float": set(), "int8": {4}}
    assert errors["float"] < errors["int8"]


def test_a_gemm_split_is_the_same_sum(tmp_path: Path) -> None:
    proto = flatten(read_proto(linear(tmp_path).path))
    split_gemms(proto.graph, {"turned", "bare", "fc"})
    assert operators(proto.graph)["Gemm"] == 1
    onnx.checker.check_model(proto, full_check=True)
    split = tmp_path / "split.onnx"
    split.write_bytes(proto.SerializeToString())
    for name, expected in open_reference(tmp_path / "source" / "source.onnx")(FEEDS).items():
        np.testing.assert_allclose(
            open_reference(split)(FEEDS)[name], expected, rtol=1e-5, atol=1e-5
        )


def test_attention_keeps_its_products_of_activations(tmp_path: Path) -> None:
    model = model_from_text(tmp_path / "source", ATTENTION)
    result, graph = compressed(model, INT8, tmp_path / "out")
    assert operators(graph)["MatMulNBits"] == 3
    assert operators(graph)["MatMul"] == 2
    random = np.random.default_rng(0)
    feeds = {
        "x": random.standard_normal((2, 5, 8)).astype(np.float32),
        "mask": np.zeros((2, 1, 5), np.float32),
    }
    assert error_of(model, result, feeds) < 0.02


def test_a_weight_that_is_no_matrix_or_comes_first_is_left(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]> net (float[2, 4, 32] x)
      => (float[2, 4, 8] y, float[2, 4, 32] z)
    <float[2, 32, 8] w, float[4, 4] v, float[32, 32] u>
    { [stack] y = MatMul (x, w) [first] a = MatMul (v, x) [plain] z = MatMul (a, u) }"""
    result, graph = compressed(model_from_text(tmp_path / "source", text), INT8, tmp_path / "out")
    assert operators(graph)["MatMulNBits"] == 1
    assert (
        "1 of 3 linear layers hold their weights in 8 bits; as they were: stack, first"
        in result.notes[0].text
    )


def test_what_can_hold_no_such_weights_is_refused(tmp_path: Path) -> None:
    convolutions = model_from_text(tmp_path / "convolutions", RESIDUAL)
    with pytest.raises(UnsupportedError, match="int8 weight-only would only be its name"):
        compress_with_onnxruntime(
            convolutions, INT8.model_copy(update={"keep_fp32": ("fc",)}), tmp_path
        )
    proto = proto_from_text(RESIDUAL)
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "w3")
    quantised = numpy_helper.from_array(np.ones((4, 5), np.int8), "w3_q")
    proto.graph.initializer.extend([quantised, numpy_helper.from_array(np.float32(0.1), "s")])
    proto.graph.initializer.remove(weight)
    proto.graph.node.insert(
        0, onnx.helper.make_node("DequantizeLinear", ["w3_q", "s"], ["w3"], name="dq")
    )
    (tmp_path / "qdq").mkdir()
    onnx.save_model(proto, str(tmp_path / "qdq" / "source.onnx"))
    with pytest.raises(UnsupportedError, match="holds Q/DQ pairs already"):
        compress_with_onnxruntime(
            convolutions.model_copy(update={"root": tmp_path / "qdq"}), INT8, tmp_path
        )


@pytest.mark.parametrize("recipe", [INT4, INT8.model_copy(update={"activation": "int8"})])
def test_what_ran_proves_the_label_and_unmasks_an_fp32_engine_that_bears_it(
    recipe: Recipe, tmp_path: Path
) -> None:
    model = linear(tmp_path)
    graphs = {
        "few": compressed(model, recipe, tmp_path / "out")[0],
        "fp32": model.model_copy(update={"precision": recipe.precision}),
    }
    verdicts = {}
    for name, graph in graphs.items():
        (tmp_path / name).mkdir()
        engine = onnxruntime_.build(graph, recipe, BuildOptions(profiles=()), tmp_path / name)
        table = onnxruntime_.layers(engine, FEEDS)
        assert table is not None
        verdicts[name] = mislabelled(recipe.precision, table, weight_only=True)
    assert verdicts["few"] == ""
    assert "weight-only, but by time only 0 % of its heavy layers" in verdicts["fp32"]
