"""fp16 and bf16 written into a graph: where Casts stand, what stays in fp32, and that it still
computes the same.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from pipeline.core.recipe import Precision, Recipe
from pipeline.onnx_graph.compare import open_reference
from pipeline.stages.convert import convert
from tests.builders.convert import (
    ATTENTION,
    BF16,
    FP16,
    RESIDUAL,
    converted,
    dtypes,
    error_of,
    images,
    model_from_text,
    operators,
    ranges_on,
)


def test_fp32_is_the_same_graph(tmp_path: Path) -> None:
    model = model_from_text(tmp_path / "source", RESIDUAL)
    result = convert(
        model, Recipe(backend="onnxruntime", precision=Precision.FP32), None, (), tmp_path
    )
    assert result.digest == model.digest
    assert result.path != model.path


@pytest.mark.parametrize("text", [RESIDUAL, ATTENTION])
def test_fp16_casts_at_the_borders_only(tmp_path: Path, text: str) -> None:
    random = np.random.default_rng(1)
    feeds = (
        images(4)
        if text is RESIDUAL
        else {"x": random.standard_normal((2, 5, 8)), "mask": random.standard_normal((2, 1, 5))}
    )
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    model, result, graph = converted(tmp_path, text, FP16, feeds)
    assert operators(graph)["Cast"] == len(model.inputs) + len(model.outputs)
    assert set(dtypes(graph).values()) == {TensorProto.FLOAT16}
    assert result.notes == ()
    assert error_of(model, result, feeds) < 5e-3


OVERFLOW = """
<ir_version: 9, opset_import: ["" : 20]>
net (float[N, 4] x) => (float[N, 4] y)
<float[4, 4] w, float k = {1000.0}, float tiny = {0.001}>
{
    [first] a = MatMul (x, w)
    [big] b = Mul (a, k)
    [square] c = Mul (b, b)
    [root] d = Sqrt (c)
    [small] e = Mul (d, tiny)
    [last] y = MatMul (e, w)
}
"""


@pytest.mark.parametrize("source", ["table", "samples"])
def test_nodes_that_fp16_would_overflow_stay_in_fp32(tmp_path: Path, source: str) -> None:
    model = model_from_text(tmp_path / "source", OVERFLOW)
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)}
    table, samples = (ranges_on(model, feeds), ()) if source == "table" else (None, (feeds,))
    result = convert(model, FP16, table, samples, tmp_path)
    graph = onnx.load(str(result.path)).graph
    by_name = {node.name: node for node in graph.node}
    assert [node.node for node in result.kept_fp32] == ["square", "root"]
    assert "'square'" in result.notes[0].text
    assert "'root'" in result.notes[0].text
    assert (
        by_name["square"].output[0] == by_name["root"].input[0] == "c"
    )  # no fp16 between two kept nodes: the value would not survive it
    assert by_name["last"].input[0] == "e_fp16"
    assert error_of(model, result, feeds) < 5e-3


def test_without_data_nobody_looked_and_a_note_says_so(tmp_path: Path) -> None:
    result = convert(model_from_text(tmp_path / "source", RESIDUAL), FP16, None, (), tmp_path)
    assert "no data" in result.notes[0].text


def test_constants_that_fp16_cannot_hold_keep_their_node_in_fp32(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]> net (float[N, 4] x) => (float[N, 4] y)
      <float eps = {1e-12}, float low = {-3.4e38}>
    { [eps] a = Add (x, eps) [root] b = Sqrt (a) [floor] c = Max (b, low) y = Neg (c) }"""
    _, result, graph = converted(tmp_path, text, FP16, {"x": np.ones((2, 4), np.float32)})
    assert dtypes(graph) == {"eps": TensorProto.FLOAT, "low": TensorProto.FLOAT}
    assert "2 nodes stay in fp32" in result.notes[0].text


@pytest.mark.parametrize(("bias", "in_fp32"), [(5e-8, False), (3e-4, False), (1e6, True)])
def test_a_bias_keeps_its_node_in_fp32_only_if_the_loss_in_fp16_shows(
    tmp_path: Path, bias: float, in_fp32: bool
) -> None:
    text = f"""<ir_version: 9, opset_import: ["" : 20]> net (float[N, 4] x) => (float[N, 2] y)
    <float[4, 2] w = {{1, 0, 0, 1, 1, 0, 0, 1}}, float[2] b = {{{bias}, 0}}> {{
      [gemm] a = Gemm (x, w, b) y = Neg (a) }}"""
    feeds = {"x": np.ones((2, 4), np.float32)}
    model, result, graph = converted(tmp_path, text, FP16, feeds)
    assert dtypes(graph)["b" if in_fp32 else "b_fp16"] == (
        TensorProto.FLOAT if in_fp32 else TensorProto.FLOAT16
    )
    assert error_of(model, result, feeds) <= 2**-11


