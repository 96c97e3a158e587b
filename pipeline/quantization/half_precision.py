"""Rewrites an fp32 graph to fp16 or bf16, some nodes kept in fp32, with Casts where the two meet.

Each tensor keeps its name for its fp32 form, so inputs, outputs, kept nodes and subgraphs stay as
they are; the low form has a name of its own. Two kept nodes in a row pass fp32 between them. (ONNX
Runtime's and onnxconverter-common's converters pass fp16, in which the very value that had the
nodes kept overflows.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import EncodeError
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.version_converter import ConvertError, convert_version

from pipeline.core.artifacts import KeptNode, Note
from pipeline.core.recipe import Precision
from pipeline.errors import UnsupportedError
from pipeline.onnx_graph.activations import Bounds
from pipeline.onnx_graph.files import SMALL_BYTES
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS, bytes_of_tensor, graphs_of, opset_of
from pipeline.onnx_graph.recurrent import add_initial_states, is_recurrent
from pipeline.quantization.insert_qdq import drop_unread

MAX_FP16 = 65504.0
SAFE_FRACTION = 0.25
"""Of the largest fp16 value: what calibration samples may reach, for other inputs will reach
further.
"""

MIN_NORMAL_FP16 = 2.0**-14
ROUNDING_FP16 = 2.0**-11
"""Of a value: what rounding it to fp16 changes at most."""

BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})
"""Their third input is only added to the result. (So is an Add's; but there it may be the epsilon
that keeps a division from 0.)
"""

LOW = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}
DTYPES = {Precision.FP16: np.dtype(np.float16), Precision.BF16: np.dtype(ml_dtypes.bfloat16)}
MIN_OPSET = {Precision.FP16: 13, Precision.BF16: 22}
"""Convolution and pooling take bfloat16 since opset 22."""

QDQ_OPSET = 13
"""DequantizeLinear takes one scale per channel since opset 13."""

SCALES_OPSET = 19
"""QuantizeLinear and DequantizeLinear take float16 scales since opset 19."""

NAMED = 5  # nodes that a note names one by one
POSITIONS = frozenset({"Range", "CumSum", "RoiAlign", "GridSample", "NonMaxSuppression"})
SUMS_OF_SQUARES = frozenset(
    {"ReduceSumSquare", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "Det"}
)
TYPED_BY_ATTRIBUTE = frozenset({"Cast", "ConstantOfShape", "EyeLike", "Multinomial", "Bernoulli"})
RANDOM = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
NEEDS_FP32 = POSITIONS | SUMS_OF_SQUARES | TYPED_BY_ATTRIBUTE | RANDOM
"""Their values need more bits, or overflow inside the operator, or their dtype is an attribute."""

DTYPES_BY_ATTRIBUTE: dict[str, type[np.generic]] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}
"""Of a Constant node whose value is no tensor."""

SUBGRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def raise_opset(proto: onnx.ModelProto, least: int) -> onnx.ModelProto:
    """Return the model at opset `least` or above. UnsupportedError if ONNX's converter fails."""
    if opset_of(proto) >= least:
        return proto
    try:
        return convert_version(proto, least)
    # EncodeError: over 2 GiB
    except (ConvertError, EncodeError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f"opset {least} is needed, the model has {opset_of(proto)} and cannot be"
            f" raised: {error}",
            f"export it with opset {least}",
        ) from error


