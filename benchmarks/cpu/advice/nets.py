"""Models for `python -m benchmarks advice`, with random weights. The first four have a flaw that
an advice should find; the others are as people run them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.gpu.nets import resnet50 as resnet50
from benchmarks.gpu.nets import vit_b_16 as vit_b_16

WIDTH, RANK = 768, 64


class Adapted(nn.Module):
    """A layer beside its adapter, which nobody merged: x W + (x A) B."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, out)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapters() -> nn.Module:
    """x [batch, 128, 768] -> [batch, 128, 10]: six layers, each with an adapter."""
    layers = [nn.Sequential(Adapted(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


class FirstToken(nn.Module):
    """Two encoder layers, of which the last computes 127 tokens that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.encoder(x)[:, 0])


def first_token() -> nn.Module:
    """x [batch, 128, 512] -> scores [batch, 10]."""
    return FirstToken()


class LastPosition(nn.Module):
    """Scores of a vocabulary for all positions, of which the last is read."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
        self.mix = nn.Conv1d(512, 512, 5, padding=2)
        self.scores = nn.Linear(512, 1024)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.trunk(x).transpose(1, 2)).transpose(1, 2)
        return self.scores(mixed)[:, -1]


def last_position() -> nn.Module:
    """x [batch, 128, 512] -> scores [batch, 1024]."""
    return LastPosition()


def wide_layers() -> nn.Module:
    """x [batch, 2048] -> [batch, 10]: twelve layers whose weights take longer to read than to
    multiply with one row.
    """
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(12)]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


class Classifier(nn.Module):
    """BERT-base that reads its first token, as classifiers of texts do."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.bert = BertModel(BertConfig(attn_implementation="sdpa"))
        self.scores = nn.Linear(768, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.scores(self.bert(input_ids=input_ids).pooler_output)


def bert_base() -> nn.Module:
    """input_ids [batch, 128] int64 -> scores [batch, 2]."""
    torch.manual_seed(0)
    return Classifier()
