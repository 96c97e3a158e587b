"""Perplexity: e to the mean negative log-likelihood of the labels, in nats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.accuracy.metrics.arithmetic import Array, Floats, scores_by_label
from pipeline.accuracy.metrics.f1 import IGNORED
from pipeline.accuracy.metrics.metric import MANY_RESAMPLES, Batches, Metric, Picks, joined

MAX_NATS = 700.0  # e to more is no float


def perplexity() -> Metric:
    """Return the perplexity of logits [samples, ..., classes] for a label of each position."""
    return Metric(
        "perplexity",
        _evaluate,
        _likelihoods,
        labels="none",
        lower_is_better=True,
        resamples=MANY_RESAMPLES,
    )


@dataclass(frozen=True, slots=True)
class _Perplexity:
    """The nats and the labels of each sample. Negative: lower is better."""

    nats: Floats  # [samples]
    counts: Floats  # [samples]

    @property
    def units(self) -> int:
        return self.nats.size

    @property
    def classes(self) -> Mapping[int, int]:
        return {}

    def score(self, picks: Picks) -> float:
        total = float(self.counts[picks].sum())
        if not total:
            return math.nan
        mean = float(self.nats[picks].sum()) / total
        return -math.exp(min(mean, MAX_NATS)) if mean == mean else math.nan

    def class_scores(self, numbers: Sequence[int], picks: Picks) -> Floats:
        raise NotImplementedError("perplexity has no classes")


def _evaluate(records: Batches, labels: Batches | None, reference: Batches) -> _Perplexity:
    nats, counts = joined(records).astype(np.float64).T
    return _Perplexity(nats, counts)


def _likelihoods(outputs: Array, labels: Array | None, reference: Array) -> Floats:
    """Return nats and number of labels of each sample, [samples, 2]."""
    given = np.asarray(labels)
    counted = given != IGNORED
    scores = scores_by_label(outputs, np.where(counted, given, 0))  # [labels, classes]
    best = scores.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinities give NaN, which fails the engine
        log_sum = np.log(np.exp(scores - best).sum(axis=1)) + best[:, 0]
    classes = np.where(counted, given, 0).reshape(-1).astype(np.intp)
    nats = log_sum - scores[np.arange(len(scores)), classes]
    nats = np.where(counted.reshape(-1), nats, 0.0).reshape(len(given), -1).sum(axis=1)
    return np.stack([nats, counted.reshape(len(given), -1).sum(axis=1)], axis=1)
