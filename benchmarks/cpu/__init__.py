"""Benchmarks of compiled engines on the CPU; `peak` and `verdicts` measure a GPU too."""
