"""The decoder as functions of tensors: Llama, Mistral, Qwen2 and Qwen3.

Products of the same input are one product (`qkv`, `gate_up`): a GPU that serves one request waits
for memory, and long reads are faster than short ones. Norms, rotations and the softmax are in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from pipeline.llm.torch_engine.products import (
    MAX_ROWS,
    product_of_rows,
    unpacked_by_kernel,
)


class Matrix(NamedTuple):
    """A linear layer."""

    weight: torch.Tensor  # [out, in] as activations, int8 or fp8; int4: [out, in / 2] uint8
    scale: torch.Tensor | None = None  # [out] fp32, of int8 and fp8; int4: [out, groups]
    bias: torch.Tensor | None = None  # [out]
    zero: torch.Tensor | None = None  # [out, groups] uint8, of int4; None: 8

    @property
    def group(self) -> int:
        """Return how many input values share a scale; 0: those of an output channel."""
        if self.weight.dtype != torch.uint8:
            return 0
        assert self.scale is not None
        return int(2 * self.weight.shape[1] // self.scale.shape[1])


class LayerWeights(NamedTuple):
    """One block of the decoder."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Matrix  # queries, keys and values, in this order
    query_norm: torch.Tensor | None  # [head], of Qwen3
    key_norm: torch.Tensor | None
    output: Matrix
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Matrix
    down: Matrix


class Shape(NamedTuple):
    """Sizes that the weights alone do not tell."""

    heads: int
    cache_heads: int  # of keys and values
    head: int  # values per head
    epsilon: float


class Network(NamedTuple):
    """A whole model."""

    shape: Shape
    embedding: torch.Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    logits: Matrix
    frequencies: torch.Tensor  # [head / 2] fp32, radians per position
    rotation_scale: float
    window: int | None = None  # tokens that attention was made to look back; None: all

    @property
    def weight_bytes(self) -> int:
        """Return the bytes that making one token reads: all but an embedding of its own."""
        matrices = [self.logits, *(each for layer in self.layers for each in matrices_of(layer))]
        found = [part for matrix in matrices for part in matrix if part is not None]
        return sum(part.numel() * part.element_size() for part in found)

    @property
    def cache_bytes_per_token(self) -> int:
        """Return the bytes of keys and values of one position, in all layers."""
        values = 2 * len(self.layers) * self.shape.cache_heads * self.shape.head
        return int(values * self.embedding.element_size())


class Cache(NamedTuple):
    """Keys and values of one layer."""

    keys: torch.Tensor  # [rows, cache heads, context, head]
    values: torch.Tensor


class Place(NamedTuple):
    """Where in their texts the tokens stand."""

    positions: torch.Tensor  # [requests, tokens] int64
    cosines: torch.Tensor  # [requests, tokens, head] fp32
    sines: torch.Tensor
    visible: torch.Tensor | None  # [requests, 1, 1, tokens, context]; None: texts begin here
    rows: torch.Tensor | None = None  # [requests] int64, of the cache; None: the first ones


