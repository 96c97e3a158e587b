"""The choice of the next token, for libraries whose own choice is not used. Pure.

Order: penalties, temperature, the `top_k` likeliest, then the fewest of them that hold `top_p`.
"""

from __future__ import annotations

import secrets
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from service.language.generation import Sampling

MAX_PENALTY = 2.0


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for values that no choice is possible with."""
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(getattr(sampling, name)) <= MAX_PENALTY:
            raise ValueError(f"{name}: expected -2 to 2, got {getattr(sampling, name):g}")
    if not (0 <= sampling.temperature < np.inf):
        raise ValueError(f"temperature: expected 0 or more, got {sampling.temperature:g}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p: expected above 0 and up to 1, got {sampling.top_p:g}")
    if sampling.top_k is not None and sampling.top_k < 0:
        raise ValueError(f"top_k: expected 0 or more, got {sampling.top_k}")


def random_of(sampling: Sampling) -> np.random.Generator:
    """Return what draws the tokens of an answer: one number from 0 to 1 each."""
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return np.random.default_rng(seed % 2**64)


class Sampler:
    """Chooses the tokens of one answer. The same seed and logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling, self._counts = sampling, Counter[int]()
        self._random = random_of(sampling)

    def choose(self, logits: NDArray[np.float32]) -> int:
        """Return the next token; `logits` [vocabulary] are not changed."""
        scores = self._penalised(logits)
        if self._sampling.temperature > 0:
            token = self._drawn(scores / self._sampling.temperature)
        else:
            token = int(scores.argmax())
        self._counts[token] += 1
        return token

    def _penalised(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        scores = logits.astype(np.float64)
        presence, frequency = self._sampling.presence_penalty, self._sampling.frequency_penalty
        if presence or frequency:
            for token, count in self._counts.items():
                scores[token] -= presence + frequency * count
        return scores

    def _drawn(self, scores: NDArray[np.float64]) -> int:
        order = np.argsort(-scores, kind="stable")[: self._sampling.top_k or scores.size]
        weights = np.exp(scores[order] - scores[order[0]])
        shares = np.cumsum(weights / weights.sum())
        kept = int(np.searchsorted(shares, self._sampling.top_p)) + 1
        shares = shares[:kept] / shares[min(kept, shares.size) - 1]
        index = int(np.searchsorted(shares, self._random.random(), side="right"))
        return int(order[min(index, shares.size - 1)])
