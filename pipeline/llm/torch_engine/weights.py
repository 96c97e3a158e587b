"""From a module of transformers to our network, with joined products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipeline.errors import ModelError, UnsupportedError
from pipeline.llm.torch_engine.network import LayerWeights, Matrix, Network, Shape

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Of activations, by the format of the cache in a plan."""

KINDS = ("llama", "mistral", "qwen2", "qwen3")
MOVING = ("dynamic", "longrope")
"""Rotations that depend on the length of the text."""


def network_of(module: Any) -> Network:
    """Return the network of a causal language model of transformers, in the precision and on the
    device of its weights. Its own weights become parts of the joined ones, so that they take memory
    once. UnsupportedError for other architectures.
    """
    config, body = module.config, module.model
    if config.model_type not in KINDS:
        raise UnsupportedError(
            f"expected a model of the kind {', '.join(KINDS)}, got {config.model_type}",
            "leave the GPU's candidates out",
        )
    rotary = body.rotary_emb
    kind = getattr(rotary, "rope_type", "default")
    if kind in MOVING:
        raise UnsupportedError(
            f"position embeddings of the kind {kind} change with the length of a text",
            "leave the GPU's candidates out",
        )
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        return Network(
            shape=Shape(
                config.num_attention_heads, config.num_key_value_heads, size, config.rms_norm_eps
            ),
            embedding=body.embed_tokens.weight.detach(),
            layers=tuple(map(layer_weights, body.layers)),
            norm=body.norm.weight.detach(),
            logits=Matrix(module.lm_head.weight.detach()),
            frequencies=rotary.inv_freq.detach().float(),
            rotation_scale=float(getattr(rotary, "attention_scaling", 1.0)),
            window=window_of(config),
        )


def window_of(config: Any) -> int | None:
    """Return how many tokens attention looks back; None: all."""
    if not getattr(config, "use_sliding_window", True):
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def layer_weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else norm.weight.detach() for norm in norms)
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=query_norm,
        key_norm=key_norm,
        output=joined([attention.o_proj]),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=joined([mlp.gate_proj, mlp.up_proj]),
        down=joined([mlp.down_proj]),
    )


def joined(linears: Sequence[Any]) -> Matrix:
    """Return linear layers of one input as one, whose parts they become."""
    if len(linears) == 1:
        weight = linears[0].weight.detach()
    else:
        weight = torch.cat([each.weight.detach() for each in linears])
        first = 0
        for each in linears:
            each.weight.data = weight[first : first + each.out_features]
            first += each.out_features
    biases = [each.bias for each in linears if each.bias is not None]
    if biases and len(biases) != len(linears):
        raise ModelError("a bias is missing in part of the attention", "check config.json")
    bias = torch.cat([each.detach() for each in biases]) if biases else None
    return Matrix(weight, bias=bias)
