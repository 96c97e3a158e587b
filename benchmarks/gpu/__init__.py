"""Benchmarks on a GPU, and what `gpu_models` is made of."""