def matrices_of(layer: LayerWeights) -> tuple[Matrix, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def rotations(network: Network, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of all positions, [context, head] fp32."""
    steps = torch.arange(context, device=network.frequencies.device, dtype=torch.float32)
    angles = torch.outer(steps, network.frequencies).repeat(1, 2)
    return angles.cos() * network.rotation_scale, angles.sin() * network.rotation_scale


def product(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return the product of [..., in] and a linear layer, [..., out] as `x`."""
    if matrix.scale is None:
        return functional.linear(x, matrix.weight, matrix.bias)
    if x.is_cuda and x[..., 0].numel() <= MAX_ROWS:
        parts = product_of_rows(
            x.reshape(-1, x.shape[-1]), matrix.weight, matrix.scale, matrix.zero
        )
        y = parts.sum(0).view(*x.shape[:-1], -1).to(x.dtype)
    elif matrix.group:
        y = functional.linear(x, unpacked(matrix).to(x.dtype))
    else:
        y = (functional.linear(x, matrix.weight.to(x.dtype)) * matrix.scale).to(x.dtype)
    return y if matrix.bias is None else y + matrix.bias


def unpacked(matrix: Matrix) -> torch.Tensor:
    """Return weights of int4 as numbers, [out, in] as the scales."""
    weight, scale, _, zero = matrix
    assert scale is not None
    if weight.is_cuda:
        return unpacked_by_kernel(weight, scale, zero)
    groups = weight.view(*scale.shape, -1)
    codes = torch.cat((groups & 15, groups >> 4), -1).to(scale.dtype)
    codes = codes - (8 if zero is None else zero.to(scale.dtype)[..., None])
    return (codes * scale[..., None]).flatten(1)


def normalised(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * weight).to(x.dtype)


def rotated(x: torch.Tensor, place: Place) -> torch.Tensor:
    """Rotate heads by their positions: [requests, tokens, heads, head]."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    cosines, sines = place.cosines[:, :, None], place.sines[:, :, None]
    return (wide * cosines + turned * sines).to(x.dtype)


def block(
    x: torch.Tensor, weights: LayerWeights, cache: Cache, place: Place, shape: Shape
) -> torch.Tensor:
    """Return the block's output, [requests, tokens, hidden] as `x`, and fill the cache."""
    attended = attention(
        normalised(x, weights.attention_norm, shape.epsilon), weights, cache, place, shape
    )
    x = x + product(attended, weights.output)
    gate, up = product(normalised(x, weights.mlp_norm, shape.epsilon), weights.gate_up).chunk(2, -1)
    return x + product(functional.silu(gate) * up, weights.down)


def attention(
    x: torch.Tensor, weights: LayerWeights, cache: Cache, place: Place, shape: Shape
) -> torch.Tensor:
    """Return what the heads see, [requests, tokens, heads x head], before the last product."""
    requests, tokens, _ = x.shape
    sizes = [shape.heads, shape.cache_heads, shape.cache_heads]
    heads = product(x, weights.qkv).view(requests, tokens, sum(sizes), shape.head)
    queries, keys, values = heads.split(sizes, 2)
    if weights.query_norm is not None and weights.key_norm is not None:
        queries = normalised(queries, weights.query_norm, shape.epsilon)
        keys = normalised(keys, weights.key_norm, shape.epsilon)
    queries, keys = rotated(queries, place), rotated(keys, place)
    rows = torch.arange(requests, device=x.device) if place.rows is None else place.rows
    cache.keys[rows[:, None], :, place.positions] = keys
    cache.values[rows[:, None], :, place.positions] = values
    if place.visible is None:
        seen = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return seen.transpose(1, 2).reshape(requests, tokens, -1)
    if place.rows is not None:
        cache = Cache(cache.keys[rows], cache.values[rows])
    # queries that share keys are rows of one product, [requests, cache heads, group x tokens, head]
    group = shape.heads // shape.cache_heads
    queries = queries.view(requests, tokens, shape.cache_heads, group, shape.head)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(requests, shape.cache_heads, -1, shape.head)
    scores = (queries @ cache.keys.transpose(2, 3)).float() * shape.head**-0.5
    scores = scores.view(requests, shape.cache_heads, group, tokens, -1)
    scores = scores.masked_fill(~place.visible, float("-inf")).softmax(-1).to(x.dtype)
    seen = scores.view(requests, shape.cache_heads, group * tokens, -1) @ cache.values
    seen = seen.view(requests, shape.cache_heads, group, tokens, shape.head)
    return seen.permute(0, 3, 1, 2, 4).reshape(requests, tokens, -1)


def logits(x: torch.Tensor, norm: torch.Tensor, matrix: Matrix, epsilon: float) -> torch.Tensor:
    """Return the scores of all next tokens, [..., vocabulary] fp32."""
    return product(normalised(x, norm, epsilon), matrix).float()


def choice(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens and their log-probabilities: [requests] each."""
    best, tokens = scores.max(-1)
    return tokens, best - scores.logsumexp(-1)
