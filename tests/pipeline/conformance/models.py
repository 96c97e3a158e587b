"""Small ONNX models, each with one property of an interface that a backend may get wrong, and the
feeds to try it with.

`refused_by` holds the backends that do not take a model, and a pattern of what they say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from pipeline.core.artifacts import OnnxModel
from pipeline.core.shapes import Profile, Tensors, dtype_of
from pipeline.onnx_graph.files import onnx_model

OPSET = 20
Interface = Sequence[tuple[str, str, tuple[int | str, ...]]]
"""Name, dtype and shape of each input or output."""


@dataclass(frozen=True)
class Case:
    """A model, the profiles it is built for, and feeds inside them."""

    name: str
    proto: ModelProto
    profiles: tuple[Profile, ...]
    feeds: tuple[Tensors, ...]
    refused_by: Mapping[str, str] = field(default_factory=dict)  # pattern by backend

    @property
    def valued(self) -> frozenset[str]:
        """The inputs whose values decide a shape."""
        return frozenset(name for profile in self.profiles for name in profile.values)

    def write(self, root: Path) -> OnnxModel:
        root.mkdir(parents=True, exist_ok=True)
        (root / "model.onnx").write_bytes(self.proto.SerializeToString())
        return onnx_model(root, "model.onnx")

    def expected(self, feeds: Tensors) -> Tensors:
        """What ONNX's own reference implementation answers."""
        names = [value.name for value in self.proto.graph.output]
        answers = ReferenceEvaluator(self.proto).run(names, dict(feeds))
        return {name: np.asarray(answer) for name, answer in zip(names, answers, strict=True)}


def model(
    nodes: Sequence[NodeProto],
    inputs: Interface,
    outputs: Interface,
    constants: Tensors | None = None,
) -> ModelProto:
    initializers = [
        numpy_helper.from_array(np.asarray(array), name)
        for name, array in (constants or {}).items()
    ]
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [_value(*i) for i in inputs],
        [_value(*o) for o in outputs],
        initializers,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _value(name: str, dtype: str, shape: tuple[int | str, ...]) -> ValueInfoProto:
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(dtype_of(dtype)), list(shape)
    )


def profiles_of(
    *ranges: dict[str, list[int]], **values: list[int] | list[list[int]]
) -> tuple[Profile, ...]:
    """A profile for each of `ranges`, all with the same ranges of values, by input name."""
    return tuple(Profile.model_validate({"dims": bounds, "values": values}) for bounds in ranges)


def on_tensorrt(words: str) -> dict[str, str]:
    return {"tensorrt": words, "tensorrt_rtx": words}


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
    outputs = [
        ("product", "float32", ("batch", 4)),
        ("largest", "float32", ()),
        ("sum", "float32", ("batch", 4)),
    ]
    feeds = {"c": ramp(2, 3), "a": ramp(2, 4), "b": ramp(4)}  # not in the model's order
    return Case(
        "several inputs and outputs",
        model(nodes, inputs, outputs),
        profiles_of({"batch": [1, 2, 4]}),
        (feeds,),
    )


def dtypes() -> Case:
    nodes = [
        helper.make_node("Add", ["i64", "i64"], ["i64_out"]),
        helper.make_node("Mul", ["i32", "i32"], ["i32_out"]),
        helper.make_node("Not", ["b"], ["b_out"]),
        helper.make_node("Mul", ["f16", "f16"], ["f16_out"]),
    ]
    kinds = {"i64": "int64", "i32": "int32", "b": "bool", "f16": "float16"}
    proto = model(
        nodes,
        [(name, dtype, ("n",)) for name, dtype in kinds.items()],
        [(f"{name}_out", dtype, ("n",)) for name, dtype in kinds.items()],
    )
    feeds = {name: ramp(7, dtype="int64").astype(dtype) for name, dtype in kinds.items()}
    return Case("int64, int32, bool, float16", proto, profiles_of({"n": [1, 4, 16]}), (feeds,))


