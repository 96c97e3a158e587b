"""The kernels that ONNX Runtime runs on a CPU: its profile joined with its optimised graph.

Everything specific to ONNX Runtime's kernels is here. The precision of a kernel comes from these
rules, the strongest evidence first:

1. A kernel that only moves or converts data (QuantizeLinear, DequantizeLinear, Cast, the Reorders
   of the blocked layout): `none`.
2. `tactic`: an operator with integer kernels only (QLinearConv, MatMulInteger,
   DynamicQuantizeMatMul): int8.
3. `types`: for any other kernel the widest float that it reads or writes. On a CPU a Conv on floats
   multiplies floats: there is no hidden TF32, and casts from fp16 to fp32 are visible. 8-bit
   integers alone (MaxPool between two quantised layers) count as int8. MatMulNBits holds 4-bit
   weights and reads floats: at accuracy level 4 it quantises its input and multiplies int8,
   otherwise it multiplies fp32.
4. Sizes, indices and masks only: `integer`. Nothing known, or double: `unknown`.

The tensors tell which ONNX nodes a kernel computes: both graphs use the same names, so a kernel
computes the nodes between its inputs and its outputs. If the optimiser added tensors in between, a
kernel has only the node with its own name, or none.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import onnx

from pipeline.backends.base import Session
from pipeline.backends.layer_timing import LAYER_WARMUP_RUNS, bound_sizes, run_for_layers
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors
from pipeline.errors import InternalError
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import graphs_of
from pipeline.results.layer_table import Evidence, Layer, LayerPrecision, LayerTable

if TYPE_CHECKING:
    import onnxruntime

CONVERTING = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "Cast",
        "CastLike",
        "ReorderInput",
        "ReorderOutput",
    }
)
MOVING = CONVERTING | {
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Identity",
    "Concat",
    "Slice",
    "Split",
    "Expand",
}
BRANCHING = frozenset({"If", "Loop", "Scan"})  # their bodies' nodes are timed by themselves
COUNTING = frozenset({"Shape", "Size"})
INT8_HEAVY = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "QAttention",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    }
)
NBITS = "MatMulNBits"
FLOAT_HEAVY = frozenset(
    {
        "Attention",
        "Conv",
        "ConvTranspose",
        "Einsum",
        "FusedConv",
        "FusedGemm",
        "FusedMatMul",
        "GRU",
        "Gemm",
        "GroupQueryAttention",
        "LSTM",
        "MatMul",
        "MultiHeadAttention",
        "NhwcFusedConv",
        "RNN",
        "TransposeMatMul",
    }
)
LEVEL_OF_INT8 = 4  # MatMulNBits' accuracy_level

DTYPES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16"}
WIDTHS = {"fp16": 2, "bf16": 3, "fp32": 4, "double": 8}  # bf16 after fp16: it has fp32's range
BYTES = frozenset({"int8", "uint8"})
INTEGERS = frozenset({"int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"}) | BYTES

# The suffix that the optimiser adds to the name of a node or tensor.
ADDED = re.compile(r"(_token_\d+|_nchwc|/duplicated|/\w*Fusion/*)+$")
SUMMED = 3  # the input of a blocked Conv that is added to its result
KERNEL = "_kernel_time"
LAYOUT_CHANGES = frozenset({"ReorderInput", "ReorderOutput", "Transpose"})


# -- the shell: runs the session


def profile_into(options: onnxruntime.SessionOptions, folder: Path) -> None:
    """Set the options for a profile and the optimised graph `optimised.onnx` in `folder`."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    # the weights may be over 2 GiB
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", "optimised.data"
    )
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", "1024"
    )