def flatten(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return one flat graph.

    Local functions are inlined, Constant nodes are initializers, and every node has a unique name.
    """
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    graph = proto.graph
    nodes = []
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        value = _constant(node)
        if value is None or node.output[0] in outputs:
            nodes.append(node)
        else:
            graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    times = Counter(node.name for node in nodes)
    for index, node in enumerate(nodes):
        if not node.name or times[node.name] > 1:
            node.name = f"{node.name or node.op_type}_{index}"
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unread(graph)
    return proto


def _constant(node: onnx.NodeProto) -> NDArray[np.generic] | None:
    """Return the numeric value of a Constant node; None for other nodes."""
    if node.op_type != "Constant" or node.domain not in DEFAULT_DOMAINS:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        is_text = attribute.t.data_type == onnx.TensorProto.STRING
        return None if is_text else numpy_helper.to_array(attribute.t)
    dtype = DTYPES_BY_ATTRIBUTE.get(attribute.name)
    if dtype is None:
        return None
    return np.asarray(onnx.helper.get_attribute_value(attribute), dtype)


# --- which nodes stay in fp32 ---


def reasons_for_fp32(graph: onnx.GraphProto, bounds: Mapping[str, Bounds]) -> dict[str, str]:
    """Return, by node, why fp16 would break it. `bounds` of activations come from real samples.

    A bias that fp16 cannot hold breaks nothing if rounding the sum loses more than rounding the
    bias.
    """
    problems = {
        name: f"values up to {bound.largest:.3g}"
        for name, bound in bounds.items()
        if not _fits(bound.largest)
    }
    errors: dict[str, float] = {}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            largest = float(np.abs(numpy_helper.to_array(tensor)).max(initial=0.0))
            error = _rounding_error(largest)
            if error > 0.01 * largest:
                problems[tensor.name] = f"constants up to {largest:.3g}"
                errors[tensor.name] = error
    reasons: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in QUANTIZERS:
            continue
        inputs = list(node.input)
        if _hides_error_of_bias(node, bounds, errors):
            del inputs[2:]
        name = next((name for name in (*inputs, *node.output) if name in problems), None)
        if name is not None:
            reasons[node.name] = f"{problems[name]} in '{name}'"
    return reasons


def _rounding_error(value: float) -> float:
    """Return the difference of a value to its fp16; infinite above the largest fp16."""
    with np.errstate(over="ignore"):
        return abs(float(np.float16(value)) - value)


def _hides_error_of_bias(
    node: onnx.NodeProto, bounds: Mapping[str, Bounds], errors: Mapping[str, float]
) -> bool:
    """Return True if rounding the result loses more than rounding the bias."""
    if node.op_type not in BIASED or len(node.input) < 3:
        return False
    largest = max((bounds[name].largest for name in node.output if name in bounds), default=0.0)
    factors = {attribute.name: abs(attribute.f) for attribute in node.attribute}
    beta = factors.get("beta", 1.0)  # of Gemm: what its bias is multiplied by
    return bool(errors.get(node.input[2], np.inf) * beta <= ROUNDING_FP16 * largest)


def overflow_notes(graph: onnx.GraphProto, reasons: Mapping[str, str]) -> list[Note]:
    """Return notes on the nodes that `reasons_for_fp32` returned."""
    return fp32_notes(graph, reasons, "fp16 cannot hold their values")


def fp32_notes(graph: onnx.GraphProto, reasons: Mapping[str, str], cause: str) -> list[Note]:
    """Return a note on the nodes that stay in fp32 for one cause; none without nodes."""
    if not reasons:
        return []
    kinds = Counter(node.op_type for node in graph.node if node.name in reasons)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    examples = [f"'{name}': {reason}" for name, reason in list(reasons.items())[:NAMED]]
    if len(reasons) > NAMED:
        examples.append("...")
    nodes = nodes_text(len(reasons))
    text = f"{nodes} in fp32 ({counts}), {cause}: {'; '.join(examples)}"
    return [Note(stage="convert", text=text, level="info")]


def kept_in_fp32(graph: onnx.GraphProto, reasons: Mapping[str, str]) -> tuple[KeptNode, ...]:
    """Return the nodes of `reasons` that run in fp32, for the check of the engine and the report.

    A node that reads a DequantizeLinear is left out, because it may run in 8 bits.
    """
    quantised: set[str] = set()
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            quantised.update(node.output)
    return tuple(
        KeptNode(
            node=node.name,
            operator=node.op_type,
            reason=reasons[node.name],
            unnamed=is_recurrent(node),
        )
        for node in graph.node
        if node.name in reasons and quantised.isdisjoint(node.input)
    )


def nodes_text(count: int) -> str:
    """Return `1 node stays` or `2 nodes stay`."""
    return "1 node stays" if count == 1 else f"{count} nodes stay"


def _fits(largest: float) -> bool:
    return largest == 0 or MIN_NORMAL_FP16 <= largest <= SAFE_FRACTION * MAX_FP16


def _from_shapes(graph: onnx.GraphProto) -> set[str]:
    """Return the nodes that compute from shapes and constants only.

    They compute sizes and positions, for which 11 bits are too few.
    """
    tensors = {tensor.name for tensor in graph.initializer} | {""}
    nodes: set[str] = set()
    for node in graph.node:
        reads_only_them = len(node.input) > 0 and tensors.issuperset(node.input)
        is_computed = reads_only_them and node.op_type not in QUANTIZERS
        if is_computed or node.op_type in ("Shape", "Size"):
            tensors.update(node.output)
            nodes.add(node.name)
    return nodes


# --- the rewrite ---


@dataclass(frozen=True, slots=True)
class _Ports:
    """The inputs and outputs of a node that change their dtype."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


NO_PORTS = _Ports()


def lower(proto: onnx.ModelProto, precision: Precision, fp32_nodes: frozenset[str]) -> None:
    """Let all nodes compute in `precision`, except `fp32_nodes` and nodes without such a kernel.

    The graph is changed in place. Node names must be unique.
    """
    graph = proto.graph
    types = _types(proto)
    fp32_nodes |= _from_shapes(graph)
    ports: dict[str, _Ports] = {}
    for node in graph.node:
        if node.name not in fp32_nodes:
            port = _ports(node, types, precision, opset_of(proto))
            if port != NO_PORTS:
                ports[node.name] = port
    ports |= _quantizer_ports(graph, types, ports)
    recurrent = _low_recurrent(graph, types, ports, LOW[precision])
    _Rewriter(graph, precision, ports).run()
    add_initial_states(graph, recurrent, LOW[precision])


def _low_recurrent(
    graph: onnx.GraphProto, types: Mapping[str, int], ports: Mapping[str, _Ports], low: int
) -> frozenset[str]:
    """Return the names of the recurrent nodes that read a low X.

    X is low by a Cast, or in the graph itself.
    """
    names: set[str] = set()
    for node in graph.node:
        if is_recurrent(node):
            becomes_low = 0 in ports.get(node.name, NO_PORTS).inputs
            if becomes_low or types.get(node.input[0]) == low:
                names.add(node.name)
    return frozenset(names)


def _types(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the element type of every tensor of the top level.

    They come from ONNX's inference on the graph without its large weights.
    """
    thin = onnx.ModelProto(
        ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions
    )
    thin.graph.name = proto.graph.name
    thin.graph.node.extend(proto.graph.node)
    thin.graph.input.extend(proto.graph.input)
    thin.graph.output.extend(proto.graph.output)
    for tensor in proto.graph.initializer:
        if bytes_of_tensor(tensor) <= SMALL_BYTES:
            thin.graph.initializer.append(tensor)
        else:
            thin.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    graph = onnx.shape_inference.infer_shapes(thin, data_prop=True).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    return types | {tensor.name: tensor.data_type for tensor in proto.graph.initializer}


def _ports(
    node: onnx.NodeProto, types: Mapping[str, int], precision: Precision, opset: int
) -> _Ports:
    """Return the inputs and outputs of a node that can be low.

    The type constraints of its operator decide. None can be low if a type is unknown.
    """
    if node.op_type in NEEDS_FP32 | QUANTIZERS or node.domain not in DEFAULT_DOMAINS:
        return NO_PORTS
    if any(attribute.type in SUBGRAPHS for attribute in node.attribute):
        return NO_PORTS
    if not onnx.defs.has(node.op_type, opset, ""):
        return NO_PORTS
    if not all(types.get(name) for name in (*node.input, *node.output) if name):
        return NO_PORTS
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    allowed = {
        constraint.type_param_str: constraint.allowed_type_strs
        for constraint in schema.type_constraints
    }
    low = f"tensor({'float16' if precision is Precision.FP16 else 'bfloat16'})"

    def movable(
        names: Sequence[str], formals: Sequence[onnx.defs.OpSchema.FormalParameter]
    ) -> tuple[int, ...]:
        indices: list[int] = []
        for index, name in enumerate(names):
            formal = formals[min(index, len(formals) - 1)]  # the last one may stand for several
            if types.get(name) == TensorProto.FLOAT and low in allowed.get(formal.type_str, []):
                indices.append(index)
        return tuple(indices)

    outputs = movable(node.output, schema.outputs)
    if node.op_type == "LayerNormalization":
        outputs = outputs[:1]  # the second and third have the dtype of stash_type
    return _Ports(movable(node.input, schema.inputs), outputs)


def _quantizer_ports(
    graph: onnx.GraphProto, types: Mapping[str, int], ports: Mapping[str, _Ports]
) -> dict[str, _Ports]:
    """Give Q the dtype of the producer of its input, and DQ that of its readers.

    So no Cast separates them from their operators. The Q of a weight gets the dtype of its DQ.
    """
    read_high = _names_read_high(graph, ports) | {value.name for value in graph.output}
    read_only_low = _names_read_low(graph, ports) - read_high
    quantizers: dict[str, _Ports] = {}
    for node in graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        has_float_scale = types.get(node.input[1]) == TensorProto.FLOAT
        if has_float_scale and node.output[0] in read_only_low:
            quantizers[node.name] = _Ports(inputs=(1,), outputs=(0,))
    low_tensors = _names_made_low(graph, ports)
    low_weights = _constants_quantised_low(graph, frozenset(quantizers))
    for node in graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        if node.input[0] in low_tensors or node.output[0] in low_weights:
            quantizers[node.name] = _Ports(inputs=(0, 1))
    return quantizers


def _constants_quantised_low(graph: onnx.GraphProto, low_dqs: frozenset[str]) -> set[str]:
    """Return the results of each Q of a constant that only low DQs read."""
    constants = {
        tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT
    }
    other_reads: set[str] = set()
    for node in graph.node:
        if node.name not in low_dqs:
            other_reads.update(node.input)
    return {
        node.output[0]
        for node in graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] in constants
    } - other_reads


def _names_read_low(graph: onnx.GraphProto, ports: Mapping[str, _Ports]) -> set[str]:
    """Return the tensors that low inputs read."""
    names: set[str] = set()
    for node in graph.node:
        names.update(node.input[index] for index in ports.get(node.name, NO_PORTS).inputs)
    return names


def _names_read_high(graph: onnx.GraphProto, ports: Mapping[str, _Ports]) -> set[str]:
    """Return the tensors that other inputs read, including all inputs of subgraphs."""
    names: set[str] = set()
    for inner in graphs_of(graph):
        for node in inner.node:
            port = ports.get(node.name, NO_PORTS) if inner is graph else NO_PORTS
            names.update(name for index, name in enumerate(node.input) if index not in port.inputs)
    return names


def _names_made_low(graph: onnx.GraphProto, ports: Mapping[str, _Ports]) -> set[str]:
    """Return the tensors that low outputs produce."""
    names: set[str] = set()
    for node in graph.node:
        names.update(node.output[index] for index in ports.get(node.name, NO_PORTS).outputs)
    return names


class _Rewriter:
    """One pass over the nodes in order.

    It renames low tensors, and adds a Cast behind each tensor that is needed in both forms.
    """

    def __init__(
        self, graph: onnx.GraphProto, precision: Precision, ports: Mapping[str, _Ports]
    ) -> None:
        self.graph, self.precision, self.ports = graph, precision, ports
        self.names: dict[str, str] = {}
        self.taken = {tensor.name for tensor in graph.initializer}
        self.made_low = _names_made_low(graph, ports)
        self.read_low = _names_read_low(graph, ports)
        self.read_high = _names_read_high(graph, ports)
        for inner in graphs_of(graph):
            self.read_high.update(value.name for value in inner.output)
            for node in inner.node:
                self.taken.update(node.input, node.output)

    def run(self) -> None:
        self._convert_constants()
        nodes = [cast for value in self.graph.input for cast in self._casts(value.name)]
        for node in self.graph.node:
            outputs = list(node.output)
            port = self.ports.get(node.name, NO_PORTS)
            for index in port.inputs:
                node.input[index] = self.low_name(node.input[index])
            for index in port.outputs:
                node.output[index] = self.low_name(node.output[index])
            nodes.append(node)
            nodes += [cast for name in outputs for cast in self._casts(name)]
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        self._convert_value_info()
        drop_unread(self.graph)

    def low_name(self, name: str) -> str:
        if name not in self.names:
            unique = f"{name}_{self.precision}"
            while unique in self.taken:
                unique += "_"
            self.taken.add(unique)
            self.names[name] = unique
        return self.names[name]

    def _casts(self, name: str) -> list[onnx.NodeProto]:
        """Return the Cast behind a tensor that is produced in one form and read in the other."""
        if name in self.made_low:
            if name not in self.read_high:
                return []
            return [_cast(self.low_name(name), name, f"{name}_to_fp32", TensorProto.FLOAT)]
        if name not in self.read_low:
            return []
        cast_name = f"{name}_to_{self.precision}"
        return [_cast(name, self.low_name(name), cast_name, LOW[self.precision])]

    def _convert_constants(self) -> None:
        """Add low copies of the constants that low nodes read.

        An fp32 constant is removed if no other node reads it.
        """
        replaceable = {value.name for value in self.graph.input}
        scales = {node.input[1] for node in self.graph.node if node.op_type in QUANTIZERS}
        for index, tensor in enumerate(self.graph.initializer):
            if tensor.name not in self.read_low or tensor.name in replaceable:
                continue
            values = _narrow(numpy_helper.to_array(tensor), self.precision)
            if tensor.name in scales:  # a scale that becomes 0 would make NaN of all its values
                limits = ml_dtypes.finfo(values.dtype)  # type: ignore[no-untyped-call]
                smallest = limits.smallest_subnormal
                values = np.where(values == 0, smallest, values)
            low = numpy_helper.from_array(values, self.low_name(tensor.name))
            if tensor.name in self.read_high:
                self.graph.initializer.append(low)
            else:
                self.graph.initializer[index].CopyFrom(low)

    def _convert_value_info(self) -> None:
        """Keep known shapes under the new names."""
        for value in list(self.graph.value_info):
            if value.name in self.made_low:
                low = self.graph.value_info.add()
                low.CopyFrom(value)
                low.name = self.low_name(value.name)
                low.type.tensor_type.elem_type = LOW[self.precision]
        outputs = {name for node in self.graph.node for name in node.output}
        values = [value for value in self.graph.value_info if value.name in outputs]
        del self.graph.value_info[:]
        self.graph.value_info.extend(values)


def _cast(source: str, target: str, name: str, dtype: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [source], [target], name=name, to=dtype)


def _narrow(values: NDArray[np.generic], precision: Precision) -> NDArray[np.generic]:
    """Return rounded values, with every finite value still finite.

    The -3.4e38 of an attention mask would become infinite, and times 0 it gives NaN.
    """
    limit = float(ml_dtypes.finfo(DTYPES[precision]).max)  # type: ignore[no-untyped-call]
    clipped = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    return np.asarray(clipped.astype(DTYPES[precision]))
