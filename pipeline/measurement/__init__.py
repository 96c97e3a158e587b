"""Clocks, statistics of latencies, and how two engines compare."""
