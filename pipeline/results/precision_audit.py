"""The precision that an engine really runs: the verdict on a layer table, and its fusions. Pure.

Heavy layers decide: convolutions, Gemms, MatMuls, attention. The layers between them (pooling,
Softmax, casts) do not determine an engine's precision, and a recipe may keep some of them in fp32.
"""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.artifacts import KeptNode, Note
from pipeline.core.recipe import Precision
from pipeline.results.layer_table import Layer, LayerTable

MAX_UNKNOWN = 0.1  # share of the time of unknown precision; above it, a warning names the layers
MAX_MOVING = 0.1  # share of the time that moves or converts data; above it, there is a note
# The next limits are shares of the time of heavy layers with a known precision.
# TF32 or less in an fp32 engine: TensorRT's fp32 engines measured 0, so this allows for rounding
MAX_BELOW_FP32 = 0.01
# the label's precision in a tf32, fp16 or bf16 engine: measured 0.99 to 1, less if nodes stay in
# fp32
MIN_FLOAT = 0.5
# the label's precision in an int8 or fp8 engine; below MIN_FLOAT there is a warning. Measured 0.97
# to 1; placement may leave many layers out
MIN_QUANTISED = 0.1
# dtypes of weights with few bits
FEW_BITS = frozenset({"int8", "uint8", "int4", "uint4", "i4", "u4"})
# ONNX Runtime's MatMul with such weights; its profile omits inputs that the kernel has packed
NARROW = "MatMulNBits"

SLOWEST_NAMED = 3
UNKNOWN_NAMED = 5
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "ConvInteger", "QLinearConv"})
INTEGER_OPERATORS = frozenset(
    {"MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"}
)
"""Integer operators of ONNX. A model with them computes in 8 bits, whatever the engine's label."""

MATMULS = frozenset({"MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"})
PRODUCTS = CONVOLUTIONS | MATMULS | frozenset({"Attention", "Einsum", "GRU", "LSTM", "RNN"})
# operators that are left out of a fusion's text
SILENT = frozenset({"", "Cast", "QuantizeLinear", "DequantizeLinear", "Identity", "Constant"})
SHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})  # left out too


@dataclass(frozen=True, slots=True)
class Reformats:
    """Layers that only move or convert data."""

    count: int
    share: float  # of the time


def time_by_precision(table: LayerTable) -> Mapping[str, float]:
    """Return the share of the time per precision, largest first.

    Layers that move or convert data count as `none`.
    """
    return _shares(table.layers)


def ran_in(label_precision: Precision, table: LayerTable | None) -> Precision:
    """Return the precision in which the heavy layers spend most of their time.

    `label_precision` is returned if no layer's precision is known.
    """
    shares = _shares(layer for layer in table.layers if layer.heavy) if table else {}
    known = [Precision(name) for name in shares if name in list(Precision)]
    return known[0] if known else label_precision


def reformats(table: LayerTable) -> Reformats:
    """Return the number of layers that only move or convert data, and their share of the time."""
    count = sum(layer.precision == "none" for layer in table.layers)
    return Reformats(count, time_by_precision(table).get("none", 0.0))


def slowest(layers: Iterable[Layer], count: int) -> tuple[Layer, ...]:
    """Return the `count` slowest layers, slowest first. Layers without a time are left out."""
    timed = [layer for layer in layers if layer.seconds is not None]
    return tuple(sorted(timed, key=lambda layer: -(layer.seconds or 0.0))[:count])


# -- the verdict -------------------------------------------------------------


