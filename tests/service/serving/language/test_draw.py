"""Tokens drawn on the device are those that the sampler of other libraries draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.llm.scoring import log_softmax
from pipeline.llm.torch_engine.buffers import Buffers
from service.language.generation import Sampling
from service.serving.language.sampling import Sampler
from service.serving.language.torch_engine.draw import Draw, draw, draw_for

VOCABULARY, TOKENS = 50, 60
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "both": {"temperature": 2.0, "top_k": 20, "top_p": 0.6},
    "a large top_k": {"temperature": 1.0, "top_k": 10 * VOCABULARY},
    "a tiny top_p": {"temperature": 1.0, "top_p": 1e-9},
    "penalties": {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    "greedy with penalties": {"presence_penalty": 2.0, "frequency_penalty": -0.5},
}


def buffers_of(rows: int) -> Buffers:
    scores, tokens = torch.zeros(rows, VOCABULARY), torch.zeros(rows, dtype=torch.int64)
    nothing = torch.zeros(0)
    return Buffers(
        context=1,
        keys=nothing,
        values=nothing,
        tokens=tokens,
        positions=tokens,
        log_probs=torch.zeros(rows),
        scores=scores,
        cosines=nothing,
        sines=nothing,
        columns=nothing,
    )


@pytest.mark.parametrize("seed", [0, 7, -1])
def test_rows_together_draw_what_each_sampler_draws(seed: int) -> None:
    samplings = [Sampling(seed=seed, **case) for case in CASES.values()]
    samplers = [Sampler(each) for each in samplings]
    drawn = [(row + 1, Draw(each)) for row, each in enumerate(samplings)]
    buffers, random = buffers_of(len(drawn) + 1), np.random.default_rng(1)
    for _ in range(TOKENS):
        scores = random.normal(0, 2, tuple(buffers.scores.shape)).astype(np.float32)
        scores[1:, 3] = scores[1:, 4]  # two of a likelihood
        buffers.scores.copy_(torch.from_numpy(scores))
        buffers.tokens.fill_(-1)
        draw(buffers, drawn)
        wanted = [each.choose(row) for each, row in zip(samplers, scores[1:], strict=True)]
        assert buffers.tokens.tolist() == [-1, *wanted], "row 0 is drawn by nobody"
        logs = log_softmax(scores[1:])[np.arange(len(wanted)), wanted]
        assert buffers.log_probs[1:].numpy() == pytest.approx(logs, abs=1e-5)
        assert torch.equal(buffers.scores, torch.from_numpy(scores)), "the scores stay"


def test_greedy_answers_need_no_draw() -> None:
    assert draw_for(Sampling(top_k=3, top_p=0.5, seed=1)) is None
    for case in CASES.values():
        assert draw_for(Sampling(**case)) is not None
