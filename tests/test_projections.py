"""Attention with a packed product gets three products, wherever its form is known, and answers as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from pipeline.attention import plain_attention

HEADS, SIZE = 2, 4
WIDTH = HEADS * SIZE
SELECT = {
    "Gather": "{each} = Gather<axis = 0>(all, n{index})",
    "Slice": "s{each} = Slice(all, o{index}, o{next}, o0)  {each} = Squeeze(s{each}, o0)",
    "Split": "",
}
KEYS = {
    "at once": "kt = Transpose<perm = [0, 1, 3, 2]>(k)",
    "in three dimensions": "km = Reshape(k, three)  kmt = Transpose<perm = [0, 2, 1]>(km)  kt = Reshape(kmt, turned)",
    "turned twice": """k2 = Reshape(k3, merged)  kt_ = Transpose<perm = [1, 0, 2]>(k2)
        kmt = Transpose<perm = [0, 2, 1]>(kt_)  kt = Reshape(kmt, turned)""",  # as exporters write it for fixed shapes
    "turned once": "k2 = Reshape(k3, merged)  kmt = Transpose<perm = [1, 2, 0]>(k2)  kt = Reshape(kmt, turned)",  # as simplifiers do
}
ONLY_TOKENS = {"turned twice", "turned once"}


def packed(form: str, select: str = "Gather", keys: str = "at once", bias: bool = True, turned: bool = True, window: int = 5) -> onnx.ModelProto:
    """One attention of any batch and 5 tokens; `form`: "rows" as timm writes it, "tokens" as nn.MultiheadAttention; `turned`: rows come first.

    In windows of other than 5 tokens rows and tokens are grouped anew.
    """
    by_tokens = form == "tokens"
    x = "xt = Transpose<perm = [1, 0, 2]>(x)" if by_tokens and turned else "xt = Identity(x)"
    product = "m = MatMul(xt, w)  p = Add(m, b)" if bias else "p = MatMul(xt, w)"
    if by_tokens:
        apart = "v4 = Reshape(p, apart)  v5 = Unsqueeze(v4, o0)  t5 = Transpose<perm = [3, 1, 2, 0, 4]>(v5)  all = Squeeze(t5, o3)"
    else:
        apart = "v5 = Reshape(p, apart)  all = Transpose<perm = [2, 0, 3, 1, 4]>(v5)"
    names = [f"{letter}{'3' * by_tokens}" for letter in "qkv"]
    chosen = "  ".join(SELECT[select].format(each=name, index=index, next=index + 1) for index, name in enumerate(names))
    if select == "Split":
        chosen = f"sq, sk, sv = Split<axis = 0>(all, thirds)  {'  '.join(f'{name} = Squeeze(s{name[0]}, o0)' for name in names)}"
    if by_tokens:
        heads = "{each}2 = Reshape({each}3, merged)  {each}t_ = Transpose<perm = [1, 0, 2]>({each}2)  {each} = Reshape({each}t_, heads)"
        chosen += "  ".join(["", *(heads.format(each=each) for each in "qkv" if each != "k" or keys not in ONLY_TOKENS)])
    if not by_tokens:
        after = "c = Transpose<perm = [0, 2, 1, 3]>(a)  y = Reshape(c, back)"
    elif turned:
        after = """c = Transpose<perm = [2, 0, 1, 3]>(a)  c2 = Reshape(c, flat)  g = Gemm<transB = 1>(c2, wo, bo)  g3 = Reshape(g, tokens)
            y = Transpose<perm = [1, 0, 2]>(g3)"""
    else:
        after = "c = Transpose<perm = [2, 0, 1, 3]>(a)  y = Reshape(c, tokens)"
    shape = f"N, 5, {WIDTH}" if turned or not by_tokens else f"5, N, {WIDTH}"
    constants = {
        "thirds": [1, 1, 1],
        "apart": [window, -1, 3, WIDTH] if by_tokens else [-1, window, 3, HEADS, SIZE],
        "merged": [window, -1, SIZE],
        "heads": [-1, HEADS, window, SIZE],
        "three": [-1, window, SIZE],
        "turned": [-1, HEADS, SIZE, window],
        "flat": [-1, WIDTH],
        "tokens": [5, -1, WIDTH],
        "back": [-1, 5, WIDTH],
        **{f"o{index}": [index] for index in range(4)},
    }
    written = ", ".join(f"int64[{len(each)}] {name} = {{{', '.join(map(str, each))}}}" for name, each in constants.items())
    scalars = ", ".join(f"int64 n{index} = {{{index}}}" for index in range(3))
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]> g (float[{shape}] x) => (float[{shape}] y)
    <{written}, {scalars}, float scale = {{0.5}}> {{
        {x}  {product}  {apart}  {chosen}
        {KEYS[keys]}  qs = Mul(q, scale)  s = MatMul(qs, kt)  soft = Softmax<axis = -1>(s)  a = MatMul(soft, v)  {after}
    }}""")
    random = np.random.default_rng(0)
    weights = {"w": (WIDTH, 3 * WIDTH), "b": (3 * WIDTH,), "wo": (WIDTH, WIDTH), "bo": (WIDTH,)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(random.standard_normal(of, np.float32), name) for name, of in weights.items())
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def answer(model: onnx.ModelProto, rows: int, number: int = 0) -> np.ndarray:
    shape = [each.dim_value or rows for each in model.graph.input[0].type.tensor_type.shape.dim]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {model.graph.input[0].name: np.random.default_rng(1).standard_normal(shape, np.float32)})[number])


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


