"""Measurements, and the pages that show them; README.md lists them all."""
