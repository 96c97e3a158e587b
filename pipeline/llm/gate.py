"""The verdict on one candidate's scores: intervals over texts, against the limits of the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.progress import MAX_DROP, PERPLEXITY, AccuracyFigures
from pipeline.llm.plan import LanguageAccuracy
from pipeline.llm.scoring import DocumentScore, Scores
from pipeline.llm.ways import WayScore
from pipeline.measurement.statistics import Interval, bootstrap


class Judged(Frozen):
    """What the scores of an engine come to."""

    perplexity_increase: Interval = Field(
        description="Of texts that are read at once: 0.02 is 2 %."
    )
    cached_perplexity_increase: Interval = Field(
        description="Of their last tokens, read one by one."
    )
    divergence: Interval = Field(description="From the model in fp32, nats per token.")
    agreement: Interval = Field(description="Share of tokens that both find likeliest.")
    greedy_equal: float = Field(
        description="Share of the greedy tokens before the first difference."
    )
    path_difference: float = Field(
        description="Of log-probabilities read at once and one by one, nats."
    )
    tokens: int = Field(description="Scored tokens.")
    ways: tuple[WayScore, ...] = Field(
        default=(), description="Greedy answers as they are served, beside the same ones alone."
    )
    failures: tuple[str, ...] = Field(description="The limits that it exceeds. Empty: none.")

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def worst_increase(self) -> Interval:
        return max(
            self.perplexity_increase, self.cached_perplexity_increase, key=lambda each: each.value
        )

    @property
    def figures(self) -> AccuracyFigures | None:
        """Return the worst increase as a plot shows it; None if it is too large for one."""
        worst = self.worst_increase
        if not all(abs(each) <= MAX_DROP for each in (worst.low, worst.value, worst.high)):
            return None
        return AccuracyFigures(PERPLEXITY, worst.value, worst.low, worst.high, self.passed)


def judge(scores: Scores, limits: LanguageAccuracy) -> Judged:
    """Compare an engine's scores with the limits. The upper end of each interval decides."""
    documents = scores.documents
    increase = _increase(documents, lambda one: (one.loss - one.reference_loss, one.tokens))
    cached = _increase(
        documents,
        lambda one: (one.cached_loss - one.cached_reference_loss, one.cached_tokens),
    )
    divergence = _ratio(documents, lambda one: (one.divergence, one.tokens))
    agreement = _ratio(documents, lambda one: (one.agreeing, one.tokens))
    failures = []
    most = limits.max_perplexity_increase
    for interval, how in ((increase, "read at once"), (cached, "read one by one")):
        if not interval.high <= most:
            failures.append(
                f"perplexity of texts {how} changes by {percent_text(interval)}, allowed is"
                f" {100 * most:.3g} %"
            )
    if limits.max_kl is not None and not divergence.high <= limits.max_kl:
        failures.append(
            f"divergence of {divergence.value:.4f} nats per token (to {divergence.high:.4f}),"
            f" allowed are {limits.max_kl:.4f}"
        )
    if limits.min_agreement is not None and not agreement.low >= limits.min_agreement:
        failures.append(
            f"{agreement.value:.1%} of the likeliest tokens agree (from {agreement.low:.1%}),"
            f" asked are {limits.min_agreement:.1%}"
        )
    if not scores.path_difference <= limits.max_path_difference:
        failures.append(
            "what it serves is not what was scored: log-probabilities differ by"
            f" {scores.path_difference:.3f} nats in the mean, allowed are"
            f" {limits.max_path_difference:.3f}"
        )
    failures += [
        f"an answer {each.way} is not the one that it gives alone: log-probabilities differ by"
        f" {each.difference:.3f} nats in the mean, allowed are {limits.max_serving_difference:.3f}"
        for each in scores.ways
        if not each.difference <= limits.max_serving_difference
    ]
    greedy = sum(answer.tokens for answer in scores.greedy)
    return Judged(
        perplexity_increase=increase,
        cached_perplexity_increase=cached,
        divergence=divergence,
        agreement=agreement,
        greedy_equal=sum(answer.equal for answer in scores.greedy) / max(greedy, 1),
        path_difference=scores.path_difference,
        tokens=sum(one.tokens for one in documents),
        ways=scores.ways,
        failures=tuple(failures),
    )


Parts = Callable[[DocumentScore], tuple[float, float]]


def _ratio(documents: Sequence[DocumentScore], parts: Parts) -> Interval:
    """Return the ratio of two sums over texts, with an interval over texts."""
    values = np.array([parts(one) for one in documents])  # [documents, 2]

    def figure(drawn: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
        above, below = values[drawn].sum(0)
        return float(above / below)

    return bootstrap(figure, len(documents))


def _increase(documents: Sequence[DocumentScore], parts: Parts) -> Interval:
    """Return the increase of the perplexity: exp of the mean extra loss, less 1."""
    loss = _ratio(documents, parts)
    low, value, high = np.expm1([loss.low, loss.value, loss.high])
    return Interval(value=float(value), low=float(low), high=float(high))


def percent_text(interval: Interval) -> str:
    """Return an interval in percent: `0.32 % (0.11 to 0.51 %)`."""
    value, low, high = (100 * each for each in (interval.value, interval.low, interval.high))
    return f"{value:.2f} % ({low:.2f} to {high:.2f} %)"
