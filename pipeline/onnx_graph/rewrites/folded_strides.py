"""The rewrite of `space_to_depth.py`, with the names of the convolutions that it changes."""

from __future__ import annotations

import onnx

from pipeline.onnx_graph.space_to_depth import fold_strides


def fold_strides_by_name(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return the model with folded strides, and the names of the folded convolutions."""
    folded = fold_strides(model)
    blocks = {node.output[0] for node in folded.graph.node if node.op_type == "SpaceToDepth"}
    before = {name for node in model.graph.node for name in node.output}
    names = tuple(
        node.name
        for node in folded.graph.node
        if node.op_type == "Conv" and node.input[0] in blocks - before
    )
    return (folded, names) if names else (model, ())
