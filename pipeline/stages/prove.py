"""Prove: which precision every kernel of an engine really runs in, and for how long. The verdict on it is `pipeline.precision`."""

from __future__ import annotations

from pipeline import backends
from pipeline.core import Engine, Frozen, LayerTable, Progress, Tensors, silent


class Proof(Frozen):
    """What one engine really runs; None where its backend gives no evidence."""

    table: LayerTable | None = None


def prove(engine: Engine, feeds: Tensors, progress: Progress = silent) -> Proof:
    """The layer table of an engine, timed on `feeds` by plain enqueue, in this process."""
    progress(None, "timing every layer")
    return Proof(table=backends.backend(engine.target.backend).layers(engine, feeds))
