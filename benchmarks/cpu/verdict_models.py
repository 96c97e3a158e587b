"""Architectures for `python -m benchmarks verdicts`: each function is an entrypoint of a plan.
Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LOUD = 500.0  # gain of a product whose results fp16 cannot hold


@dataclass(frozen=True)
class Architecture:
    """A model, and what it takes."""

    about: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of the input, without its batch
    batch: tuple[int, int, int]  # min, opt, max
    sizes: tuple[int, ...]  # batches to measure; the first decides

    @property
    def name(self) -> str:
        return self.build.__name__


def mlp() -> nn.Module:
    """x [batch, 64] -> scores [batch, 10]."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def convnet() -> nn.Module:
    """x [batch, 3, 32, 32] -> scores [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Recurrent(nn.Module):
    """A GRU over 32 steps in both directions; the last step is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(64, 128, num_layers=2, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.gru(x)
        return self.scores(hidden[:, -1])


def gru() -> nn.Module:
    """x [batch, 32, 64] -> scores [batch, 10]."""
    return Recurrent()


class Overflowing(nn.Module):
    """Squares its activations: inner values reach some 100,000, which fp16 cannot hold, and are
    normalised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 256)
        self.trunk = nn.Linear(256, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 256)
        self.norm = nn.LayerNorm(256)
        self.scores = nn.Linear(256, 10)
        with torch.no_grad():
            self.up.weight *= LOUD

    def forward(self, x: Tensor) -> Tensor:
        inner = self.trunk(torch.relu(self.stem(x))) * 4
        wide = torch.relu(self.up(inner * inner))
        return self.scores(torch.relu(self.norm(self.down(wide))))


def overflowing() -> nn.Module:
    """x [batch, 64] -> scores [batch, 10]."""
    return Overflowing()


def encoder() -> nn.Module:
    """x [batch, 128, 256] -> [batch, 128, 256]: four layers of a transformer encoder."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def resnet18() -> nn.Module:
    """x [batch, 3, 224, 224] -> scores [batch, 1000]."""
    import torchvision

    return torchvision.models.resnet18(weights=None)


def mobilenet() -> nn.Module:
    """x [batch, 3, 224, 224] -> scores [batch, 1000]."""
    import torchvision

    return torchvision.models.mobilenet_v2(weights=None)


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("two linear layers", mlp, (64,), (1, 1, 64), (1,)),
        Architecture("two convolutions", convnet, (3, 32, 32), (1, 1, 64), (1,)),
        Architecture("a GRU of two layers, both ways", gru, (32, 64), (1, 8, 32), (8,)),
        Architecture("a block that overflows in fp16", overflowing, (64,), (1, 8, 64), (8,)),
        Architecture("four encoder layers, 128 tokens", encoder, (128, 256), (1, 8, 16), (8,)),
        Architecture("ResNet-18", resnet18, (3, 224, 224), (1, 8, 32), (8,)),
        Architecture("MobileNetV2", mobilenet, (3, 224, 224), (1, 8, 32), (8,)),
    )
}
