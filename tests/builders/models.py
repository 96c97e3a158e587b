"""Small models that tests export and run, each with one property that exporters get wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class ResidualCnn(nn.Module):
    """[batch, 1, 8, 8] -> [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.block = _Residual(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        pooled: Tensor = self.block(torch.relu(self.stem(image))).mean(dim=(2, 3))
        out: Tensor = self.head(self.drop(pooled))
        return out


class Encoder(nn.Module):
    """ids int64 [batch, sequence], mask int64 [batch, sequence] -> embedding, tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(self.embed(ids), src_key_padding_mask=mask == 0)
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        embedding = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
        return {"embedding": embedding, "tokens": hidden}


class Several(nn.Module):
    """x float32 [batch, 3], scale float32 scalar -> (scaled, (count int64 scalar, positive
    bool)).
    """

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return x * scale, (torch.tensor(7) + (x > 0).sum(), x > 0)


class BakedBatch(nn.Module):
    """Reshapes with the batch of its example: wrong at every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.view(int(x.shape[0]), 6))
        return out


class FrozenBranch(nn.Module):
    """Its sign depends on the data: a trace keeps one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        if x.sum() < 0:
            return -y
        return y


class Positions(nn.Module):
    """x float32 [n] -> the indices of its positive values, as many as there are."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).nonzero()


class Widened(nn.Module):
    """x float32 [batch, 3], width int64 scalar -> [batch, width, 3]: a value decides the shape."""

    def forward(self, x: Tensor, width: Tensor) -> Tensor:
        size = width.item()
        torch._check(size >= 2)
        return torch.relu(x.unsqueeze(1).expand(x.shape[0], size, x.shape[1]))


class NoExporter(nn.Module):
    """Uses an operator that has no ONNX form."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x).real


def residual_cnn() -> nn.Module:
    return ResidualCnn()


def encoder() -> nn.Module:
    return Encoder()


def several() -> nn.Module:
    return Several()


def baked_batch() -> nn.Module:
    return BakedBatch()


def frozen_branch() -> nn.Module:
    return FrozenBranch()


def positions() -> nn.Module:
    return Positions()


def widened() -> nn.Module:
    return Widened()


def no_exporter() -> nn.Module:
    return NoExporter()


class OnlyTraceable(nn.Module):
    """Counts its calls in a way that torch.export refuses and a trace does not notice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if int(x.shape[0]) > 100:  # tracing warns here
            return x, x
        return x * float(torch.tensor(2.0).numpy()), x.reshape(-1)[:: x.shape[1]]


def only_traceable() -> nn.Module:
    return OnlyTraceable()


class Recurrent(nn.Module):
    """x [batch, 12, 16] -> [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x)[0][:, -1])
        return out


class Block(nn.Module):
    """x [batch, sequence, 32] -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def recurrent() -> nn.Module:
    return Recurrent()


def block() -> nn.Module:
    return Block()
