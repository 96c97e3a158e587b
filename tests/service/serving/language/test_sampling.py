"""The choice of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from service.language.generation import Sampling
from service.serving.language.sampling import Sampler, check_sampling

LOGITS = np.log(np.array([0.1, 0.5, 0.15, 0.25], dtype=np.float32))


def drawn(sampling: Sampling, count: int = 2000) -> list[float]:
    """The share of each token."""
    sampler = Sampler(sampling)
    tokens = [sampler.choose(LOGITS) for _ in range(count)]
    return [tokens.count(token) / count for token in range(LOGITS.size)]


def test_greedy_is_the_likeliest_token() -> None:
    assert drawn(Sampling(), 3) == [0, 1, 0, 0]


def test_tokens_come_as_often_as_they_are_likely() -> None:
    assert drawn(Sampling(temperature=1.0, seed=1)) == pytest.approx(
        [0.1, 0.5, 0.15, 0.25], abs=0.05
    )


def test_a_higher_temperature_makes_them_more_equal() -> None:
    shares = np.array([0.1, 0.5, 0.15, 0.25]) ** 0.5
    found = drawn(Sampling(temperature=2.0, seed=1))
    assert found == pytest.approx(list(shares / shares.sum()), abs=0.05)


def test_top_k_keeps_the_likeliest_ones() -> None:
    found = drawn(Sampling(temperature=1.0, seed=1, top_k=2))
    assert found == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.05)
    assert drawn(Sampling(temperature=5.0, seed=1, top_k=1), 20) == [0, 1, 0, 0]


def test_top_p_keeps_the_fewest_that_hold_it() -> None:
    found = drawn(Sampling(temperature=1.0, seed=1, top_p=0.7))
    assert found == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.05)
    assert drawn(Sampling(temperature=1.0, seed=1, top_p=1e-9), 20) == [0, 1, 0, 0]


def test_a_seed_repeats_the_tokens_and_none_does_not() -> None:
    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(LOGITS) for _ in range(100)]

    assert tokens(-5) == tokens(-5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)


def test_penalties_make_repeated_tokens_rarer() -> None:
    presence = Sampler(Sampling(presence_penalty=2.0))
    assert [presence.choose(LOGITS) for _ in range(4)] == [1, 3, 2, 0]
    frequency = Sampler(Sampling(frequency_penalty=0.4))
    assert [frequency.choose(LOGITS) for _ in range(3)] == [1, 1, 3]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(presence_penalty=2.5), "presence_penalty: expected -2 to 2, got 2.5"),
        (Sampling(frequency_penalty=float("nan")), "frequency_penalty"),
        (Sampling(temperature=-1.0), "temperature: expected 0 or more"),
        (Sampling(temperature=float("inf")), "temperature"),
        (Sampling(top_p=0.0), "top_p: expected above 0"),
        (Sampling(top_k=-1), "top_k: expected 0 or more, got -1"),
    ],
)
def test_impossible_values_are_refused(sampling: Sampling, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sampling(sampling)
