"""A model of your own: a CNN for colour images with three channels. Replace it by yours."""

import torch
from torch import nn


class Stripes(nn.Module):
    """Says in which of four directions the stripes of an image run."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(channels, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image))  # [batch, 3, 32, 32] -> [batch, 4]


def build() -> nn.Module:
    """Return the model. Crucible calls this function, and then loads the weights."""
    return Stripes()
