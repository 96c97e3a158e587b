"""One recipe, one graph: what the converted graphs hold, and that they still compute the same."""

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from pipeline import backends
from pipeline.core.artifacts import BuildOptions
from pipeline.core.progress import silent
from pipeline.core.recipe import Placement, Precision, Recipe
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import PlanError, UnsupportedError
from pipeline.onnx_graph.files import onnx_model
from pipeline.quantization.existing_qdq import scales_of
from pipeline.stages.convert import convert
from tests.builders.convert import (
    ATTENTION,
    DOWNSAMPLE,
    FP16,
    RESIDUAL,
    converted,
    dtypes,
    error_of,
    images,
    model_from_text,
    operators,
    proto_from_text,
    table_of,
)
from tests.builders.qat import PLAIN, quantised

TENSORRT = Recipe(backend="tensorrt", precision=Precision.INT8, rest=Precision.FP16)
OPENVINO = Recipe(backend="openvino", precision=Precision.INT8, activation="uint8")
ONNXRUNTIME = Recipe(backend="onnxruntime", precision=Precision.INT8, activation="uint8")
INT8 = {"tensorrt": TENSORRT, "openvino": OPENVINO, "onnxruntime": ONNXRUNTIME}


@pytest.mark.parametrize("backend", INT8)
def test_int8_graphs_stay_close_and_hold_no_float_weights(tmp_path: Path, backend: str) -> None:
    model, result, graph = converted(tmp_path, RESIDUAL, INT8[backend], images(16))
    assert error_of(model, result, images(8, seed=3)) < 0.06
    assert result.precision is Precision.INT8
    left = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16) and len(tensor.dims) > 1
    }
    assert {name.removesuffix("_fp16") for name in left} == {"w3"}  # the classifier's


@pytest.mark.parametrize("backend", INT8)
def test_each_placement_rule_holds_in_the_graph(tmp_path: Path, backend: str) -> None:
    _, _, graph = converted(tmp_path, RESIDUAL, INT8[backend], images(16))
    made_by = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def kinds(name: str) -> list[str]:
        return [
            made_by[tensor].op_type if tensor in made_by else ""
            for node in graph.node
            if node.name == name
            for tensor in node.input
        ]

    for conv in ("conv1", "conv2", "conv3"):
        assert kinds(conv)[:2] == ["DequantizeLinear", "DequantizeLinear"]
        expected_bias = (
            ["DequantizeLinear" if backend == "onnxruntime" else ""] if conv != "conv3" else []
        )
        assert kinds(conv)[2:] == expected_bias
    assert kinds("add") == [
        "Conv" if backend == "tensorrt" else "DequantizeLinear",
        "DequantizeLinear",
    ]
    assert "DequantizeLinear" not in kinds("relu1") + kinds("relu2") + kinds("fc")
    pairs = Counter(node.input[0] for node in graph.node if node.op_type == "QuantizeLinear")
    assert max(pairs.values()) == 1  # one pair per tensor, shared by its readers
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in constants:
            assert constants[node.input[2]].max() == constants[node.input[2]].min() == 0
            assert constants[node.input[0]].dtype == (
                np.int32 if constants[node.input[0]].ndim == 1 else np.int8
            )
            assert constants[node.input[1]].shape == (
                constants[node.input[0]].shape[0],
            )  # per output channel
        elif node.op_type == "DequantizeLinear":
            assert constants[node.input[1]].shape == ()  # activations per tensor
            assert constants[node.input[2]].dtype == (
                np.int8 if backend == "tensorrt" else np.uint8
            )
            assert backend != "tensorrt" or constants[node.input[2]] == 0


POOLED = """
<ir_version: 9, opset_import: ["" : 20]>
net (float[N, 3, 8, 8] x) => (float[N, 5] y)
<float[4, 3, 3, 3] w1, float[4] b1, float[6, 4, 3, 3] w2, float[6] b2, float[6, 5] w3>
{
    [conv1] c1 = Conv (x, w1, b1)
    [relu] r = Relu (c1)
    [pool] p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    [conv2] c2 = Conv (p, w2, b2)
    [flat] f = Flatten (c2)
    [fc] y = Gemm (f, w3)
}
"""


