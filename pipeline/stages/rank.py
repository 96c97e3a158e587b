"""Rank: which nodes of an fp16 graph lose the most, by what real samples do in them; the worst first.

The graph is lifted to fp32 and run. Beside each node stands its shadow: the same node, its inputs rounded to fp16. So every node's own loss is seen
alone, and not what the nodes before it have lost. Running the fp16 graph itself on a CPU would not tell: ONNX Runtime computes such nodes
in fp32, and drops Casts between them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from pipeline.activations import KEEPS_VALUES, NOTHING, Bounds, Probe, bounds_of, merge, open_probe, rows_per_run, with_aliases
from pipeline.casts import LARGEST_FP16, QUANTIZERS, SAFE_FRACTION
from pipeline.core import Frozen, OnnxModel, Progress, Tensors, silent
from pipeline.data import Batch, SampleSet
from pipeline.graph import external_files, onnx_model, read_proto, write_proto

MOST_SAMPLES = 128  # looked at, and the worst ones besides: each run holds every activation twice
AMPLIFIED = 2.0**-8  # relative error; rounding inputs and outputs to fp16 alone costs about 2**-11
MOST_ERROR = 1e6  # stands for "nothing is left": values become NaN or infinite

NORMALISATIONS = frozenset(
    {"LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", "MeanVarianceNormalization", "LpNormalization"}
)
SUMS = frozenset({"Softmax", "LogSoftmax", "ReduceMean", "ReduceSum", "ReduceProd", "ReduceL1", "ReduceLogSumExp", "GlobalAveragePool"})
PARTS = frozenset({"Pow", "Sqrt", "Reciprocal", "Div", "Exp", "Log"})  # of which exporters build the ones above
DELICATE = NORMALISATIONS | SUMS | PARTS
"""Sums over many values, and what follows them: a kernel may add them up in fp16, which the shadows do not show."""

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
ONLY_SHAPES = frozenset({"Shape", "Size"})


class NodeHarm(Frozen):
    """What fp16 does to one node."""

    node: str
    operator: str
    largest: float  # magnitude among its inputs and outputs
    error: float  # of its outputs, relative to their norm, in the worst batch; at most MOST_ERROR

    @property
    def overflows(self) -> bool:
        """Whether it comes so near to the limit of fp16 that other inputs will go beyond."""
        return self.largest > SAFE_FRACTION * LARGEST_FP16


class NodeRanking(Frozen):
    """The nodes that are worth keeping in fp32: those that overflow, largest values first, then the others by their error."""

    nodes: tuple[NodeHarm, ...] = ()
    samples: int = 0
    failure: str = ""  # why there is no ranking


def rank_nodes(model: OnnxModel, samples: SampleSet, worst: tuple[int, ...], out: Path, progress: Progress = silent) -> NodeRanking:
    """Rank the nodes that compute in fp16 in `model`, as `convert` wrote it. `worst` are samples to look at in any case, by index."""
    progress(0.0, "writing the graph with its shadows")
    proto = read_proto(model.path)
    half = half_tensors(read_proto(model.path, weights=False))
    nodes = tuple(node for node in proto.graph.node if _is_low(node, half))
    kinds = {node.name: node.op_type for node in nodes}
    tensors = {node.name: tuple(name for name in (*node.input, *node.output) if name in half) for node in nodes}
    lift(proto)
    shadows = add_shadows(proto.graph, {node.name for node in nodes}, half)
    write_proto(proto, out / "shadows.onnx")
    probe = open_probe(onnx_model(out, "shadows.onnx"))
    for file in (*external_files(out / "shadows.onnx"), out / "shadows.onnx"):  # loaded, and as large as the model
        file.unlink()
    looked, seen, errors = _observe(probe, samples, worst, shadows, progress)
    harms = [
        NodeHarm(node=name, operator=kind, largest=max((seen[t].largest for t in tensors[name] if t in seen), default=0.0), error=errors[name])
        for name, kind in kinds.items()
    ]
    delicate = [harm for harm in harms if harm.overflows or harm.operator in DELICATE or harm.error > AMPLIFIED]
    return NodeRanking(nodes=tuple(sorted(delicate, key=_worst_first)), samples=looked)


def _worst_first(harm: NodeHarm) -> tuple[float, float]:
    return (-harm.largest if harm.overflows else 0.0, -harm.error)


def half_tensors(proto: onnx.ModelProto) -> frozenset[str]:
    """Names of all fp16 tensors of the top level."""
    graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    typed = (*graph.value_info, *graph.input, *graph.output)
    return frozenset(
        [value.name for value in typed if value.type.tensor_type.elem_type == HALF]
        + [tensor.name for tensor in proto.graph.initializer if tensor.data_type == HALF]
    )


def _is_low(node: onnx.NodeProto, half: frozenset[str]) -> bool:
    skipped = QUANTIZERS | ONLY_SHAPES | {"Cast"}
    return node.op_type not in skipped and not half.isdisjoint((*node.input, *node.output))


def lift(proto: onnx.ModelProto) -> None:
    """Make the fp16 tensors of an fp16 graph fp32, in place; weights keep their rounded values."""
    graph = proto.graph
    for tensor in graph.initializer:
        if tensor.data_type == HALF:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Cast" else ():
            if attribute.name == "to" and attribute.i == HALF:  # `saturate` may stand before it
                attribute.i = FLOAT
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == HALF:
            value.type.tensor_type.elem_type = FLOAT
    del graph.value_info[:]


def add_shadows(graph: onnx.GraphProto, low: set[str], half: frozenset[str]) -> dict[str, dict[str, str]]:
    """After each node of `low` the same node on inputs rounded to fp16, in place; node name -> its output -> the shadow's output."""
    constants = {tensor.name for tensor in graph.initializer}
    rounded: set[str] = set()
    shadows: dict[str, dict[str, str]] = {}
    nodes = []
    for node in graph.node:
        moved = [name for name in dict.fromkeys(node.input) if name in half and name not in constants]
        shadowed = node.name in low and node.op_type not in KEEPS_VALUES and bool(moved)
        for name in moved if shadowed else ():
            if name not in rounded:
                rounded.add(name)
                nodes += _rounding(name)
        nodes.append(node)
        if shadowed:
            shadow = onnx.NodeProto()
            shadow.CopyFrom(node)
            shadow.name = f"{node.name}/shadow"
            shadow.input[:] = [f"{name}/rounded" if name in moved else name for name in node.input]
            shadow.output[:] = [f"{name}/shadow" if name else "" for name in node.output]
            shadows[node.name] = {name: f"{name}/shadow" for name in node.output if name in half}
            nodes.append(shadow)
    del graph.node[:]
    graph.node.extend(nodes)
    return shadows


