"""FLOPs and bytes of every node at given sizes, for comparison with a measured latency.

One multiply-accumulate counts as 2 FLOPs. Matrix products and convolutions are counted exactly.
Pooling, normalisation and activations are counted roughly, by a fixed number of operations per
element. Nodes that move data (Transpose, Gather, Concat, Cast) have 0 FLOPs. Views (Reshape) have 0
bytes, too. Bytes are those of a node's own inputs and outputs, as if nothing were fused or cached.
Of a tensor from which a node takes a part (Gather, Slice), only that part counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
from numpy.typing import NDArray
from onnx import inliner, numpy_helper
from onnx.external_data_helper import uses_external_data as is_external

from pipeline.errors import ModelError
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS, operator_of, type_name

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One node of the main graph at concrete sizes."""

    node: str
    operator: str
    flops: float | None  # None: a necessary shape is known only at run time
    bytes_read: int | None
    bytes_written: int | None


@dataclass(frozen=True, slots=True)
class SizedTensor:
    """A tensor whose shape is known before running."""

    shape: Shape
    dtype: str  # numpy's name, or ONNX's where numpy has none
    item_bytes: float  # 0 for strings, whose size is not fixed

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        return self.size * self.item_bytes


def node_costs(path: Path, sizes: Mapping[str, int]) -> tuple[NodeCost, ...]:
    """Return the cost of every node of the main graph, in its order.

    If, Loop and Scan count as one node of unknown FLOPs. ModelError names a symbol without a size.
    """
    proto = _sized_model(path, sizes)
    known = _known_tensors(proto)
    return tuple(node_cost(node, known) for node in proto.graph.node)


def sized_tensors(path: Path, sizes: Mapping[str, int]) -> dict[str, SizedTensor]:
    """Return every tensor of the main graph whose shape is known before running, by its name.

    ModelError names a symbol without a size.
    """
    return _known_tensors(_sized_model(path, sizes))


def total(amounts: Iterable[float | None]) -> float | None:
    """Return the sum; None if an amount is unknown."""
    known: list[float] = []
    for amount in amounts:
        if amount is None:
            return None
        known.append(amount)
    return sum(known, 0.0)


def _sized_model(path: Path, sizes: Mapping[str, int]) -> onnx.ModelProto:
    return inliner.inline_local_functions(_bound(read_proto(path, weights=False), sizes))


def _bound(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """Replace the inputs' symbols by sizes, and remove every other shape.

    Shape inference then computes them.
    """
    constants = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name in constants:
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                continue
            symbol = dim.dim_param or f"{value.name}_{axis}"
            if symbol not in sizes:
                raise ModelError(
                    f"input '{value.name}' has dimension '{symbol}', which has no size",
                    f"give a size for '{symbol}'",
                )
            dim.dim_value = sizes[symbol]
    proto.graph.ClearField("value_info")
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    return proto


def _known_tensors(proto: onnx.ModelProto) -> dict[str, SizedTensor]:
    """Return every tensor whose shape can be computed before running.

    Shape inference and the folding of computed sizes take turns until nothing is added. onnx's own
    propagation of sizes stops at Div, Slice and others, which exporters put between a Shape and a
    Reshape.
    """
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) > MAX_SIZES:
            tensor.ClearField("raw_data")  # each round of inference would copy the weights
    folded = onnx.ModelProto()
    folded.CopyFrom(proto)
    while True:
        known = _inferred_tensors(folded)
        outputs = {name for node in folded.graph.node for name in node.output}
        if outputs - {""} <= known.keys() or not _fold_sizes(folded, known):
            return known


def _fold_sizes(proto: onnx.ModelProto, known: Mapping[str, SizedTensor]) -> bool:
    """Replace nodes that compute sizes from known shapes and constants by constants.

    Return True if a node was replaced.
    """
    values = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in proto.graph.initializer
        if math.prod(tensor.dims) <= MAX_SIZES and not is_external(tensor)
    }
    opset = {entry.domain: entry.version for entry in proto.opset_import}
    has_changed = False
    for node in proto.graph.node:
        value = _size_of(node, known, values, opset)
        if value is not None and value.size <= MAX_SIZES:
            values[node.output[0]] = value
            has_changed |= node.op_type != "Constant"
            node.CopyFrom(
                onnx.helper.make_node(
                    "Constant",
                    [],
                    [node.output[0]],
                    node.name,
                    value=numpy_helper.from_array(value),
                )
            )
    return has_changed


