"""Metrics with one score per sample: top-k, cosine, and agreement of indices."""

from __future__ import annotations

from functools import partial

import numpy as np

from pipeline.accuracy.metrics.arithmetic import (
    Array,
    Floats,
    cosine_per_sample,
    index_hits,
    rows,
    topk_hits,
)
from pipeline.accuracy.metrics.metric import (
    Batches,
    Decode,
    Metric,
    SampleScores,
    as_they_are,
    class_labels,
    joined,
)
from pipeline.postprocess import IndexOutput


def top_k(name: str, k: int, index: IndexOutput | None) -> Metric:
    """Return top-k of scores [samples, ..., classes], or of the indices of an output."""
    hits = partial(_topk, k) if index is None else partial(_index_hits, k)
    return Metric(name, _scores_by_class, hits, decode_indices(index), labels="classes")


def cosine() -> Metric:
    """Return the cosine of each sample's output to that of the reference."""
    return Metric("cosine", _scores, _cosine, labels="none")


def agreement(index: IndexOutput) -> Metric:
    """Return the share of equal indices. Candidates are scored by `index_agreement` instead."""
    return Metric("agreement", _scores, _equal, decode_indices(index), labels="none")


def decode_indices(index: IndexOutput | None) -> Decode:
    """Return the decoder of an output of indices, to [samples, ..., k]; of others, none."""

    def decode(outputs: Array, mask: Array | None) -> Array:
        assert index is not None
        return index.with_last(outputs)

    return as_they_are if index is None else decode


def _scores(records: Batches, labels: Batches | None, reference: Batches) -> SampleScores:
    return SampleScores(joined(records).astype(np.float64))


def _scores_by_class(records: Batches, labels: Batches | None, reference: Batches) -> SampleScores:
    scores = joined(records).astype(np.float64)
    return SampleScores(scores, class_labels(labels, scores.size))


def _topk(k: int, outputs: Array, labels: Array | None, reference: Array) -> Floats:
    return topk_hits(outputs, np.asarray(labels), k)


def _index_hits(k: int, indices: Array, labels: Array | None, reference: Array) -> Floats:
    return index_hits(indices, np.asarray(labels), k)


def _cosine(outputs: Array, labels: Array | None, reference: Array) -> Floats:
    return cosine_per_sample(rows(outputs, len(outputs)), rows(reference, len(reference)))


def _equal(indices: Array, labels: Array | None, reference: Array) -> Floats:
    same = indices == reference
    return np.asarray(same.reshape(len(same), -1).mean(axis=1))