def _rounding(name: str) -> list[onnx.NodeProto]:
    """The values of a tensor as fp16 holds them, as fp32."""
    down = onnx.helper.make_node("Cast", [name], [f"{name}/fp16"], name=f"{name}/to_fp16", to=HALF)
    up = onnx.helper.make_node("Cast", [f"{name}/fp16"], [f"{name}/rounded"], name=f"{name}/to_fp32", to=FLOAT)
    return [down, up]


def _observe(
    probe: Probe, samples: SampleSet, worst: tuple[int, ...], shadows: Mapping[str, Mapping[str, str]], progress: Progress
) -> tuple[int, dict[str, Bounds], dict[str, float]]:
    """Run the samples: how many, the bounds of every tensor, and the largest error of every node."""
    seen: dict[str, Bounds] = {}
    errors: dict[str, float] = defaultdict(float)
    looked = 0
    for batch in _chosen(probe, samples, worst):
        values = probe.run(_as_fp32(batch.feeds))
        for name, array in values.items():
            seen[name] = merge(seen.get(name, NOTHING), bounds_of(array))
        for node, pairs in shadows.items():
            errors[node] = max(errors[node], *(relative_error(values[name], values[shadow]) for name, shadow in pairs.items() if name in values), 0.0)
        looked += batch.samples
        progress(min(looked / min(samples.samples, MOST_SAMPLES), 1.0), f"{looked} samples looked at")
    return looked, with_aliases(probe, seen), errors


def _chosen(probe: Probe, samples: SampleSet, worst: tuple[int, ...]) -> Iterator[Batch]:
    """The batches of the first samples, and those that hold the worst ones."""
    first = next(iter(samples.batches(1)))
    size = min(rows_per_run(probe, _as_fp32(first.feeds), first.samples), MOST_SAMPLES)
    last = max((MOST_SAMPLES - 1, *worst))
    for batch in takewhile(lambda batch: batch.first <= last, samples.batches(size)):
        if batch.first < MOST_SAMPLES or any(batch.first <= index < batch.first + batch.samples for index in worst):
            yield batch


def _as_fp32(feeds: Tensors) -> Tensors:
    return {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in feeds.items()}


def relative_error(exact: NDArray[np.float32], shadow: NDArray[np.float32]) -> float:
    """The norm of what is lost over the norm of what was there; MOST_ERROR where finite values become NaN or infinite."""
    finite = np.isfinite(exact)
    with np.errstate(over="ignore"):  # that is what is looked for
        low = shadow.astype(np.float16).astype(np.float64)[finite]
    if not np.isfinite(low).all():
        return MOST_ERROR
    norm, lost = math.sqrt(float(np.square(exact[finite], dtype=np.float64).sum())), math.sqrt(float(np.square(low - exact[finite]).sum()))
    return min(lost / norm, MOST_ERROR) if norm else MOST_ERROR * bool(lost)
