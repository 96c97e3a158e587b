"""The work of each layer of an engine, and its roofline: the least time at the device's peaks.

A layer computes the nodes of the model's graph that it names. What one node writes and another node
of the same layer reads stays in registers or caches, so it does not count as moved. Floats have the
width of the types that the layer reads and writes.

The roofline is the longer of two times: the layer's FLOPs at the peak of its precision, and its
bytes at the peak of the level of memory that holds them. Activations come from the smallest level
that holds all of the layer's bytes. Weights are read once per run, so they come from the smallest
level that holds the weights of the whole engine. A share over 1 is an error of this model: the
kernel saves multiplications (Winograd), data stayed in caches whose speed is not known, or the
peaks were measured on a busy host.
All functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.core.recipe import ITEM_BYTES, Precision, Recipe
from pipeline.host.gpu import Peaks
from pipeline.results.graph_node import GraphNode, NodeWork
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.results.precision_audit import FEW_BITS, NARROW, PRODUCTS

# Bytes of the types of layers. Other types, such as int64, are sizes and indices.
LAYER_BYTES = {
    **{str(precision): float(size) for precision, size in ITEM_BYTES.items()},
    **dict.fromkeys(("uint8", "i8", "u8"), 1.0),
    **dict.fromkeys(("uint4", "i4", "u4"), 0.5),
}
# Bytes of the types of a graph whose values take the width of the layer.
FLOAT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Limit(StrEnum):
    """Which of its two times is a layer's roofline."""

    ARITHMETIC = "arithmetic"
    MEMORY = "memory"


