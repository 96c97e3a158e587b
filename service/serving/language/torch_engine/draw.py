"""The choice of tokens on the device, where the scores are. It draws what `Sampler` of
service/serving/language/sampling.py draws from the same scores and seed, for several rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.llm.torch_engine.buffers import Buffers
from service.language.generation import Sampling
from service.serving.language.sampling import random_of


class Draw:
    """How the tokens of one answer are drawn, and which ones it has."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling, self._random = sampling, random_of(sampling)
        self._counts: torch.Tensor | None = None  # [vocabulary] fp64, of the answer's tokens

    def next_numbers(self, vocabulary: int) -> tuple[float, float, float, float]:
        """Return temperature, number of likeliest tokens, `top_p`, and the next random number."""
        sampling = self._sampling
        if not sampling.temperature:  # the likeliest token, after penalties
            return 1.0, 1.0, 1.0, 0.0
        likeliest = min(sampling.top_k or vocabulary, vocabulary)
        return sampling.temperature, likeliest, sampling.top_p, self._random.random()

    def penalise(self, scores: torch.Tensor) -> None:
        """Lower the scores of the answer's tokens, [vocabulary] fp64."""
        presence, frequency = self._sampling.presence_penalty, self._sampling.frequency_penalty
        if not (presence or frequency):
            return
        if self._counts is None:
            self._counts = torch.zeros_like(scores)
        scores -= (self._counts > 0) * presence + self._counts * frequency

    def count(self, token: torch.Tensor) -> None:
        """Remember a token of the answer, [1] int64, if penalties ask for it."""
        if self._counts is not None:
            self._counts[token] += 1


def draw_for(sampling: Sampling) -> Draw | None:
    """Return how the tokens of an answer are drawn; None: always the likeliest one."""
    is_greedy = not (
        sampling.temperature or sampling.presence_penalty or sampling.frequency_penalty
    )
    return None if is_greedy else Draw(sampling)


def draw(buffers: Buffers, drawn: Sequence[tuple[int, Draw]]) -> None:
    """Replace the tokens of these rows, which were the likeliest ones, by tokens that are drawn
    from their scores, with the log-probabilities of these.
    """
    device, vocabulary = buffers.scores.device, buffers.scores.shape[1]
    numbers = [each.next_numbers(vocabulary) for _, each in drawn]
    rows = torch.tensor([row for row, _ in drawn]).to(device, non_blocking=True)
    facts = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    temperature, likeliest, top_p, random = facts[:, :, None].unbind(1)  # [rows, 1] each
    with torch.no_grad():
        scores = buffers.scores[rows].double()  # [rows, vocabulary]
        log_probs = scores.log_softmax(-1)
        for number, (_, each) in enumerate(drawn):
            each.penalise(scores[number])
        ordered, order = (scores / temperature).sort(dim=-1, descending=True, stable=True)
        kept = torch.arange(vocabulary, device=device) < likeliest
        weights = (ordered - ordered[:, :1]).exp() * kept
        shares = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)
        last = ((shares < top_p) & kept).sum(-1, keepdim=True).minimum(likeliest.long() - 1)
        shares = shares / shares.gather(-1, last)
        place = (shares <= random).sum(-1, keepdim=True).minimum(last)
        tokens = order.gather(-1, place)[:, 0]
        buffers.tokens[rows] = tokens
        buffers.log_probs[rows] = log_probs.gather(-1, tokens[:, None])[:, 0].float()
        for number, (_, each) in enumerate(drawn):
            each.count(tokens[number : number + 1])
