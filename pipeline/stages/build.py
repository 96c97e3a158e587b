"""Build: one converted graph into one engine. Refuses before the build what the backend cannot run,
with every node named.
"""

from __future__ import annotations

from pathlib import Path

from pipeline import backends
from pipeline.core import BuildOptions, Engine, OnnxModel, Progress, Recipe, Refusal, silent
from pipeline.errors import UnsupportedError


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """The engine of a converted graph. Raises UnsupportedError that lists every node the backend
    cannot run.
    """
    backend = backends.backend(recipe.backend)
    progress(None, "looking for unsupported nodes")
    if refusals := backend.unsupported(model, backend.probe(), options.tensorrt.plugins):
        raise unsupported_error(recipe.backend, refusals)
    progress(None, "building")
    return backend.build(model, recipe, options, out, progress)


def unsupported_error(backend: str, refusals: tuple[Refusal, ...]) -> UnsupportedError:
    """One error for all nodes that a backend refuses."""
    lines = [f"  {r.node}: {r.operator} (opset {r.opset}): {r.reason}" for r in refusals]
    remedies = dict.fromkeys(r.remedy for r in refusals)
    return UnsupportedError(
        f"{backend} cannot run {len(refusals)} nodes of this model:\n" + "\n".join(lines),
        "; ".join(remedies),
    )
