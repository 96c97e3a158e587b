"""Arithmetic of accuracy: errors between two arrays, and scores per sample. Numpy only, no state.

Arrays are [samples, ...] unless noted. All results are computed in float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError

Array = NDArray[np.generic]
Floats = NDArray[np.float64]

Z_95 = 1.959964  # standard deviations that contain 95 % of a normal distribution
# for identical outputs, which have no noise: JSON has no infinity; float32 reaches about 150 dB
SNR_LIMIT_DB = 200.0
# models mask classes with -inf, the lowest float, or at the least with -10,000 added to the score
MASKED = -9000.0


def by_sample(array: Array, samples: int, whole: bool = False) -> Array:
    """Return the array as [samples, ...]. An array without a sample axis becomes [1, ...].

    `whole`: the array is the output for one sample that is a whole feed, so its first axis does
    not count samples.
    """
    has_axis = array.ndim > 0 and array.shape[0] == samples and not whole
    return array if has_axis else array[np.newaxis]


def rows(array: Array, samples: int) -> Floats:
    """Return one row per sample, [samples, elements], or [1, elements] without a sample axis."""
    table = by_sample(array, samples)
    return table.astype(np.float64).reshape(table.shape[0], -1)


def mask_nonfinite(candidate: Floats, reference: Floats) -> tuple[Floats, Floats, int, int]:
    """Return both arrays with 0 where one is not finite, and the counts of NaN and infinity.

    Only values that are NaN or infinite on one side count. Equal infinities, and NaN on both sides,
    agree: a model that masks with -inf is not wrong.
    """
    nan_candidate, nan_reference = np.isnan(candidate), np.isnan(reference)
    either_nan = nan_candidate | nan_reference
    infinite = (np.isinf(candidate) | np.isinf(reference)) & ~either_nan
    nan = int(np.count_nonzero(nan_candidate != nan_reference))
    inf = int(np.count_nonzero(infinite & (candidate != reference)))
    bad = either_nan | infinite
    return np.where(bad, 0.0, candidate), np.where(bad, 0.0, reference), nan, inf


def cosine_per_sample(candidate: Floats, reference: Floats) -> Floats:
    """Return the cosine of each row with its reference row: 1 if both are zero, 0 if one is.

    Infinities on which both sides agree are left out. A row with another value that is not finite
    gives NaN.
    """
    agree = np.isinf(reference) & (candidate == reference)
    candidate, reference = np.where(agree, 0.0, candidate), np.where(agree, 0.0, reference)
    with np.errstate(invalid="ignore"):  # infinity / infinity is NaN, as intended
        dots = np.einsum("ij,ij->i", candidate, reference)
        lengths = np.linalg.norm(candidate, axis=1) * np.linalg.norm(reference, axis=1)
        cosines = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths != 0)
    both_zero = ~candidate.any(axis=1) & ~reference.any(axis=1)
    return np.where(both_zero, 1.0, np.clip(cosines, -1.0, 1.0))


def snr_db(signal: float, noise: float) -> float:
    """Return signal to noise in dB from two sums of squares, within +-SNR_LIMIT_DB."""
    if noise == 0:
        return SNR_LIMIT_DB
    if signal == 0:
        return -SNR_LIMIT_DB
    return float(np.clip(10 * np.log10(signal / noise), -SNR_LIMIT_DB, SNR_LIMIT_DB))


def topk_hits(outputs: Array, labels: Array, k: int) -> Floats:
    """Return per sample the share of its labels among the k highest scores; NaN if a score is NaN.

    outputs [samples, classes], labels [samples] integers; or outputs [samples, ..., classes] with a
    label for each position before the classes. Ties, frequent in int8 engines, go to the lower
    class, as in argmax. DataError if the shapes do not fit or a label is no class.
    """
    scores = scores_by_label(outputs, labels)
    classes = labels.reshape(-1).astype(np.int64)
    own = scores[np.arange(len(scores)), classes][:, None]
    lower_class = np.arange(scores.shape[1]) < classes[:, None]
    ahead = (scores > own) | ((scores == own) & lower_class)
    hits = np.where(
        np.isnan(scores).any(axis=1), np.nan, (ahead.sum(axis=1) < k).astype(np.float64)
    )
    return np.asarray(hits.reshape(len(outputs), -1).mean(axis=1))


def index_hits(indices: Array, labels: Array, k: int) -> Floats:
    """Return per sample the share of its labels among the first k indices.

    indices [samples, ..., at least k], the best first; labels [samples, ...] integers. DataError if
    the shapes do not fit.
    """
    places = indices.shape[:-1]
    if (
        labels.dtype.kind not in "iu"
        or labels.shape[:1] != places[:1]
        or _long_axes(labels.shape) != _long_axes(places)
    ):
        raise DataError(
            f"expected integer labels of shape {places}, got {labels.dtype} of shape"
            f" {labels.shape}",
            "give one integer label per place, choose another `accuracy.output`, or set"
            " `accuracy.metric: agreement`",
        )
    hits = (indices[..., :k] == labels.reshape(*places, 1)).any(axis=-1)
    return np.asarray(hits.reshape(len(hits), -1).mean(axis=1))


def chosen_scores(scores: Array, indices: Array) -> Floats:
    """Return the scores at the indices. scores [..., classes], indices [..., k]."""
    return np.take_along_axis(scores, indices.astype(np.intp), -1).astype(np.float64)


def index_agreement(indices: Array, expected: Array, scores: Array) -> Floats:
    """Return how well each index does in the reference's scores: 1 as the reference's own index.

    0 is an index that does no better than the average class. Indices are [..., k], scores
    [..., classes]. Equal scores agree whatever their indices, and almost equal scores agree almost.
    Masked classes are left out of the average: beside them, all others would seem equal.
    """
    own, other = chosen_scores(scores, expected), chosen_scores(scores, indices)
    finite = np.isfinite(scores)
    unmasked = finite & np.greater(scores, MASKED)
    counted = np.where(unmasked.any(axis=-1, keepdims=True), unmasked, finite)
    count = np.maximum(counted.sum(axis=-1, keepdims=True), 1)
    average = np.sum(scores, axis=-1, keepdims=True, dtype=np.float64, where=counted) / count
    best = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=finite)
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = np.abs(own - other) / (best - average)
    both_nan = np.isnan(own) & np.isnan(other)
    loss = np.where((own == other) | both_nan, 0.0, np.where(np.isnan(loss), 1.0, loss))
    return np.asarray(1.0 - np.clip(loss, 0.0, 1.0))


def scores_by_label(outputs: Array, labels: Array) -> Floats:
    """Return the scores for each label, [labels, classes]. DataError if they do not fit."""
    next_step = (
        "give one integer label per sample, choose another `accuracy.output`, or set"
        " `accuracy.metric: cosine`"
    )
    # axes of 1 may follow
    is_table = outputs.ndim >= 2 and outputs.size == outputs.shape[0] * outputs.shape[1]
    per_sample = is_table and labels.shape == outputs.shape[:1]
    per_place = (
        outputs.ndim >= 2
        and labels.shape[:1] == outputs.shape[:1]
        and _long_axes(labels.shape) == _long_axes(outputs.shape[:-1])
    )
    if not is_table and not per_place:
        needed = (
            "top-k needs an output of shape [samples, classes], or [samples, ..., classes] with a"
            " label for each place"
        )
        raise DataError(
            f"{needed}: got {outputs.shape} with labels of shape {labels.shape}", next_step
        )
    if labels.dtype.kind not in "iu" or not (per_sample or per_place):
        raise DataError(
            f"expected {outputs.shape[0]} integer labels, got {labels.dtype} of shape"
            f" {labels.shape}",
            next_step,
        )
    classes = outputs.shape[1 if per_sample else -1]
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        raise DataError(
            f"labels run from {labels.min()} to {labels.max()}, but the output has {classes}"
            " classes",
            next_step,
        )
    return outputs.astype(np.float64).reshape(-1, classes)


def mean_of_known(scores: Floats) -> float:
    """Return the mean of those scores that are numbers; NaN if none is."""
    known = scores[np.isfinite(scores)]
    return float(known.mean()) if known.size else float("nan")


def _long_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without its axes of 1."""
    return tuple(size for size in shape if size != 1)


