"""The preprocessing of images in PyTorch, before the user's module, for baselines and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.artifacts import ModelSource
from pipeline.core.processing import Preprocess

if TYPE_CHECKING:
    import torch


def with_preprocessing(
    module: torch.nn.Module, source: ModelSource, device: str = "cpu"
) -> torch.nn.Module:
    """Return the module behind the source's steps, or the module itself if there are none.

    The result takes images as uint8 [N, H, W, C]. The steps are computed in fp32, on the module's
    `device`.
    """
    if not source.preprocess:
        return module
    import torch

    steps = [source.preprocess.get(spec.name) for spec in source.inputs]

    class Preprocessed(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            for index, step in enumerate(steps):
                if step:  # once, for a copy to the GPU would wait in every call
                    self.register_buffer(f"mean_{index}", _by_channel(step.mean, device))
                    self.register_buffer(f"std_{index}", _by_channel(step.std, device))
            self.training = False  # as in the module; an exported program has no eval()

        def forward(self, *args: torch.Tensor) -> object:
            values = list(args)
            for index, step in enumerate(steps):
                if step:
                    mean, std = getattr(self, f"mean_{index}"), getattr(self, f"std_{index}")
                    values[index] = _values_of(args[index], step, mean, std)
            return self.inner(*values)

    return Preprocessed()


def _by_channel(numbers: tuple[float, ...], device: str) -> torch.Tensor:
    import torch

    return torch.tensor(numbers, dtype=torch.float32, device=device).reshape(-1, 1, 1)


def _values_of(
    raw: torch.Tensor, step: Preprocess, mean: torch.Tensor, std: torch.Tensor
) -> torch.Tensor:
    """Return what the module takes: the layout of the model's input, contiguous."""
    import torch

    values = raw.permute(0, 3, 1, 2).float()
    if step.resize:
        values = torch.nn.functional.interpolate(
            values, step.resize.target, mode="bilinear", align_corners=False
        )
    values = (values * step.scale - mean) / std
    return (values if step.layout == "NCHW" else values.permute(0, 2, 3, 1)).contiguous()
