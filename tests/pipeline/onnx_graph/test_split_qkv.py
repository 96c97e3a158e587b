"""Attention with a packed product gets three products, wherever its form is known, and answers as
before.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from pipeline.onnx_graph.attention import plain_attention
from tests.builders.attention import HEADS, KEYS, ONLY_TOKENS, SELECT, WIDTH, packed


def answer(model: onnx.ModelProto, rows: int, number: int = 0) -> np.ndarray:
    shape = [dim.dim_value or rows for dim in model.graph.input[0].type.tensor_type.shape.dim]
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(
        session.run(
            None,
            {
                model.graph.input[0].name: np.random.default_rng(1).standard_normal(
                    shape, np.float32
                )
            },
        )[number]
    )


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(model.SerializeToString())


def operators(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


def unpacked(model: onnx.ModelProto) -> onnx.ModelProto:
    """It, once it was found to answer as `model` does."""
    after = plain_attention(copied(model))
    assert after is not None
    onnx.checker.check_model(after, full_check=True)
    for rows in (1, 3):
        np.testing.assert_allclose(answer(after, rows), answer(model, rows), rtol=1e-4, atol=1e-5)
    return after


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        *(("tokens", keys) for keys in KEYS),
        *(("rows", keys) for keys in KEYS if keys not in ONLY_TOKENS),
    ],
)
@pytest.mark.parametrize("select", SELECT)
def test_each_known_form_gets_three_products_and_moves_only_its_heads(
    form: str, select: str, keys: str
) -> None:
    names = operators(unpacked(packed(form, select, keys)))
    assert names.count("MatMul") == (6 if form == "tokens" else 5)
    assert names.count("Transpose") == 4 + (keys == "at once"), (
        "queries, keys, values and the answer; simplification merges that of the keys"
    )
    assert not {"Gather", "Slice", "Split", "Squeeze", "Unsqueeze", "Gemm"} & set(names)


def test_tokens_that_come_first_stay_first() -> None:
    names = operators(unpacked(packed("tokens", turned=False)))
    assert (names.count("MatMul"), names.count("Transpose"), names.count("Gather")) == (5, 5, 0)


def test_a_transposition_that_does_not_say_its_order_is_no_error() -> None:
    model = packed("tokens", keys="turned twice")
    for node in model.graph.node:
        if node.output[0] == "kt_":
            del node.attribute[:]
    assert plain_attention(copied(model)) is not None


def test_a_product_without_a_bias_is_one_too() -> None:
    assert "Add" not in operators(unpacked(packed("rows", bias=False)))


def test_layers_that_share_a_weight_share_its_thirds() -> None:
    first, second = (onnx.compose.add_prefix(packed("rows"), prefix) for prefix in ("a/", "b/"))
    model = onnx.compose.merge_models(first, second, io_map=[("a/y", "b/x")])
    for node in model.graph.node:
        node.input[:] = ["a/w" if name == "b/w" else name for name in node.input]
    shapes = [tuple(tensor.dims) for tensor in unpacked(model).graph.initializer]
    assert shapes.count((WIDTH, WIDTH)) == 3


@pytest.mark.parametrize("form", ["rows", "tokens"])
@pytest.mark.parametrize(
    "kind",
    [
        "other parts",
        "a weight that is computed",
        "a bias of two dimensions",
        "read elsewhere too",
        "windows",
        "windows of sizes that are not known",
        "sizes that are not known",
    ],
)
def test_what_looks_otherwise_keeps_its_packed_product(form: str, kind: str) -> None:
    model = packed(form)
    nodes = {node.output[0]: node for node in model.graph.node}
    if kind == "other parts":
        nodes["q3" if form == "tokens" else "q"].input[1] = "n1"
    elif kind == "a weight that is computed":
        model.graph.node.insert(0, onnx.helper.make_node("Relu", ["w"], ["positive"]))
        nodes["m"].input[1] = "positive"
    elif kind == "a bias of two dimensions":
        (bias,) = [tensor for tensor in model.graph.initializer if tensor.name == "b"]
        bias.dims.insert(0, 1)
    elif kind == "read elsewhere too":
        model.graph.node.extend([onnx.helper.make_node("Relu", ["p"], ["positive"])])
    elif kind == "windows":
        model = packed(form, window=1)
    elif kind == "windows of sizes that are not known":
        model = packed(form, window=1)
        for value in (*model.graph.input, *model.graph.value_info):
            for dim in value.type.tensor_type.shape.dim[:2]:
                dim.CopyFrom(onnx.TensorShapeProto.Dimension())
    else:
        del model.graph.value_info[:]
    after = plain_attention(copied(model)) or model
    assert [node.op_type for node in after.graph.node].count("MatMul") == (
        4 if form == "tokens" else 3
    ), "the way out of tokens is another matter"


def test_an_answer_that_is_projected_otherwise_keeps_its_way_out() -> None:
    model = packed("tokens")
    (gemm,) = [node for node in model.graph.node if node.op_type == "Gemm"]
    gemm.attribute.append(onnx.helper.make_attribute("alpha", 0.5))
    names = operators(unpacked(model))
    assert (names.count("Gemm"), names.count("MatMul")) == (1, 5)


@pytest.mark.parametrize(("kind", "left"), [("none", 0), ("empty", 0), ("of every token", 1)])
def test_a_gemm_may_have_no_bias_but_one_of_width(kind: str, left: int) -> None:
    model = packed("tokens")
    (gemm,) = [node for node in model.graph.node if node.op_type == "Gemm"]
    if kind == "none":
        del gemm.input[2]
    else:
        gemm.input[2] = "" if kind == "empty" else "every"
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.ones((1, WIDTH), np.float32), "every")
        )
    assert operators(unpacked(model)).count("Gemm") == left


def test_a_gemms_weight_need_not_be_turned() -> None:
    model = packed("tokens")
    (gemm,) = [node for node in model.graph.node if node.op_type == "Gemm"]
    del gemm.attribute[:]
    assert "Gemm" not in operators(unpacked(model))


@pytest.mark.parametrize("need_weights", [True, False])
def test_what_torch_exports_is_one_of_the_known_forms(tmp_path: Path, need_weights: bool) -> None:
    import torch

    class Attending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            torch.nn.init.normal_(self.attention.in_proj_bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answered: torch.Tensor = self.attention(x, x, x, need_weights=need_weights)[0]
            return answered

    shapes = {"x": {0: torch.export.Dim("N")}}
    torch.onnx.export(
        Attending().eval(),
        (torch.randn(2, 5, WIDTH),),
        tmp_path / "model.onnx",
        dynamo=True,
        dynamic_shapes=shapes,
        verbose=False,
    )
    names = operators(unpacked(onnx.load(tmp_path / "model.onnx")))
    assert names.count("MatMul") + names.count("Gemm") == 6
    assert not {"Gather", "Squeeze"} & set(names)