def mislabelled(
    precision: Precision,
    table: LayerTable,
    kept: tuple[str, ...] = (),
    weight_only: bool = False,
    forced: Sequence[KeptNode] = (),
) -> str:
    """Return why an engine does not run the precision of its label; empty if it does.

    The text gives the shares and the slowest layers. It is empty too if no precision is known.
    Limits, as shares of the heavy layers' time:

        fp32               at most 1 % in TF32 or less
        tf32, fp16, bf16   at least half in exactly that precision
        int8, fp8          at least a tenth: TensorRT may run layers in 16 bits that are faster so
        weight_only        at least a tenth in layers that read weights of 4 or 8 bits, because
                           their products are of floats

    `kept`: patterns of the nodes that the recipe keeps in fp32. They are intended, so they do not
    count (fp32 takes four times as long as fp16). `forced`: nodes that the conversion left in fp32.
    Candidate.title counts them, so an engine with no other heavy layers has no false label.
    """
    judged = _judged(table, kept, forced)
    if not judged and any(layer.heavy for layer in table.layers):
        if _judged(table, kept):
            return ""
        return f"called {precision}, but every heavy layer is kept in fp32"
    if weight_only:
        return _wide_weights(precision, judged)
    shares = _known_shares(precision, judged)
    if not shares:
        return ""
    share = shares.get(precision, 0.0)
    if precision is Precision.FP32:
        is_mismatch = 1.0 - share > MAX_BELOW_FP32
    elif precision in (Precision.INT8, Precision.FP8):
        is_mismatch = share < MIN_QUANTISED
    else:
        is_mismatch = share < MIN_FLOAT
    if not is_mismatch:
        return ""
    return (
        f"called {precision}, but {_shares_text(precision, shares)}; {_slowest_text(judged, table)}"
    )


def _wide_weights(precision: Precision, heavy: tuple[Layer, ...]) -> str:
    """Return why an engine does not have the weights of its label; empty if it does.

    Empty too if the inputs are unknown for most of the time.
    """
    known = [layer for layer in heavy if layer.inputs]
    known_s = _seconds(known)
    narrow_s = _seconds(
        layer for layer in known if layer.kind == NARROW or FEW_BITS.intersection(layer.inputs[1:])
    )
    if not known_s or known_s < 0.5 * _seconds(heavy) or narrow_s >= MIN_QUANTISED * known_s:
        return ""
    share = percent_text(narrow_s / known_s)
    return (
        f"called {precision} weight-only, but by time only {share} of its heavy layers read weights"
        " in 4 or 8 bits"
    )


def precision_notes(
    table: LayerTable,
    precision: Precision | None = None,
    kept: tuple[str, ...] = (),
    forced: Sequence[KeptNode] = (),
) -> tuple[Note, ...]:
    """Return the notes on a layer table.

    They cover unknown precisions, the cost of moving data and of nodes in fp32, and int8 or fp8
    engines with less than half of the time in that precision.
    """
    notes = [*_forced_notes(table, precision, kept, forced)]
    if (unknown := time_by_precision(table).get("unknown", 0.0)) > MAX_UNKNOWN:
        layers = [
            layer
            for layer in slowest(table.layers, len(table.layers))
            if layer.precision == "unknown"
        ]
        names = ", ".join(layer.name for layer in layers[:UNKNOWN_NAMED])
        names += _and_more(len(layers) - UNKNOWN_NAMED)
        notes.append(
            Note(
                stage="prove",
                text=f"the precision of {percent_text(unknown)} of the time is not known: {names}",
            )
        )
    moving = reformats(table)
    if moving.share > MAX_MOVING:
        text = (
            f"{percent_text(moving.share)} of the time goes to {moving.count} layers that only move"
            " or convert data"
        )
        notes.append(Note(stage="prove", text=text, level="info"))
    if precision in (Precision.INT8, Precision.FP8):
        shares = _known_shares(precision, _judged(table, kept, forced))
        if MIN_QUANTISED <= shares.get(precision, 0.0) < MIN_FLOAT:
            notes.append(
                Note(
                    stage="prove",
                    text=f"{precision} is the smaller part: {_shares_text(precision, shares)}",
                )
            )
    return tuple(notes)


def _forced_notes(
    table: LayerTable,
    precision: Precision | None,
    kept: tuple[str, ...],
    forced: Sequence[KeptNode],
) -> Iterable[Note]:
    """Yield a note on the cost of nodes that stay in fp32.

    It is a warning if no heavy layer remains for the precision of the label.
    """
    if not forced or not _seconds(table.layers):
        return
    count = "1 node that stays" if len(forced) == 1 else f"{len(forced)} nodes that stay"
    text = f"{count} in fp32: {percent_text(forced_share(table, forced))} of the time"
    alone = any(layer.heavy for layer in table.layers) and not _judged(table, kept, forced)
    if alone:
        text += f"; every heavy layer is one of them, so no product runs in {precision}"
    yield Note(stage="prove", text=text, level="warning" if alone else "info")


