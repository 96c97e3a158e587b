"""The generators of docs/benchmarks.md and of the tables and figures on other pages."""
