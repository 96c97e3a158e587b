"""What OpenVINO really runs on a CPU: the runtime graph of a compiled model joined with its times.
All that is OpenVINO's own is here.

How the precision of a layer is known, first what proves most:

1. A layer that only moves or converts data (Reorder, Convert, Reshape, FakeQuantize, which
   quantises): `none`.
2. `tactic`: the end of the kernel's name, its primitive type: `brgconv_avx2_f32`, `jit_avx2_I8`,
   `brgemm_avx512_amx_bf16`. It names the type that a heavy layer multiplies; not of a snippet,
   whose first input may be a mask.
3. `types`: of a heavy layer whose primitive says nothing (`undef` before the first run of a dynamic
   shape) its runtime precision. Of any other layer the widest float that it reads or writes: an Add
   of f32 and u8 adds in f32, though its runtime precision may say u8.
4. Sizes, indices and masks only: `integer`. Nothing known: `unknown`.

Layers that OpenVINO computed while compiling, or that are no more than a view, do not run and are
left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from pipeline.backends.base import Session
from pipeline.backends.layer_timing import LAYER_WARMUP_RUNS, bound_sizes, run_for_layers
from pipeline.core import Precision, Tensors
from pipeline.results.layer_table import Layer, LayerTable

MOVING = frozenset(
    {
        "Broadcast",
        "Concatenation",
        "Concat",
        "Convert",
        "FakeQuantize",
        "Input",
        "MemoryInput",
        "MemoryOutput",
        "Output",
        "Pad",
        "Reorder",
        "Reshape",
        "Split",
        "Squeeze",
        "StridedSlice",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
HEAVY_LAYERS = frozenset({"Convolution", "FullyConnected", "MatMul"})
FUSED_HEAVY = frozenset(
    {
        "Deconvolution",
        "GRU",
        "LLMMLP",
        "LSTM",
        "MHA",
        "QKVProjection",
        "RNN",
        "RNNCell",
        "RNNSeq",
        "ScaledDotProductAttention",
    }
)
SNIPPETS = "Subgraph"  # code generated for several nodes, attention too
MULTIPLYING = frozenset(
    {
        "MatMul",
        "Convolution",
        "GroupConvolution",
        "ConvolutionBackpropData",
        "GroupConvolutionBackpropData",
    }
)

MULTIPLIED = {
    "f32": Precision.FP32,
    "f16": Precision.FP16,
    "bf16": Precision.BF16,
    "i8": Precision.INT8,
    "u8": Precision.INT8,
}
DTYPES = {
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "i8": "int8",
    "u8": "uint8",
    "i32": "int32",
    "i64": "int64",
    "boolean": "bool",
}
WIDTHS = {"fp16": 2, "bf16": 3, "fp32": 4}  # bf16 after fp16: it has fp32's range
BYTES = frozenset({"int8", "uint8"})
INTEGERS = frozenset({"int32", "int64", "bool", "u1", "i16", "u16", "u32", "u64"}) | BYTES
MADE_OF = re.compile(r"/WithoutBiases$")  # OpenVINO's halves of a Conv or Gemm with a bias


@dataclass(frozen=True, slots=True)
class RuntimeLayer:
    """One node of the runtime graph, in OpenVINO's words."""

    name: str
    kind: str  # layerType
    precision: str  # runtimePrecision
    primitive: str  # primitiveType
    nodes: tuple[str, ...] = ()  # originalLayersNames
    inputs: tuple[str, ...] = ()  # element types
    outputs: tuple[str, ...] = ()


# -- the shell: asks a compiled model ----------------------------------------


def runtime_layers(compiled: Any) -> tuple[RuntimeLayer, ...]:
    """The runtime graph of a compiled model, in the order of running."""
    return tuple(_runtime_layer(op) for op in compiled.get_runtime_model().get_ordered_ops())


def _runtime_layer(op: Any) -> RuntimeLayer:
    info = op.get_rt_info()

    def word(key: str) -> str:
        return str(info[key].astype(str)) if key in info else ""

    return RuntimeLayer(
        name=str(op.get_friendly_name()),
        kind=word("layerType"),
        precision=word("runtimePrecision"),
        primitive=word("primitiveType"),
        nodes=tuple(name for name in word("originalLayersNames").split(",") if name),
        inputs=tuple(str(port.get_element_type().to_string()) for port in op.inputs()),
        outputs=tuple(str(port.get_element_type().to_string()) for port in op.outputs()),
    )


