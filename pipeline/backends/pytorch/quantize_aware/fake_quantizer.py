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
        if self.axis is None and self.training:
            self._observe(x)
        if not self.has_range:
            return x
        scale = self.scale(x)
        zero = torch.zeros_like(scale, dtype=torch.int32)
        floats = x.float()  # 16 bits under autocast
        if self.axis is None:
            rounded = torch.fake_quantize_per_tensor_affine(floats, scale, zero, LOW, HIGH)
        else:
            rounded = torch.fake_quantize_per_channel_affine(
                floats, scale, zero, self.axis, LOW, HIGH
            )
        return rounded.to(x.dtype)

    @property
    def has_range(self) -> bool:
        """Return False for an activation that no batch has passed."""
        return self.axis is not None or bool(self.bound > 0)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scale: [] of an activation, as learnt; [channels] of a weight `x`."""
        if self.axis is None:
            bound = self.bound
        else:
            others = [axis for axis in range(x.ndim) if axis != self.axis]
            bound = x.detach().float().abs().amax(others)
        return bound.clamp(min=SMALLEST) / HIGH

    def _observe(self, x: torch.Tensor) -> None:
        largest = x.detach().abs().amax().to(self.bound.dtype)
        if not torch.isfinite(largest):
            return
        known = self.bound > 0
        self.bound.copy_(torch.where(known, self.bound.lerp(largest, MOMENTUM), largest))
