"""Sensitivity: rank the nodes of a reduced-precision graph (int8, fp16, bf16) by their errors.

The errors are measured on real samples. The worst node comes first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors
from pipeline.data.batch import Batch
from pipeline.data.samples import SampleSet
from pipeline.onnx_graph.activations import (
    NOTHING,
    Bounds,
    Probe,
    bounds_of,
    merge,
    open_probe,
    rows_per_run,
    with_aliases,
)
from pipeline.onnx_graph.files import external_files, onnx_model, read_proto, write_proto
from pipeline.quantization.half_precision import DTYPES, MAX_FP16, SAFE_FRACTION
from pipeline.quantization.insert_qdq import holds_qdq
from pipeline.quantization.sensitivity_graph import (
    Shadow,
    add_shadows,
    source_as_converted,
    tensors_of_16_bits,
)
from pipeline.results.candidates import NodeHarm, NodeRanking

MAX_SAMPLES = 128
"""Number of samples, besides the worst ones: each run holds every activation three times."""

AMPLIFIED = {Precision.FP16: 2.0**-8, Precision.BF16: 2.0**-5}
"""Relative error above which a node amplifies errors.

Rounding of its inputs and outputs alone gives about an eighth of it.
"""

FLOAT = np.dtype(np.float32)
HALVES = frozenset(DTYPES.values())
MASKED = 1e30  # larger magnitudes stand for infinity: a mask of -3.4e38 is infinite in bf16
MAX_ERROR = 1e6  # the error of values that become NaN or infinite

NORMALISATIONS = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "GroupNormalization",
        "InstanceNormalization",
        "MeanVarianceNormalization",
        "LpNormalization",
    }
)
"""Operators that sum squares, which overflow fp16 at far smaller values than their inputs do."""

SUMS = frozenset(
    {
        "Softmax",
        "LogSoftmax",
        "ReduceMean",
        "ReduceSum",
        "ReduceProd",
        "ReduceL1",
        "ReduceLogSumExp",
        "GlobalAveragePool",
    }
)
PARTS = frozenset({"Pow", "Sqrt", "Reciprocal", "Div", "Exp", "Log"})
"""Operators from which exporters build the ones above."""

DELICATE = NORMALISATIONS | SUMS | PARTS
"""Sums over many values, and the operators that follow them.

