"""ONNX Runtime GenAI on a CPU: its builder writes the graph, and its generators read tokens."""