def layer_table(
    compiled: Any, request: Any, session: Session, operators: Mapping[str, str], feeds: Tensors
) -> LayerTable:
    """Every layer that a model compiled with PERF_COUNT runs, in the order of running, each with
    its median time.

    `session` runs `request`; `operators` are OpenVINO's operators by the names of its own graph,
    which tell what a snippet multiplies.
    """
    sizes = bound_sizes(session, feeds)
    means: list[dict[str, int]] = []
    runs = run_for_layers(session, lambda: means.append(_means(request)))
    found = layers_from_runtime(
        runtime_layers(compiled), medians(means, LAYER_WARMUP_RUNS), operators
    )
    return LayerTable(sizes=sizes, runs=runs, layers=found)


def _means(request: Any) -> dict[str, int]:
    """Microseconds per layer, the mean over all runs so far; only layers that ran."""
    micros: dict[str, int] = defaultdict(int)
    for part in request.get_profiling_info():
        if str(part.status).endswith(".EXECUTED"):
            micros[part.node_name] += round(part.real_time.total_seconds() * 1e6)
    return dict(micros)


# -- pure --------------------------------------------------------------------


def medians(means: Sequence[Mapping[str, int]], warmup: int = 0) -> dict[str, float]:
    """Median seconds of each layer per run after `warmup`, from OpenVINO's counters: after each run
    the mean over all, in whole microseconds.

    A run's own time is the difference of two totals, off by as many microseconds as there were
    runs: the median of ten is off by a few.
    """
    totals = [
        {name: mean * count for name, mean in each.items()} for count, each in enumerate(means, 1)
    ]
    names = dict.fromkeys(name for each in means for name in each)
    runs = range(warmup, len(means))
    before: Mapping[str, int] = {}
    return {
        name: (
            max(
                0.0,
                median(
                    totals[run].get(name, 0) - (totals[run - 1] if run else before).get(name, 0)
                    for run in runs
                ),
            )
            * 1e-6
        )
        for name in names
    }


def layers_from_runtime(
    runtime: Iterable[RuntimeLayer], seconds: Mapping[str, float], operators: Mapping[str, str]
) -> tuple[Layer, ...]:
    """The layers that ran, each with its time. A time of no known layer becomes an `unknown` layer,
    so that no time is lost.
    """
    ran = [
        _layer(layer, seconds[layer.name], operators) for layer in runtime if layer.name in seconds
    ]
    known = {layer.name for layer in ran}
    lost = (
        Layer(name=name, kind="", precision="unknown", evidence="none", seconds=each)
        for name, each in seconds.items()
        if name not in known
    )
    return (*ran, *lost)


def _layer(layer: RuntimeLayer, seconds: float, operators: Mapping[str, str]) -> Layer:
    heavy = is_heavy(layer, operators)
    precision, evidence = precision_of(layer, heavy)
    return Layer(
        name=layer.name,
        kind=layer.kind,
        precision=precision,
        evidence=evidence,
        heavy=heavy,
        nodes=tuple(dict.fromkeys(MADE_OF.sub("", name) for name in layer.nodes)),
        inputs=tuple(DTYPES.get(dtype, dtype) for dtype in layer.inputs),
        outputs=tuple(DTYPES.get(dtype, dtype) for dtype in layer.outputs),
        seconds=seconds,
        tactic=layer.primitive,
    )


def is_heavy(layer: RuntimeLayer, operators: Mapping[str, str]) -> bool:
    """Whether a layer multiplies matrices; a snippet does if one of its nodes does."""
    if layer.kind == SNIPPETS:
        return any(operators.get(name) in MULTIPLYING for name in layer.nodes)
    return layer.kind in HEAVY_LAYERS | FUSED_HEAVY


def precision_of(
    layer: RuntimeLayer, heavy: bool
) -> tuple[Precision | Literal["integer", "none", "unknown"], Literal["tactic", "types", "none"]]:
    """The precision of a layer and its evidence, by the rules above."""
    if layer.kind in MOVING:
        return "none", "none"
    if heavy and layer.kind != SNIPPETS:
        named = MULTIPLIED.get(layer.primitive.rpartition("_")[2].lower())
        told = MULTIPLIED.get(layer.precision)
        return (named, "tactic") if named else (told, "types") if told else ("unknown", "none")
    types = {DTYPES.get(dtype, dtype) for dtype in (*layer.inputs, *layer.outputs)}
    types.discard("dynamic")  # an input that is not there
    if floats := types & WIDTHS.keys():
        return Precision(max(floats, key=WIDTHS.__getitem__)), "types"
    if types and types <= BYTES:
        return Precision.INT8, "types"
    return ("integer", "types") if types & INTEGERS else ("unknown", "none")


def heavy_precisions(runtime: Iterable[RuntimeLayer]) -> tuple[str, ...]:
    """What each heavy layer runs in, known before it has run once; its runtime precision in
    OpenVINO's words.
    """
    return tuple(layer.precision for layer in runtime if layer.kind in HEAVY_LAYERS)