def test_an_int32_bias_has_the_scale_of_its_accumulator_behind_a_pool_too(tmp_path: Path) -> None:
    """The pool's output shares the scale of its input; searches choose another range for it, which
    must not reach the bias.
    """
    model = model_from_text(tmp_path / "source", POOLED)
    ranges = {
        "x": (-3.0, 3.0),
        "c1": (-2.0, 2.0),
        "r": (0.0, 1.0),
        "p": (0.0, 2.0),
        "c2": (-4.0, 4.0),
        "f": (-4.0, 4.0),
        "y": (-5.0, 5.0),
    }
    graph = onnx.load(str(convert(model, ONNXRUNTIME, table_of(ranges), (), tmp_path).path)).graph
    made_by = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    biased = [node for node in graph.node if node.op_type == "Conv"]
    assert [node.name for node in biased] == ["conv1", "conv2"]
    for node in biased:
        activation, weights, bias = (constants[made_by[name].input[1]] for name in node.input)
        assert bias == pytest.approx(activation * weights)


def test_scales_and_weights_follow_the_formula_by_hand(tmp_path: Path) -> None:
    model = model_from_text(tmp_path / "source", RESIDUAL)
    ranges = dict.fromkeys(("x", "c1", "r1", "c2", "s", "r2", "c3", "p", "f", "y"), (-1.0, 2.54))
    result = convert(
        model, Recipe(backend="openvino", precision=Precision.INT8), table_of(ranges), (), tmp_path
    )
    constants = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onnx.load(str(result.path)).graph.initializer
    }
    weights = next(
        numpy_helper.to_array(t)
        for t in proto_from_text(RESIDUAL).graph.initializer
        if t.name == "w1"
    )
    scale = np.abs(weights).max(axis=(1, 2, 3)) / 127
    assert constants["x_scale"] == np.float32(2.54 / 127)
    assert constants["w1_scale"] == pytest.approx(scale, rel=1e-6)
    assert np.array_equal(
        constants["w1_q"], np.rint(weights / constants["w1_scale"].reshape(-1, 1, 1, 1))
    )


def test_the_rest_of_a_tensorrt_graph_is_fp16_without_casts_inside(tmp_path: Path) -> None:
    _, result, graph = converted(tmp_path, RESIDUAL, TENSORRT, images(16))
    casts = [node for node in graph.node if node.op_type == "Cast"]
    assert [node.output[0] for node in casts] == [
        "y"
    ]  # the input goes straight into its QuantizeLinear
    assert result.opset >= 19


def test_a_block_with_two_convolutions_stays_close_with_one_of_them_in_floats(
    tmp_path: Path,
) -> None:
    model, result, graph = converted(tmp_path, DOWNSAMPLE, TENSORRT, images(16))
    assert error_of(model, result, images(8, seed=3)) < 0.08
    made_by = {name: node for node in graph.node for name in node.output}
    into = {
        node.name: [made_by[name].op_type for name in node.input]
        for node in graph.node
        if node.op_type == "Add"
    }
    assert into == {"add1": ["DequantizeLinear", "Conv"], "add2": ["DequantizeLinear", "Conv"]}


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the library tensorrt_rtx"
)
@pytest.mark.parametrize(
    "text", [RESIDUAL, DOWNSAMPLE, ATTENTION], ids=["residual", "downsample", "attention"]
)
def test_tensorrt_builds_the_graph(tmp_path: Path, text: str) -> None:
    """Strongly typed, for a GPU that is not here: every type of the graph fits."""
    random = np.random.default_rng(1)
    text_feeds = {
        "x": random.standard_normal((2, 5, 8)).astype(np.float32),
        "mask": random.standard_normal((2, 1, 5)).astype(np.float32),
    }
    recipe = TENSORRT.model_copy(update={"backend": "tensorrt_rtx", "compute_capability": "8.9"})
    _, result, _ = converted(tmp_path, text, recipe, text_feeds if text is ATTENTION else images(4))
    dims = {"N": [1, 2, 4]} | ({"T": [1, 5, 8]} if text is ATTENTION else {})
    options = BuildOptions(profiles=(Profile.model_validate({"dims": dims}),))
    assert (
        backends.backend("tensorrt_rtx").build(result, recipe, options, tmp_path, silent).size_bytes
        > 0
    )