def layer_table(
    profiled: onnxruntime.InferenceSession, session: Session, model: Path, feeds: Tensors
) -> LayerTable:
    """Return every kernel of a session, in the order of running, with its median time.

    `profiled` was opened with `profile_into`; this ends its profile. `session` runs `profiled`.
    `model` is the ONNX graph of the session. Profiling adds about 10 µs to each kernel.
    """
    sizes = bound_sizes(session, feeds)
    runs = run_for_layers(session)
    profile = Path(profiled.end_profiling())
    optimised = read_proto(profile.with_name("optimised.onnx"), weights=False)
    layers = layers_from_profile(
        profile.read_text(),
        optimised.graph,
        read_proto(model, weights=False).graph,
        LAYER_WARMUP_RUNS,
    )
    return LayerTable(sizes=sizes, runs=runs, layers=layers)


# -- pure: the profile


def layers_from_profile(
    profile: str, optimised: onnx.GraphProto, original: onnx.GraphProto, warmup: int = 0
) -> tuple[Layer, ...]:
    """Return the kernels of a profile with the medians of their times after `warmup` runs.

    A kernel that runs more than once in a run (in a loop) has its sum. The time of If and Loop is
    without that of their inner nodes.
    """
    levels = {
        node.name: _accuracy_level(node) for node in _nodes(optimised) if node.op_type == NBITS
    }
    nodes = nodes_by_kernel(optimised, original)
    times: dict[str, list[float]] = defaultdict(list)
    first: dict[str, Mapping[str, Any]] = {}
    for run in runs_of_profile(profile)[warmup:]:
        seconds: dict[str, float] = defaultdict(float)
        for event, own in _own_seconds(run.kernels):
            name = str(event["name"]).removesuffix(KERNEL)
            first.setdefault(name, event["args"])
            seconds[name] += own
        for name, value in seconds.items():
            times[name].append(value)
    return tuple(
        _layer(name, args, nodes.get(name, ()), levels.get(name, 0), median(times[name]))
        for name, args in first.items()
    )


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """One run in a profile. Its kernels are in their order; one may hold others (If, Loop)."""

    start_us: float
    end_us: float
    kernels: Sequence[Mapping[str, Any]]


