"""The fixed memory of texts that are continued together: a CUDA graph knows its addresses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.llm.torch_engine.network import Cache, Network, Place, rotations

CONTEXT_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a step reads and writes. A row is one request."""

    context: int  # tokens of a text
    keys: torch.Tensor  # [layers, rows, cache heads, context, head]
    values: torch.Tensor  # not part of one tensor with the keys: torch.compile writes to both
    tokens: torch.Tensor  # [rows] int64: the last ones
    positions: torch.Tensor  # [rows] int64: where these are read
    log_probs: torch.Tensor  # [rows] fp32, of the last tokens
    scores: torch.Tensor  # [rows, vocabulary] fp32, from which they were chosen
    cosines: torch.Tensor  # [context, head] fp32
    sines: torch.Tensor
    columns: torch.Tensor  # [context] int64
    graphs: Any = None  # the memory in which all recorded works compute; None on a CPU

    @classmethod
    def for_network(cls, network: Network, rows: int, context: int) -> Buffers:
        """Return empty buffers for texts of at most this number of tokens."""
        context = -(-context // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        shape, like = network.shape, network.embedding
        size = (len(network.layers), rows, shape.cache_heads, context, shape.head)
        with torch.no_grad():
            cosines, sines = rotations(network, context)
            tokens = torch.zeros(rows, dtype=torch.int64, device=like.device)
            wide = {"dtype": torch.float32, "device": like.device}
            return cls(
                context=context,
                keys=like.new_zeros(size),
                values=like.new_zeros(size),
                tokens=tokens,
                positions=torch.zeros_like(tokens),
                log_probs=torch.zeros(rows, **wide),
                scores=torch.zeros((rows, len(like)), **wide),
                cosines=cosines,
                sines=sines,
                columns=torch.arange(context, device=like.device),
                graphs=torch.cuda.graph_pool_handle() if like.is_cuda else None,
            )

    @property
    def caches(self) -> list[Cache]:
        return [Cache(*each) for each in zip(self.keys, self.values, strict=True)]

    def first(self, rows: int) -> Buffers:
        """Return the first rows of these buffers."""
        return replace(
            self,
            keys=self.keys[:, :rows],
            values=self.values[:, :rows],
            tokens=self.tokens[:rows],
            positions=self.positions[:rows],
            log_probs=self.log_probs[:rows],
            scores=self.scores[:rows],
        )

    def place_of(
        self,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
        *,
        is_start: bool = False,
    ) -> Place:
        """Return where tokens stand that are read at these positions, [requests, tokens]."""
        visible = self.columns <= positions[..., None]  # [requests, tokens, context]
        return Place(
            positions,
            self.cosines[positions],
            self.sines[positions],
            None if is_start else visible[:, None, None],
            rows,
        )
