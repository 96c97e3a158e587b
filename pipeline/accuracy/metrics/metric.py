"""What a metric is: how it decodes outputs, and how it scores a set and its resamples.

    output  --decode-->  decoded  --record-->  records, one per sample  --evaluate-->  Evaluation

Outputs are decoded and recorded batch by batch, so only records are kept. A metric with a score per
sample records that score. Any other one records what it needs to score the whole set, and any
resample of it. Scores are higher for better outputs; `Metric.shown` turns an error rate back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.accuracy.metrics.arithmetic import Array, Floats
from pipeline.errors import DataError

Picks = NDArray[np.int64]
Batches = Sequence[Array]
"""Arrays of the batches of a set, each [samples of the batch, ...]."""

ROUNDING = 1e-9  # so that 3 of 300 is within a max_drop of 0.01, whatever the last bit is
RESAMPLES = 200  # of a metric of the whole set, where each costs milliseconds or more
MANY_RESAMPLES = 2000  # of sums of numbers
MAX_SHUFFLED = 1024  # samples; more take time and do not change the result


class Evaluation(Protocol):
    """The outputs of one side, ready to be scored. A unit is a sample, or several (a pair)."""

    @property
    def units(self) -> int: ...

    @property
    def classes(self) -> Mapping[int, int]:
        """The number of units with each class; empty if the metric has no classes."""
        ...

    def score(self, picks: Picks) -> float:
        """Return the score of these units, which may repeat. NaN if they have none."""
        ...

    def class_scores(self, numbers: Sequence[int], picks: Picks) -> Floats:
        """Return the score of each of these classes on these units. NaN if it has none there."""
        ...


@dataclass(frozen=True, slots=True)
class SampleScores:
    """An evaluation with one score per sample. The score of samples is their mean."""

    scores: Floats  # [samples]
    labels: NDArray[np.int64] | None = None  # the class of each sample; None: no classes

    @property
    def units(self) -> int:
        return self.scores.size

    @property
    def classes(self) -> Mapping[int, int]:
        return {} if self.labels is None else counts_of(self.labels)

    def score(self, picks: Picks) -> float:
        return float(self.scores[picks].mean()) if picks.size else float("nan")

    def class_scores(self, numbers: Sequence[int], picks: Picks) -> Floats:
        return np.array([self.score(self.of_class(number, picks)) for number in numbers])

    def of_class(self, number: int, picks: Picks) -> Picks:
        """Return those of the samples that have this class."""
        assert self.labels is not None
        own: Picks = picks[self.labels[picks] == number]
        return own


Decode = Callable[[Array, Array | None], Array]
"""Decodes [samples, ...] outputs, with the mask [samples, positions] if the plan names one."""

Record = Callable[[Array, Array | None, Array], Array]
"""Makes [samples, ...] records from decoded outputs, labels, and those of the reference."""

Evaluate = Callable[[Batches, Batches | None, Batches], Evaluation]
"""Evaluates the records of one side, with the labels and the reference's records of all batches."""

KeptLabels = Literal["all", "classes", "none"]
"""classes: only labels that are one integer per sample."""

Check = Callable[[Array, Array | None], None]
"""Raises DataError if the reference's outputs cannot have these labels."""


def as_they_are(outputs: Array, mask: Array | None) -> Array:
    return outputs


def decoded_alone(decoded: Array, labels: Array | None, reference: Array) -> Array:
    return decoded


def accept_all(outputs: Array, labels: Array | None) -> None:
    """Accept any labels: the metric compares them itself."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: a built-in one, or a function of the user."""

    name: str
    evaluate: Evaluate
    record: Record = decoded_alone
    decode: Decode = as_they_are
    check: Check = accept_all
    lower_is_better: bool = False
    labels: KeptLabels = "all"  # the labels that `evaluate` needs
    hides_nan: bool = False  # decoded outputs do not show that an output is NaN
    may_be_partial: bool = True  # it may be computed on a part of the set
    is_function: bool = False  # it is the user's
    unit: int = 1  # consecutive samples that are scored together
    resamples: int = RESAMPLES
    most_shuffled: int = MAX_SHUFFLED
    class_names: tuple[str, ...] = field(default=())  # of class 0, 1, ...; empty: numbers

    def shown(self, score: float) -> float:
        """Return a score as it is known: an error rate is positive."""
        return -score if self.lower_is_better else score

    def keeps(self, labels: Array) -> bool:
        """Return whether the labels of a batch, [samples, ...], must be kept."""
        if self.labels == "classes":
            return labels.dtype.kind in "iu" and labels.size == len(labels)
        return self.labels == "all"

    def class_name(self, number: int) -> str:
        return self.class_names[number] if self.class_names else str(number)


def joined(arrays: Batches) -> Array:
    """Join all batches to one array, [samples, ...]. DataError if samples differ in shape."""
    try:
        return np.concatenate(arrays)
    except ValueError as error:
        next_step = (
            "choose an output whose shape is the same for all samples with `accuracy.output`, or"
            " set `accuracy.metric: cosine`"
        )
        raise DataError(f"the metric needs samples of one shape: {error}", next_step) from error


def counts_of(labels: NDArray[np.int64]) -> dict[int, int]:
    """Return how often each label occurs."""
    numbers, counts = np.unique(labels, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def class_labels(labels: Batches | None, samples: int) -> NDArray[np.int64] | None:
    """Return one class per sample, [samples]; None if the labels are something else."""
    if not labels or any(each.dtype.kind not in "iu" or each.size != len(each) for each in labels):
        return None
    classes = np.concatenate([each.reshape(-1) for each in labels]).astype(np.int64)
    return classes if classes.size == samples else None
