"""Where the ink of an image lies and how far it spreads: the moments of its grey values, no
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZE = 8


class Ink(nn.Module):
    """image [batch, 1, 8, 8] -> ink [batch, 3]: mean row, mean column, and the area of the ellipse
    that the ink spreads over, in pixels.
    """

    def __init__(self) -> None:
        super().__init__()
        lines = torch.arange(float(SIZE))
        self.register_buffer(
            "places",
            torch.stack([lines.repeat_interleave(SIZE), lines.repeat(SIZE)], dim=1),
            persistent=False,
        )  # [64, 2]

    def forward(self, image: Tensor) -> Tensor:
        grey = image.clamp(min=0).flatten(1)  # [batch, 64]
        share = grey / grey.sum(dim=1, keepdim=True).clamp(min=1e-6)
        centre = share @ self.places  # [batch, 2]
        away = self.places - centre.unsqueeze(1)  # [batch, 64, 2]
        covariance = away.transpose(1, 2) @ (share.unsqueeze(2) * away)  # [batch, 2, 2]
        area = torch.pi * torch.linalg.det(covariance).clamp(min=0).sqrt()
        return torch.cat([centre, area.unsqueeze(1)], dim=1)


def build() -> nn.Module:
    return Ink()
