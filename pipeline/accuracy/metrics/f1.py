"""F1: the mean over classes of the harmonic mean of precision and recall, by scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.accuracy.metrics.arithmetic import Array, Floats, mean_of_known
from pipeline.accuracy.metrics.metric import Batches, Decode, Metric, Picks, accept_all, counts_of
from pipeline.errors import DataError

IGNORED = -100  # the label of positions that do not count, as PyTorch's losses have it


def f1(decode: Decode, of_scores: bool) -> Metric:
    """Return macro F1 of decoded classes [samples, ...] against labels of the same shape.

    `of_scores`: the output holds a score for each class.
    """
    check = check_classes if of_scores else accept_all
    return Metric("f1", _evaluate, decode=decode, check=check, hides_nan=True)


def check_classes(outputs: Array, labels: Array | None) -> None:
    """Raise DataError for a label that is none of the classes of scores [samples, ..., classes]."""
    given = np.asarray(labels)
    given = given[given != IGNORED]
    if given.size and not 0 <= given.min() <= given.max() < outputs.shape[-1]:
        raise DataError(
            f"labels run from {given.min()} to {given.max()}, but the output has"
            f" {outputs.shape[-1]} classes",
            f"correct the labels; positions that do not count have the label {IGNORED}",
        )


@dataclass(frozen=True, slots=True)
class _Classes:
    """True and predicted class of every place, with the sample that each place belongs to."""

    units: int
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    owners: NDArray[np.intp]
    classes: Mapping[int, int]

    def score(self, picks: Picks) -> float:
        """Return the mean over those of the classes that are true or predicted somewhere."""
        return mean_of_known(self.class_scores(sorted(self.classes), picks))

    def class_scores(self, numbers: Sequence[int], picks: Picks) -> Floats:
        from sklearn.metrics import f1_score

        drawn = np.bincount(picks, minlength=self.units)
        scores = f1_score(
            self.labels,
            self.predicted,
            labels=list(numbers),
            average=None,
            sample_weight=drawn[self.owners],
            zero_division=np.nan,
        )
        return np.asarray(scores, dtype=np.float64)


def _evaluate(records: Batches, labels: Batches | None, reference: Batches) -> _Classes:
    predicted = [_places(sample) for batch in records for sample in batch]
    given = [np.asarray(sample).reshape(-1) for batch in labels or () for sample in batch]
    for index, (found, label) in enumerate(zip(predicted, given, strict=True)):
        if found.size != label.size or label.dtype.kind not in "iu":
            raise DataError(
                f"sample {index} has {label.size} labels of {label.dtype}, and {found.size}"
                " predicted classes",
                "give an integer label for each place of the output before its classes, and"
                f" {IGNORED} where it does not count",
            )
    sizes = [label.size for label in given]
    owners = np.repeat(np.arange(len(given)), sizes)
    all_labels = np.concatenate(given).astype(np.int64)
    counted = all_labels != IGNORED
    if not counted.any():
        raise DataError(f"every label is {IGNORED}, so none counts", "correct the labels")
    all_labels, owners = all_labels[counted], owners[counted]
    places = np.unique(np.stack([owners, all_labels]), axis=1)
    return _Classes(
        len(given),
        all_labels,
        np.concatenate(predicted)[counted],
        owners,
        counts_of(places[1].astype(np.int64)),
    )


def _places(sample: object) -> NDArray[np.int64]:
    classes = np.asarray(sample).reshape(-1)
    if classes.dtype.kind not in "iu":
        raise DataError(
            f"f1 needs integer classes, and the decoder gives {classes.dtype}",
            "correct the function of `accuracy.decode`",
        )
    return classes.astype(np.int64)
