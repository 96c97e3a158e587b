"""Small ONNX models, each with one property of an interface that a backend may get wrong, and the feeds to try it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from pipeline.core import OnnxModel, Profile, Tensors
from pipeline.graph import dtype_of, onnx_model

OPSET = 20
Interface = Sequence[tuple[str, str, tuple[int | str, ...]]]
"""Name, dtype and shape of each input or output."""


@dataclass(frozen=True)
class Case:
    """A model, the profile it is built for, and feeds inside it."""

    name: str
    proto: ModelProto
    profile: Profile
    feeds: tuple[Tensors, ...]

    def write(self, root: Path) -> OnnxModel:
        root.mkdir(parents=True, exist_ok=True)
        (root / "model.onnx").write_bytes(self.proto.SerializeToString())
        return onnx_model(root, "model.onnx")

    def expected(self, feeds: Tensors) -> Tensors:
        """What ONNX's own reference implementation answers."""
        names = [value.name for value in self.proto.graph.output]
        answers = ReferenceEvaluator(self.proto).run(names, dict(feeds))
        return {name: np.asarray(answer) for name, answer in zip(names, answers, strict=True)}


def model(nodes: Sequence[NodeProto], inputs: Interface, outputs: Interface, constants: Tensors | None = None) -> ModelProto:
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "graph", [_value(*i) for i in inputs], [_value(*o) for o in outputs], initializers)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _value(name: str, dtype: str, shape: tuple[int | str, ...]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype_of(dtype)), list(shape))


