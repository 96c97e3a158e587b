"""The layers that a TensorRT engine runs: the engine inspector's layers joined with their times.

Everything specific to TensorRT's layers is here. The precision of a layer comes from these rules,
the strongest evidence first:

1. A layer that only moves or converts data (Reformat, NoOp, a cast between two dtypes) has the
   precision `none`.
2. `tactic`: the kernel's name. `sm90_xmma_gemm_f16f16_f16f32_f32` reads two f16, multiplies f16,
   adds up in f32, writes f32: fp16. The multiplied type counts. TF32 is visible nowhere else, since
   its inputs and outputs are FP32. Kernels of one operator only (pooling) name their types in
   words: FP16, IMMA.
3. `types`: the dtypes that the layer reads and writes. A heavy layer (the name of fused attention
   tells nothing) multiplies in the narrowest type that it reads; FP32 may still be TF32, and the
   precision audit accepts it as a proof of neither. For any other layer the widest type counts:
   Myelin's kernels that read Half and write Float compute the steps between in Float, and a kernel
   that reads Int8, adds in Half and writes Int8 does no int8 arithmetic. LayerNorm and Softmax with
   Half in and Half out count as fp16, though they add up in Float as the ONNX operators require.
4. Sizes, indices and masks only: `integer`. Nothing known: `unknown`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

from pipeline.backends.layer_timing import TakesInputs, bound_sizes
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors
from pipeline.errors import InternalError
from pipeline.results.layer_table import Evidence, Layer, LayerPrecision, LayerTable

RUNS = 20
WARMUP_RUNS = 5

MOVING = frozenset(
    {
        "reformat",
        "noop",
        "reshape",
        "cast",
        "copy",
        "transpose",
        "shuffle",
        "slice",
        "concatenation",
        "constant",
        "wait",
        "signal",
    }
)
# Myelin's abbreviations of cast, reshape, transpose, move, copy, slice.
MOVING_STEPS = frozenset({"cas", "res", "tra", "mov", "cop", "sli"})
HEAVY = re.compile(
    r"conv(?!ert)|gemm|matrixmultiply|matmul|mha|attention|fprop|fullyconnected", re.IGNORECASE
)

_TYPE = r"(?:tf32|bf16|f16|f32|i8|s8|u8|e4m3|e5m2)"
# xmma: inputs_[multiplied]added_output, f32f32_tf32f32_f32, or without the multiplied type,
# f16f16_f32_f16; CUTLASS 3: a_b_added_c_d
SIGNATURE = re.compile(
    rf"_(?P<read>{_TYPE}){_TYPE}?"
    rf"_(?P<first>{_TYPE})(?P<second>(?:{_TYPE}|i32)?)_(?:{_TYPE}|i32)(?=_|$)"
)
MULTIPLIED = {
    "tf32": Precision.TF32,
    "bf16": Precision.BF16,
    "f16": Precision.FP16,
    "f32": Precision.FP32,
    "i8": Precision.INT8,
    "s8": Precision.INT8,
    "u8": Precision.INT8,
    "e4m3": Precision.FP8,
    "e5m2": Precision.FP8,
}
# names without such a signature: turing_h1688cudnn_..., ampere_scudnn_...,
# cutlass_80_tensorop_bf16_s16816gemm_..., sm72_xmma_pooling_IMMA_...
WORDS = (
    (re.compile(r"fp8|e4m3|e5m2|qmma"), Precision.FP8),
    (re.compile(r"tf32"), Precision.TF32),
    (re.compile(r"int8|imma|i8816|i16832|i8i8|icudnn|igemm"), Precision.INT8),
    (re.compile(r"bf16"), Precision.BF16),
    (re.compile(r"fp16|f16|hmma|h884|h1688|h16816|hcudnn|hgemm"), Precision.FP16),
    # tensor cores multiply no fp32: CUTLASS's s1688 without a type is TF32
    (re.compile(r"tensorop_s1688"), Precision.TF32),
    (re.compile(r"fp32|f32|scudnn|sgemm|ffma"), Precision.FP32),
)
HASH = re.compile(r"0x[0-9a-f]+")  # may hold "f16" by chance

# the inspector's words: "Half", "Row major linear FP16 format", "Thirty-two wide channel vectorized
# row major Int8 format"
DTYPES = (
    (re.compile(r"fp8|float8|e4m3|e5m2", re.IGNORECASE), "fp8"),
    (re.compile(r"bf16|bfloat16", re.IGNORECASE), "bf16"),
    (re.compile(r"fp16|float16|half", re.IGNORECASE), "fp16"),
    (re.compile(r"uint8", re.IGNORECASE), "uint8"),
    (re.compile(r"int8", re.IGNORECASE), "int8"),
    (re.compile(r"int64", re.IGNORECASE), "int64"),
    (re.compile(r"int32", re.IGNORECASE), "int32"),
    (re.compile(r"bool", re.IGNORECASE), "bool"),
    (re.compile(r"fp32|float", re.IGNORECASE), "fp32"),
)
# bf16 comes after fp16: it has the range of fp32.
WIDTHS = {"fp8": 1, "int8": 1, "fp16": 2, "bf16": 3, "fp32": 4}
INTEGERS = frozenset({"int64", "int32", "bool", "uint8"})

ONNX_LAYER = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f]|\[ONNX Layer: |$)", re.DOTALL)
# The parser's prefix for a node without a name, before the name of its first output.
UNNAMED = "node_of_"
# A part of a layer's name; layers of the first profile have none.
PROFILE = re.compile(r" \[profile (?P<number>[1-9]\d*)\]")
# Myelin's layers end in the number of their graph. Each profile has graphs of its own.
MYELIN_GRAPH = re.compile(r"_myl(?P<number>\d+)_\d+$")


class TimedSession(TakesInputs, Protocol):
    """The part of a session that is needed to time its layers."""

    @property
    def context(self) -> Any: ...
    def enqueue(self) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


class Inspected(Protocol):
    """A loaded engine that can be inspected."""

    @property
    def cuda_engine(self) -> Any: ...
    def session(self, profile: int | None = None) -> TimedSession: ...


# -- the shell: needs a GPU --------------------------------------------------


def layer_table(
    trt: Any, loaded: Inspected, feeds: Tensors, profile: int = 0, runs: int = RUNS
) -> LayerTable:
    """Return every layer of an engine at the shapes of `feeds`, with its median time.

    The times are of `runs` enqueues of one profile without a graph, since a captured graph reports
    no layers. With the profiler attached each enqueue waits for its layers: their sum exceeds the
    engine's latency, which the benchmark measures without a profiler.
    """
    session = loaded.session(profile)
    try:
        sizes = bound_sizes(session, feeds)
        for _ in range(WARMUP_RUNS):
            session.enqueue()
        session.synchronize()
        of_run: dict[str, float] = defaultdict(float)  # a layer in a loop has its sum

        def add(name: str, seconds: float) -> None:
            of_run[name] += seconds

        reporter = profiler(trt, add)  # lives as long as the context that calls it
        session.context.profiler = reporter
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(runs):
            of_run.clear()
            session.enqueue()
            session.synchronize()
            for name, seconds in of_run.items():
                times[name].append(seconds)
        information = _inspect(trt, loaded.cuda_engine, session.context)
        layers = layers_from_inspector(information, times, profile)
        return LayerTable(sizes=sizes, runs=runs, layers=layers, profile=profile)
    finally:
        session.close()


def profiler(trt: Any, report: Callable[[str, float], None]) -> Any:
    """Return a trt.IProfiler that calls `report` with the name and the seconds of every layer."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            report(layer_name, ms * 1e-3)

    return Profiler()


