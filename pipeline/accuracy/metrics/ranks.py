"""Rank correlation (Spearman, by scipy): of one number per sample, or of pairs of embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.accuracy.metrics.arithmetic import Array, Floats, cosine_per_sample
from pipeline.accuracy.metrics.metric import Batches, Decode, Metric, Picks, joined
from pipeline.errors import DataError

PAIR = 2


def spearman(decode: Decode) -> Metric:
    """Return the rank correlation of one number per sample with the labels."""
    return Metric("spearman", _of_numbers, _numbers, decode)


def similarity(decode: Decode) -> Metric:
    """Return the rank correlation of the cosines of pairs with their labels.

    Samples 0 and 1 are a pair, 2 and 3, and so on. Both have the label of the pair.
    """
    return Metric("sts", _of_pairs, _vectors, decode, unit=PAIR, may_be_partial=False)


@dataclass(frozen=True, slots=True)
class _Correlation:
    numbers: Floats  # [units]
    labels: Floats  # [units]

    @property
    def units(self) -> int:
        return self.numbers.size

    @property
    def classes(self) -> Mapping[int, int]:
        return {}

    def score(self, picks: Picks) -> float:
        from scipy.stats import spearmanr

        numbers, labels = self.numbers[picks], self.labels[picks]
        if not picks.size or np.ptp(numbers) == 0 or np.ptp(labels) == 0:  # no ranks
            return float("nan")
        return float(spearmanr(numbers, labels).statistic)

    def class_scores(self, numbers: Sequence[int], picks: Picks) -> Floats:
        raise NotImplementedError("a correlation has no classes")


def _of_numbers(records: Batches, labels: Batches | None, reference: Batches) -> _Correlation:
    return _Correlation(joined(records).astype(np.float64), _labels(labels))


def _of_pairs(records: Batches, labels: Batches | None, reference: Batches) -> _Correlation:
    vectors, scores = joined(records).astype(np.float64), _labels(labels)
    if len(vectors) % PAIR:
        raise DataError(
            f"sts compares samples in pairs, and the set has {len(vectors)}",
            "give both samples of each pair, one after the other",
        )
    unequal = np.flatnonzero(scores[::PAIR] != scores[1::PAIR])
    if unequal.size:
        first = int(unequal[0]) * PAIR
        raise DataError(
            f"samples {first} and {first + 1} are a pair, and have the labels {scores[first]:g} and"
            f" {scores[first + 1]:g}",
            "give both samples of a pair its label",
        )
    return _Correlation(cosine_per_sample(vectors[::PAIR], vectors[1::PAIR]), scores[::PAIR])


def _labels(labels: Batches | None) -> Floats:
    given = joined(labels or ())
    if given.dtype.kind not in "iuf" or given.size != len(given):
        raise DataError(
            f"expected one number per sample as label, got {given.dtype} of shape {given.shape}",
            "give `labels` of shape [samples]",
        )
    return given.reshape(-1).astype(np.float64)


def _numbers(decoded: Array, labels: Array | None, reference: Array) -> Array:
    if decoded.size != len(decoded):
        raise DataError(
            f"spearman needs one number per sample, got an output of shape {decoded.shape}",
            "choose another `accuracy.output`, or `accuracy.decode: module:function`; for"
            " embeddings of pairs, `accuracy.metric: sts`",
        )
    return _floats(decoded.reshape(-1), "spearman")


def _vectors(decoded: Array, labels: Array | None, reference: Array) -> Array:
    stacked = np.stack(list(decoded)) if decoded.dtype == object else decoded
    long_axes = [size for size in stacked.shape[1:] if size != 1]
    if len(long_axes) > 1:
        raise DataError(
            f"sts needs one vector per sample, got an output of shape {stacked.shape}",
            "set `accuracy.decode: mean_pool` for [samples, positions, values], or choose another"
            " `accuracy.output`",
        )
    return _floats(stacked.reshape(len(stacked), -1), "sts")


def _floats(values: Array, metric: str) -> Floats:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{metric} needs numbers, and the decoder gives others: {error}",
            "correct the function of `accuracy.decode`",
        ) from error
