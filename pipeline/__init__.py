"""Crucible's pipeline: a trained model in, the fastest engine that keeps its accuracy out, with the
evidence.

    import pipeline

    report = pipeline.compile("plan.yaml", "out")
    with pipeline.open_engine("out") as engine:
        outputs = engine.run({"x": array})

What this package exports is its public API; all else may change. Importing it loads no heavy
library.
"""

from pipeline.api import (
    OpenEngine,
    compile,
    open_engine,
    quantize_aware,
    read_plan,
    read_report,
)
from pipeline.errors import CrucibleError

__all__ = [
    "compile",
    "open_engine",
    "OpenEngine",
    "quantize_aware",
    "read_plan",
    "read_report",
    "CrucibleError",
]