def bfloat16() -> Case:
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"]),
        helper.make_node("Cast", ["square"], ["wide"], to=TensorProto.FLOAT),
    ]
    proto = model(
        nodes,
        [("x", "bfloat16", ("n",))],
        [("square", "bfloat16", ("n",)), ("wide", "float32", ("n",))],
    )
    refused_by = {"onnxruntime": "takes no bfloat16 arrays from Python, and 'x' is bfloat16"}
    return Case(
        "bfloat16",
        proto,
        profiles_of({"n": [1, 4, 16]}),
        ({"x": ramp(7).astype(ml_dtypes.bfloat16)},),
        refused_by,
    )


def pixels() -> Case:
    nodes = [
        helper.make_node("Cast", ["image"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["wide", "half"], ["darker"]),
        helper.make_node("Cast", ["darker"], ["pixels"], to=TensorProto.UINT8),
    ]
    proto = model(
        nodes,
        [("image", "uint8", ("n", 4))],
        [("pixels", "uint8", ("n", 4))],
        {"half": np.array(0.5, np.float32)},
    )
    return Case(
        "uint8 in and out",
        proto,
        profiles_of({"n": [1, 2, 4]}),
        ({"image": np.arange(0, 256, 32, dtype=np.uint8).reshape(2, 4)},),
    )


def largest_bytes() -> Case:
    proto = model(
        [helper.make_node("Max", ["a", "b"], ["c"])],
        [("a", "uint8", ("n",)), ("b", "uint8", ("n",))],
        [("c", "uint8", ("n",))],
    )
    feeds = {"a": np.array([0, 100, 255], np.uint8), "b": np.array([1, 99, 128], np.uint8)}
    return Case(
        "arithmetic in uint8",
        proto,
        profiles_of({"n": [1, 4, 16]}),
        (feeds,),
        on_tensorrt("(?i)max|uint8"),
    )


def scalars() -> Case:
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
    ]
    inputs = [("x", "float32", ("n", 2)), ("scale", "float32", ())]
    proto = model(nodes, inputs, [("y", "float32", ("n", 2)), ("total", "float32", ())])
    feeds = tuple({"x": ramp(3, 2), "scale": np.array(value, np.float32)} for value in (2, -3))
    return Case("scalars", proto, profiles_of({"n": [1, 3, 3]}), feeds)


def convolution() -> Case:
    weights = {"w": ramp(8, 3, 3, 3) / 128, "fc": ramp(8, 5) / 16}
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "fc"], ["logits"]),
    ]
    proto = model(
        nodes,
        [("image", "float32", ("batch", 3, 8, 8))],
        [("logits", "float32", ("batch", 5))],
        weights,
    )
    feeds = tuple({"image": ramp(batch, 3, 8, 8) / 1024} for batch in (1, 4, 8, 3, 1))
    return Case(
        "dynamic batch at min, opt, max and between",
        proto,
        profiles_of({"batch": [1, 4, 8]}),
        feeds,
    )


def two_symbols() -> Case:
    nodes = [
        helper.make_node("Cast", ["mask"], ["m"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "m"], ["y"]),
    ]
    inputs = [("x", "float32", ("batch", "sequence")), ("mask", "int64", ("batch", "sequence"))]
    proto = model(nodes, inputs, [("y", "float32", ("batch", "sequence"))])
    sizes = ((1, 1), (4, 16), (2, 5))
    feeds = tuple({"x": ramp(*size), "mask": ramp(*size, dtype="int64") % 2} for size in sizes)
    return Case(
        "two dynamic axes", proto, profiles_of({"batch": [1, 2, 4], "sequence": [1, 8, 16]}), feeds
    )


def two_profiles() -> Case:
    """One for long single rows, one for batches of short ones; each shape fits one of them only."""
    one = two_symbols()
    profiles = profiles_of(
        {"batch": [1, 1, 1], "sequence": [1, 32, 64]}, {"batch": [2, 4, 8], "sequence": [1, 8, 16]}
    )
    feeds = tuple(
        {"x": ramp(*size), "mask": ramp(*size, dtype="int64") % 3}
        for size in ((1, 64), (8, 16), (1, 3), (2, 5))
    )
    return Case("two profiles", one.proto, profiles, feeds)