A kernel may add the values in 16 bits, which the shadows do not show.
"""


def rank_nodes(
    source: OnnxModel,
    low: OnnxModel,
    samples: SampleSet,
    worst: tuple[int, ...],
    out: Path,
    progress: Progress = silent,
) -> NodeRanking:
    """Rank the reduced-precision nodes of `low`, which `convert` made from `source`.

    `worst` are the indices of samples to run in any case.
    """
    progress(0.0, "writing the graph with its shadows")
    lossy = read_proto(low.path)
    exact = source_as_converted(read_proto(source.path), lossy)
    if low.precision is Precision.INT8 and holds_qdq(exact.graph):
        return NodeRanking(
            failure=(
                "the model has its own Q/DQ pairs, and every scale is kept: to run a node in fp32,"
                " remove its pairs before the compile"
            )
        )
    shadows = add_shadows(exact, lossy, tensors_of_16_bits(read_proto(low.path, weights=False)))
    exact_names: set[str] = set()
    lossy_names: set[str] = set()
    for shadow in shadows:
        exact_names.update(shadow.tensors)
        for exact_name, shadow_name, lossy_name in shadow.outputs:
            exact_names |= {exact_name, shadow_name}
            lossy_names.add(lossy_name)
    exact_probe = _probe_of(exact, out / "shadows.onnx", exact_names)
    lossy_probe = _probe_of(lossy, out / "lossy.onnx", lossy_names)
    batches = _batches_to_run(exact_probe, samples, worst, progress)
    dtype = DTYPES.get(low.precision, FLOAT)
    observations = _observe(exact_probe, lossy_probe, batches, shadows, dtype)
    harms = (_harm(shadow, observations, low.precision) for shadow in shadows)
    nodes = sorted((harm for harm in harms if worth_keeping(harm, low.precision)), key=_worst_first)
    return NodeRanking(nodes=tuple(nodes), samples=observations.samples)


def _probe_of(proto: onnx.ModelProto, file: Path, tensors: Collection[str]) -> Probe:
    """Load a graph that outputs `tensors`. Remove its files, which are as large as the model."""
    write_proto(proto, file)
    probe = open_probe(onnx_model(file.parent, file.name))
    for path in (*external_files(file), file):
        path.unlink()
    sources = {probe.aliases.get(name, name) for name in tensors}
    return replace(probe, outputs=tuple(name for name in probe.outputs if name in sources))


def worth_keeping(harm: NodeHarm, precision: Precision) -> bool:
    """Return True if fp32 may help a node.

    That is every 8-bit node, and a 16-bit node that overflows, is delicate or amplifies errors.
    """
    if precision not in AMPLIFIED:
        return True
    return harm.overflows or harm.operator in DELICATE or harm.error > AMPLIFIED[precision]


def _worst_first(harm: NodeHarm) -> tuple[float, float]:
    return (-harm.largest if harm.overflows else 0.0, -harm.error)


def _harm(shadow: Shadow, observations: _Observations, precision: Precision) -> NodeHarm:
    bounds = [observations.bounds.get(name, NOTHING) for name in shadow.tensors]
    largest = max((bound.largest for bound in bounds), default=0.0)
    return NodeHarm(
        node=shadow.node,
        operator=shadow.operator,
        largest=largest,
        overflows=precision is Precision.FP16 and overflows(shadow.operator, largest),
        error=observations.own[shadow.node],
        accumulated=observations.accumulated[shadow.node],
    )


def overflows(operator: str, largest: float) -> bool:
    """Return True if values of this size are too near to the limit of fp16.

    For an operator that sums squares, the squares count.
    """
    magnitude = largest**2 if operator in NORMALISATIONS else largest
    return magnitude > SAFE_FRACTION * MAX_FP16


@dataclass(slots=True)
class _Observations:
    """Results of the runs: bounds by tensor of the model, and the largest errors by node."""

    samples: int = 0
    bounds: dict[str, Bounds] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    accumulated: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add_errors(self, node: str, own: float, accumulated: float) -> None:
        self.own[node] = max(self.own[node], own)
        self.accumulated[node] = max(self.accumulated[node], accumulated)


def _observe(
    exact: Probe,
    lossy: Probe,
    batches: Iterator[Batch],
    shadows: Sequence[Shadow],
    dtype: np.dtype[np.generic],
) -> _Observations:
    """Run the batches through both graphs."""
    observations = _Observations()
    bounded = frozenset(name for shadow in shadows for name in shadow.tensors)
    for batch in batches:
        feeds = _as_fp32(batch.feeds)
        values = with_aliases(exact, dict(exact.run(feeds)))
        lossy_values = with_aliases(lossy, dict(lossy.run(feeds)))
        for name in bounded.intersection(values):
            bounds = observations.bounds.get(name, NOTHING)
            observations.bounds[name] = merge(bounds, bounds_of(values[name]))
        for shadow in shadows:
            for name, shadow_name, lossy_name in shadow.outputs:
                if name not in values:  # integers, or computed from constants only
                    continue
                own = relative_error(values[name], values[shadow_name], dtype)
                accumulated = relative_error(values[name], lossy_values[lossy_name], dtype)
                observations.add_errors(shadow.node, own, accumulated)
        observations.samples += batch.samples
    return observations


def _batches_to_run(
    probe: Probe, samples: SampleSet, worst: tuple[int, ...], progress: Progress
) -> Iterator[Batch]:
    """Yield the batches of the first samples, and those with the worst ones."""
    first = next(iter(samples.batches(1)))
    size = min(rows_per_run(probe, _as_fp32(first.feeds), first.samples), MAX_SAMPLES)
    last, count = max((MAX_SAMPLES - 1, *worst)), 0
    for batch in takewhile(lambda batch: batch.first <= last, samples.batches(size)):
        holds_worst = any(batch.first <= index < batch.first + batch.samples for index in worst)
        if batch.first < MAX_SAMPLES or holds_worst:
            share = min(count / min(samples.samples, MAX_SAMPLES), 1.0)
            progress(share, f"{count} samples run")
            count += batch.samples
            yield batch


def _as_fp32(feeds: Tensors) -> Tensors:
    return {
        name: array.astype(np.float32) if array.dtype in HALVES else array
        for name, array in feeds.items()
    }


def relative_error(
    exact: NDArray[np.float32], low: NDArray[np.float32], dtype: np.dtype[np.generic]
) -> float:
    """Return the norm of the error of `low`, rounded to `dtype`, over the norm of `exact`.

    The result is MAX_ERROR if values become NaN or infinite. Infinite values of `exact`, and
    values that stand for infinity in a mask, are excluded.
    """
    counted = np.abs(exact) < MASKED  # False for NaN
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        rounded = low.astype(dtype).astype(np.float64)[counted]
    if not np.isfinite(rounded).all():
        return MAX_ERROR
    norm = _euclidean_norm(exact[counted])
    loss = _euclidean_norm(rounded - exact[counted])
    if norm == 0:
        return 0.0 if loss == 0 else MAX_ERROR
    return min(loss / norm, MAX_ERROR)


def _euclidean_norm(values: NDArray[np.floating[Any]]) -> float:
    return math.sqrt(float(np.square(values, dtype=np.float64).sum()))
