"""Surgery: an operator that a backend lacks, written in operators that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx

if TYPE_CHECKING:
    from onnx_graphsurgeon import Graph, Tensor


def write_out_det(model: onnx.ModelProto) -> onnx.ModelProto:
    """The determinant of every 2x2 matrix as a*d - b*c: TensorRT has no importer for Det.
    ValueError for larger matrices.
    """
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model))
    for node in [node for node in graph.nodes if node.op == "Det"]:
        (matrix,), (det,) = node.inputs, node.outputs
        if matrix.shape is None or tuple(matrix.shape[-2:]) != (2, 2):
            raise ValueError(f"Det '{node.name}' is of {matrix.shape}, expected 2x2 matrices")
        node.outputs.clear()  # cleanup then drops it
        rows = [_gather(graph, matrix, index, axis=-2) for index in (0, 1)]
        (a, b), (c, d) = ([_gather(graph, row, index, axis=-1) for index in (0, 1)] for row in rows)
        products = [_add(graph, "Mul", [a, d], {}), _add(graph, "Mul", [b, c], {})]
        graph.nodes.append(
            gs.Node("Sub", f"det_{len(graph.nodes)}", inputs=products, outputs=[det])
        )
    return gs.export_onnx(graph.cleanup().toposort())


def _gather(graph: Graph, tensor: Tensor, index: int, axis: int) -> Tensor:
    """One row, or one column, of every matrix."""
    import onnx_graphsurgeon as gs

    return _add(
        graph,
        "Gather",
        [tensor, gs.Constant(f"det_index_{len(graph.nodes)}", np.array(index))],
        {"axis": axis},
    )


def _add(graph: Graph, operator: str, inputs: list[Tensor], attributes: dict[str, int]) -> Tensor:
    """The output of a new node."""
    import onnx_graphsurgeon as gs

    name = f"det_{len(graph.nodes)}"
    output = gs.Variable(name, dtype=inputs[0].dtype)
    graph.nodes.append(gs.Node(operator, name, attributes, inputs, [output]))
    return output