def paired_interval(lost: int, gained: int, samples: int) -> tuple[float, float]:
    """Return the 95 % score interval (Tango 1998) of a drop (lost - gained) / samples.

    Each sample is right or wrong for both sides. Without any difference a bootstrap gives [0, 0].
    This interval is then about -3.8/samples to 3.8/samples, the two-sided form of the rule of three
    (3/samples, one-sided). Within -1 to 1.
    """
    return -_largest_drop(gained, lost, samples), _largest_drop(lost, gained, samples)


def _largest_drop(lost: int, gained: int, samples: int) -> float:
    """Return the largest true drop within Z_95 standard errors of the observed drop.

    Found by bisection.
    """
    low, high = (lost - gained) / samples, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _standard_errors(lost, gained, samples, middle) > -Z_95:
            low = middle
        else:
            high = middle
    return high


def _standard_errors(lost: int, gained: int, samples: int, drop: float) -> float:
    """Return (observed drop - `drop`) / standard error, with the error under the true `drop`."""
    a = 2 * samples
    b = (2 * samples - lost + gained) * drop - lost - gained
    c = -gained * drop * (1 - drop)
    # the most likely rate of gained samples under `drop`
    gains = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
    variance = samples * (2 * gains + drop * (1 - drop))
    distance = lost - gained - samples * drop
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)
