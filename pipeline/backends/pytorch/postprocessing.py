"""The reduction of outputs in PyTorch, behind the user's module, for baselines and programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.backends.pytorch.module import leaves_of
from pipeline.core.artifacts import ModelSource
from pipeline.core.processing import Postprocess
from pipeline.core.shapes import TensorSpec
from pipeline.postprocess import sources_of

if TYPE_CHECKING:
    import torch


def with_postprocessing(
    module: torch.nn.Module, source: ModelSource, outputs: Sequence[TensorSpec]
) -> torch.nn.Module:
    """Return the module in front of the source's steps, or the module itself if there are none.

    The result gives one flat tuple of tensors: `outputs`, which are those of the engine. The steps
    are computed in fp32. `name_outputs` must have been called before on the module's result.
    """
    if not source.postprocess:
        return module
    import torch

    names = sources_of((spec.name for spec in outputs), source.postprocess)
    steps = [source.postprocess.get(name) for name in names]

    class Postprocessed(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            self.training = False  # as in the module; an exported program has no eval()

        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            reduced: list[torch.Tensor] = []
            for leaf, step in zip(leaves_of(self.inner(*args)), steps, strict=True):
                reduced += _reduced(leaf, step) if step else (leaf,)
            return tuple(reduced)

    return Postprocessed()


def _reduced(scores: torch.Tensor, step: Postprocess) -> tuple[torch.Tensor, ...]:
    """Return the indices and, for `top_k`, the values."""
    scores = scores.float()
    if step.top_k is None:
        return (scores.argmax(step.axis),)
    values, indices = scores.topk(step.top_k, step.axis)
    if step.softmax:
        values = scores.softmax(step.axis).gather(step.axis, indices)
    return indices, values
