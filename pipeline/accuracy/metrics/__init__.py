"""Metrics of accuracy: built-in ones by name, and functions of the user."""
