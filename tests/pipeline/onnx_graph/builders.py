"""Models written in ONNX's own text form."""

from pathlib import Path

import onnx

HEADER = '<ir_version: 8, opset_import: ["" : 17]>\n'


def parse(graph: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEADER + graph)


def save(folder: Path, graph: str) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(parse(graph).SerializeToString())
    return path