@pytest.mark.parametrize(("form", "keys"), [*(("tokens", keys) for keys in KEYS), *(("rows", keys) for keys in KEYS if keys not in ONLY_TOKENS)])
@pytest.mark.parametrize("select", SELECT)
def test_each_known_form_gets_three_products_and_moves_only_its_heads(form: str, select: str, keys: str) -> None:
    found = operators(unpacked(packed(form, select, keys)))
    assert found.count("MatMul") == (6 if form == "tokens" else 5)
    assert found.count("Transpose") == 4 + (keys == "at once"), "queries, keys, values and the answer; simplification merges that of the keys"
    assert not {"Gather", "Slice", "Split", "Squeeze", "Unsqueeze", "Gemm"} & set(found)


def test_tokens_that_come_first_stay_first() -> None:
    found = operators(unpacked(packed("tokens", turned=False)))
    assert (found.count("MatMul"), found.count("Transpose"), found.count("Gather")) == (5, 5, 0)


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
    assert [node.op_type for node in after.graph.node].count("MatMul") == (4 if form == "tokens" else 3), "the way out of tokens is another matter"


def test_an_answer_that_is_projected_otherwise_keeps_its_way_out() -> None:
    model = packed("tokens")
    (gemm,) = [node for node in model.graph.node if node.op_type == "Gemm"]
    gemm.attribute.append(onnx.helper.make_attribute("alpha", 0.5))
    found = operators(unpacked(model))
    assert (found.count("Gemm"), found.count("MatMul")) == (1, 5)


@pytest.mark.parametrize(("kind", "left"), [("none", 0), ("empty", 0), ("of every token", 1)])
def test_a_gemm_may_have_no_bias_but_one_of_width(kind: str, left: int) -> None:
    model = packed("tokens")
    (gemm,) = [node for node in model.graph.node if node.op_type == "Gemm"]
    if kind == "none":
        del gemm.input[2]
    else:
        gemm.input[2] = "" if kind == "empty" else "every"
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, WIDTH), np.float32), "every"))
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
    torch.onnx.export(Attending().eval(), (torch.randn(2, 5, WIDTH),), tmp_path / "model.onnx", dynamo=True, dynamic_shapes=shapes, verbose=False)
    found = operators(unpacked(onnx.load(tmp_path / "model.onnx")))
    assert found.count("MatMul") + found.count("Gemm") == 6
    assert not {"Gather", "Squeeze"} & set(found)
