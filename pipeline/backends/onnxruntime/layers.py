"""What ONNX Runtime really runs on a CPU: the nodes of its profile joined with the graph as it
optimised it. All that is its own is here.

How the precision of a kernel is known, first what proves most:

1. A kernel that only moves or converts data (QuantizeLinear, DequantizeLinear, Cast, the Reorders
   of the blocked layout): `none`.
2. `tactic`: a kernel that exists in integer arithmetic only, by its operator: QLinearConv,
   MatMulInteger, DynamicQuantizeMatMul: int8.
3. `types`: of any other the widest float it reads or writes. On a CPU a Conv on floats multiplies
   floats: there is no TF32 that hides in it, and fp16 is cast to fp32 in the open. 8-bit integers
   alone (MaxPool between two quantised layers) count as int8. MatMulNBits holds 4-bit weights and
   reads floats: at accuracy level 4 it quantises what it reads and multiplies int8, otherwise it
   multiplies fp32.
4. Sizes, indices and masks only: `integer`. Nothing known, or double: `unknown`.

Which ONNX nodes a kernel computes is read off the tensors: both graphs name them alike, so a kernel
has the nodes between its inputs and its outputs. Where the optimiser made new tensors and that
cannot be closed, it has the one node whose name it bears, or none.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import onnx

from pipeline.backends.base import Session
from pipeline.backends.checks import LAYER_WARMUP_RUNS, bound_sizes, run_for_layers
from pipeline.core import Precision, Tensors
from pipeline.errors import InternalError
from pipeline.onnx_graph.files import read_proto
from pipeline.onnx_graph.inspect import graphs_of
from pipeline.results.layer_table import Layer, LayerTable

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

ADDED = re.compile(
    r"(_token_\d+|_nchwc|/duplicated|/\w*Fusion/*)+$"
)  # what the optimiser adds to the name of a node or tensor
SUMMED = 3  # the input of a blocked Conv that is added to its result
KERNEL = "_kernel_time"


# -- the shell: runs the session
# ------------------------------------------------------------------------------


def profile_into(options: onnxruntime.SessionOptions, folder: Path) -> None:
    """Ask for a profile, and for the optimised graph as `optimised.onnx`, in `folder`."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", "optimised.data"
    )  # may be over 2 GiB
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", "1024"
    )


def layer_table(
    profiled: onnxruntime.InferenceSession, session: Session, model: Path, feeds: Tensors
) -> LayerTable:
    """Every kernel of a session opened with `profile_into`, in the order of running, each with its
    median time.

    `session` runs `profiled`, whose profile is closed; `model` is the ONNX graph it was opened
    from. Profiling adds some 10 µs to each kernel.
    """
    sizes = bound_sizes(session, feeds)
    runs = run_for_layers(session)
    profile = Path(profiled.end_profiling())
    optimised = read_proto(profile.with_name("optimised.onnx"), weights=False)
    found = layers_from_profile(
        profile.read_text(),
        optimised.graph,
        read_proto(model, weights=False).graph,
        LAYER_WARMUP_RUNS,
    )
    return LayerTable(sizes=sizes, runs=runs, layers=found)


# -- pure: the profile
# ------------------------------------------------------------------------------


def layers_from_profile(
    profile: str, optimised: onnx.GraphProto, original: onnx.GraphProto, warmup: int = 0
) -> tuple[Layer, ...]:
    """The kernels of a profile, each with the median of its times after `warmup` runs.

    A kernel that runs more than once in a run (in a loop) counts with its sum; what holds other
    nodes (If, Loop) without theirs.
    """
    levels = {
        node.name: _accuracy_level(node)
        for inner in graphs_of(optimised)
        for node in inner.node
        if node.op_type == NBITS
    }
    nodes = nodes_by_kernel(optimised, original)
    times: dict[str, list[float]] = defaultdict(list)
    first: dict[str, Mapping[str, Any]] = {}
    for run in _runs(profile)[warmup:]:
        seconds: dict[str, float] = defaultdict(float)
        for event, own in _own_seconds(run):
            name = str(event["name"]).removesuffix(KERNEL)
            first.setdefault(name, event["args"])
            seconds[name] += own
        for name, value in seconds.items():
            times[name].append(value)
    return tuple(
        _layer(name, args, nodes.get(name, ()), levels.get(name, 0), median(times[name]))
        for name, args in first.items()
    )


