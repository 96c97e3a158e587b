"""The preprocessing of images in PyTorch, before the user's module, for baselines and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core import ModelSource, Preprocess

if TYPE_CHECKING:
    import torch


def with_preprocessing(module: torch.nn.Module, source: ModelSource) -> torch.nn.Module:
    """Return the module behind the source's steps, or the module itself if there are none.

    The result takes images as uint8 [N, H, W, C]. The steps are computed in fp32.
    """
    if not source.preprocess:
        return module
    import torch

    steps = [source.preprocess.get(spec.name) for spec in source.inputs]

    class Preprocessed(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            self.training = False  # as in the module; an exported program has no eval()

        def forward(self, *args: torch.Tensor) -> object:
            return self.inner(
                *(
                    _values_of(arg, step) if step else arg
                    for arg, step in zip(args, steps, strict=True)
                )
            )

    return Preprocessed()


def _values_of(raw: torch.Tensor, step: Preprocess) -> torch.Tensor:
    """Return what the module takes: the layout of the model's input, contiguous."""
    import torch

    values = raw.permute(0, 3, 1, 2).float()
    if step.resize:
        values = torch.nn.functional.interpolate(
            values, step.resize.target, mode="bilinear", align_corners=False
        )
    mean = torch.tensor(step.mean, device=values.device).reshape(-1, 1, 1)
    std = torch.tensor(step.std, device=values.device).reshape(-1, 1, 1)
    values = (values * step.scale - mean) / std
    return (values if step.layout == "NCHW" else values.permute(0, 2, 3, 1)).contiguous()