class Unknown(StrEnum):
    """Why the work or the roofline of a layer is not known, in a few words for tables."""

    NO_GRAPH = "no work in this report"
    OTHER_SIZES = "timed at other sizes"
    NO_NODES = "no node of the graph"
    NO_PRODUCT = "names no product"
    SHARED = "shares its nodes"
    SHAPES = "shapes not known"
    OPERATORS = "FLOPs not known"
    NO_WORK = "no work"
    PEAKS = "peaks not known"
    PRECISION = "no peak of its precision"
    TIME = "not timed"


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one layer, and its roofline as far as it is known."""

    flops: float | None = None
    moved_bytes: float | None = None
    weight_bytes: float = 0.0  # of them constants
    least_s: float | None = None  # the roofline
    limit: Limit | None = None
    level: str = ""  # of memory, if that is the limit: the one that takes longest
    share: float | None = None  # the roofline of the measured time
    unknown: Unknown | None = None  # why there is no share

    @property
    def is_above_peak(self) -> bool:
        """True for a share above 100 %, which no device can reach: an error of the model."""
        return self.share is not None and self.share > 1.0


def work_of_layers(
    graph: Sequence[GraphNode],
    sizes: Mapping[str, int] | None,
    table: LayerTable,
    recipe: Recipe,
    peaks: Peaks | None,
) -> tuple[LayerWork, ...]:
    """Return the work of each layer of a table, in its order.

    `sizes`: those at which the work of the graph is counted; None: it is not counted. `peaks`: of
    the device on which the layers were timed; None: they are not known.
    """
    if sizes is None:
        return (LayerWork(unknown=Unknown.NO_GRAPH),) * len(table.layers)
    if any(table.sizes.get(symbol, size) != size for symbol, size in sizes.items()):
        return (LayerWork(unknown=Unknown.OTHER_SIZES),) * len(table.layers)
    works = _Graph(graph).works(table.layers, recipe)
    weights = sum(work.weight_bytes for work in works)
    return tuple(
        _with_roofline(work, layer, peaks, weights)
        for work, layer in zip(works, table.layers, strict=True)
    )


class _Graph:
    """The nodes of a graph by name, and the readers of each."""

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self.nodes = nodes
        self.indices: dict[str, list[int]] = defaultdict(list)
        self.readers: dict[int, set[int]] = defaultdict(set)
        for index, node in enumerate(nodes):
            if node.operator not in ("input", "output"):
                self.indices[node.name].append(index)
            for read in node.reads:
                self.readers[read].add(index)

    def works(self, layers: Sequence[Layer], recipe: Recipe) -> tuple[LayerWork, ...]:
        named = [self._indices_of(layer) for layer in layers]
        every = frozenset(index for found in self.indices.values() for index in found)
        unnamed = every.difference(*named)
        held = [
            self._with_product(indices, unnamed) if layer.heavy else indices
            for layer, indices in zip(layers, named, strict=True)
        ]
        owners = _owners(layers, held)
        works = []
        for position, (layer, indices) in enumerate(zip(layers, held, strict=True)):
            is_whole = all(owners[index] == position for index in indices)
            works.append(self._work(layer, indices, is_whole, recipe))
        return tuple(works)

    def _indices_of(self, layer: Layer) -> frozenset[int]:
        return frozenset(index for name in layer.nodes for index in self.indices.get(name, ()))

    def _with_product(self, indices: frozenset[int], unnamed: frozenset[int]) -> frozenset[int]:
        """Add the product to the nodes of a heavy layer that names none.

        OpenVINO calls a MatMul with a bias by the name of the Add alone. No layer names that
        product, and no other node reads it.
        """
        if self._has_product(indices):
            return indices
        read = {source for index in indices for source in self.nodes[index].reads}
        products = [
            source
            for source in read & unnamed
            if self._has_product({source}) and self.readers[source] <= indices
        ]
        return indices | {products[0]} if len(products) == 1 else indices

    def _has_product(self, indices: Iterable[int]) -> bool:
        return not PRODUCTS.isdisjoint(self.nodes[index].operator for index in indices)

    def _work(
        self, layer: Layer, indices: frozenset[int], is_whole: bool, recipe: Recipe
    ) -> LayerWork:
        """Return the work of a layer that computes these nodes, without its roofline."""
        if not indices:
            return LayerWork(unknown=Unknown.NO_NODES)
        if layer.heavy and not self._has_product(indices):
            return LayerWork(unknown=Unknown.NO_PRODUCT)
        if not is_whole:
            return LayerWork(unknown=Unknown.SHARED)
        works = {index: self.nodes[index].work for index in indices}
        known = {index: work for index, work in works.items() if work is not None}
        if len(known) < len(works):
            return LayerWork(unknown=Unknown.SHAPES)
        moved_bytes = weight_bytes = 0.0
        if any(work.moved_bytes for work in known.values()):  # else they are all views
            widths = _Widths.of(layer, recipe)
            weight_bytes = sum(
                _scaled(work.weight_bytes, work.weight_dtype, widths.weights)
                for work in known.values()
            )
            moved_bytes = weight_bytes + self._activation_bytes(known, widths)
        flops = [work.flops for work in known.values() if work.flops is not None]
        if len(flops) < len(known):
            return LayerWork(
                moved_bytes=moved_bytes, weight_bytes=weight_bytes, unknown=Unknown.OPERATORS
            )
        return LayerWork(flops=sum(flops), moved_bytes=moved_bytes, weight_bytes=weight_bytes)

    def _activation_bytes(self, works: Mapping[int, NodeWork], widths: _Widths) -> float:
        """Return what nodes in one layer read from others, and what they write for others."""
        read: dict[int, float] = {}
        written = 0.0
        for index, work in works.items():
            for source, count in zip(self.nodes[index].reads, work.read_bytes, strict=True):
                if source not in works:
                    scaled = _scaled(count, self._dtype_of(source), widths.read)
                    read[source] = max(read.get(source, 0.0), scaled)
            if not self.readers[index] <= works.keys():
                written += _scaled(work.written_bytes, work.dtype, widths.written)
        return sum(read.values()) + written

    def _dtype_of(self, index: int) -> str:
        work = self.nodes[index].work
        return work.dtype if work else ""


def _owners(layers: Sequence[Layer], held: Sequence[frozenset[int]]) -> dict[int, int | None]:
    """Return the position of the layer that computes each node.

    Of several that name a node it is the heavy one. None: several are heavy, or none.
    """
    positions: dict[int, list[int]] = defaultdict(list)
    for position, indices in enumerate(held):
        for index in indices:
            positions[index].append(position)
    owners: dict[int, int | None] = {}
    for index, candidates in positions.items():
        heavy = [position for position in candidates if layers[position].heavy]
        chosen = candidates if len(candidates) == 1 else heavy
        owners[index] = chosen[0] if len(chosen) == 1 else None
    return owners


@dataclass(frozen=True, slots=True)
class _Widths:
    """Bytes of the floats of a layer; None: those of the graph."""

    read: float | None
    weights: float | None
    written: float | None

    @classmethod
    def of(cls, layer: Layer, recipe: Recipe) -> _Widths:
        own = ITEM_BYTES.get(layer.precision) if isinstance(layer.precision, Precision) else None
        read = _first_width(layer.inputs, own)
        weights = own if layer.heavy else read
        if recipe.weight_only and (layer.kind == NARROW or FEW_BITS & {*layer.inputs[1:]}):
            weights = ITEM_BYTES[recipe.precision]
        return cls(read, weights, _first_width(layer.outputs, own))


def _first_width(dtypes: Iterable[str], default: float | None) -> float | None:
    return next((LAYER_BYTES[dtype] for dtype in dtypes if dtype in LAYER_BYTES), default)


def _scaled(count: float, dtype: str, width: float | None) -> float:
    """Return bytes of this type of the graph as they are with the width of a layer."""
    if width is None or dtype not in FLOAT_BYTES:
        return count
    return count * width / FLOAT_BYTES[dtype]


# -- the roofline ------------------------------------------------------------


def _with_roofline(work: LayerWork, layer: Layer, peaks: Peaks | None, weights: float) -> LayerWork:
    """Add the roofline of a layer, or why it is not known. `weights`: bytes of all layers'."""
    if work.unknown or work.moved_bytes is None:
        return work
    if not (work.flops or work.moved_bytes):
        return replace(work, unknown=Unknown.NO_WORK)
    if peaks is None or not peaks.bytes_per_s:
        return replace(work, unknown=Unknown.PEAKS)
    memory_s, level = _memory_s(work, peaks, weights)
    arithmetic_s = _arithmetic_s(work, layer, peaks)
    if arithmetic_s is None:
        return replace(work, unknown=Unknown.PRECISION)
    least_s = max(arithmetic_s, memory_s)
    limit = Limit.ARITHMETIC if arithmetic_s > memory_s else Limit.MEMORY
    bounded = replace(
        work, least_s=least_s, limit=limit, level=level if limit is Limit.MEMORY else ""
    )
    if not layer.seconds:
        return replace(bounded, unknown=Unknown.TIME)
    return replace(bounded, share=least_s / layer.seconds)


def _memory_s(work: LayerWork, peaks: Peaks, weights: float) -> tuple[float, str]:
    """Return the least time to move a layer's bytes, and the level that takes longest."""
    moved_bytes = work.moved_bytes or 0.0
    parts = [
        (moved_bytes - work.weight_bytes, peaks.level_of(moved_bytes)),
        (work.weight_bytes, peaks.level_of(max(moved_bytes, weights))),
    ]
    times = [(count / level.bytes_per_s, level.name) for count, level in parts]
    return sum(seconds for seconds, _ in times), max(times)[1]


def _arithmetic_s(work: LayerWork, layer: Layer, peaks: Peaks) -> float | None:
    """Return the time of a layer's FLOPs at the peak of its precision; None if that is not known.

    The arithmetic of layers that are not heavy takes less time than their data: it counts as 0
    where no peak is known.
    """
    peak = None
    if isinstance(layer.precision, Precision):
        peak = peaks.flops_per_s.get(layer.precision)
    if not peak:
        return None if layer.heavy else 0.0
    return (work.flops or 0.0) / peak
