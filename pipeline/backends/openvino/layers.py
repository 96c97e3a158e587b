"""The layers that OpenVINO runs on a CPU: the runtime graph of a compiled model with its times.

Everything specific to OpenVINO's layers is here. The precision of a layer comes from these rules,
the strongest evidence first:

1. A layer that only moves or converts data (Reorder, Convert, Reshape, FakeQuantize, which
   quantises): `none`.
2. `tactic`: the end of the kernel's name, its primitive type: `brgconv_avx2_f32`, `jit_avx2_I8`,
   `brgemm_avx512_amx_bf16`. It is the type that a heavy layer multiplies. It does not count for a
   snippet: the first input of a snippet may be a mask.
3. `types`: the runtime precision of a heavy layer without a type in its primitive (`undef` before
   the first run of a dynamic shape). For any other layer the widest float that it reads or writes:
   an Add of f32 and u8 adds in f32, although its runtime precision may be u8.
4. Sizes, indices and masks only: `integer`. Nothing known: `unknown`.

Layers that OpenVINO computed at compile time, and views, do not run and are left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pipeline.backends.base import Session
from pipeline.backends.layer_timing import LAYER_WARMUP_RUNS, bound_sizes, run_for_layers
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors
from pipeline.results.layer_table import Evidence, Layer, LayerPrecision, LayerTable

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
    """One node of the runtime graph, with OpenVINO's names."""

    name: str
    kind: str  # layerType
    precision: str  # runtimePrecision
    primitive: str  # primitiveType
    nodes: tuple[str, ...] = ()  # originalLayersNames
    inputs: tuple[str, ...] = ()  # element types
    outputs: tuple[str, ...] = ()


# -- the shell: reads a compiled model ---------------------------------------


def runtime_layers(compiled: Any) -> tuple[RuntimeLayer, ...]:
    """Return the runtime graph of a compiled model, in the order of running."""
    return tuple(_runtime_layer(op) for op in compiled.get_runtime_model().get_ordered_ops())


def _runtime_layer(op: Any) -> RuntimeLayer:
    info = op.get_rt_info()

    def text(key: str) -> str:
        return str(info[key].astype(str)) if key in info else ""

    return RuntimeLayer(
        name=str(op.get_friendly_name()),
        kind=text("layerType"),
        precision=text("runtimePrecision"),
        primitive=text("primitiveType"),
        nodes=tuple(name for name in text("originalLayersNames").split(",") if name),
        inputs=tuple(str(port.get_element_type().to_string()) for port in op.inputs()),
        outputs=tuple(str(port.get_element_type().to_string()) for port in op.outputs()),
    )


def layer_table(
    compiled: Any, request: Any, session: Session, operators: Mapping[str, str], feeds: Tensors
) -> LayerTable:
    """Return every layer that runs, in the order of running, with its median time.

    The model is compiled with PERF_COUNT. `session` runs `request`. `operators` are OpenVINO's
    operators by node name; they show whether a snippet multiplies matrices.
    """
    sizes = bound_sizes(session, feeds)
    means: list[dict[str, int]] = []
    runs = run_for_layers(session, lambda: means.append(means_of(request)))
    seconds = medians(means, LAYER_WARMUP_RUNS)
    layers = layers_from_runtime(runtime_layers(compiled), seconds, operators)
    return LayerTable(sizes=sizes, runs=runs, layers=layers)


def means_of(request: Any) -> dict[str, int]:
    """Return the microseconds of each layer that ran: the mean over all runs so far."""
    micros: dict[str, int] = defaultdict(int)
    for part in request.get_profiling_info():
        if str(part.status).endswith(".EXECUTED"):
            micros[part.node_name] += round(part.real_time.total_seconds() * 1e6)
    return dict(micros)


# -- pure --------------------------------------------------------------------


def medians(means: Sequence[Mapping[str, int]], warmup: int = 0) -> dict[str, float]:
    """Return the median seconds of each layer per run after `warmup`.

    `means` holds OpenVINO's counters after each run: the mean over all runs so far, in whole
    microseconds. The time of one run is the difference of two totals. Its error is up to one
    microsecond for each run so far: the median of ten runs is off by a few microseconds.
    """
    totals: list[Mapping[str, int]] = [{}]  # before the first run
    for count, counters in enumerate(means, 1):
        totals.append({name: mean * count for name, mean in counters.items()})
    names = dict.fromkeys(name for counters in means for name in counters)
    result = {}
    for name in names:
        micros = [
            totals[run + 1].get(name, 0) - totals[run].get(name, 0)
            for run in range(warmup, len(means))
        ]
        result[name] = max(0.0, median(micros)) * 1e-6
    return result


def layers_from_runtime(
    runtime: Iterable[RuntimeLayer], seconds: Mapping[str, float], operators: Mapping[str, str]
) -> tuple[Layer, ...]:
    """Return the layers that ran, with their times.

    A time without a known layer becomes an `unknown` layer, so that no time is lost.
    """
    layers = [
        _layer(layer, seconds[layer.name], operators) for layer in runtime if layer.name in seconds
    ]
    known = {layer.name for layer in layers}
    unknown = [
        Layer(name=name, kind="", precision="unknown", evidence="none", seconds=value)
        for name, value in seconds.items()
        if name not in known
    ]
    return (*layers, *unknown)


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
    """Return True if a layer, or one node of a snippet, multiplies matrices."""
    if layer.kind == SNIPPETS:
        return any(operators.get(name) in MULTIPLYING for name in layer.nodes)
    return layer.kind in HEAVY_LAYERS | FUSED_HEAVY


def precision_of(layer: RuntimeLayer, heavy: bool) -> tuple[LayerPrecision, Evidence]:
    """Return the precision of a layer and its evidence, by the rules above."""
    if layer.kind in MOVING:
        return "none", "none"
    if heavy and layer.kind != SNIPPETS:
        of_primitive = MULTIPLIED.get(layer.primitive.rpartition("_")[2].lower())
        if of_primitive:
            return of_primitive, "tactic"
        of_runtime = MULTIPLIED.get(layer.precision)
        return (of_runtime, "types") if of_runtime else ("unknown", "none")
    types = {DTYPES.get(dtype, dtype) for dtype in (*layer.inputs, *layer.outputs)}
    types.discard("dynamic")  # a missing optional input
    floats = types & WIDTHS.keys()
    if floats:
        return Precision(max(floats, key=WIDTHS.__getitem__)), "types"
    if types and types <= BYTES:
        return Precision.INT8, "types"
    return ("integer", "types") if types & INTEGERS else ("unknown", "none")


def heavy_precisions(runtime: Iterable[RuntimeLayer]) -> tuple[str, ...]:
    """Return the runtime precision of each heavy layer, by OpenVINO's name.

    It is known before the first run.
    """
    return tuple(layer.precision for layer in runtime if layer.kind in HEAVY_LAYERS)
