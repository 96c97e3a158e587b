"""What precision an engine really runs in: the verdict on a layer table, and its fusions in words.
Pure.

Heavy layers decide: convolutions, Gemms, MatMuls, attention. What stands between them (pooling,
Softmax, casts) says nothing about the precision that an engine is called by, and a recipe may keep
some of it in fp32.
"""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.core import KeptNode, Note, Precision
from pipeline.results.layer_table import Layer, LayerTable

MAX_UNKNOWN = 0.1  # of the time; above, a warning names the layers
MAX_MOVING = 0.1  # of the time; above, a note says so
# of the time of heavy layers whose precision is known:
# that an fp32 engine may spend in TF32 or less; TensorRT's fp32 engines measured 0, so this is
# rounding
MAX_BELOW_FP32 = 0.01
# that must run in the precision of a tf32, fp16 or bf16 engine; measured 0.99 to 1, nodes kept in
# fp32 take their part
MIN_FLOAT = 0.5
# what a product reads beside floats if its weights have few bits
FEW_BITS = frozenset({"int8", "uint8", "int4", "uint4", "i4", "u4"})
# ONNX Runtime's product with such weights; its profile leaves out inputs that a kernel packed for
# itself
NARROW = "MatMulNBits"
# of an int8 or fp8 engine; below MIN_FLOAT is a warning. Measured 0.97 to 1; placement may leave
# much out
MIN_QUANTISED = 0.1

SLOWEST_NAMED = 3
UNKNOWN_NAMED = 5
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "ConvInteger", "QLinearConv"})
INTEGER_OPERATORS = frozenset(
    {"MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"}
)
"""Of ONNX's own; a model that holds them computes in 8 bits whatever an engine of it is called."""

MATMULS = frozenset({"MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"})
PRODUCTS = CONVOLUTIONS | MATMULS | frozenset({"Attention", "Einsum", "GRU", "LSTM", "RNN"})
# do not make a fusion worth telling
SILENT = frozenset({"", "Cast", "QuantizeLinear", "DequantizeLinear", "Identity", "Constant"})
SHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})  # nor do these


@dataclass(frozen=True, slots=True)
class Reformats:
    """Layers that only move or convert data."""

    count: int
    share: float  # of the time


def time_by_precision(table: LayerTable) -> Mapping[str, float]:
    """Share of the time per precision, largest first; layers that move or convert data count as
    `none`.
    """
    return _shares(table.layers)


def ran_in(called: Precision, table: LayerTable | None) -> Precision:
    """The precision in which the heavy layers spend most of their time; what the engine is called
    by where nothing is known of them.
    """
    shares = _shares(layer for layer in table.layers if layer.heavy) if table else {}
    known = [Precision(name) for name in shares if name in list(Precision)]
    return known[0] if known else called


def reformats(table: LayerTable) -> Reformats:
    """How many layers only move or convert data, and their share of the time."""
    count = sum(layer.precision == "none" for layer in table.layers)
    return Reformats(count, time_by_precision(table).get("none", 0.0))


def slowest(layers: Iterable[Layer], count: int) -> tuple[Layer, ...]:
    """The layers that take the most time, slowest first; those without a time are left out."""
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
    """Why an engine does not run what it is called by, with the shares and the slowest layers;
    empty if it does or nothing is known.

    fp32 fails with more than 1 % of the heavy layers' time in TF32 or less, tf32, fp16 and bf16
    with less than half of it in that very precision, int8 and fp8 with less than a tenth: TensorRT
    may leave layers in 16 bits that are faster there. `kept` are the patterns of the nodes that the
    recipe itself keeps in fp32: they are asked for, so they count neither way (fp32 takes four
    times as long as fp16). `forced` are the nodes that the conversion left in fp32. Candidate.title
    counts them, so an engine of nothing else is no false label. Of weights alone the products are
    of floats: what they read decides, and a tenth of the time must go to weights in 4 or 8 bits.
    """
    judged = _judged(table, kept, forced)
    if not judged and any(layer.heavy for layer in table.layers):
        return (
            ""
            if _judged(table, kept)
            else f"called {precision}, but every heavy layer is kept in fp32"
        )
    if weight_only:
        return _wide_weights(precision, judged)
    shares = _known_shares(precision, judged)
    if not shares:
        return ""
    share = shares.get(precision, 0.0)
    if precision is Precision.FP32:
        wrong = 1.0 - share > MAX_BELOW_FP32
    else:
        wrong = share < (
            MIN_QUANTISED if precision in (Precision.INT8, Precision.FP8) else MIN_FLOAT
        )
    return (
        f"called {precision}, but {_told(precision, shares)}; {_named_slowest(judged, table)}"
        if wrong
        else ""
    )


