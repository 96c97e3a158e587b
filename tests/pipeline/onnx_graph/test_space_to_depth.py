"""A stride that is folded into channels gives the same, and what cannot be folded stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.onnx_graph.space_to_depth import fold_strides


def convolution(
    shape: list[int | str], weight: tuple[int, ...], **attributes: Any
) -> onnx.ModelProto:
    random = np.random.default_rng(1)
    constants = {
        "w": random.standard_normal(weight).astype(np.float32),
        "b": random.standard_normal(weight[0]).astype(np.float32),
    }
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)], "convolution",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", weight[0], None, None])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "pad", "left"),
    [
        (32, 7, 2, 3, [4, 4]),
        (48, 16, 16, 0, [1, 1]),
        (16, 4, 4, 0, [1, 1]),
        (16, 3, 2, 1, [2, 2]),
        (24, 5, 2, 2, [3, 3]),
        (24, 2, 4, 0, [1, 1]),
    ],
    ids=["ResNet", "ViT", "Swin", "MobileNet", "five", "smaller than its stride"],
)
def test_a_folded_stride_gives_the_same(
    side: int, kernel: int, stride: int, pad: int, left: list[int]
) -> None:
    before = convolution(
        ["n", 3, side, side], (5, 3, kernel, kernel), strides=[stride] * 2, pads=[pad] * 4
    )
    after = fold_strides(onnx.ModelProto.FromString(before.SerializeToString()))
    assert [node.op_type for node in after.graph.node] == ["SpaceToDepth", "Conv"]
    attributes = {
        each.name: helper.get_attribute_value(each) for each in after.graph.node[1].attribute
    }
    assert (attributes["kernel_shape"], attributes["strides"]) == (left, [1, 1])
    fed = {"x": np.random.default_rng(2).standard_normal((2, 3, side, side)).astype(np.float32)}
    expected, actual = (
        onnxruntime.InferenceSession(
            each.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(None, fed)[0]
        for each in (before, after)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_two_convolutions_of_one_weight_are_folded_each_in_its_way() -> None:
    before = convolution([2, 3, 32, 32], (5, 3, 7, 7), strides=[2, 2], pads=[3] * 4)
    before.graph.node.append(
        helper.make_node("Conv", ["x", "w", "b"], ["z"], strides=[2, 2], pads=[2, 2, 3, 3])
    )
    before.graph.output.append(
        helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 5, None, None])
    )
    after = fold_strides(onnx.ModelProto.FromString(before.SerializeToString()))
    assert [node.op_type for node in after.graph.node].count("SpaceToDepth") == 2
    fed = {"x": np.random.default_rng(2).standard_normal((2, 3, 32, 32)).astype(np.float32)}
    answers = [
        onnxruntime.InferenceSession(
            each.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(["y", "z"], fed)
        for each in (before, after)
    ]
    for expected, actual in zip(*answers, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "weight", "attributes"),
    [
        (["n", 3, 33, 33], (5, 3, 7, 7), {"strides": [2, 2], "pads": [3] * 4}),
        (["n", 3, "h", "w"], (5, 3, 7, 7), {"strides": [2, 2], "pads": [3] * 4}),
        ([2, 3, 32, 32], (5, 3, 7, 7), {"strides": [2, 2]}),
        ([2, 3, 32, 32], (5, 3, 7, 7), {"pads": [3] * 4}),
        ([2, 3, 32, 32], (5, 3, 7, 7), {"strides": [2, 4], "pads": [3] * 4}),
        ([2, 3, 32, 32], (5, 3, 4, 4), {"strides": [2, 2], "pads": [3] * 4, "dilations": [2, 2]}),
        ([2, 4, 32, 32], (6, 2, 7, 7), {"strides": [2, 2], "pads": [3] * 4, "group": 2}),
        ([2, 3, 32, 32], (5, 3, 7, 7), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ([2, 8, 32, 32], (5, 8, 7, 7), {"strides": [2, 2], "pads": [3] * 4}),
    ],
    ids=[
        "odd side",
        "dynamic side",
        "smaller answer",
        "no stride",
        "two strides",
        "dilated",
        "grouped",
        "automatic padding",
        "many channels",
    ],
)
def test_a_stride_that_cannot_be_folded_stays(
    shape: list[int | str], weight: tuple[int, ...], attributes: Any
) -> None:
    after = fold_strides(convolution(shape, weight, **attributes))
    assert [node.op_type for node in after.graph.node] == ["Conv"]
