"""Build: make an engine from a converted graph.

Before the build, every node that the backend cannot run is reported.
"""

from __future__ import annotations

from pathlib import Path

from pipeline import backends
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Refusal
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Recipe
from pipeline.errors import UnsupportedError


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Build the engine of a converted graph.

    Raises UnsupportedError with a list of all nodes that the backend cannot run.
    """
    backend = backends.backend(recipe.backend)
    progress(None, "looking for unsupported nodes")
    if refusals := backend.unsupported(model, backend.probe(), options.tensorrt.plugins):
        raise unsupported_error(recipe.backend, refusals)
    progress(None, "building")
    return backend.build(model, recipe, options, out, progress)


def unsupported_error(backend: str, refusals: tuple[Refusal, ...]) -> UnsupportedError:
    """Return one error for all nodes that a backend refuses."""
    lines = [
        f"  {refusal.node}: {refusal.operator} (opset {refusal.opset}): {refusal.reason}"
        for refusal in refusals
    ]
    remedies = dict.fromkeys(refusal.remedy for refusal in refusals)
    return UnsupportedError(
        f"{backend} cannot run {len(refusals)} nodes of this model:\n" + "\n".join(lines),
        "; ".join(remedies),
    )
