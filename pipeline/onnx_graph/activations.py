"""Run a model with all its float activations as outputs, for calibration and the overflow check.

ONNX Runtime runs the graph without optimisations, with each float tensor added to its outputs. One
run holds all of them at once, 88 MB per ResNet-50 sample. So callers run few samples at a time
(`rows_per_run`) and drop each array before the next run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from pipeline.core.artifacts import OnnxModel
from pipeline.core.shapes import Tensors

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

RUN_BYTES = 256 * 2**20
"""Bytes of activations in one run. More is not faster on a CPU; less leaves its threads idle."""

KEEPS_VALUES = frozenset({"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity"})
"""Operators with the values of their first input as output, which need no output of their own."""

T = TypeVar("T")

FLOATS = ("tensor(float)", "tensor(float16)")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a tensor's finite values, with the numbers of all and of nonfinite values."""

    minimum: float
    maximum: float
    count: int
    nonfinite: int

    @property
    def largest(self) -> float:
        return max(abs(self.minimum), abs(self.maximum))


NOTHING = Bounds(0.0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Probe:
    """A loaded model with its activations as outputs.

    `aliases` maps a tensor that only reshapes another one to that one.
    """

    session: InferenceSession
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]  # float inputs
    aliases: dict[str, str]

    def run(self, feeds: Tensors) -> dict[str, NDArray[np.float32]]:
        """Return every float activation of one run, including inputs, without aliases."""
        arrays = (
            dict(zip(self.outputs, self.session.run(list(self.outputs), dict(feeds)), strict=True))
            if self.outputs
            else {}
        )
        arrays |= {name: feeds[name] for name in self.inputs}
        return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def open_probe(model: OnnxModel) -> Probe:
    """Load `model` with its float activations as outputs. Its external data is not copied."""
    import onnxruntime

    proto = onnx.load_model(str(model.path), load_external_data=False)
    aliases = _expose(proto.graph)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(model.path.parent.resolve())
    )
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    floats = [value.name for value in session.get_outputs() if value.type in FLOATS]
    inputs = tuple(value.name for value in session.get_inputs() if value.type in FLOATS)
    observed = {*floats, *inputs}
    return Probe(
        session=session,
        outputs=tuple(name for name in floats if name not in aliases and name not in inputs),
        inputs=inputs,
        aliases={name: source for name, source in aliases.items() if source in observed},
    )


def _expose(graph: onnx.GraphProto) -> dict[str, str]:
    """Make every activation an output, and return the aliases. ONNX Runtime infers the types."""
    constant = {tensor.name for tensor in graph.initializer} | {""}
    outputs = {value.name for value in graph.output}
    aliases: dict[str, str] = {}
    for node in graph.node:
        # weights in another form, not activations
        if node.op_type == "Constant" or (node.input and constant.issuperset(node.input)):
            constant.update(node.output)
            continue
        for name in node.output:
            if name and name not in outputs:
                graph.output.append(onnx.ValueInfoProto(name=name))
        if node.op_type in KEEPS_VALUES:
            aliases[node.output[0]] = aliases.get(node.input[0], node.input[0])
    return aliases


def rows_per_run(probe: Probe, feeds: Tensors, rows: int) -> int:
    """Return the number of samples that one run may hold within RUN_BYTES, by a run of `rows`."""
    total = sum(array.nbytes for array in probe.run(feeds).values())
    return max(1, RUN_BYTES * rows // max(total, 1))


def bounds_of(values: NDArray[np.float32]) -> Bounds:
    """Return the signed bounds of all finite values."""
    if values.size == 0:
        return NOTHING
    low, high = float(values.min()), float(values.max())  # NaN and infinities come through
    if np.isfinite(low) and np.isfinite(high):
        return Bounds(low, high, values.size, 0)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return Bounds(low, high, values.size, values.size - finite.size)


def merge(a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of both together. Bounds without finite values do not widen the range."""
    count, nonfinite = a.count + b.count, a.nonfinite + b.nonfinite
    known = [bounds for bounds in (a, b) if bounds.count > bounds.nonfinite]
    if not known:
        return Bounds(0.0, 0.0, count, nonfinite)
    return Bounds(min(k.minimum for k in known), max(k.maximum for k in known), count, nonfinite)


def observe(probe: Probe, feeds_list: Iterable[Tensors]) -> dict[str, Bounds]:
    """Return the bounds of every activation over all feeds, including aliases."""
    bounds: dict[str, Bounds] = {}
    for feeds in feeds_list:
        for name, values in probe.run(feeds).items():
            bounds[name] = merge(bounds.get(name, NOTHING), bounds_of(values))
    return with_aliases(probe, bounds)


def with_aliases(probe: Probe, results: dict[str, T]) -> dict[str, T]:
    """Add the tensors that have the values of another tensor."""
    aliases = probe.aliases.items()
    return results | {name: results[source] for name, source in aliases if source in results}