def reshaped() -> Case:
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Reshape", ["h", "target"], ["y"]),
    ]
    proto = model(
        nodes,
        [("x", "float32", ("n", 6)), ("target", "int64", (2,))],
        [("y", "float32", ("rows", "columns"))],
    )
    targets = ((1, (2, 3)), (2, (3, 4)), (4, (6, 4)), (2, (4, 3)), (3, (6, 3)))
    feeds = tuple({"x": ramp(n, 6), "target": np.array(target)} for n, target in targets)
    return Case(
        "values that are a shape",
        proto,
        profiles_of({"n": [1, 2, 4]}, target=[[2, 3], [3, 4], [6, 4]]),
        feeds,
    )


def top_k() -> Case:
    outputs = [("values", "float32", ("n", "found")), ("places", "int64", ("n", "found"))]
    proto = model(
        [helper.make_node("TopK", ["x", "k"], ["values", "places"])],
        [("x", "float32", ("n", 12)), ("k", "int64", (1,))],
        outputs,
    )
    feeds = tuple(
        {"x": ramp(n, 12)[:, ::-1].copy(), "k": np.array([k])}
        for n, k in ((1, 1), (2, 3), (4, 8), (2, 5))
    )
    return Case("a value that is a size", proto, profiles_of({"n": [1, 2, 4]}, k=[1, 3, 8]), feeds)


def counted() -> Case:
    nodes = [helper.make_node("Range", ["start", "limit", "step"], ["all"])]
    proto = model(
        nodes,
        [("limit", "int64", ())],
        [("all", "int64", ("count",))],
        {"start": np.array(0), "step": np.array(1)},
    )
    return Case(
        "a scalar that is a size",
        proto,
        profiles_of({}, limit=[1, 3, 8]),
        tuple({"limit": np.array(limit)} for limit in (1, 3, 8, 5)),
    )


def positions() -> Case:
    proto = model(
        [helper.make_node("NonZero", ["x"], ["where"])],
        [("x", "float32", ("n", 3))],
        [("where", "int64", (2, "found"))],
    )
    feeds = ({"x": ramp(2, 3)}, {"x": np.zeros((4, 3), np.float32)}, {"x": ramp(3, 3)})
    rtx = {"tensorrt_rtx": "NonZero"}
    return Case("output sized by values", proto, profiles_of({"n": [1, 2, 4]}), feeds, rtx)


def boxes_chosen() -> Case:
    """Two pairs of boxes that overlap by 0.82, and one alone; by score, the best first."""
    boxes = np.array(
        [[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 10, 1, 11], [0, 10.1, 1, 11.1], [0, 100, 1, 101]]],
        np.float32,
    )
    scores = np.array([[[0.9, 0.75, 0.6, 0.95, 0.3]]], np.float32)
    constants = {
        "most": np.array([3]),
        "overlap": np.array([0.5], np.float32),
        "least": np.array([0.4], np.float32),
    }
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", *constants], ["chosen"])
    inputs: Interface = [("boxes", "float32", (1, "n", 4)), ("scores", "float32", (1, 1, "n"))]
    proto = model([node], inputs, [("chosen", "int64", ("found", 3))], constants)
    feeds = tuple(
        {"boxes": boxes[:, :n], "scores": scores[:, :, :n] * np.float32(scale)}
        for n, scale in ((5, 1), (5, 0.1), (2, 1))
    )
    return Case(
        "non-maximum suppression",
        proto,
        profiles_of({"n": [1, 5, 8]}),
        feeds,
        {"tensorrt_rtx": "node_of_chosen"},
    )


def empty_batch() -> Case:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    proto = model(
        nodes, [("x", "float32", ("batch", 3))], [("z", "float32", ("batch", 2))], {"w": ramp(3, 2)}
    )
    feeds = tuple({"x": ramp(batch, 3)} for batch in (2, 0, 4))
    return Case("empty batch", proto, profiles_of({"batch": [0, 2, 4]}), feeds)


