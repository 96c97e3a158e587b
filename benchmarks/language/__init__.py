"""Benchmarks of language models."""
