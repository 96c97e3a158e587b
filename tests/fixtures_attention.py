"""An attention as torch.export writes it out, and what it answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LEAST = np.finfo(np.float32).min


def written_out(hides: float = LEAST, computed: bool = False, dtype: type[np.floating[Any]] = np.float32) -> onnx.ModelProto:
    """scaled_dot_product_attention: b 2, t 4, h 3, d 5. The mask adds `hides` where a token is not `seen`; `computed`: by a product, not a Where."""
    node, scale, of = helper.make_node, dtype(5**-0.25), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
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
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, fed)[0])