def aliases() -> Case:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Identity", ["y"], ["same"]),
        helper.make_node("Identity", ["x"], ["copy"]),
        helper.make_node("Identity", ["c"], ["constant"]),
    ]
    outputs = [(name, "float32", (4,)) for name in ("y", "same", "copy", "constant")]
    proto = model(
        nodes, [("x", "float32", (4,)), ("unused", "float32", (2,))], outputs, {"c": ramp(4)}
    )
    return Case(
        "outputs that alias, an unused input",
        proto,
        (Profile(),),
        ({"x": ramp(4), "unused": ramp(2)},),
    )


def passed_through() -> Case:
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    proto = model(
        nodes, [("x", "float32", ("n",))], [("y", "float32", ("n",)), ("x", "float32", ("n",))]
    )
    return Case(
        "an input that is an output",
        proto,
        profiles_of({"n": [1, 4, 4]}),
        ({"x": ramp(4)}, {"x": ramp(2)}),
    )


def odd_names() -> Case:
    proto = model(
        [helper.make_node("Neg", ["in/x:0"], ["out y.1"])],
        [("in/x:0", "float32", (2,))],
        [("out y.1", "float32", (2,))],
    )
    return Case(
        "names with slashes, colons and spaces", proto, (Profile(),), ({"in/x:0": ramp(2)},)
    )


def branches() -> Case:
    def body(operator: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node(operator, ["x"], [operator])],
            operator,
            [],
            [_value(operator, "float32", ("n",))],
        )

    node = helper.make_node(
        "If", ["positive"], ["y"], then_branch=body("Identity"), else_branch=body("Neg")
    )
    proto = model(
        [node], [("x", "float32", ("n",)), ("positive", "bool", ())], [("y", "float32", ("n",))]
    )
    feeds = tuple({"x": ramp(3), "positive": np.array(value)} for value in (True, False))
    return Case("a branch on data", proto, profiles_of({"n": [1, 3, 4]}), feeds)


def sequence_inside() -> Case:
    nodes = [
        helper.make_node("SequenceConstruct", ["a", "b"], ["both"]),
        helper.make_node("ConcatFromSequence", ["both"], ["c"], axis=0),
    ]
    proto = model(
        nodes, [("a", "float32", ("n",)), ("b", "float32", ("m",))], [("c", "float32", ("l",))]
    )
    profiles = profiles_of({"n": [1, 2, 4], "m": [1, 2, 4]})
    return Case(
        "a sequence inside",
        proto,
        profiles,
        ({"a": ramp(2), "b": ramp(3)},),
        on_tensorrt("SequenceConstruct"),
    )


def strings_inside() -> Case:
    nodes = [
        helper.make_node("Cast", ["x"], ["text"], to=TensorProto.STRING),
        helper.make_node("Cast", ["text"], ["y"], to=TensorProto.FLOAT),
    ]
    proto = model(nodes, [("x", "float32", ("n",))], [("y", "float32", ("n",))])
    refused_by = {"openvino": "to: string", **on_tensorrt("Cast")}
    return Case(
        "strings inside", proto, profiles_of({"n": [1, 2, 4]}), ({"x": ramp(3)},), refused_by
    )


def takes_strings() -> Case:
    """Not one of CASES: no array can hold its input."""
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    return _untaken(
        node, helper.make_tensor_type_proto(TensorProto.STRING, ["n"]), ("y", "float32", ("n",))
    )


def takes_a_sequence() -> Case:
    node = helper.make_node("SequenceLength", ["x"], ["y"])
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    return _untaken(node, helper.make_sequence_type_proto(tensor), ("y", "int64", ()))


def _untaken(
    node: NodeProto, kind: TypeProto, output: tuple[str, str, tuple[int | str, ...]]
) -> Case:
    graph = helper.make_graph(
        [node], "graph", [helper.make_value_info("x", kind)], [_value(*output)]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(proto, full_check=True)
    return Case(f"takes {kind.WhichOneof('value')}", proto, (), ())


CASES = tuple(
    make()
    for make in (
        several,
        dtypes,
        bfloat16,
        pixels,
        largest_bytes,
        scalars,
        convolution,
        two_symbols,
        two_profiles,
        reshaped,
        top_k,
        counted,
        positions,
        boxes_chosen,
        empty_batch,
        aliases,
        passed_through,
        odd_names,
        branches,
        sequence_inside,
        strings_inside,
    )
)
