"""Rewrites an fp32 graph to fp16 or bf16, some nodes kept in fp32, with Casts where the two meet.

Each tensor keeps its name for its fp32 form, so inputs, outputs, kept nodes and subgraphs stay as
they are; the low form has a name of its own. Two kept nodes in a row pass fp32 between them. (ONNX
Runtime's and onnxconverter-common's converters pass fp16, in which the very value that had the
nodes kept overflows.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import EncodeError
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.version_converter import ConvertError, convert_version

from pipeline.core import KeptNode, Note, Precision
from pipeline.errors import UnsupportedError
from pipeline.onnx_graph.activations import Bounds
from pipeline.onnx_graph.files import SMALL_BYTES
from pipeline.onnx_graph.inspect import DEFAULT_DOMAINS, bytes_of_tensor, graphs_of, opset_of
from pipeline.onnx_graph.recurrent import add_initial_states, is_recurrent
from pipeline.quantization.insert_qdq import drop_unread

LARGEST_FP16 = 65504.0
SAFE_FRACTION = 0.25
"""Of the largest fp16 value: what calibration samples may reach, for other inputs will reach
further.
"""

SMALLEST_NORMAL_FP16 = 2.0**-14
ROUNDING_FP16 = 2.0**-11
"""Of a value: what rounding it to fp16 changes at most."""

BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})
"""Their third input is only added to the result. (So is an Add's; but there it may be the epsilon
that keeps a division from 0.)
"""

LOW = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}
DTYPES = {Precision.FP16: np.dtype(np.float16), Precision.BF16: np.dtype(ml_dtypes.bfloat16)}
LEAST_OPSET = {Precision.FP16: 13, Precision.BF16: 22}
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

QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def raise_opset(proto: onnx.ModelProto, least: int) -> onnx.ModelProto:
    """The model at opset `least` or above, by ONNX's converter; UnsupportedError if it cannot."""
    if opset_of(proto) >= least:
        return proto
    try:
        return convert_version(proto, least)
    except (
        ConvertError,
        EncodeError,
        RuntimeError,
        ValueError,
    ) as error:  # EncodeError: over 2 GiB
        raise UnsupportedError(
            f"this precision needs opset {least}, the model has {opset_of(proto)} and cannot be"
            f" raised: {error}",
            f"export it with opset {least}",
        ) from error


def flatten(proto: onnx.ModelProto) -> onnx.ModelProto:
    """One flat graph: local functions inlined, Constant nodes as initializers, every node with a
    name of its own.
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
    """The numeric value of a Constant node; None of any other."""
    if node.op_type != "Constant" or node.domain not in DEFAULT_DOMAINS:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        return (
            numpy_helper.to_array(attribute.t)
            if attribute.t.data_type != onnx.TensorProto.STRING
            else None
        )
    dtypes = {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
    }
    return (
        np.asarray(onnx.helper.get_attribute_value(attribute), dtypes[attribute.name])
        if attribute.name in dtypes
        else None
    )


# --- which nodes stay in fp32 ---


def reasons_for_fp32(graph: onnx.GraphProto, bounds: Mapping[str, Bounds]) -> dict[str, str]:
    """Per node that fp16 would break: why. `bounds` of the activations come from real samples.

    A bias that fp16 cannot hold breaks nothing where the result, which it is added to, is rounded
    by more than is lost of it.
    """
    outside = {
        name: f"values up to {seen.largest:.3g}"
        for name, seen in bounds.items()
        if not _fits(seen.largest)
    }
    errors: dict[str, float] = {}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            largest = float(np.abs(numpy_helper.to_array(tensor)).max(initial=0.0))
            with np.errstate(over="ignore"):
                error = abs(float(np.float16(largest)) - largest)
            if error > 0.01 * largest:
                outside[tensor.name], errors[tensor.name] = f"constants up to {largest:.3g}", error
    reasons = {}
    for node in graph.node:
        if node.op_type in QUANTIZERS:
            continue
        rounding = ROUNDING_FP16 * max(
            (bounds[name].largest for name in node.output if name in bounds), default=0.0
        )
        beta = next(
            (abs(attribute.f) for attribute in node.attribute if attribute.name == "beta"), 1.0
        )  # of Gemm: what its bias is multiplied by
        is_unseen = (
            node.op_type in BIASED
            and len(node.input) > 2
            and errors.get(node.input[2], np.inf) * beta <= rounding
        )
        judged = (*node.input[: 2 if is_unseen else None], *node.output)
        strange = next((name for name in judged if name in outside), None)
        if strange is not None:
            reasons[node.name] = f"{outside[strange]} in '{strange}'"
    return reasons


def overflow_notes(graph: onnx.GraphProto, reasons: Mapping[str, str]) -> list[Note]:
    """What a user should know of the nodes that `reasons_for_fp32` found."""
    return fp32_notes(graph, reasons, "fp16 cannot hold their values")


def fp32_notes(graph: onnx.GraphProto, reasons: Mapping[str, str], cause: str) -> list[Note]:
    """Which nodes stay in fp32 for one cause, and the reason of each; no note where there is
    none.
    """
    if not reasons:
        return []
    kinds = Counter(node.op_type for node in graph.node if node.name in reasons)
    named = "; ".join(f"'{name}': {why}" for name, why in list(reasons.items())[:NAMED]) + (
        "; ..." if len(reasons) > NAMED else ""
    )
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return [
        Note(
            stage="convert",
            text=f"{nodes_text(len(reasons))} in fp32 ({counted}), {cause}: {named}",
            level="info",
        )
    ]


def kept_in_fp32(graph: onnx.GraphProto, reasons: Mapping[str, str]) -> tuple[KeptNode, ...]:
    """The nodes of `reasons` that run in fp32, for the check of the engine and for the report.

    A node that reads a DequantizeLinear is none of them: it may run in 8 bits.
    """
    quantised = {
        name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output
    }
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
    """`1 node stays`, `2 nodes stay`."""
    return "1 node stays" if count == 1 else f"{count} nodes stay"


def _fits(largest: float) -> bool:
    return largest == 0 or SMALLEST_NORMAL_FP16 <= largest <= SAFE_FRACTION * LARGEST_FP16


def _from_shapes(graph: onnx.GraphProto) -> set[str]:
    """Nodes that compute from shapes and constants only: sizes and positions, for which 11 bits are
    too few.
    """
    known = {tensor.name for tensor in graph.initializer} | {""}
    found = set()
    for node in graph.node:
        if node.op_type in ("Shape", "Size") or (
            node.op_type not in QUANTIZERS and node.input and known.issuperset(node.input)
        ):
            known.update(node.output)
            found.add(node.name)
    return found


# --- the rewrite ---


@dataclass(frozen=True, slots=True)
class _Ports:
    """Which inputs and outputs of a node change their dtype."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def lower(proto: onnx.ModelProto, precision: Precision, kept: frozenset[str]) -> None:
    """Make all nodes but `kept`, and those that have no such kernel, compute in `precision`. In
    place; node names must be unique.
    """
    types = _types(proto)
    kept |= _from_shapes(proto.graph)
    ports = {
        node.name: _ports(node, types, precision, opset_of(proto))
        for node in proto.graph.node
        if node.name not in kept
    }
    ports = _with_quantizers(
        proto.graph,
        types,
        {name: port for name, port in ports.items() if port.inputs or port.outputs},
    )
    recurrent = _low_recurrent(proto.graph, types, ports, LOW[precision])
    _Rewriter(proto.graph, precision, ports).run()
    add_initial_states(proto.graph, recurrent, LOW[precision])