def _wide_weights(precision: Precision, heavy: tuple[Layer, ...]) -> str:
    """Why an engine does not hold the weights it is called by; empty if it does, or if of most of
    the time it is not known.
    """
    known = [layer for layer in heavy if layer.inputs]
    narrow = _seconds(
        layer for layer in known if layer.kind == NARROW or FEW_BITS.intersection(layer.inputs[1:])
    )
    if (
        not _seconds(known)
        or _seconds(known) < 0.5 * _seconds(heavy)
        or narrow >= MIN_QUANTISED * _seconds(known)
    ):
        return ""
    share = percent_text(narrow / _seconds(known))
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
    """What a reader must know of a table: where the evidence ends, what moving data costs, what the
    nodes in fp32 cost, and that int8 or fp8 is the smaller part.
    """
    notes = [*_forced_notes(table, precision, kept, forced)]
    if (unknown := time_by_precision(table).get("unknown", 0.0)) > MAX_UNKNOWN:
        layers = [
            layer
            for layer in slowest(table.layers, len(table.layers))
            if layer.precision == "unknown"
        ]
        names = ", ".join(layer.name for layer in layers[:UNKNOWN_NAMED]) + _and_more(
            len(layers) - UNKNOWN_NAMED
        )
        notes.append(
            Note(
                stage="prove",
                text=f"the precision of {percent_text(unknown)} of the time is not known: {names}",
            )
        )
    found = reformats(table)
    if found.share > MAX_MOVING:
        text = (
            f"{percent_text(found.share)} of the time goes to {found.count} layers that only move"
            " or convert data"
        )
        notes.append(Note(stage="prove", text=text, level="info"))
    if precision in (Precision.INT8, Precision.FP8):
        shares = _known_shares(precision, _judged(table, kept, forced))
        if MIN_QUANTISED <= shares.get(precision, 0.0) < MIN_FLOAT:
            notes.append(
                Note(
                    stage="prove",
                    text=f"{precision} is the smaller part: {_told(precision, shares)}",
                )
            )
    return tuple(notes)


def _forced_notes(
    table: LayerTable,
    precision: Precision | None,
    kept: tuple[str, ...],
    forced: Sequence[KeptNode],
) -> Iterable[Note]:
    """What the nodes that stay in fp32 cost; a warning where nothing heavy is left for the
    precision of the label.
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
    """The share of the time that the nodes take which the conversion left in fp32."""
    whole = _seconds(table.layers)
    return (
        _seconds(layer for layer in table.layers if _is_forced(layer, forced)) / whole
        if whole
        else 0.0
    )


def _judged(
    table: LayerTable, kept: tuple[str, ...], forced: Sequence[KeptNode] = ()
) -> tuple[Layer, ...]:
    """The heavy layers, without those that run in fp32 because the recipe or the conversion says
    so.
    """

    def is_kept(layer: Layer) -> bool:
        named = any(fnmatch.fnmatch(node, pattern) for node in layer.nodes for pattern in kept)
        return (named and _is_full(layer)) or _is_forced(layer, forced)

    return tuple(layer for layer in table.layers if layer.heavy and not is_kept(layer))


def _is_full(layer: Layer) -> bool:
    return layer.precision in (Precision.FP32, Precision.TF32)


def _is_forced(layer: Layer, forced: Sequence[KeptNode]) -> bool:
    """Whether a layer runs in fp32 and computes a node that the conversion left so."""
    named = not {each.node for each in forced}.isdisjoint(layer.nodes)
    in_loop = any(each.unnamed for each in forced) and _names_no_product(layer)
    return _is_full(layer) and (named or in_loop)


def _names_no_product(layer: Layer) -> bool:
    """Whether none of the nodes that a layer names multiplies matrices: its product is that of a
    node it does not name.
    """
    known = all(layer.operators) and len(layer.operators) == len(layer.nodes)
    return known and PRODUCTS.isdisjoint(layer.operators)


def _known_shares(precision: Precision, heavy: tuple[Layer, ...]) -> Mapping[str, float]:
    """Shares of the heavy layers' time as far as its precision is known; empty if less than half of
    it is.

    FP32 inputs and outputs are proof of neither fp32 nor TF32, so for a tf32 engine a layer known
    by them alone is not known.
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
    whole = sum(seconds.values())
    return (
        {name: part / whole for name, part in sorted(seconds.items(), key=lambda item: -item[1])}
        if whole
        else {}
    )


