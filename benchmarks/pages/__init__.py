"""The generators of docs/benchmarks and of the table in the README."""
