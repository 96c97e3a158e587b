"""Candidates: their recipes, their stages, and what follows from those that fail."""
