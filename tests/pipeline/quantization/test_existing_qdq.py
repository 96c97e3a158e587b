"""Scales of graphs that bring their own: counted, and missed when one is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from pipeline.core.recipe import Precision
from pipeline.quantization.existing_qdq import QDQ, given_precision, lost_scales, scales_of
from pipeline.quantization.lint.fixes import fold_weight
from pipeline.quantization.lint.qdq_view import View
from tests.builders.qat import PLAIN, WEIGHTS, quantised


def test_each_scale_is_counted_by_operator_and_by_the_tensors_it_belongs_to() -> None:
    scales = scales_of(quantised(PLAIN).graph)
    assert {operator: scales[operator, "", b"", b""] for operator in QDQ} == {
        "QuantizeLinear": ["x"],
        "DequantizeLinear": ["xq", "wi", "vi"],
    }
    by_scale = {
        (key[0], key[1], np.frombuffer(key[2], np.float64).size): tensors
        for key, tensors in scales.items()
        if key[2]
    }
    assert by_scale == {
        ("QuantizeLinear", "int8", 1): ["x"],
        ("DequantizeLinear", "int8", 1): ["xq"],
        ("DequantizeLinear", "int8", 4): ["wi", "vi"],
    }


def drop_pair(proto: onnx.ModelProto) -> None:
    (conv,) = (node for node in proto.graph.node if node.name == "conv")
    conv.input[0] = "x"
    stay = [node for node in proto.graph.node if node.name not in ("q", "dq")]
    del proto.graph.node[:]
    proto.graph.node.extend(stay)


def fold_weight_dq(proto: onnx.ModelProto) -> None:
    (dq,) = (node for node in proto.graph.node if node.name == "wdq")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4, 3, 3), np.float32), "wd"))
    proto.graph.node.remove(dq)


def change_scale(proto: onnx.ModelProto) -> None:
    (scale,) = (tensor for tensor in proto.graph.initializer if tensor.name == "s")
    scale.CopyFrom(numpy_helper.from_array(np.float32(0.020001), "s"))


def change_one_channel(proto: onnx.ModelProto) -> None:
    (scale,) = (tensor for tensor in proto.graph.initializer if tensor.name == "ws")
    scale.CopyFrom(numpy_helper.from_array(np.array([0.01, 0.02, 0.01, 0.0201], np.float32), "ws"))


def change_zero_point(proto: onnx.ModelProto) -> None:
    (zero,) = (tensor for tensor in proto.graph.initializer if tensor.name == "z")
    zero.CopyFrom(numpy_helper.from_array(np.int8(3), "z"))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (drop_pair, "1 of 1 QuantizeLinear were lost, which stood at x"),
        (fold_weight_dq, "1 of 3 DequantizeLinear were lost, which stood at xq, wi, vi"),
        (change_scale, "1 of 1 QuantizeLinear of scale 0.02 were lost"),
        (
            change_one_channel,
            (
                "2 of 2 DequantizeLinear of scale 0.01 ... (4 channels) were lost, which stood at"
                " wi, vi"
            ),
        ),
        (change_zero_point, "1 of 1 QuantizeLinear of scale 0.02 were lost"),
    ],
)
def test_a_lost_scale_is_found_and_named(
    loss: Callable[[onnx.ModelProto], None], words: str
) -> None:
    before, after = quantised(PLAIN), quantised(PLAIN)
    loss(after)
    assert lost_scales(before.graph, after.graph).startswith(words)
    assert lost_scales(before.graph, before.graph) == ""


def test_a_zero_point_behind_an_identity_is_the_same_zero_point() -> None:
    shared = PLAIN.replace("DequantizeLinear(xq, s, z)", "DequantizeLinear(xq, s, zz)")
    before, after = quantised(f"zz = Identity(z) {shared}"), quantised(PLAIN)
    assert lost_scales(before.graph, after.graph) == lost_scales(after.graph, before.graph) == ""


def test_folding_the_q_of_a_weight_loses_nothing() -> None:
    before, after = quantised(PLAIN), quantised(PLAIN)
    assert fold_weight(View(after.graph))
    assert lost_scales(before.graph, after.graph) == ""


WEIGHTS_ONLY = f"{WEIGHTS} [conv] y = Conv<pads = [1, 1, 1, 1]>(x, wd)"
FP8 = "xq = QuantizeLinear<output_dtype = 17>(x, s) xd = DequantizeLinear(xq, s) y = Relu(xd)"


@pytest.mark.parametrize(
    ("body", "precision"),
    [
        (PLAIN, Precision.INT8),
        (PLAIN.replace(", z)", ")"), Precision.INT8),
        (WEIGHTS_ONLY, None),
        ("y = Relu(x)", None),
        (FP8, Precision.FP8),
    ],
)
def test_a_model_brings_the_precision_of_its_quantised_activations(
    body: str, precision: Precision | None
) -> None:
    proto = quantised(body)
    if precision is Precision.FP8:
        proto.opset_import[0].version = 21
    assert given_precision(proto.graph) is precision