def _size_of(
    node: onnx.NodeProto,
    known: Mapping[str, SizedTensor],
    values: Mapping[str, NDArray[np.generic]],
    opset: dict[str, int],
) -> NDArray[np.generic] | None:
    """Return the result of a node that computes sizes from known values; None otherwise."""
    if node.op_type == "Shape" and node.input[0] in known:
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        shape = known[node.input[0]].shape
        return np.array(shape[bounds.get("start", 0) : bounds.get("end")], np.int64)
    if node.op_type not in SIZE_OPERATORS or len(node.output) != 1:
        return None
    inputs = [name for name in node.input if name]
    if not all(name in values for name in inputs):
        return None
    try:
        evaluator = onnx.reference.ReferenceEvaluator(node, opsets=opset)
        (value,) = evaluator.run(None, {name: values[name] for name in inputs})
    # The graph has a fault there: its shapes stay unknown.
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    return np.asarray(value)


def _inferred_tensors(proto: onnx.ModelProto) -> dict[str, SizedTensor]:
    """Return every tensor whose shape is declared or inferred."""
    try:
        graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    # Shapes contradict each other: only the declared ones are known.
    except onnx.shape_inference.InferenceError:
        graph = proto.graph
    known = {
        tensor.name: _sized(tuple(tensor.dims), tensor.data_type) for tensor in graph.initializer
    }
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            continue
        if all(dim.HasField("dim_value") for dim in kind.shape.dim):
            shape = tuple(dim.dim_value for dim in kind.shape.dim)
            known.setdefault(value.name, _sized(shape, kind.elem_type))
    return known


