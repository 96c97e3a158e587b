"""Modules trained with fake quantisers: where ours go, and what an export makes of them."""