def forced_share(table: LayerTable, forced: Sequence[KeptNode]) -> float:
    """Return the share of the time of the nodes that the conversion left in fp32."""
    total_s = _seconds(table.layers)
    forced_s = _seconds(layer for layer in table.layers if _is_forced(layer, forced))
    return forced_s / total_s if total_s else 0.0


def _judged(
    table: LayerTable, kept: tuple[str, ...], forced: Sequence[KeptNode] = ()
) -> tuple[Layer, ...]:
    """Return the heavy layers, without those that the recipe or the conversion keeps in fp32."""

    def is_kept(layer: Layer) -> bool:
        named = any(fnmatch.fnmatch(node, pattern) for node in layer.nodes for pattern in kept)
        return (named and _is_full(layer)) or _is_forced(layer, forced)

    return tuple(layer for layer in table.layers if layer.heavy and not is_kept(layer))


def _is_full(layer: Layer) -> bool:
    return layer.precision in (Precision.FP32, Precision.TF32)


def _is_forced(layer: Layer, forced: Sequence[KeptNode]) -> bool:
    """Return whether a layer runs in fp32 and computes a node that the conversion left in fp32."""
    named = not {kept.node for kept in forced}.isdisjoint(layer.nodes)
    in_loop = any(kept.unnamed for kept in forced) and _names_no_product(layer)
    return _is_full(layer) and (named or in_loop)


def _names_no_product(layer: Layer) -> bool:
    """Return whether no node that a layer names multiplies matrices.

    The product of such a heavy layer belongs to a node that it does not name.
    """
    known = all(layer.operators) and len(layer.operators) == len(layer.nodes)
    return known and PRODUCTS.isdisjoint(layer.operators)


def _known_shares(precision: Precision, heavy: tuple[Layer, ...]) -> Mapping[str, float]:
    """Return the shares of the heavy layers' time with a known precision.

    Empty if less than half of the time is known. FP32 inputs and outputs prove neither fp32 nor
    TF32. So for a tf32 engine, a layer with no other evidence counts as unknown.
    """
    known = [
        layer
        for layer in heavy
        if isinstance(layer.precision, Precision)
        and not (precision is Precision.TF32 and _may_be_tf32(layer))
    ]
    return _shares(known) if _seconds(known) >= 0.5 * _seconds(heavy) else {}


def _may_be_tf32(layer: Layer) -> bool:
    return layer.precision is Precision.FP32 and layer.evidence == "types"


def _seconds(layers: Iterable[Layer]) -> float:
    return sum(layer.seconds or 0.0 for layer in layers)


def _shares(layers: Iterable[Layer]) -> Mapping[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for layer in layers:
        seconds[str(layer.precision)] += layer.seconds or 0.0
    total_s = sum(seconds.values())
    if not total_s:
        return {}
    largest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: part_s / total_s for name, part_s in largest_first}


def _shares_text(precision: Precision, shares: Mapping[str, float]) -> str:
    """Describe what the heavy layers run, the label's precision first."""
    texts = [f"{percent_text(shares.get(precision, 0.0))} {precision}"]
    for name, share in shares.items():
        if name != precision:
            texts.append(f"{percent_text(share)} {name}")
    return f"its heavy layers run {', '.join(texts)} by time"


def _slowest_text(judged: tuple[Layer, ...], table: LayerTable) -> str:
    total_s = _seconds(table.layers)
    texts = [
        f"{node_text(layer)} {layer.precision} {percent_text((layer.seconds or 0.0) / total_s)}"
        for layer in slowest(judged, SLOWEST_NAMED)
    ]
    return f"slowest: {', '.join(texts)} of all time"