def test_onnxruntime_runs_the_graph_in_8_bit_kernels(tmp_path: Path) -> None:
    import onnxruntime

    recipe = ONNXRUNTIME.model_copy(update={"placement": Placement(last_layer=True)})
    _, result, _ = converted(tmp_path, RESIDUAL, recipe, images(16))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(result.path), options, providers=["CPUExecutionProvider"])
    optimised = operators(onnx.load(str(tmp_path / "optimised.onnx")).graph)
    assert (optimised["QLinearConv"], optimised["QLinearAdd"], optimised["QGemm"]) == (3, 1, 1)
    assert optimised["Conv"] == optimised["Add"] == optimised["Gemm"] == optimised["Relu"] == 0


@pytest.mark.parametrize("backend", INT8)
def test_without_the_first_layer_its_result_is_that_of_floats(tmp_path: Path, backend: str) -> None:
    """Behind an image's normalisation; the rest in fp32, so that nothing but a pair could change
    it.
    """
    stem = "[sub] m = Sub (x, mean) [div] n = Div (m, std) [conv1] c1 = Conv"
    text = RESIDUAL.replace(
        "b3>", "b3, float[3, 1, 1] mean, float[3, 1, 1] std = {0.5, 0.25, 2.0}>"
    )
    text = text.replace("[conv1] c1 = Conv", stem).replace("(x, w1, b1)", "(n, w1, b1)")
    for first in (True, False):
        recipe = INT8[backend].model_copy(
            update={"placement": Placement(first_layer=first), "rest": Precision.FP32}
        )
        model, result, graph = converted(tmp_path / str(first), text, recipe, images(16))
        makers = {name: node.op_type for node in graph.node for name in node.output}
        assert (
            makers.get(next(node for node in graph.node if node.name == "conv1").input[1])
            == "DequantizeLinear"
        ) is first
        assert error_of(model, result, images(8, seed=3)) < 0.06
        before, after = (observed(each.path, "c1", images(8, seed=3)) for each in (model, result))
        assert np.array_equal(before, after) is not first


def observed(path: Path, tensor: str, feeds: Tensors) -> NDArray[np.generic]:
    """What a tensor inside the graph holds, without the optimiser, which would put other kernels in
    its place.
    """
    import onnxruntime

    proto = onnx.load(str(path))
    proto.graph.output.append(onnx.ValueInfoProto(name=tensor))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run([tensor], dict(feeds))[0])


def test_tensorrt_runs_an_unquantised_first_layer_in_fp16(tmp_path: Path) -> None:
    _, _, graph = converted(
        tmp_path,
        RESIDUAL,
        TENSORRT.model_copy(update={"placement": Placement(first_layer=False)}),
        images(16),
    )
    conv = next(node for node in graph.node if node.name == "conv1")
    makers = {name: node.op_type for node in graph.node for name in node.output}
    assert makers[conv.input[0]] == "Cast"
    assert {dtypes(graph)[name] for name in conv.input[1:]} == {TensorProto.FLOAT16}


