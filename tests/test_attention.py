"""Attention is written plainly where its form is known, and gives the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from pipeline.attention import HIDDEN, plain_attention
from tests.fixtures_attention import LEAST, answer, written_out

PLAIN = ["Add", "MatMul", "MatMul", "Mul", "Softmax", *["Transpose"] * 3]


def operators(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("hides", [LEAST, -np.inf])
def test_attention_with_a_mask_of_two_numbers_becomes_plain(hides: float) -> None:
    before = written_out(hides)
    after = plain_attention(onnx.ModelProto.FromString(before.SerializeToString()))
    np.testing.assert_allclose(answer(after), answer(before), rtol=1e-5, atol=1e-6)
    assert operators(after) == [*PLAIN, "Where"]
    assert min(float(numpy_helper.to_array(tensor).min()) for tensor in after.graph.initializer) == HIDDEN


def test_a_mask_that_is_computed_keeps_its_guard_against_nan() -> None:
    before = written_out(LEAST, computed=True)
    after = plain_attention(onnx.ModelProto.FromString(before.SerializeToString()))
    np.testing.assert_allclose(answer(after), answer(before), rtol=1e-5, atol=1e-6)
    assert {"IsNaN", "Where"} <= set(operators(after))
    assert operators(after).count("Transpose") == 3, "its keys are transposed at once all the same"


def test_what_does_not_look_like_attention_stays() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Softmax", ["r"], ["y"])], "plain",
        [helper.make_tensor_value_info("x", 1, [1, 4])], [helper.make_tensor_value_info("y", 1, [1, 4])],
    )  # fmt: skip
    after = plain_attention(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    assert operators(after) == ["Relu", "Softmax"]