def _runs(profile: str) -> list[list[Mapping[str, Any]]]:
    """The kernels' events of each run."""
    try:
        events: list[Mapping[str, Any]] = json.loads(profile)
    except ValueError as error:
        raise InternalError(
            f"ONNX Runtime's profile is no JSON: {error}: {profile[:200]!r}"
        ) from error
    whole = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == "model_run"
    ]
    kernels = sorted(
        (event for event in events if str(event.get("name", "")).endswith(KERNEL)),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    return [
        [event for event in kernels if start <= event["ts"] <= end] for start, end in sorted(whole)
    ]


def _own_seconds(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Each event with its seconds without those of the events within it."""
    timed = list(events)
    own = [float(event["dur"]) for event in timed]
    around: list[int] = []
    for index, event in enumerate(timed):
        while around and timed[around[-1]]["ts"] + timed[around[-1]]["dur"] <= event["ts"]:
            around.pop()
        if around and timed[around[-1]]["args"].get("op_name") in BRANCHING:
            own[around[-1]] -= event["dur"]
        around.append(index)
    return ((event, max(micros, 0.0) * 1e-6) for event, micros in zip(timed, own, strict=True))


def _layer(
    name: str, args: Mapping[str, Any], nodes: tuple[str, ...], level: int, seconds: float
) -> Layer:
    operator = str(args.get("op_name", ""))
    inputs, outputs = (
        tuple(
            DTYPES.get(dtype, dtype)
            for tensor in args.get(f"{side}_type_shape", ())
            for dtype in tensor
        )
        for side in ("input", "output")
    )
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


def precision_of(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], level: int = 0
) -> tuple[Precision | Literal["integer", "none", "unknown"], Literal["tactic", "types", "none"]]:
    """The precision of a kernel and its evidence, by the rules above; `level` is the accuracy level
    of MatMulNBits.
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
    """Whether a kernel multiplies matrices."""
    return operator in INT8_HEAVY | FLOAT_HEAVY or operator == NBITS


def _accuracy_level(node: onnx.NodeProto) -> int:
    return next(
        (int(attribute.i) for attribute in node.attribute if attribute.name == "accuracy_level"), 0
    )


# -- pure: from kernels back to ONNX nodes
# ------------------------------------------------------------------------------


def nodes_by_kernel(
    optimised: onnx.GraphProto, original: onnx.GraphProto
) -> dict[str, tuple[str, ...]]:
    """The nodes of the original graph that each kernel of the optimised one computes, in their own
    order; by the kernel's name.
    """
    known = _Original.of(original)
    kernels = [node for inner in graphs_of(optimised) for node in inner.node]
    alias = _aliases(kernels, known)
    return {kernel.name: _nodes_of(kernel, alias, known) for kernel in kernels}


@dataclass(frozen=True, slots=True)
class _Original:
    by_name: Mapping[str, onnx.NodeProto]  # a node without a name goes by its first output
    producers: Mapping[str, str]  # of each tensor the node that makes it
    constants: frozenset[str]

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> _Original:
        inner = list(graphs_of(graph))
        by_name = {
            node.name or next(iter(node.output), ""): node for each in inner for node in each.node
        }
        producers = {
            tensor: name for name, node in by_name.items() for tensor in node.output if tensor
        }
        return cls(
            by_name,
            producers,
            frozenset(tensor.name for each in inner for tensor in each.initializer),
        )

    def named(self, kernel: onnx.NodeProto) -> str:
        """The node whose name the kernel bears, or whose output; empty if none."""
        if kernel.name in self.by_name or (kernel.op_type in MOVING and "_token_" in kernel.name):
            return kernel.name if kernel.name in self.by_name else ""
        plain = ADDED.sub("", kernel.name)
        return plain if plain in self.by_name else self.producers.get(plain, "")

    def after(self, tensor: str, operator: str) -> str:
        """The output of the one node of this operator that reads a tensor; the tensor itself if
        there is none, or it is one already.
        """
        if self.by_name[self.producers[tensor]].op_type == operator:
            return tensor
        readers = [
            node
            for node in self.by_name.values()
            if tensor in node.input and node.op_type == operator
        ]
        return readers[0].output[0] if len(readers) == 1 else tensor


def _aliases(kernels: Sequence[onnx.NodeProto], known: _Original) -> dict[str, str]:
    """Of tensors that the optimiser made, which tensor of the original graph they hold, in whatever
    layout.
    """
    alias: dict[str, str] = {}
    for kernel in kernels:
        node = known.by_name.get(known.named(kernel))
        if kernel.name.endswith("_nchwc") and node is not None:
            alias[kernel.output[0]] = _made_in_blocks(kernel, known)
        elif (
            node is not None
            and node.op_type == kernel.op_type
            and len(node.output) == len(kernel.output)
        ):
            alias |= {
                made: first
                for made, first in zip(kernel.output, node.output, strict=True)
                if made not in known.producers
            }
    inserted = [
        kernel
        for kernel in kernels
        if kernel.op_type in ("ReorderInput", "ReorderOutput", "Transpose")
        and not known.named(kernel)
    ]
    for kernel in inserted:
        if kernel.output[0] not in known.producers:
            alias.setdefault(kernel.output[0], alias.get(kernel.input[0], kernel.input[0]))
    for kernel in reversed(inserted):
        if kernel.input[0] not in known.producers:
            alias.setdefault(kernel.input[0], alias.get(kernel.output[0], kernel.output[0]))
    return alias


def _made_in_blocks(kernel: onnx.NodeProto, known: _Original) -> str:
    """The original tensor that a kernel of the blocked layout makes: it is named after its first,
    before an Add and an activation joined it.
    """
    tensor = ADDED.sub("", kernel.name)
    if tensor not in known.producers:
        return tensor
    if len(kernel.input) > SUMMED and kernel.input[SUMMED]:
        tensor = known.after(tensor, "Add")
    activation = next(
        (attribute.s.decode() for attribute in kernel.attribute if attribute.name == "activation"),
        "",
    )
    return known.after(tensor, activation) if activation else tensor


def _nodes_of(
    kernel: onnx.NodeProto, alias: Mapping[str, str], known: _Original
) -> tuple[str, ...]:
    named = known.named(kernel)
    made = [
        tensor for each in kernel.output if (tensor := alias.get(each, each)) in known.producers
    ]
    read = {alias.get(tensor, tensor) for tensor in kernel.input}
    if set(made) <= read and not named:  # put in to change the layout: computes no node
        return ()
    between = _between(made or (list(known.by_name[named].output) if named else []), read, known)
    nodes = dict.fromkeys((named, *between) if named else between)
    return tuple(
        sorted(nodes, key=lambda name: known.by_name[name].op_type not in FLOAT_HEAVY)
    )  # the one that says what it is comes first


def _between(made: Sequence[str], read: set[str], known: _Original) -> tuple[str, ...]:
    """The nodes between the tensors read and those made; empty if one of them needs a tensor that
    is neither read nor constant.
    """
    found: set[str] = set()
    todo = list(made)
    while todo:
        tensor = todo.pop()
        if (tensor in read and tensor not in made) or tensor in known.constants or not tensor:
            continue
        if tensor not in known.producers:
            return ()
        name = known.producers[tensor]
        if name not in found:
            found.add(name)
            todo += known.by_name[name].input
    return tuple(name for name in known.by_name if name in found)
