"""Processes that run strangers' models: restricted, watched, and ended together."""
