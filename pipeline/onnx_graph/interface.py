"""Restore the interface that a rewritten graph lost."""

from __future__ import annotations

import onnx


def restore_interface(source: onnx.ModelProto, result: onnx.ModelProto) -> None:
    """Give inputs and outputs the shapes that the source declares.

    An input keeps its new shape if a dynamic dimension became a number, so that this is noticed.
    """
    declared = {value.name: value for value in (*source.graph.input, *source.graph.output)}
    for value in result.graph.input:
        before = declared.get(value.name)
        if before is not None and _have_same_type(before, value) and not _is_fixed(before, value):
            value.CopyFrom(before)
    for value in result.graph.output:  # outputs are compared by their values at many sizes
        before = declared.get(value.name)
        if before is not None and _have_same_type(before, value):
            value.CopyFrom(before)


def _have_same_type(before: onnx.ValueInfoProto, after: onnx.ValueInfoProto) -> bool:
    return bool(before.type.tensor_type.elem_type == after.type.tensor_type.elem_type)


def _is_fixed(before: onnx.ValueInfoProto, after: onnx.ValueInfoProto) -> bool:
    """Return True if a dynamic dimension became a number, or if the rank changed."""
    old, new = before.type.tensor_type.shape.dim, after.type.tensor_type.shape.dim
    return len(old) != len(new) or any(
        a.HasField("dim_value") and not b.HasField("dim_value")
        for a, b in zip(new, old, strict=True)
    )