def _sized(shape: Shape, elem_type: int) -> SizedTensor:
    dtype = type_name(elem_type)
    if dtype in ("string", "undefined"):
        return SizedTensor(shape, dtype, 0.0)
    if dtype.endswith("int4") or dtype.startswith("float4"):
        return SizedTensor(shape, dtype, 0.5)
    if dtype.endswith("int2"):
        return SizedTensor(shape, dtype, 0.25)
    return SizedTensor(shape, dtype, onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


def node_cost(node: onnx.NodeProto, known: Mapping[str, SizedTensor]) -> NodeCost:
    """Return the cost of one node from the tensors whose shapes are known."""
    operator = operator_of(node)
    if operator in VIEWS:
        return NodeCost(node.name, operator, 0.0, 0, 0)
    reads = bytes_read(node, known)
    return NodeCost(
        node.name,
        operator,
        _flops(node, operator, known),
        None if reads is None else math.ceil(sum(reads.values())),
        bytes_written(node, known),
    )


def bytes_read(node: onnx.NodeProto, known: Mapping[str, SizedTensor]) -> dict[str, float] | None:
    """Return the bytes that a node reads of each tensor; None if a necessary shape is unknown."""
    takes_part = operator_of(node) in PARTIAL_READERS
    needed = (*node.input, *node.output[:1]) if takes_part else node.input
    if any(name not in known for name in needed if name):
        return None
    reads = {name: known[name].bytes for name in node.input if name}
    if takes_part:
        data = node.input[0]
        reads[data] = min(reads[data], known[node.output[0]].size * known[data].item_bytes)
    return reads


def bytes_written(node: onnx.NodeProto, known: Mapping[str, SizedTensor]) -> int | None:
    """Return the bytes of all outputs of a node; None if the shape of one is unknown."""
    names = [name for name in node.output if name]
    if any(name not in known for name in names):
        return None
    return math.ceil(sum(known[name].bytes for name in names))


def _flops(node: onnx.NodeProto, operator: str, known: Mapping[str, SizedTensor]) -> float | None:
    if operator in MOVERS:
        return 0.0
    if node.domain not in DEFAULT_DOMAINS or any(
        attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute
    ):
        return None  # an unknown operator, or a branch or loop that depends on values
    if any(name not in known for name in (*node.input, node.output[0]) if name):
        return None
    rule = RULES.get(operator, _per_element)
    return rule(
        node,
        [known[name].shape if name else () for name in node.input],
        known[node.output[0]].shape,
    )


Rule = Callable[[onnx.NodeProto, list[Shape], Shape], float | None]
"""FLOPs from a node, its inputs' shapes and its first output's shape."""


def _conv(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    return 2.0 * math.prod(output) * math.prod(inputs[1][1:])  # weight [out, in / groups, *kernel]


def _quantized_conv(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    # inputs: x, scale, zero point, weight
    return 2.0 * math.prod(output) * math.prod(inputs[3][1:])


def _conv_transpose(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    # weight [in, out / groups, *kernel]
    return 2.0 * math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _matmul(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    return 2.0 * math.prod(output) * inputs[0][-1]


def _gemm(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return 2.0 * math.prod(output) * inputs[0][0 if transposed else -1]


def _einsum(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float | None:
    equation = next(
        attribute.s.decode() for attribute in node.attribute if attribute.name == "equation"
    ).replace(" ", "")
    terms = equation.split("->")[0].split(",")
    if "." in equation or any(
        len(term) != len(shape) for term, shape in zip(terms, inputs, strict=True)
    ):
        return None
    sizes = {
        label: size
        for term, shape in zip(terms, inputs, strict=True)
        for label, size in zip(term, shape, strict=True)
    }
    return 2.0 * math.prod(sizes.values())


def _attention(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float | None:
    if len(inputs) > 4 and inputs[4]:
        return None  # with keys of the past, whose number is not in one fixed place
    heads = next(
        (attribute.i for attribute in node.attribute if attribute.name == "q_num_heads"),
        inputs[0][1],
    )
    queries, keys = inputs[0][-2], inputs[1][-2]
    width = math.prod(inputs[0]) / inputs[0][0] / queries  # of all heads together
    products = 2.0 * queries * keys * (width + math.prod(output) / output[0] / output[-2])
    return inputs[0][0] * (products + SOFTMAX_FLOPS * heads * queries * keys)


def _recurrent(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    # x [time, batch, in], W [directions, gates, in]; R has as many gates, and the width
    # gates / (gates per cell)
    steps = inputs[0][0] * inputs[0][1]
    directions, gates, width = inputs[1]
    hidden = gates // GATES[node.op_type]
    return 2.0 * steps * directions * gates * (width + hidden)


def _window(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    kernel = next(
        attribute.ints for attribute in node.attribute if attribute.name == "kernel_shape"
    )
    return float(math.prod(output) * math.prod(kernel))


def _per_input(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    return float(math.prod(inputs[0]))


def _per_element(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> float:
    return float(PER_ELEMENT.get(node.op_type, 1) * math.prod(output))


SOFTMAX_FLOPS = 5
MAX_SIZES = 64  # elements of a tensor that can hold sizes
SIZE_OPERATORS = frozenset(
    """Add Cast Concat Constant ConstantOfShape Div Equal Expand Gather Identity Max Min
    Mod Mul Neg Range ReduceProd Reshape Slice Squeeze Sub Unsqueeze
    Where""".split()  # noqa: SIM905
)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
PER_ELEMENT = {  # operations per output element where it is not 1; rough
    "BatchNormalization": 2,
    "Gelu": 8,
    "GroupNormalization": 8,
    "HardSwish": 3,
    "InstanceNormalization": 8,
    "LayerNormalization": 8,
    "LogSoftmax": SOFTMAX_FLOPS,
    "RMSNormalization": 5,
    "Sigmoid": 4,
    "Softmax": SOFTMAX_FLOPS,
    "Swish": 5,
    "Tanh": 4,
}
VIEWS = frozenset(
    """Constant Dropout Flatten Identity Reshape Shape Size Squeeze
    Unsqueeze""".split()  # noqa: SIM905
)
PARTIAL_READERS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
MOVERS = frozenset(
    """Cast CastLike Compress Concat ConstantOfShape DepthToSpace EyeLike Expand Gather
    GatherElements GatherND NonZero OneHot Pad Range ScatterElements ScatterND Slice SpaceToDepth
    Split Tile Transpose Trilu Unique Where""".split()  # noqa: SIM905
)
RULES: dict[str, Rule] = {
    "Attention": _attention,
    "Conv": _conv,
    "ConvInteger": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearConv": _quantized_conv,
    "QLinearMatMul": _matmul,
    "AveragePool": _window,
    "LpPool": _window,
    "MaxPool": _window,
    **dict.fromkeys(GATES, _recurrent),
    **dict.fromkeys(
        ("GlobalAveragePool", "GlobalMaxPool", "ArgMax", "ArgMin", "TopK", "CumSum"), _per_input
    ),
    **dict.fromkeys(
        (
            f"Reduce{kind}"
            for kind in (
                "Sum",
                "Mean",
                "Max",
                "Min",
                "Prod",
                "L1",
                "L2",
                "SumSquare",
                "LogSum",
                "LogSumExp",
            )
        ),
        _per_input,
    ),
}