def _told(precision: Precision, shares: Mapping[str, float]) -> str:
    """What the heavy layers run, the precision asked for first."""
    others = [
        f"{percent_text(share)} {name}" for name, share in shares.items() if name != precision
    ]
    return (
        "its heavy layers run"
        f" {', '.join([f'{percent_text(shares.get(precision, 0.0))} {precision}', *others])} by"
        " time"
    )


def _named_slowest(judged: tuple[Layer, ...], table: LayerTable) -> str:
    whole = _seconds(table.layers)
    named = [
        f"{node_text(layer)} {layer.precision} {percent_text((layer.seconds or 0.0) / whole)}"
        for layer in slowest(judged, SLOWEST_NAMED)
    ]
    return f"slowest: {', '.join(named)} of all time"


def node_text(layer: Layer, most: int = 1) -> str:
    """The first ONNX nodes of a layer and how many more there are; its own name where it has
    none.
    """
    nodes = layer.nodes or (layer.name,)
    return ", ".join(nodes[:most]) + _and_more(len(nodes) - most)


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def percent_text(share: float) -> str:
    """`45 %`, with a digit more near 0 and 1."""
    return (
        f"{100 * share:.0f} %"
        if 0.1 <= share <= 0.99 or share in (0.0, 1.0)
        else f"{100 * share:.1f} %"
    )


# -- fusions -----------------------------------------------------------------


def fusions(table: LayerTable) -> tuple[str, ...]:
    """Which ONNX operators share a kernel, in words: attention and normalisation first, then
    convolutions and Gemms with what they took in.

    Empty where the operators of the nodes are not known.
    """
    groups = Counter(text for layer in table.layers if (text := _merged(layer)))
    each = [
        f"{text} in one kernel: {count}"
        for text, count in sorted(groups.items(), key=lambda item: (-item[1], item[0]))
    ]
    return (*_attention(table), *_normalisation(table), *each)


def _merged(layer: Layer) -> str:
    """`Conv + Add + Relu`, the heavy operators first; empty for one operator, and for attention,
    which has a line of its own.
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
    fused, places = attention_in_one_kernel(table, _places(table, "Softmax"))
    return (
        (f"attention (MatMul, Softmax, MatMul) in one kernel: {fused} of {places}",)
        if places
        else ()
    )


def attention_in_one_kernel(table: LayerTable, softmaxes: Iterable[str]) -> tuple[int, int]:
    """Of the attentions of these Softmax nodes: how many one kernel computes as a whole, and how
    many there are.
    """
    known = _places(table, "Softmax")
    places = {node: known[node] for node in softmaxes if node in known}
    if sum(operator == "MatMul" for layer in table.layers for operator in layer.operators) < 2:
        return 0, 0
    return sum(any(_is_attention(layer) for layer in layers) for layers in places.values()), len(
        places
    )


def _normalisation(table: LayerTable) -> tuple[str, ...]:
    """LayerNorm as one operator, or written out: then a ReduceMean and the Sqrt share a kernel."""
    found = []
    if places := _places(table, "LayerNormalization"):
        whole = [layers[0] for layers in places.values() if len(layers) == 1]
        added = sum("Add" in layer.operators for layer in whole)
        found.append(
            f"LayerNormalization in one kernel: {len(whole)} of {len(places)}"
            + f", {added} with the Add before it" * bool(added)
        )
    places = _places(table, "Sqrt")
    if places and _places(table, "ReduceMean"):
        whole = [
            layers[0]
            for layers in places.values()
            if len(layers) == 1 and "ReduceMean" in layers[0].operators
        ]
        found.append(
            f"LayerNorm written out (ReduceMean to Sqrt) in one kernel: {len(whole)} of"
            f" {len(places)}"
        )
    return tuple(found)


def _places(table: LayerTable, operator: str) -> Mapping[str, tuple[Layer, ...]]:
    """The kernels that take part in each node of this operator."""
    places: dict[str, tuple[Layer, ...]] = {}
    for layer in table.layers:
        for node, its in zip(layer.nodes, layer.operators, strict=False):
            if its == operator and layer.precision != "none":
                places[node] = (*places.get(node, ()), layer)
    return places
