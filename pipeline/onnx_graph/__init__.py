"""ONNX graphs: read, compare, count, and rewrite without changing the outputs."""