def test_an_encoder_keeps_attention_products_mask_and_skips_in_floats(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    mask = np.where(random.random((2, 1, 5)) < 0.3, np.finfo(np.float32).min, 0).astype(np.float32)
    feeds = {"x": random.standard_normal((2, 5, 8)).astype(np.float32), "mask": mask}
    for name, recipe in INT8.items():
        model, result, graph = converted(tmp_path / name, ATTENTION, recipe, feeds)
        quantised = {node.name for node in graph.node for tensor in node.input if "_dq" in tensor}
        assert quantised >= {"q", "k", "o"}
        assert not quantised & {"scores", "masked", "softmax", "mix", "bias", "skip", "norm"}
        assert error_of(model, result, feeds) < 0.05


def test_seven_bit_weights_where_the_cpu_would_saturate(tmp_path: Path) -> None:
    model, result, graph = converted(
        tmp_path, RESIDUAL, ONNXRUNTIME.model_copy(update={"weight_bits": 7}), images(16)
    )
    weights = [
        numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 4
    ]
    assert len(weights) == 3
    assert all(w.min() >= -64 and w.max() <= 63 and np.abs(w).max() == 63 for w in weights)
    assert error_of(model, result, images(8, seed=3)) < 0.08


def test_keep_fp32_leaves_nodes_alone(tmp_path: Path) -> None:
    _, _, graph = converted(
        tmp_path, RESIDUAL, TENSORRT.model_copy(update={"keep_fp32": ("conv2", "re*")}), images(4)
    )
    by_name = {node.name: node for node in graph.node}
    assert list(by_name["conv2"].input) == ["r1", "w2", "b2"]
    assert dtypes(graph)["w2"] == TensorProto.FLOAT
    assert by_name["relu2"].output[0] == "r2"


def test_a_pattern_that_matches_nothing_is_named_with_near_names(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="conv22") as error:
        convert(
            model_from_text(tmp_path / "source", RESIDUAL),
            FP16.model_copy(update={"keep_fp32": ("conv22",)}),
            None,
            (),
            tmp_path,
        )
    assert "conv2" in error.value.next_step


def test_int8_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="calibration"):
        convert(model_from_text(tmp_path / "source", RESIDUAL), TENSORRT, None, (), tmp_path)


def test_a_tensor_that_calibration_did_not_see_leaves_its_node_in_floats(tmp_path: Path) -> None:
    result = convert(
        model_from_text(tmp_path / "source", RESIDUAL),
        OPENVINO,
        table_of({"x": (-1.0, 1.0)}),
        (),
        tmp_path,
    )
    assert "conv2" in result.notes[0].text
    assert operators(onnx.load(str(result.path)).graph)["QuantizeLinear"] == 1


def test_a_model_with_its_own_scales_keeps_every_one(tmp_path: Path) -> None:
    _, quantised, _ = converted(tmp_path, RESIDUAL, OPENVINO, images(4))
    (tmp_path / "again").mkdir()
    again = convert(quantised, TENSORRT, None, (), tmp_path / "again")
    assert again.digest == quantised.digest
    assert "every scale is kept" in again.notes[0].text


def test_a_quantised_source_is_an_int8_graph_to_an_int8_recipe(tmp_path: Path) -> None:
    _, quantised, _ = converted(tmp_path, RESIDUAL, ONNXRUNTIME, images(4))
    source = quantised.model_copy(
        update={"precision": Precision.FP32}
    )  # what export makes of a file that holds Q/DQ
    (tmp_path / "again").mkdir()
    assert convert(source, ONNXRUNTIME, None, (), tmp_path / "again").precision is Precision.INT8


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_an_old_opset_is_raised_for_scales_per_channel(tmp_path: Path, backend: str) -> None:
    model, result, _ = converted(
        tmp_path, RESIDUAL.replace('"" : 20', '"" : 11'), INT8[backend], images(4)
    )
    assert (model.opset, result.opset) == (11, 13)
    assert error_of(model, result, images(8, seed=3)) < 0.06


def test_int8_in_name_only_is_refused(tmp_path: Path) -> None:
    text = (
        '<ir_version: 9, opset_import: ["" : 20]> net (float[N, 4] x) => (float[N, 3] y) <float[4,'
        " 3] w> { y = MatMul (x, w) }"
    )
    model = model_from_text(tmp_path / "source", text)
    with pytest.raises(UnsupportedError, match="nothing can be quantised"):
        convert(model, ONNXRUNTIME, table_of({"x": (-1.0, 1.0)}), (), tmp_path)
    assert not list(tmp_path.glob("*.onnx"))


