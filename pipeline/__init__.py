"""Crucible's pipeline: a trained model in, the fastest engine that keeps its accuracy out, with the
evidence.
"""
