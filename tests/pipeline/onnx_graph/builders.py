"""Models written in ONNX's own text form."""

from pathlib import Path

import onnx


def parse(graph: str, opset: int = 17) -> onnx.ModelProto:
    """Return the model of one graph."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{graph}')


def save(folder: Path, graph: str, opset: int = 17) -> Path:
    """Write the model of one graph as `model.onnx`."""
    path = folder / "model.onnx"
    path.write_bytes(parse(graph, opset).SerializeToString())
    return path
