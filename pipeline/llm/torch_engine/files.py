"""A network in a folder: its tensors as safetensors, the rest as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline.core.frozen import Frozen
from pipeline.errors import DamagedError
from pipeline.llm.torch_engine.network import LayerWeights, Matrix, Network, Shape

WEIGHTS_FILE = "model.safetensors"
NETWORK_FILE = "network.json"
MAX_LAYERS = 1000


class NetworkFacts(Frozen):
    """What the tensors do not tell."""

    layers: int = Field(ge=1, le=MAX_LAYERS)
    heads: int = Field(ge=1)
    cache_heads: int = Field(ge=1)
    head: int = Field(ge=2)  # values per head
    epsilon: float = Field(gt=0)
    rotation_scale: float
    window: int | None = Field(default=None, ge=1)
    has_own_logits: bool  # no: the embedding is the last matrix, too


def write_network(network: Network, folder: Path) -> None:
    """Write a network. An embedding that is the last matrix, too, is written once."""
    own = network.logits.weight.data_ptr() != network.embedding.data_ptr()
    tensors = dict(_named(network))
    if not own:
        del tensors["logits.weight"]
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS_FILE)
    facts = NetworkFacts(
        layers=len(network.layers),
        **network.shape._asdict(),
        rotation_scale=network.rotation_scale,
        window=network.window,
        has_own_logits=own,
    )
    (folder / NETWORK_FILE).write_text(facts.model_dump_json(indent=1), encoding="utf-8")


def read_network(folder: Path, device: str) -> Network:
    """Read a network onto a device. DamagedError if its files do not fit together."""
    try:
        text = (folder / NETWORK_FILE).read_text(encoding="utf-8")
        facts = NetworkFacts.model_validate_json(text)
        tensors = load_file(folder / WEIGHTS_FILE, device=device)
        return _network(facts, tensors)
    except (OSError, ValidationError, SafetensorError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedError(
            f"the network in '{folder}' cannot be read: {reason}", "compile the model again"
        ) from error


def _named(network: Network) -> Iterator[tuple[str, torch.Tensor]]:
    yield "embedding", network.embedding
    yield "norm", network.norm
    yield "frequencies", network.frequencies
    yield from _named_parts("logits", network.logits)
    for number, layer in enumerate(network.layers):
        for name, part in layer._asdict().items():
            whole = f"layers.{number}.{name}"
            if isinstance(part, Matrix):
                yield from _named_parts(whole, part)
            elif part is not None:
                yield whole, part


def _named_parts(name: str, matrix: Matrix) -> Iterator[tuple[str, torch.Tensor]]:
    for part, tensor in matrix._asdict().items():
        if tensor is not None:
            yield f"{name}.{part}", tensor


def _network(facts: NetworkFacts, tensors: dict[str, torch.Tensor]) -> Network:
    def matrix(name: str) -> Matrix:
        others = (tensors.get(f"{name}.{part}") for part in Matrix._fields[1:])
        return Matrix(tensors[f"{name}.weight"], *others)

    def layer(name: str) -> LayerWeights:
        return LayerWeights(
            attention_norm=tensors[f"{name}.attention_norm"],
            qkv=matrix(f"{name}.qkv"),
            query_norm=tensors.get(f"{name}.query_norm"),
            key_norm=tensors.get(f"{name}.key_norm"),
            output=matrix(f"{name}.output"),
            mlp_norm=tensors[f"{name}.mlp_norm"],
            gate_up=matrix(f"{name}.gate_up"),
            down=matrix(f"{name}.down"),
        )

    return Network(
        shape=Shape(facts.heads, facts.cache_heads, facts.head, facts.epsilon),
        embedding=tensors["embedding"],
        layers=tuple(layer(f"layers.{number}") for number in range(facts.layers)),
        norm=tensors["norm"],
        logits=matrix("logits") if facts.has_own_logits else Matrix(tensors["embedding"]),
        frequencies=tensors["frequencies"],
        rotation_scale=facts.rotation_scale,
        window=facts.window,
    )