def runs_of_profile(profile: str) -> list[ProfiledRun]:
    """Return the runs in a profile. InternalError if it is no JSON."""
    try:
        events: list[Mapping[str, Any]] = json.loads(profile)
    except ValueError as error:
        raise InternalError(
            f"ONNX Runtime's profile is no JSON: {error}: {profile[:200]!r}"
        ) from error
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == "model_run"
    )
    kernels = sorted(
        (event for event in events if str(event.get("name", "")).endswith(KERNEL)),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    return [
        ProfiledRun(start, end, [event for event in kernels if start <= event["ts"] <= end])
        for start, end in spans
    ]


def _own_seconds(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield each event with its seconds, without those of the events within it."""
    ordered = list(events)
    own = [float(event["dur"]) for event in ordered]
    enclosing: list[int] = []
    for index, event in enumerate(ordered):
        while enclosing and _end(ordered[enclosing[-1]]) <= event["ts"]:
            enclosing.pop()
        if enclosing and ordered[enclosing[-1]]["args"].get("op_name") in BRANCHING:
            own[enclosing[-1]] -= event["dur"]
        enclosing.append(index)
    return ((event, max(micros, 0.0) * 1e-6) for event, micros in zip(ordered, own, strict=True))


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _layer(
    name: str, args: Mapping[str, Any], nodes: tuple[str, ...], level: int, seconds: float
) -> Layer:
    operator = str(args.get("op_name", ""))
    inputs = _dtypes_of(args.get("input_type_shape", ()))
    outputs = _dtypes_of(args.get("output_type_shape", ()))
    precision, evidence = precision_of(operator, inputs, outputs, level)
    return Layer(
        name=name,
        kind=operator,
        precision=precision,
        evidence=evidence,
        heavy=is_heavy(operator) and precision != "integer",
        nodes=nodes,
        inputs=inputs,
        outputs=outputs,
        seconds=seconds,
        tactic=operator,
    )


def _dtypes_of(tensors: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The dtypes of tensors as a profile lists them: one mapping of dtype to shape for each."""
    return tuple(DTYPES.get(dtype, dtype) for tensor in tensors for dtype in tensor)


def precision_of(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], level: int = 0
) -> tuple[LayerPrecision, Evidence]:
    """Return the precision of a kernel and its evidence, by the rules above.

    `level` is the accuracy level of MatMulNBits.
    """
    if operator in MOVING | BRANCHING:
        return "none", "none"
    if operator in INT8_HEAVY or operator.startswith("QLinear"):
        return Precision.INT8, "tactic"
    if operator == NBITS and level == LEVEL_OF_INT8:
        return Precision.INT8, "tactic"
    types = {*inputs, *outputs}
    floats = types & WIDTHS.keys()
    if floats and operator not in COUNTING:
        widest = max(floats, key=WIDTHS.__getitem__)
        return ("unknown" if widest == "double" else Precision(widest)), "types"
    if types and types <= BYTES:
        return Precision.INT8, "types"
    return ("integer", "types") if types & INTEGERS else ("unknown", "none")


def is_heavy(operator: str) -> bool:
    """Return True if a kernel multiplies matrices."""
    return operator in INT8_HEAVY | FLOAT_HEAVY or operator == NBITS


def _accuracy_level(node: onnx.NodeProto) -> int:
    return next(
        (int(attribute.i) for attribute in node.attribute if attribute.name == "accuracy_level"), 0
    )


# -- pure: from kernels back to ONNX nodes


def nodes_by_kernel(
    optimised: onnx.GraphProto, original: onnx.GraphProto
) -> dict[str, tuple[str, ...]]:
    """Return by kernel name the nodes of the original graph that the kernel computes.

    They are in the order of the original graph, but for the main node, which comes first.
    """
    source = _Original.of(original)
    kernels = list(_nodes(optimised))
    aliases = _aliases(kernels, source)
    return {kernel.name: _nodes_of(kernel, aliases, source) for kernel in kernels}


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a graph and of its subgraphs."""
    for body in graphs_of(graph):
        yield from body.node


@dataclass(frozen=True, slots=True)
class _Original:
    by_name: Mapping[str, onnx.NodeProto]  # a node without a name has that of its first output
    producers: Mapping[str, str]  # the name of the node that computes a tensor
    constants: frozenset[str]

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> _Original:
        by_name = {node.name or next(iter(node.output), ""): node for node in _nodes(graph)}
        producers: dict[str, str] = {}
        for name, node in by_name.items():
            producers.update((tensor, name) for tensor in node.output if tensor)
        constants = {tensor.name for body in graphs_of(graph) for tensor in body.initializer}
        return cls(by_name, producers, frozenset(constants))

    def named(self, kernel: onnx.NodeProto) -> str:
        """Return the node with the kernel's name, or with an output of that name; "" if none."""
        if kernel.name in self.by_name or (kernel.op_type in MOVING and "_token_" in kernel.name):
            return kernel.name if kernel.name in self.by_name else ""
        plain = ADDED.sub("", kernel.name)
        return plain if plain in self.by_name else self.producers.get(plain, "")

    def after(self, tensor: str, operator: str) -> str:
        """Return the output of the only node of this operator that reads a tensor.

        The tensor itself if there is no such node, or if the operator computes the tensor.
        """
        if self.by_name[self.producers[tensor]].op_type == operator:
            return tensor
        readers = [
            node
            for node in self.by_name.values()
            if tensor in node.input and node.op_type == operator
        ]
        return readers[0].output[0] if len(readers) == 1 else tensor


def _aliases(kernels: Sequence[onnx.NodeProto], source: _Original) -> dict[str, str]:
    """Map the optimiser's tensors to the tensors of the original graph that they hold.

    Their layouts may differ. A kernel with the name of a node has that node's outputs. Around a
    kernel of the blocked layout, such as `conv_nchwc`, the optimiser inserts ReorderInput and
    ReorderOutput, and Transpose around one that runs channels last. These compute nothing: their
    input and output are the same tensor. So names are propagated through them, first forward, then
    backward.
    """
    aliases: dict[str, str] = {}
    for kernel in kernels:
        aliases |= _aliases_of_outputs(kernel, source)
    inserted = [kernel for kernel in kernels if _only_changes_layout(kernel, source)]
    _propagate_forward(aliases, inserted, source)
    _propagate_backward(aliases, inserted, source)
    return aliases


def _aliases_of_outputs(kernel: onnx.NodeProto, source: _Original) -> dict[str, str]:
    """Return the original tensors of a kernel's outputs, if its name identifies its node."""
    node = source.by_name.get(source.named(kernel))
    if node is None:
        return {}
    if kernel.name.endswith("_nchwc"):
        return {kernel.output[0]: _output_of_blocked(kernel, source)}
    if node.op_type != kernel.op_type or len(node.output) != len(kernel.output):
        return {}
    return {
        output: original
        for output, original in zip(kernel.output, node.output, strict=True)
        if output not in source.producers
    }


def _only_changes_layout(kernel: onnx.NodeProto, source: _Original) -> bool:
    """Return True for a kernel that the optimiser inserted to change the layout of a tensor."""
    return kernel.op_type in LAYOUT_CHANGES and not source.named(kernel)


def _propagate_forward(
    aliases: dict[str, str], inserted: Sequence[onnx.NodeProto], source: _Original
) -> None:
    """Give the output of each inserted kernel the name of its input."""
    for kernel in inserted:
        before, after = kernel.input[0], kernel.output[0]
        if after not in source.producers:
            aliases.setdefault(after, aliases.get(before, before))


def _propagate_backward(
    aliases: dict[str, str], inserted: Sequence[onnx.NodeProto], source: _Original
) -> None:
    """Give the input of each inserted kernel the name of its output, the last kernel first."""
    for kernel in reversed(inserted):
        before, after = kernel.input[0], kernel.output[0]
        if before not in source.producers:
            aliases.setdefault(before, aliases.get(after, after))


def _output_of_blocked(kernel: onnx.NodeProto, source: _Original) -> str:
    """Return the original tensor that a kernel of the blocked layout computes.

    The kernel has the name of its first node, from before an Add and an activation were fused.
    """
    tensor = ADDED.sub("", kernel.name)
    if tensor not in source.producers:
        return tensor
    if len(kernel.input) > SUMMED and kernel.input[SUMMED]:
        tensor = source.after(tensor, "Add")
    activation = _activation_of(kernel)
    return source.after(tensor, activation) if activation else tensor


def _activation_of(kernel: onnx.NodeProto) -> str:
    """Return the operator of the activation that is fused into a kernel; "" if none."""
    for attribute in kernel.attribute:
        if attribute.name == "activation":
            return str(attribute.s.decode())
    return ""


def _nodes_of(
    kernel: onnx.NodeProto, aliases: Mapping[str, str], source: _Original
) -> tuple[str, ...]:
    """Return the nodes that a kernel computes. The main one comes first."""
    name = source.named(kernel)
    outputs = [aliases.get(tensor, tensor) for tensor in kernel.output]
    outputs = [tensor for tensor in outputs if tensor in source.producers]
    inputs = {aliases.get(tensor, tensor) for tensor in kernel.input}
    if set(outputs) <= inputs and not name:  # inserted to change the layout: computes no node
        return ()
    if not outputs and name:
        outputs = list(source.by_name[name].output)
    nodes = list(_between(outputs, inputs, source))
    if name:
        nodes = list(dict.fromkeys((name, *nodes)))
    return tuple(sorted(nodes, key=lambda node: source.by_name[node].op_type not in FLOAT_HEAVY))


def _between(outputs: Sequence[str], inputs: set[str], source: _Original) -> tuple[str, ...]:
    """Return the nodes between inputs and outputs.

    Empty if one of them needs a tensor that is neither an input nor a constant.
    """
    names: set[str] = set()
    todo = list(outputs)
    while todo:
        tensor = todo.pop()
        is_input = tensor in inputs and tensor not in outputs
        if is_input or tensor in source.constants or not tensor:
            continue
        if tensor not in source.producers:
            return ()
        name = source.producers[tensor]
        if name not in names:
            names.add(name)
            todo += source.by_name[name].input
    return tuple(name for name in source.by_name if name in names)