@pytest.mark.parametrize("node", ["Gemm <beta = 4e7> (x, w, b)", "Gemm (x, b, b)"])
def test_what_is_more_than_a_small_bias_keeps_its_node_in_fp32(tmp_path: Path, node: str) -> None:
    text = f"""<ir_version: 9, opset_import: ["" : 20]> net (float[N, 1] x) => (float[N, 1] y)
      <float[1, 1] w = {{1.0}}, float[1, 1] b = {{2.5e-8}}>
    {{ [gemm] a = {node} y = Neg (a) }}"""
    _, result, _ = converted(tmp_path, text, FP16, {"x": np.ones((2, 1), np.float32)})
    assert "'gemm'" in result.notes[0].text


def test_a_bias_that_is_not_small_beside_the_result_keeps_its_node_in_fp32(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]> net (float[N, 1] x) => (float[N, 1] y)
      <float[1, 1] w = {1.0}, float[1] b = {2e-8}>
    { [gemm] a = Gemm (x, w, b) [scaled] y = Mul (a, w) }"""
    _, result, _ = converted(tmp_path, text, FP16, {"x": np.full((2, 1), 1e-5, np.float32)})
    assert "'gemm'" in result.notes[0].text


SUBGRAPH = """
<ir_version: 9, opset_import: ["" : 20]>
net (float[N, 4] x, bool flag) => (float[N, 4] y, int64[2] size)
<float[4, 4] w>
{
    [outer] a = MatMul (x, w)
    [branch] b = If (flag) <then_branch = yes () => (float[N, 4] t) { t = Relu (a) },
      else_branch = no () => (float[N, 4] e) { e = Neg (a) }>
    [after] y = MatMul (b, w)
    [shape] s = Shape (a)
    [floats] f = Cast <to = 1> (s)
    [half] h = Mul (f, f)
    [ints] size = Cast <to = 7> (h)
}
"""


def test_subgraphs_and_shape_arithmetic_stay_in_fp32(tmp_path: Path) -> None:
    feeds = {"x": np.ones((3000, 4), np.float32), "flag": np.array(True)}
    model, result, graph = converted(tmp_path, SUBGRAPH, FP16, feeds)
    by_name = {node.name: node for node in graph.node}
    assert by_name["half"].input[0] == "f"
    assert by_name["outer"].output[0] == "a_fp16"
    assert open_reference(result.path)(feeds)["size"].tolist() == [9_000_000, 16]
    for flag in (True, False):
        assert error_of(model, result, feeds | {"flag": np.array(flag)}) < 5e-3


def test_inputs_that_an_operator_takes_in_fp32_only_stay(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]> net (float[N, 1, 4, 4] x)
      => (float[N, 1, 8, 8] y) <float[4] scales = {1.0, 1.0, 2.0, 2.0}>
    { y = Resize <mode = "nearest"> (x, , scales) }"""
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 1, 4, 4)).astype(np.float32)}
    model, result, graph = converted(tmp_path, text, FP16, feeds)
    assert dtypes(graph)["scales"] == TensorProto.FLOAT
    assert operators(graph)["Cast"] == 2
    assert error_of(model, result, feeds) < 1e-3


def test_bf16_raises_the_opset_and_no_constant_becomes_infinite(tmp_path: Path) -> None:
    text = RESIDUAL.replace("float[5] b3>", "float[5] b3, float low = {-3.4028235e38}>").replace(
        "[relu1] r1 = Relu (c1)", "[relu1] r1 = Max (c1, low)"
    )
    _, result, graph = converted(tmp_path, text, BF16, images(2))
    assert result.opset >= 22
    assert result.notes == ()
    assert set(dtypes(graph).values()) == {TensorProto.BFLOAT16}
    assert all(
        np.isfinite(numpy_helper.to_array(tensor).astype(np.float32)).all()
        for tensor in graph.initializer
    )


FOREIGN = """
<ir_version: 9, opset_import: ["" : 19]>
net (float[N, 4] x) => (float[N, 3] y)
<float[4, 3] w, float s = {0.02}, float[3] t = {0.01, 1e-9, 0.01}, int8 z = {0},
  int8[3] k = {0, 0, 0}>
{
    [act] a = Relu (x)
    [aq] aq = QuantizeLinear (a, s, z)
    [ad] ad = DequantizeLinear (aq, s, z)
    [wq] wq = QuantizeLinear <axis = 1> (w, t, k)
    [wd] wd = DequantizeLinear <axis = 1> (wq, t, k)
    [mm] y = MatMul (ad, wd)
}
"""


def test_fp16_around_pairs_of_others_keeps_no_cast_between_and_no_scale_of_zero(
    tmp_path: Path,
) -> None:
    """Its weights are floats that a Q makes integers, as ModelOpt leaves them."""
    feeds = {"x": np.random.default_rng(0).random((8, 4), np.float32)}
    model = model_from_text(tmp_path / "source", FOREIGN)
    graph = onnx.load(str(convert(model, FP16, None, (feeds,), tmp_path).path)).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert [node.output[0] for node in graph.node if node.op_type == "Cast"] == ["x_fp16", "y"]
    assert {array.dtype.name for array in constants.values()} == {"float16", "int8"}
    assert constants["t_fp16"][1] == np.float16(2.0**-24)
    assert constants["w_fp16"].shape == (4, 3)
