"""An attention as torch.export writes it out, and what it answers; one whose queries, keys and
values come out of one product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LEAST = float(np.finfo(np.float32).min)


def written_out(
    hides: float = LEAST, computed: bool = False, dtype: type[np.floating[Any]] = np.float32
) -> onnx.ModelProto:
    """scaled_dot_product_attention: b 2, t 4, h 3, d 5. The mask adds `hides` where a token
    is not `seen`; `computed`: by a product, not a Where.
    """
    node, scale, of = (
        helper.make_node,
        dtype(5**-0.25),
        helper.np_dtype_to_tensor_dtype(np.dtype(dtype)),
    )
    choice = [
        node("And", ["all", "seen"], ["seen by each"]),
        node("Where", ["seen by each", "zero", "hides"], ["mask"]),
    ]
    product = [
        node("Not", ["seen"], ["unseen"]),
        node("Cast", ["unseen"], ["ones"], to=of),
        node("Mul", ["ones", "hides"], ["mask"]),
    ]
    nodes = [
        node("Transpose", ["q"], ["qt"], perm=[0, 2, 1, 3]),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1, 3]),
        node("Transpose", ["v"], ["vt"], perm=[0, 2, 1, 3]),
        node("Reshape", ["kt", "three"], ["k3"]),
        node("Transpose", ["k3"], ["k3t"], perm=[0, 2, 1]),
        node("Reshape", ["k3t", "four"], ["k4"]),
        node("Mul", ["qt", "scale"], ["qs"]),
        node("Mul", ["k4", "scale"], ["ks"]),
        node("MatMul", ["qs", "ks"], ["scores"]),
        *(product if computed else choice),
        node("Add", ["scores", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["weights"], axis=-1),
        node("IsNaN", ["weights"], ["lost"]),
        node("Where", ["lost", "zero", "weights"], ["whole"]),
        node("MatMul", ["whole", "vt"], ["y"]),
    ]
    constants = {
        "three": np.array([-1, 4, 5]),
        "four": np.array([2, 3, 5, 4]),
        "scale": scale,
        "zero": dtype(0),
        "all": np.full((1, 1, 4, 1), fill_value=True),
        "hides": dtype(hides),
    }
    inputs = [helper.make_tensor_value_info(name, of, [2, 4, 3, 5]) for name in "qkv"]
    inputs.append(helper.make_tensor_value_info("seen", TensorProto.BOOL, [2, 1, 1, 4]))
    graph = helper.make_graph(
        nodes, "attention", inputs,
        [helper.make_tensor_value_info("y", of, [2, 3, 4, 5])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def answer(model: onnx.ModelProto, blind: bool = False) -> np.ndarray:
    """Of random inputs; every row sees its first token, or if `blind` the first sees none."""
    import onnxruntime

    random = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    fed = {name: random.standard_normal((2, 4, 3, 5)).astype(dtype) for name in "qkv"}
    fed["seen"] = random.random((2, 1, 1, 4)) < 0.5
    fed["seen"][..., 0] = True
    fed["seen"][0] &= not blind
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, fed)[0])


HEADS, SIZE = 2, 4
WIDTH = HEADS * SIZE
SELECT = {
    "Gather": "{each} = Gather<axis = 0>(all, n{index})",
    "Slice": "s{each} = Slice(all, o{index}, o{next}, o0)  {each} = Squeeze(s{each}, o0)",
    "Split": "",
}
KEYS = {
    "at once": "kt = Transpose<perm = [0, 1, 3, 2]>(k)",
    "in three dimensions": (
        "km = Reshape(k, three)  kmt = Transpose<perm = [0, 2, 1]>(km)  kt = Reshape(kmt, turned)"
    ),
    "turned twice": (
        """k2 = Reshape(k3, merged)  kt_ = Transpose<perm = [1, 0, 2]>(k2)
        kmt = Transpose<perm = [0, 2, 1]>(kt_)  kt = Reshape(kmt, turned)"""
    ),  # as exporters write it for fixed shapes
    "turned once": (  # as simplifiers do
        "k2 = Reshape(k3, merged)  kmt = Transpose<perm = [1, 2, 0]>(k2)  kt = Reshape(kmt, turned)"
    ),
}
ONLY_TOKENS = {"turned twice", "turned once"}


def packed(
    form: str,
    select: str = "Gather",
    keys: str = "at once",
    bias: bool = True,
    turned: bool = True,
    window: int = 5,
) -> onnx.ModelProto:
    """One attention of any batch and 5 tokens; `form`: "rows" as timm writes it, "tokens" as
    nn.MultiheadAttention; `turned`: rows come first.

    In windows of other than 5 tokens rows and tokens are grouped anew.
    """
    by_tokens = form == "tokens"
    x = "xt = Transpose<perm = [1, 0, 2]>(x)" if by_tokens and turned else "xt = Identity(x)"
    product = "m = MatMul(xt, w)  p = Add(m, b)" if bias else "p = MatMul(xt, w)"
    if by_tokens:
        apart = (
            "v4 = Reshape(p, apart)  v5 = Unsqueeze(v4, o0)  t5 = Transpose<perm = [3, 1, 2, 0,"
            " 4]>(v5)  all = Squeeze(t5, o3)"
        )
    else:
        apart = "v5 = Reshape(p, apart)  all = Transpose<perm = [2, 0, 3, 1, 4]>(v5)"
    names = [f"{letter}{'3' * by_tokens}" for letter in "qkv"]
    chosen = "  ".join(
        SELECT[select].format(each=name, index=index, next=index + 1)
        for index, name in enumerate(names)
    )
    if select == "Split":
        chosen = (
            "sq, sk, sv = Split<axis = 0>(all, thirds) "
            f" {'  '.join(f'{name} = Squeeze(s{name[0]}, o0)' for name in names)}"
        )
    if by_tokens:
        heads = (
            "{each}2 = Reshape({each}3, merged)  {each}t_ = Transpose<perm = [1, 0, 2]>({each}2) "
            " {each} = Reshape({each}t_, heads)"
        )
        chosen += "  ".join(
            [
                "",
                *(
                    heads.format(each=each)
                    for each in "qkv"
                    if each != "k" or keys not in ONLY_TOKENS
                ),
            ]
        )
    if not by_tokens:
        after = "c = Transpose<perm = [0, 2, 1, 3]>(a)  y = Reshape(c, back)"
    elif turned:
        after = """c = Transpose<perm = [2, 0, 1, 3]>(a)  c2 = Reshape(c, flat)
            g = Gemm<transB = 1>(c2, wo, bo)  g3 = Reshape(g, tokens)
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
    written = ", ".join(
        f"int64[{len(each)}] {name} = {{{', '.join(map(str, each))}}}"
        for name, each in constants.items()
    )
    scalars = ", ".join(f"int64 n{index} = {{{index}}}" for index in range(3))
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]> g (float[{shape}] x) => (float[{shape}] y)
    <{written}, {scalars}, float scale = {{0.5}}> {{
        {x}  {product}  {apart}  {chosen}
        {KEYS[keys]}  qs = Mul(q, scale)  s = MatMul(qs, kt)  soft = Softmax<axis = -1>(s)
          a = MatMul(soft, v)  {after}
    }}"""
    )
    random = np.random.default_rng(0)
    weights = {"w": (WIDTH, 3 * WIDTH), "b": (3 * WIDTH,), "wo": (WIDTH, WIDTH), "bo": (WIDTH,)}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(random.standard_normal(of, np.float32), name)
        for name, of in weights.items()
    )
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
