"""Benchmarks of the service, and what they share: a cheap client, the servers that take turns, and
the models they serve.
"""
