"""Where the time of an engine goes: by class of operator, and beside its kernels. Pure.

The classes are those of Ivanov et al., Data Movement Is All You Need (2020): contractions,
normalisations with their reductions, and element-wise operators; and what only moves data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.results.benchmarks import LatencyRow
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.results.precision_audit import SHAPES, SILENT


class OperatorClass(StrEnum):
    """What the operators of a layer do. A fused layer has the first class that fits."""

    PRODUCT = "matrix products"
    NORMALISATION = "normalisation"
    ELEMENTWISE = "element-wise"
    LAYOUT = "layout"
    OTHER = "other"


NORMALISING = frozenset(
    """BatchNormalization GroupNormalization InstanceNormalization LayerNormalization
    LogSoftmax LpNormalization LRN MeanVarianceNormalization MVN ReduceMean ReduceSum
    RMSNormalization SimplifiedLayerNormalization SkipLayerNormalization
    Softmax""".split()  # noqa: SIM905
)
MOVING = (SHAPES | SILENT) - {""} | frozenset(
    """Concat DepthToSpace Expand Gather GatherElements GatherND Pad Shape Slice SpaceToDepth
    Split Tile""".split()  # noqa: SIM905
)
ELEMENTWISE = frozenset(
    """Abs Add And BiasGelu Ceil Clip Cos Div Eltwise Elu Equal Erf Exp FastGelu Floor Gelu Greater
    GreaterOrEqual HardSigmoid HardSwish LeakyRelu Less LessOrEqual Log Max Min Mish Mul Neg Not Or
    PRelu Pow QuickGelu Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Sum
    Swish Tanh Where Xor""".split()  # noqa: SIM905
)


def class_of(layer: Layer) -> OperatorClass:
    """Return the class of a layer, by its operators, or else by the library's own word for it."""
    operators = {name for name in layer.operators if name} or {layer.kind}
    if layer.heavy:
        return OperatorClass.PRODUCT
    if layer.precision == "none" or operators <= MOVING:
        return OperatorClass.LAYOUT
    if operators & NORMALISING:
        return OperatorClass.NORMALISATION
    if operators <= ELEMENTWISE | MOVING:
        return OperatorClass.ELEMENTWISE
    return OperatorClass.OTHER


def time_by_class(layers: Sequence[Layer]) -> Mapping[OperatorClass, float]:
    """Return the share of the time of each class, in the order of `OperatorClass`.

    Empty if no layer was timed.
    """
    total_s = sum(layer.seconds or 0.0 for layer in layers)
    if not total_s:
        return {}
    seconds = dict.fromkeys(OperatorClass, 0.0)
    for layer in layers:
        seconds[class_of(layer)] += layer.seconds or 0.0
    return {each: part_s / total_s for each, part_s in seconds.items()}


@dataclass(frozen=True, slots=True)
class Overhead:
    """One run of an engine, from outside in, in seconds: medians at the sizes of its layers."""

    wall_s: float  # end to end, on the host's clock
    compute_s: float  # of the device, or of the call on a CPU
    kernels_s: float  # sum of its layers, each timed by itself

    @property
    def host_s(self) -> float:
        """Binding, copying and fetching: the wall without computing."""
        return self.wall_s - self.compute_s

    @property
    def gaps_s(self) -> float:
        """Computing without kernels; below 0: timing the layers made them slower."""
        return self.compute_s - self.kernels_s

    @property
    def factor(self) -> float:
        """What to multiply the layers' times by, so that they are those of the unprofiled run.

        Times that leave a gap stay as they are: the gap is not theirs.
        """
        return min(1.0, self.compute_s / self.kernels_s)


def overhead(table: LayerTable, rows: Sequence[LatencyRow]) -> Overhead | None:
    """Return the overhead of an engine; None if it was not measured at the sizes of its layers."""
    kernels_s = sum(layer.seconds or 0.0 for layer in table.layers)
    row = next((row for row in rows if row.sizes == table.sizes), None)
    if row is None or not kernels_s:
        return None
    return Overhead(row.end_to_end.median_s, row.compute.median_s, kernels_s)


def scaled(table: LayerTable, factor: float) -> LayerTable:
    """Return the table with all times multiplied by a factor."""
    if factor == 1.0:
        return table
    layers = tuple(
        layer
        if layer.seconds is None
        else layer.model_copy(update={"seconds": layer.seconds * factor})
        for layer in table.layers
    )
    return table.model_copy(update={"layers": layers})