def _inspect(trt: Any, cuda_engine: Any, context: Any) -> str:
    """Return the inspector's information on the engine, in JSON.

    Without a context dynamic shapes, and with them formats, are unknown. But TensorRT 10.6 gave no
    information for the context of a second profile: then the engine is inspected without one.
    """
    json_format = trt.LayerInformationFormat.JSON
    inspector = cuda_engine.create_engine_inspector()
    inspector.execution_context = context
    information = inspector.get_engine_information(json_format)
    if not information:
        without_context = cuda_engine.create_engine_inspector()
        information = without_context.get_engine_information(json_format)
    return str(information)


# -- pure --------------------------------------------------------------------


def layers_from_inspector(
    information: str | Mapping[str, Any],
    times: Mapping[str, Sequence[float]],
    profile: int = 0,
) -> tuple[Layer, ...]:
    """Return the layers of one profile in the order of running, with the medians of their times.

    `information` is the inspector's JSON. Without detailed profiling verbosity it holds names only,
    and every precision is `unknown`. `times` are seconds by layer name. A time without a known
    layer becomes an `unknown` layer, so that no time is lost.
    """
    document = _document(information or "{}") if isinstance(information, str) else information
    layers = [_layer(entry) for entry in document.get("Layers", ())]
    layers = [layer for layer in layers if _is_of(layer.name, profile, times)]
    known = {layer.name for layer in layers}
    layers += [
        Layer(name=name, kind="", precision="unknown", evidence="none")
        for name in times
        if name not in known
    ]
    return tuple(_with_median(layer, times.get(layer.name, ())) for layer in layers)


def _with_median(layer: Layer, seconds: Sequence[float]) -> Layer:
    return layer.model_copy(update={"seconds": median(seconds)}) if seconds else layer


