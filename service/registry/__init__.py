"""Promoted models: versions, which one is current, and how each is served."""
