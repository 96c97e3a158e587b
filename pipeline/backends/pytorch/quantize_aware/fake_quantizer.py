"""A fake quantiser: rounds a tensor to int8 and back in training, and learns its range."""

from __future__ import annotations

import torch
from torch import nn

LOW, HIGH = -128, 127
MOMENTUM = 0.05
"""Share of a batch in the moving average of the range."""

SMALLEST = 1e-8  # a range of 0 has no scale


class FakeQuantizer(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Round to symmetric int8: zero point 0, which every backend takes.

    Of an activation, one range for the whole tensor: the moving average of each batch's largest
    magnitude in training mode. Of a weight, the largest magnitude along `axis`, as it is now. The
    gradient is that of the identity inside the range, and 0 outside.
    """

    bound: torch.Tensor

    def __init__(self, axis: int | None = None) -> None:
        super().__init__()
        self.axis = axis
        if axis is None:
            self.register_buffer("bound", torch.zeros(()))  # 0: no batch yet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, rounded; as it is before the first batch."""
        if self.axis is None:
            if self.training:
                self._observe(x)
            if not self.has_range:
                return x
            scale, zero = self.scale(), torch.zeros((), dtype=torch.int32, device=x.device)
            return torch.fake_quantize_per_tensor_affine(x, scale, zero, LOW, HIGH)
        scale = self.scale(x)
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(x, scale, zero, self.axis, LOW, HIGH)

    @property
    def has_range(self) -> bool:
        """Return False for an activation that no batch has passed."""
        return self.axis is not None or bool(self.bound > 0)

    def scale(self, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scale: [] of an activation, [channels] of a weight."""
        if weight is None:
            bound = self.bound
        else:
            assert self.axis is not None
            bound = weight.detach().abs().amax([d for d in range(weight.ndim) if d != self.axis])
        return bound.clamp(min=SMALLEST) / HIGH

    def _observe(self, x: torch.Tensor) -> None:
        largest = x.detach().abs().amax().to(self.bound.dtype)
        if not torch.isfinite(largest):
            return
        known = self.bound > 0
        self.bound.copy_(torch.where(known, self.bound.lerp(largest, MOMENTUM), largest))