def node_text(layer: Layer, most: int = 1) -> str:
    """Return the first ONNX nodes of a layer and the number of others, or the layer's own name."""
    nodes = layer.nodes or (layer.name,)
    return ", ".join(nodes[:most]) + _and_more(len(nodes) - most)


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def percent_text(share: float) -> str:
    """`45 %`, with a digit more near 0 and 1."""
    digits = 0 if 0.1 <= share <= 0.99 or share == 0.0 or share >= 1.0 else 1
    return f"{100 * share:.{digits}f} %"


# -- fusions -----------------------------------------------------------------


def fusions(table: LayerTable) -> tuple[str, ...]:
    """Describe which ONNX operators share a kernel.

    First attention and normalisation, then convolutions and Gemms with the operators fused into
    them. Empty if the operators of the nodes are unknown.
    """
    groups = Counter(text for layer in table.layers if (text := _fused_operators(layer)))
    lines = [
        f"{text} in one kernel: {count}"
        for text, count in sorted(groups.items(), key=lambda item: (-item[1], item[0]))
    ]
    return (*_attention(table), *_normalisation(table), *lines)


def _fused_operators(layer: Layer) -> str:
    """Return a text like `Conv + Add + Relu`, the heavy operators first.

    Empty for a single operator, and for attention, which has its own line.
    """
    counts = Counter(operator for operator in layer.operators if operator not in SILENT | SHAPES)
    if not layer.heavy or counts.total() < 2 or _is_attention(layer):
        return ""
    order = sorted(
        counts,
        key=lambda name: (
            name not in CONVOLUTIONS | MATMULS,
            name != "BatchNormalization",
            name != "Add",
            name,
        ),
    )
    return " + ".join(f"{counts[name]} {name}" if counts[name] > 1 else name for name in order)


def _is_attention(layer: Layer) -> bool:
    return (
        "Softmax" in layer.operators
        and sum(operator in MATMULS for operator in layer.operators) >= 2
    )


def _attention(table: LayerTable) -> tuple[str, ...]:
    fused, places = attention_in_one_kernel(table, _layers_by_node(table, "Softmax"))
    if not places:
        return ()
    return (f"attention (MatMul, Softmax, MatMul) in one kernel: {fused} of {places}",)


def attention_in_one_kernel(table: LayerTable, softmaxes: Iterable[str]) -> tuple[int, int]:
    """Return how many attentions of these Softmax nodes run in one kernel, and their total."""
    known = _layers_by_node(table, "Softmax")
    places = {node: known[node] for node in softmaxes if node in known}
    matmuls = sum(layer.operators.count("MatMul") for layer in table.layers)
    if matmuls < 2:
        return 0, 0
    fused = sum(any(_is_attention(layer) for layer in layers) for layers in places.values())
    return fused, len(places)


def _normalisation(table: LayerTable) -> tuple[str, ...]:
    """Describe the fusions of LayerNorm, as one operator or written out.

    A written-out LayerNorm is fused if a ReduceMean and the Sqrt share a kernel.
    """
    lines = []
    if places := _layers_by_node(table, "LayerNormalization"):
        fused = [layers[0] for layers in places.values() if len(layers) == 1]
        with_add = sum("Add" in layer.operators for layer in fused)
        line = f"LayerNormalization in one kernel: {len(fused)} of {len(places)}"
        lines.append(f"{line}, {with_add} with the Add before it" if with_add else line)
    places = _layers_by_node(table, "Sqrt")
    if places and _layers_by_node(table, "ReduceMean"):
        fused = [
            layers[0]
            for layers in places.values()
            if len(layers) == 1 and "ReduceMean" in layers[0].operators
        ]
        lines.append(
            f"LayerNorm written out (ReduceMean to Sqrt) in one kernel: {len(fused)} of"
            f" {len(places)}"
        )
    return tuple(lines)


def _layers_by_node(table: LayerTable, operator: str) -> Mapping[str, tuple[Layer, ...]]:
    """Return the layers that take part in each node of this operator."""
    places: dict[str, tuple[Layer, ...]] = {}
    for layer in table.layers:
        for node, node_operator in zip(layer.nodes, layer.operators, strict=False):
            if node_operator == operator and layer.precision != "none":
                places[node] = (*places.get(node, ()), layer)
    return places