def ramp(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Distinct values around zero, exact in every float format."""
    size = int(np.prod(shape))
    return (np.arange(size) - size // 2).reshape(shape).astype(dtype)


def several() -> Case:
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Mul", ["a", "b"], ["product"]),
        helper.make_node("ReduceMax", ["c"], ["largest"], keepdims=0),
    ]
    inputs = [("a", "float32", ("batch", 4)), ("b", "float32", (4,)), ("c", "float32", (2, 3))]
    outputs = [("product", "float32", ("batch", 4)), ("largest", "float32", ()), ("sum", "float32", ("batch", 4))]
    feeds = {"c": ramp(2, 3), "a": ramp(2, 4), "b": ramp(4)}  # not in the model's order
    return Case("several inputs and outputs", model(nodes, inputs, outputs), Profile(dims={"batch": [1, 2, 4]}), (feeds,))


def dtypes() -> Case:
    nodes = [
        helper.make_node("Add", ["i64", "i64"], ["i64_out"]),
        helper.make_node("Mul", ["i32", "i32"], ["i32_out"]),
        helper.make_node("Not", ["b"], ["b_out"]),
        helper.make_node("Max", ["u8", "floor"], ["u8_out"]),
        helper.make_node("Mul", ["f16", "f16"], ["f16_out"]),
    ]
    kinds = {"i64": "int64", "i32": "int32", "b": "bool", "u8": "uint8", "f16": "float16"}
    proto = model(
        nodes,
        [(name, dtype, ("n",)) for name, dtype in kinds.items()],
        [(f"{name}_out", dtype, ("n",)) for name, dtype in kinds.items()],
        {"floor": np.array([100], np.uint8)},
    )
    feeds = {name: ramp(7, dtype="int64").astype(dtype) for name, dtype in kinds.items()}
    return Case("int64, int32, bool, uint8, float16", proto, Profile(dims={"n": [1, 4, 16]}), (feeds,))


def scalars() -> Case:
    nodes = [helper.make_node("Mul", ["x", "scale"], ["y"]), helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0)]
    inputs = [("x", "float32", ("n", 2)), ("scale", "float32", ())]
    proto = model(nodes, inputs, [("y", "float32", ("n", 2)), ("total", "float32", ())])
    feeds = tuple({"x": ramp(3, 2), "scale": np.array(value, np.float32)} for value in (2, -3))
    return Case("scalars", proto, Profile(dims={"n": [1, 3, 3]}), feeds)


def convolution() -> Case:
    weights = {"w": ramp(8, 3, 3, 3) / 128, "fc": ramp(8, 5) / 16}
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "fc"], ["logits"]),
    ]
    proto = model(nodes, [("image", "float32", ("batch", 3, 8, 8))], [("logits", "float32", ("batch", 5))], weights)
    feeds = tuple({"image": ramp(batch, 3, 8, 8) / 1024} for batch in (1, 4, 8, 3, 1))
    return Case("dynamic batch at min, opt, max and between", proto, Profile(dims={"batch": [1, 4, 8]}), feeds)


def two_symbols() -> Case:
    nodes = [helper.make_node("Cast", ["mask"], ["m"], to=onnx.TensorProto.FLOAT), helper.make_node("Mul", ["x", "m"], ["y"])]
    inputs = [("x", "float32", ("batch", "sequence")), ("mask", "int64", ("batch", "sequence"))]
    proto = model(nodes, inputs, [("y", "float32", ("batch", "sequence"))])
    sizes = ((1, 1), (4, 16), (2, 5))
    feeds = tuple({"x": ramp(*size), "mask": ramp(*size, dtype="int64") % 2} for size in sizes)
    return Case("two dynamic axes", proto, Profile(dims={"batch": [1, 2, 4], "sequence": [1, 8, 16]}), feeds)


def positions() -> Case:
    proto = model([helper.make_node("NonZero", ["x"], ["where"])], [("x", "float32", ("n", 3))], [("where", "int64", (2, "found"))])
    feeds = ({"x": ramp(2, 3)}, {"x": np.zeros((4, 3), np.float32)}, {"x": ramp(3, 3)})
    return Case("output sized by values", proto, Profile(dims={"n": [1, 2, 4]}), feeds)


def empty_batch() -> Case:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    proto = model(nodes, [("x", "float32", ("batch", 3))], [("z", "float32", ("batch", 2))], {"w": ramp(3, 2)})
    feeds = tuple({"x": ramp(batch, 3)} for batch in (2, 0, 4))
    return Case("empty batch", proto, Profile(dims={"batch": [0, 2, 4]}), feeds)


def aliases() -> Case:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Identity", ["y"], ["same"]),
        helper.make_node("Identity", ["x"], ["copy"]),
        helper.make_node("Identity", ["c"], ["constant"]),
    ]
    outputs = [(name, "float32", (4,)) for name in ("y", "same", "copy", "constant")]
    proto = model(nodes, [("x", "float32", (4,)), ("unused", "float32", (2,))], outputs, {"c": ramp(4)})
    return Case("outputs that alias, an unused input", proto, Profile(), ({"x": ramp(4), "unused": ramp(2)},))


def passed_through() -> Case:
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    proto = model(nodes, [("x", "float32", ("n",))], [("y", "float32", ("n",)), ("x", "float32", ("n",))])
    return Case("an input that is an output", proto, Profile(dims={"n": [1, 4, 4]}), ({"x": ramp(4)}, {"x": ramp(2)}))


def odd_names() -> Case:
    proto = model([helper.make_node("Neg", ["in/x:0"], ["out y.1"])], [("in/x:0", "float32", (2,))], [("out y.1", "float32", (2,))])
    return Case("names with slashes, colons and spaces", proto, Profile(), ({"in/x:0": ramp(2)},))


def branches() -> Case:
    def body(operator: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node(operator, ["x"], [operator])], operator, [], [_value(operator, "float32", ("n",))])

    node = helper.make_node("If", ["positive"], ["y"], then_branch=body("Identity"), else_branch=body("Neg"))
    proto = model([node], [("x", "float32", ("n",)), ("positive", "bool", ())], [("y", "float32", ("n",))])
    feeds = tuple({"x": ramp(3), "positive": np.array(value)} for value in (True, False))
    return Case("a branch on data", proto, Profile(dims={"n": [1, 3, 4]}), feeds)


CASES = tuple(
    make()
    for make in (
        several,
        dtypes,
        scalars,
        convolution,
        two_symbols,
        positions,
        empty_batch,
        aliases,
        passed_through,
        odd_names,
        branches,
    )
)