def _is_of(name: str, profile: int, times: Mapping[str, object]) -> bool:
    """Return True if a layer belongs to a profile. `times` holds the layers that took time."""
    if name in times:
        return True
    graph = _graph_of(name)
    if times and graph is not None:  # a layer without a time, of a graph that ran
        return graph in map(_graph_of, times)
    match = PROFILE.search(name)
    return profile == (int(match["number"]) if match else 0)


def _graph_of(name: str) -> str | None:
    match = MYELIN_GRAPH.search(name)
    return match["number"] if match else None


def _document(information: str) -> Mapping[str, Any]:
    try:
        # not strict: the separators of Metadata are control characters
        document = json.loads(information, strict=False)
    except ValueError as error:
        raise InternalError(
            f"TensorRT's engine information is no JSON: {error}: {information[:200]!r}"
        ) from error
    return document if isinstance(document, dict) else {}


def _layer(entry: str | Mapping[str, Any]) -> Layer:
    if isinstance(entry, str):  # built without detailed verbosity
        return Layer(name=entry, kind="", precision="unknown", evidence="none")
    kind, tactic = str(entry.get("LayerType", "")), str(entry.get("TacticName") or "")
    inputs, outputs = _dtypes(entry.get("Inputs", ())), _dtypes(entry.get("Outputs", ()))
    heavy = is_heavy(kind, tactic)
    precision, evidence = precision_of(kind, tactic, inputs, outputs)
    return Layer(
        name=str(entry["Name"]),
        kind=kind,
        precision=precision,
        evidence=evidence,
        heavy=heavy,
        nodes=nodes_of(str(entry.get("Metadata", ""))),
        inputs=inputs,
        outputs=outputs,
        tactic=tactic,
    )


def _dtypes(tensors: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(_dtype(str(tensor.get("Format/Datatype", ""))) for tensor in tensors)


def precision_of(
    kind: str, tactic: str, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[LayerPrecision, Evidence]:
    """Return the precision of a layer and its evidence, by the rules above.

    `inputs` and `outputs` are dtypes as in `Layer`.
    """
    if _only_moves(kind, tactic):
        return "none", "none"
    of_tactic = precision_from_tactic(tactic)
    if of_tactic is not None:
        return of_tactic, "tactic"
    types = [*inputs, *outputs]
    read = [dtype for dtype in inputs if dtype in WIDTHS]
    floats = [dtype for dtype in types if dtype in WIDTHS]
    if is_heavy(kind, tactic) and read:
        return Precision(min(read, key=WIDTHS.__getitem__)), "types"
    if floats:
        return Precision(max(floats, key=WIDTHS.__getitem__)), "types"
    return ("integer", "types") if INTEGERS.intersection(types) else ("unknown", "none")


def precision_from_tactic(tactic: str) -> Precision | None:
    """Return the precision in a kernel's name, or None.

    `sm80_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwc` multiplies TF32.
    """
    name = HASH.sub("", tactic.lower())
    if name.startswith("__myl_"):  # Myelin's own kernels are named after their steps
        return None
    match = SIGNATURE.search(name)
    if match is not None:
        multiplied = MULTIPLIED[match["first"] if match["second"] else match["read"]]
        on_tensor_cores = "tensorop" in name
        if multiplied is Precision.FP32 and on_tensor_cores:
            return Precision.TF32
        return multiplied
    return next((precision for word, precision in WORDS if word.search(name)), None)


def is_heavy(kind: str, tactic: str) -> bool:
    """Return True if a layer multiplies matrices, by its kind or its kernel's name."""
    return not _only_moves(kind, tactic) and bool(
        HEAVY.search(kind) or HEAVY.search(HASH.sub("", tactic))
    )


def _only_moves(kind: str, tactic: str) -> bool:
    word = kind.lower()
    if word in MOVING or word.startswith("shape"):  # shape_call, ShapeHostToDevice
        return True
    if not tactic.startswith("__myl_"):
        return False
    steps = re.findall(r"[A-Z][a-z0-9]*", HASH.sub("", tactic).removeprefix("__myl_"))
    return bool(steps) and all(step[:3].lower() in MOVING_STEPS for step in steps)


def _dtype(text: str) -> str:
    """Return the dtype in the inspector's text for a format; the text itself if it is unknown."""
    return next((name for word, name in DTYPES if word.search(text)), text)


def nodes_of(metadata: str) -> tuple[str, ...]:
    """Return the ONNX nodes in a layer's metadata.

    A node without a name has the name of its first output.
    """
    return tuple(name.removeprefix(UNNAMED) for name in dict.fromkeys(ONNX_LAYER.findall(metadata)))
