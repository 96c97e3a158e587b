"""The models of gpu_models.py, each with random weights: their speed does not depend on the values,
as long as fp16 can hold these.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _with_head(module: nn.Module, head: nn.Linear) -> nn.Module:
    """A head of zeros (torchvision's ViT) would let every engine answer alike, right or wrong."""
    nn.init.normal_(head.weight, std=0.02)
    return module


def _with_biases(module: nn.Module) -> nn.Module:
    """A bias of zeros, as libraries start with, would be simplified away, and the model with it
    would be another than the one that people run.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("bias") and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return module


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18()


def resnet50() -> nn.Module:
    """Its residual branches at a fifth: with random weights the activations grow from block to
    block, beyond what fp16 and int8 can tell.
    """
    from torchvision.models import resnet50

    net = resnet50()
    for module in net.modules():
        if hasattr(module, "bn3"):
            nn.init.constant_(module.bn3.weight, 0.2)
    return net


class Pixels(nn.Module):
    """ResNet-50 that takes uint8 pixels and normalises them itself: a quarter of the bytes to
    copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = resnet50()

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 3, height, width] uint8 -> [batch, 1000]."""
        return self.net((image.float() - 127.5) / 58.0)


def resnet50_uint8() -> nn.Module:
    return Pixels()


def mobilenet_v2() -> nn.Module:
    """With statistics of a few random images: with those of torchvision's start values vanish from
    block to block, below what fp16 can tell.
    """
    from torchvision.models import mobilenet_v2

    net = mobilenet_v2()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of what comes, not a moving one
    with torch.no_grad():
        net.train()(torch.randn(8, 3, 128, 128, generator=torch.Generator().manual_seed(0)))
    return net.eval()


def vit_b_16() -> nn.Module:
    from torchvision.models import vit_b_16

    net = vit_b_16()
    return _with_biases(_with_head(net, net.heads.head))


def swin_t() -> nn.Module:
    from torchvision.models import swin_t

    net = swin_t()
    return _with_biases(_with_head(net, net.head))


class Encoder(nn.Module):
    """BERT-base: 12 layers, 768 wide, 12 heads; positions up to 2,048."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(max_position_embeddings=2048, attn_implementation="sdpa")
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[batch, sequence] int64, both -> [batch, sequence, 768]."""
        if (
            attention_mask is None
            # not through BertModel: while it is traced or captured it makes a mask of ones, and
            # PyTorch's attention is slower
        ):
            return self.bert.encoder(self.bert.embeddings(input_ids=input_ids)).last_hidden_state
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def encoder() -> nn.Module:
    return _with_biases(Encoder().eval())
