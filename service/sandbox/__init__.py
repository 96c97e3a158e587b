"""Processes for untrusted models: their restrictions, supervision and end."""