def _low_recurrent(
    graph: onnx.GraphProto, types: Mapping[str, int], ports: Mapping[str, _Ports], low: int
) -> frozenset[str]:
    """Names of the recurrent nodes that read a low X, whether it is cast or given so."""
    recurrent = [node for node in graph.node if is_recurrent(node)]
    cast = {node.name for node in recurrent if node.name in ports and 0 in ports[node.name].inputs}
    given = {node.name for node in recurrent if types.get(node.input[0]) == low}
    return frozenset(cast | given)


def _types(proto: onnx.ModelProto) -> dict[str, int]:
    """Element type of every tensor of the top level, by ONNX's inference on the graph without its
    large weights.
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
    """What of a node can be low, by the type constraints of its operator; nothing where any type is
    unknown.
    """
    nothing = _Ports((), ())
    special = node.op_type in NEEDS_FP32 | QUANTIZERS or any(
        a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute
    )
    if special or node.domain not in DEFAULT_DOMAINS or not onnx.defs.has(node.op_type, opset, ""):
        return nothing
    if not all(types.get(name) for name in (*node.input, *node.output) if name):
        return nothing
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    allowed = {
        constraint.type_param_str: constraint.allowed_type_strs
        for constraint in schema.type_constraints
    }
    low = f"tensor({'float16' if precision is Precision.FP16 else 'bfloat16'})"

    def movable(
        names: list[str], formals: list[onnx.defs.OpSchema.FormalParameter]
    ) -> tuple[int, ...]:
        kinds = [
            allowed.get(formals[min(i, len(formals) - 1)].type_str, []) for i in range(len(names))
        ]
        return tuple(
            i
            for i, name in enumerate(names)
            if types.get(name) == TensorProto.FLOAT and low in kinds[i]
        )

    inputs, outputs = (
        movable(list(node.input), list(schema.inputs)),
        movable(list(node.output), list(schema.outputs)),
    )
    if (
        node.op_type == "LayerNormalization"
    ):  # its second and third outputs have the dtype of stash_type
        outputs = outputs[:1]
    return _Ports(inputs, outputs)


def _with_quantizers(
    graph: onnx.GraphProto, types: Mapping[str, int], ports: dict[str, _Ports]
) -> dict[str, _Ports]:
    """Q takes the dtype of what makes its input, DQ that of its readers: so no Cast parts them from
    the operators they belong to.

    The Q of a weight takes that of its DQ.
    """
    low = {
        node.output[i]
        for node in graph.node
        if node.name in ports
        for i in ports[node.name].outputs
    }
    read = {value.name: False for value in graph.output}
    for inner in graphs_of(graph):
        for node in inner.node:
            for index, name in enumerate(node.input):
                is_low = inner is graph and node.name in ports and index in ports[node.name].inputs
                read[name] = read.get(name, True) and is_low
    quantizers = {}
    for node in graph.node:
        if (
            node.op_type == "DequantizeLinear"
            and read.get(node.output[0], False)
            and types.get(node.input[1]) == TensorProto.FLOAT
        ):
            quantizers[node.name] = _Ports((1,), (0,))
    constants = {
        tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT
    }
    high = {name for node in graph.node if node.name not in quantizers for name in node.input}
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and (
            node.input[0] in low or (node.input[0] in constants and node.output[0] not in high)
        ):
            quantizers[node.name] = _Ports((0, 1), ())
    return ports | quantizers


class _Rewriter:
    """One walk through the nodes in order: renames what is low, and adds a Cast after whatever is
    needed in both forms.
    """

    def __init__(
        self, graph: onnx.GraphProto, precision: Precision, ports: Mapping[str, _Ports]
    ) -> None:
        self.graph, self.precision, self.ports = graph, precision, ports
        self.taken = {
            name
            for inner in graphs_of(graph)
            for node in inner.node
            for name in (*node.input, *node.output)
        }
        self.taken |= {tensor.name for tensor in graph.initializer}
        self.names: dict[str, str] = {}
        self.made_low = {
            node.output[i]
            for node in graph.node
            if node.name in ports
            for i in ports[node.name].outputs
        }
        self.read_low = {
            node.input[i]
            for node in graph.node
            if node.name in ports
            for i in ports[node.name].inputs
        }
        self.read_high = self._read_high()

    def _read_high(self) -> set[str]:
        names = {value.name for inner in graphs_of(self.graph) for value in inner.output}
        for inner in graphs_of(self.graph):
            for node in inner.node:
                moved = (
                    self.ports[node.name].inputs
                    if inner is self.graph and node.name in self.ports
                    else ()
                )
                names |= {name for index, name in enumerate(node.input) if index not in moved}
        return names

    def run(self) -> None:
        self._convert_constants()
        nodes = [cast for value in self.graph.input for cast in self._casts(value.name)]
        for node in self.graph.node:
            made = list(node.output)
            port = self.ports.get(node.name, _Ports((), ()))
            for names, moved in ((node.input, port.inputs), (node.output, port.outputs)):
                for index in moved:
                    names[index] = self.low_name(names[index])
            nodes.append(node)
            nodes += [cast for name in made for cast in self._casts(name)]
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
        low = self.low_name(name) if name in self.made_low or name in self.read_low else ""
        if name in self.made_low and name in self.read_high:
            return [
                onnx.helper.make_node(
                    "Cast", [low], [name], name=f"{name}_to_fp32", to=TensorProto.FLOAT
                )
            ]
        if name not in self.made_low and name in self.read_low:
            return [
                onnx.helper.make_node(
                    "Cast",
                    [name],
                    [low],
                    name=f"{name}_to_{self.precision}",
                    to=LOW[self.precision],
                )
            ]
        return []

    def _convert_constants(self) -> None:
        """Low copies of the constants that low nodes read; the fp32 ones go where nothing else
        reads them.
        """
        replaceable = {value.name for value in self.graph.input}
        scales = {node.input[1] for node in self.graph.node if node.op_type in QUANTIZERS}
        for index, tensor in enumerate(self.graph.initializer):
            if tensor.name not in self.read_low or tensor.name in replaceable:
                continue
            values = _narrow(numpy_helper.to_array(tensor), self.precision)
            if tensor.name in scales:  # a scale that becomes 0 would make NaN of all its values
                smallest = ml_dtypes.finfo(values.dtype).smallest_subnormal  # type: ignore[no-untyped-call]
                values = np.where(values == 0, smallest, values)
            low = numpy_helper.from_array(values, self.low_name(tensor.name))
            if tensor.name in self.read_high:
                self.graph.initializer.append(low)
            else:
                self.graph.initializer[index].CopyFrom(low)

    def _convert_value_info(self) -> None:
        """Shapes known before stay known, under the new names."""
        for value in list(self.graph.value_info):
            if value.name in self.made_low:
                low = self.graph.value_info.add()
                low.CopyFrom(value)
                low.name, low.type.tensor_type.elem_type = (
                    self.low_name(value.name),
                    LOW[self.precision],
                )
        made = {name for node in self.graph.node for name in node.output}
        stay = [value for value in self.graph.value_info if value.name in made]
        del self.graph.value_info[:]
        self.graph.value_info.extend(stay)


def _narrow(values: NDArray[np.generic], precision: Precision) -> NDArray[np.generic]:
    """Rounded, and no finite value becomes infinite: the -3.4e38 of an attention mask would, and
    times 0 gives NaN.
    """
    limit = float(ml_dtypes.finfo(DTYPES[precision]).max)  # type: ignore[no-untyped-call]
    clipped = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    return np.asarray(clipped.astype(DTYPES[precision]))
