"""Accuracy metrics, and the sizes at which the accuracy gate looks."""
