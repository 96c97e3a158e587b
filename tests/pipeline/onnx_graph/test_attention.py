"""Attention is written plainly where its form is known, and gives the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from pipeline.errors import ModelError
from pipeline.onnx_graph.attention import plain_attention
from pipeline.onnx_graph.attention_masks import HIDDEN
from pipeline.onnx_graph.inspect import attentions
from tests.builders.attention import LEAST, answer, written_out

PLAIN = ["Add", "MatMul", "MatMul", "Mul", "Softmax", *["Transpose"] * 3]


def plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """Of a copy, for the surgery may change what it is given."""
    result = plain_attention(onnx.ModelProto.FromString(model.SerializeToString()))
    assert result is not None
    return result


def operators(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(
    ("dtype", "hides", "close"), [(np.float32, LEAST, 1e-5), (np.float16, -65504, 5e-3)]
)
def test_attention_with_a_mask_of_two_numbers_becomes_plain(
    dtype: type, hides: float, close: float
) -> None:
    before = written_out(hides, dtype=dtype)
    after = plain(before)
    np.testing.assert_allclose(answer(after), answer(before), rtol=close, atol=close)
    assert operators(after) == [*PLAIN, "Where"]
    assert (
        min(float(numpy_helper.to_array(tensor).min()) for tensor in after.graph.initializer)
        == HIDDEN
    )


def test_a_scale_that_a_node_gives_is_one_too_and_bf16_stays() -> None:
    before = written_out()
    (scale,) = [tensor for tensor in before.graph.initializer if tensor.name == "scale"]
    before.graph.node.insert(0, helper.make_node("Constant", [], ["scale"], value=scale))
    before.graph.initializer.remove(scale)
    after = plain(before)
    np.testing.assert_allclose(answer(after), answer(before), rtol=1e-5, atol=1e-6)
    assert operators(after).count("Mul") == 1
    bf16 = plain(written_out(-3e38, dtype=ml_dtypes.bfloat16))
    assert operators(bf16).count("Mul") == 2
    onnx.checker.check_model(bf16, full_check=True)
    assert {
        tensor.data_type for tensor in bf16.graph.initializer if tensor.name in ("zero", "hides")
    } == {onnx.TensorProto.BFLOAT16}


@pytest.mark.parametrize("opset", [14, 20])
@pytest.mark.parametrize(("dtype", "close"), [(np.float32, 1e-5), (np.float16, 5e-3)])
def test_a_mask_of_minus_infinity_needs_no_guard_if_a_product_counts_positions(
    opset: int, dtype: type, close: float
) -> None:
    before = written_out(-np.inf, dtype=dtype)
    before.opset_import[0].version = opset
    after = plain(before)
    for blind in (False, True):
        np.testing.assert_allclose(
            answer(after, blind), answer(before, blind), rtol=close, atol=close
        )
    assert not answer(before, blind=True)[0].any(), "a row without a token has an answer"
    assert operators(after) == sorted([*PLAIN, "Div", "Mul", "ReduceMax", "Sub", "Where"])
    assert plain_attention(after) is None


def test_a_transposition_that_does_not_say_its_order_is_no_error() -> None:
    before = written_out()
    (keys,) = [node for node in before.graph.node if node.output[0] == "k3t"]
    del keys.attribute[:]
    assert "Softmax" in operators(plain(before))


def test_a_softmax_before_a_product_is_attention_and_a_classifiers_is_not() -> None:
    model = written_out()
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{number}"
    classifier = helper.make_node("Softmax", ["y"], ["class"], "classifier")
    model.graph.node.append(classifier)
    assert attentions(model.graph) == ("Softmax_12",)


def test_a_mask_that_is_computed_keeps_its_guard_against_nan() -> None:
    before = written_out(LEAST, computed=True)
    after = plain(before)
    np.testing.assert_allclose(answer(after), answer(before), rtol=1e-5, atol=1e-6)
    assert {"IsNaN", "Where"} <= set(operators(after))
    assert operators(after).count("Transpose") == 3, "its keys are transposed at once all the same"


def test_what_does_not_look_like_attention_stays() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Softmax", ["r"], ["y"])],
        "plain",
        [helper.make_tensor_value_info("x", 1, [1, 4])],
        [helper.make_tensor_value_info("y", 1, [1, 4])],
    )
    assert (
        plain_attention(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
        is None
    )


def test_without_new_masks_rows_that_see_no_token_answer_as_before() -> None:
    before = written_out()
    after = plain_attention(onnx.ModelProto.FromString(before.SerializeToString()), masks=False)
    assert after is not None
    for blind in (False, True):
        np.testing.assert_allclose(
            answer(after, blind), answer(before, blind), rtol=1e-5, atol=1e-6
        )
    assert np.abs(answer(plain(before), blind=True) - answer(before, blind=True)).max() > 0.1, (
        "new ones do change them"
    )
    assert operators(after).count("Transpose") == 3


def test_a_subgraph_that_reads_the_answer_comes_after_it() -> None:
    before = written_out()
    before.graph.node[-1].output[0] = "whole answer"
    before.graph.initializer.append(numpy_helper.from_array(np.array(True), "condition"))
    branches = {
        name: helper.make_graph(
            [helper.make_node(operator, ["whole answer"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, 1, None)],
        )
        for name, operator in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    before.graph.node.append(helper.make_node("If", ["condition"], ["y"], **branches))
    after = plain(before)
    onnx.checker.check_model(after, full_check=True)
    np.testing.assert_allclose(answer(after), answer(before), rtol=1e-5, atol=1e-6)


def test_sparse_initializers_are_refused_and_not_lost() -> None:
    model = written_out()
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(
            numpy_helper.from_array(np.ones(1, np.float32), "sparse"),
            numpy_helper.from_array(np.array([3])),
            [5],
        )
    )
    with pytest.raises(ModelError, match="sparse initializers"):
        plain_attention(model)
