"""Rank: which nodes of a low graph (int8, fp16, bf16) lose the most, by what real samples do in
them; the worst first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from pipeline.core import OnnxModel, Precision, Progress, Tensors, silent
from pipeline.data.samples import Batch, SampleSet
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
from pipeline.quantization.half_precision import DTYPES, LARGEST_FP16, SAFE_FRACTION
from pipeline.quantization.insert_qdq import holds_qdq
from pipeline.quantization.sensitivity_graph import (
    Shadow,
    add_shadows,
    source_as_converted,
    tensors_of_16_bits,
)
from pipeline.results.report import NodeHarm, NodeRanking

MOST_SAMPLES = (
    128  # looked at, and the worst ones besides: each run holds every activation three times
)
AMPLIFIED = {Precision.FP16: 2.0**-8, Precision.BF16: 2.0**-5}
"""Relative error of a node that does more than round: rounding its inputs and outputs alone costs
about an eighth of it.
"""

FLOAT = np.dtype(np.float32)
HALVES = frozenset(DTYPES.values())
MEANS_NEVER = 1e30  # a mask of -3.4e38 is infinite in bf16, and as good
MOST_ERROR = 1e6  # stands for "nothing is left": values become NaN or infinite

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
"""They sum up squares: in fp16 those overflow where the values themselves are far from it."""

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
PARTS = frozenset(
    {"Pow", "Sqrt", "Reciprocal", "Div", "Exp", "Log"}
)  # of which exporters build the ones above
DELICATE = NORMALISATIONS | SUMS | PARTS
"""Sums over many values, and what follows them: a kernel may add them up in 16 bits, which the
shadows do not show.
"""


def rank_nodes(
    source: OnnxModel,
    low: OnnxModel,
    samples: SampleSet,
    worst: tuple[int, ...],
    out: Path,
    progress: Progress = silent,
) -> NodeRanking:
    """Rank the nodes that run low in `low`, as `convert` made it of `source`. `worst` are samples
    to look at in any case, by index.
    """
    progress(0.0, "writing the graph with its shadows")
    lossy = read_proto(low.path)
    exact = source_as_converted(read_proto(source.path), lossy)
    if low.precision is Precision.INT8 and holds_qdq(exact.graph):
        return NodeRanking(
            failure=(
                "the model came with its own Q/DQ pairs, and every scale is kept: take out those of"
                " a node before the compile"
            )
        )
    shadows = add_shadows(exact, lossy, tensors_of_16_bits(read_proto(low.path, weights=False)))
    near = frozenset(
        name
        for shadow in shadows
        for name in (*shadow.tensors, *(name for each in shadow.outputs for name in each[:2]))
    )
    beside = _probe_of(exact, out / "shadows.onnx", near)
    far = _probe_of(
        lossy,
        out / "lossy.onnx",
        frozenset(name for shadow in shadows for *_, name in shadow.outputs),
    )
    seen = _observe(
        beside,
        far,
        _chosen(beside, samples, worst, progress),
        shadows,
        DTYPES.get(low.precision, FLOAT),
    )
    harms = (_harm(shadow, seen, low.precision) for shadow in shadows)
    nodes = sorted((harm for harm in harms if worth_keeping(harm, low.precision)), key=_worst_first)
    return NodeRanking(nodes=tuple(nodes), samples=seen.samples)


def _probe_of(proto: onnx.ModelProto, file: Path, wanted: frozenset[str]) -> Probe:
    """The graph loaded, to show the tensors `wanted`; its files, as large as the model, are
    gone.
    """
    write_proto(proto, file)
    probe = open_probe(onnx_model(file.parent, file.name))
    for made in (*external_files(file), file):
        made.unlink()
    sources = {probe.aliases.get(name, name) for name in wanted}
    return replace(probe, outputs=tuple(name for name in probe.outputs if name in sources))


def worth_keeping(harm: NodeHarm, precision: Precision) -> bool:
    """Whether fp32 may help a node: every one that runs in 8 bits, of those in 16 bits what
    overflows, is delicate, or does more than round.
    """
    if precision not in AMPLIFIED:
        return True
    return harm.overflows or harm.operator in DELICATE or harm.error > AMPLIFIED[precision]


def _worst_first(harm: NodeHarm) -> tuple[float, float]:
    return (-harm.largest if harm.overflows else 0.0, -harm.error)


def _harm(shadow: Shadow, seen: _Seen, precision: Precision) -> NodeHarm:
    largest = max(
        (seen.bounds[name].largest for name in shadow.tensors if name in seen.bounds), default=0.0
    )
    return NodeHarm(
        node=shadow.node,
        operator=shadow.operator,
        largest=largest,
        overflows=precision is Precision.FP16 and overflows(shadow.operator, largest),
        error=seen.own[shadow.node],
        accumulated=seen.accumulated[shadow.node],
    )


def overflows(operator: str, largest: float) -> bool:
    """Whether values of this size, or their squares where the operator sums those up, come so near
    to the limit of fp16 that others go beyond.
    """
    return (largest**2 if operator in NORMALISATIONS else largest) > SAFE_FRACTION * LARGEST_FP16


@dataclass(slots=True)
class _Seen:
    """What the runs have shown so far: bounds per tensor of the model, the largest errors per
    node.
    """

    samples: int = 0
    bounds: dict[str, Bounds] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    accumulated: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def _observe(
    exact: Probe,
    lossy: Probe,
    batches: Iterator[Batch],
    shadows: Sequence[Shadow],
    dtype: np.dtype[np.generic],
) -> _Seen:
    """Run the batches through both graphs."""
    seen, told = _Seen(), frozenset(name for shadow in shadows for name in shadow.tensors)
    for batch in batches:
        feeds = _as_fp32(batch.feeds)
        values, low = (with_aliases(probe, dict(probe.run(feeds))) for probe in (exact, lossy))
        for name in told.intersection(values):
            seen.bounds[name] = merge(seen.bounds.get(name, NOTHING), bounds_of(values[name]))
        for shadow in shadows:
            for name, beside, far in shadow.outputs:
                if name in values:  # not integers, and nothing that is made of constants only
                    seen.own[shadow.node] = max(
                        seen.own[shadow.node], relative_error(values[name], values[beside], dtype)
                    )
                    seen.accumulated[shadow.node] = max(
                        seen.accumulated[shadow.node], relative_error(values[name], low[far], dtype)
                    )
        seen.samples += batch.samples
    return seen


def _chosen(
    probe: Probe, samples: SampleSet, worst: tuple[int, ...], progress: Progress
) -> Iterator[Batch]:
    """The batches of the first samples, and those that hold the worst ones."""
    first = next(iter(samples.batches(1)))
    size = min(rows_per_run(probe, _as_fp32(first.feeds), first.samples), MOST_SAMPLES)
    last, looked = max((MOST_SAMPLES - 1, *worst)), 0
    for batch in takewhile(lambda batch: batch.first <= last, samples.batches(size)):
        if batch.first < MOST_SAMPLES or any(
            batch.first <= index < batch.first + batch.samples for index in worst
        ):
            progress(
                min(looked / min(samples.samples, MOST_SAMPLES), 1.0), f"{looked} samples looked at"
            )
            looked += batch.samples
            yield batch


def _as_fp32(feeds: Tensors) -> Tensors:
    return {
        name: array.astype(np.float32) if array.dtype in HALVES else array
        for name, array in feeds.items()
    }


def relative_error(
    exact: NDArray[np.float32], low: NDArray[np.float32], dtype: np.dtype[np.generic]
) -> float:
    """The norm of what is lost over the norm of what was there, rounded to `dtype`; MOST_ERROR
    where values become NaN or infinite.

    What stands for minus infinity in a mask counts no more than an infinity does.
    """
    told = np.abs(exact) < MEANS_NEVER  # and no NaN
    with np.errstate(over="ignore", invalid="ignore"):  # that is what is looked for
        rounded = low.astype(dtype).astype(np.float64)[told]
    if not np.isfinite(rounded).all():
        return MOST_ERROR
    norm, lost = (
        math.sqrt(float(np.square(values, dtype=np.float64).sum()))
        for values in (exact[told], rounded - exact[told])
    )
    return min(lost / norm, MOST_ERROR) if norm else MOST_ERROR * bool(lost)
