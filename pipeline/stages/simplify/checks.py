"""The request of a simplification, and the checks of a changed graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import Progress
from pipeline.core.shapes import Profile, Tensors
from pipeline.execution.child_process import TimeLimit
from pipeline.onnx_graph.files import file_size, operator_histogram, read_proto
from pipeline.onnx_graph.fold_constants import FOLD_LIMIT_BYTES
from pipeline.onnx_graph.inspect import changed_interface
from pipeline.plan.schema import SimplifyConfig
from pipeline.quantization.existing_qdq import QUANTISED_TOLERANCE, given_precision, lost_scales

STAGE = "simplify"
FILE = "model.onnx"
TOLERANCE = 1e-4  # as compare_graphs takes it
GROWTH_LIMIT = 1.1  # file size after / before: folding that costs more is not worth its nodes


@dataclass(frozen=True, slots=True)
class SimplifyRequest:
    """The arguments of every step, except the model."""

    profiles: tuple[Profile, ...]
    options: SimplifyConfig
    samples: tuple[Tensors, ...]
    progress: Progress

    def limit(self, work: str) -> TimeLimit:
        """Return the time limit of one step."""
        return TimeLimit(self.options.timeout_s, work, "raise `simplify.timeout_s` in the plan")


def retry_clause(retryable: bool) -> str:
    """Return the clause of a note that announces a retry, or "" if there is none."""
    return ", and the next compile tries again" if retryable else ""


def tolerance_of(model: OnnxModel) -> float:
    """Return the largest allowed difference of a changed graph's outputs."""
    precision = given_precision(read_proto(model.path, weights=False).graph)
    return TOLERANCE if precision is None else QUANTISED_TOLERANCE


def operator_changes(before: OnnxModel, after: OnnxModel) -> str:
    """Return the change in the number of nodes by operator: "Mul +1, Where -2"; "" if none."""
    nodes = Counter(operator_histogram(after.path))
    nodes.subtract(operator_histogram(before.path))
    return ", ".join(f"{operator} {count:+d}" for operator, count in nodes.items() if count)


def losses(before: OnnxModel, after: OnnxModel) -> str:
    """Describe a fault of a changed model's interface, Q/DQ nodes, operator domains or size.

    The result is "" if there is no fault.
    """
    if changed := changed_interface(before, after):
        return changed
    if lost := lost_scales(read_proto(before.path).graph, read_proto(after.path).graph):
        return lost
    foreign = {operator for operator in operator_histogram(after.path) if "::" in operator}
    foreign -= set(operator_histogram(before.path))
    if foreign:
        return f"operators outside the ONNX standard were added: {', '.join(sorted(foreign))}"
    size_before, size_after = file_size(before.path), file_size(after.path)
    if size_after > GROWTH_LIMIT * size_before + FOLD_LIMIT_BYTES:
        return f"the file grew from {size_before:,} to {size_after:,} bytes"
    return ""