def test_a_half_precision_source_is_not_quantised(tmp_path: Path) -> None:
    proto = proto_from_text(RESIDUAL)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(proto, str(tmp_path / "source.onnx"))
    table = table_of(dict.fromkeys(("x", "r1", "c2", "r2"), (-1.0, 1.0)))
    with pytest.raises(UnsupportedError, match="the weight 'w1' is not fp32"):
        convert(onnx_model(tmp_path, "source.onnx"), TENSORRT, table, (), tmp_path)


def test_an_old_opset_is_raised_for_fp16_scales(tmp_path: Path) -> None:
    model, result, _ = converted(
        tmp_path, RESIDUAL.replace('"" : 20', '"" : 13'), TENSORRT, images(4)
    )
    assert (model.opset, result.opset) == (13, 19)


def test_constants_as_nodes_and_nodes_without_names_convert(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]> net (float[N, 2] x) => (float[N, 2] y)
    { w = Constant <value = float[2, 2] {1.0, 2.0, 3.0, 4.0}> ()
      k = Constant <value_float = 2.0> ()
      a = MatMul (x, w) b = Mul (a, k) y = MatMul (b, w) }"""
    feeds = {"x": np.ones((3, 2), np.float32)}
    recipe = OPENVINO.model_copy(
        update={"placement": Placement(last_layer=True), "keep_fp32": ("Mul_*",)}
    )
    model, result, graph = converted(tmp_path, text, recipe, feeds)
    assert operators(graph) == {
        "MatMul": 2,
        "Mul": 1,
        "QuantizeLinear": 2,
        "DequantizeLinear": 3,
    }  # one copy of the shared weight
    assert error_of(model, result, feeds) < 0.02


def test_weights_in_external_data_convert_and_link(tmp_path: Path) -> None:
    onnx.save_model(
        proto_from_text(RESIDUAL),
        str(tmp_path / "big.onnx"),
        save_as_external_data=True,
        location="big.data",
        size_threshold=0,
    )
    model = onnx_model(tmp_path, "big.onnx")
    for name, recipe in {
        "same": Recipe(backend="onnxruntime", precision=Precision.FP32),
        "half": FP16,
    }.items():
        (tmp_path / name).mkdir()
        result = convert(model, recipe, None, (images(2),), tmp_path / name)
        assert error_of(model, result, images(2)) < 5e-3


def test_around_own_pairs_tensorrt_gets_fp16_and_a_note_on_rounded_scales(tmp_path: Path) -> None:
    onnx.save(quantised(PLAIN), tmp_path / "model.onnx")
    (tmp_path / "out").mkdir()
    recipe = Recipe(
        backend="tensorrt", precision=Precision.INT8, quantizer="given", rest=Precision.FP16
    )
    feeds = {"x": np.random.default_rng(0).normal(0, 1, (2, 4, 8, 8)).astype(np.float32)}
    model = onnx_model(tmp_path, "model.onnx")
    result = convert(model, recipe, None, (feeds,), tmp_path / "out")
    graph = onnx.load(str(result.path)).graph
    assert result.precision is Precision.INT8
    assert len(scales_of(graph)["DequantizeLinear", "", b"", b""]) == 3
    makers = {name: node.op_type for node in graph.node for name in node.output}
    (conv,) = (node for node in graph.node if node.op_type == "Conv")
    assert [makers[name] for name in conv.input] == [
        "DequantizeLinear",
        "DequantizeLinear",
    ]  # no Cast in between
    scales = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert {
        scales[node.input[1]]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.output[0] in conv.input
    } == {TensorProto.FLOAT16}
    (note,) = (note for note in result.notes if "scales of the model are rounded" in note.text)
    assert note.level == "info"
    assert float(note.text.split(" by ")[1].split(" at most")[0]) < 2**-11
    assert error_of(model, result, feeds) < 0.02
