"""Benchmarks of what limits whole runs: the bus, the GPU, and the way through the server."""
