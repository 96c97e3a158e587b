"""Can the metric tell right outputs from wrong ones? A test on the reference's own outputs.

They are shuffled across the samples, and the reference must score better than every shuffle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.accuracy.metrics.arithmetic import Array, Floats
from pipeline.accuracy.metrics.metric import MAX_SHUFFLED, ROUNDING, Metric, SampleScores
from pipeline.errors import DataError, PlanError

# the reference must beat every shuffle: outputs unrelated to the samples do so in 1 set of 40
SHUFFLES = 39
MIN_SHUFFLED = 8  # samples; with fewer, a shuffle may return the same order
SHUFFLED_BYTES = 64 * 2**20


@dataclass(slots=True)
class Drawn:
    """Decoded outputs of the reference for a random part of the samples, with their labels.

    Every unit (a sample, or a pair of them) of a set of any length has the same chance. All have
    the shape of the first one.
    """

    unit: int = 1
    most: int = MAX_SHUFFLED  # units
    outputs: list[Array] = field(default_factory=list)  # [unit, ...] each
    labels: list[Array] = field(default_factory=list)
    seen: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    rest: list[tuple[Array, Array | None]] = field(default_factory=list)  # of an unfinished unit

    def add(self, outputs: Array, labels: Array | None) -> None:
        """Add one batch, [samples, ...]. Labels that do not fit the rows are ignored here."""
        labelled = labels if labels is not None and len(labels) == len(outputs) else None
        for row in range(len(outputs)):
            label = None if labelled is None else labelled[row : row + 1]
            self.rest.append((outputs[row : row + 1], label))
            if len(self.rest) == self.unit:
                self._add_unit(self.rest)
                self.rest = []

    def _add_unit(self, rows: Sequence[tuple[Array, Array | None]]) -> None:
        if any(output.shape != rows[0][0].shape for output, _ in rows):
            return
        output = np.concatenate([output for output, _ in rows])
        given = [label for _, label in rows if label is not None]
        label = np.concatenate(given) if len(given) == len(rows) else None
        if not self._fits(output, label):
            return
        self.seen += 1
        index = self._index(output.nbytes)
        if index is None:
            return
        self.outputs[index : index + 1] = [output]
        if label is not None:
            self.labels[index : index + 1] = [label]

    def _fits(self, output: Array, label: Array | None) -> bool:
        """Return whether output and label have the shapes of the first ones."""
        if self.outputs and output.shape != self.outputs[0].shape:
            return False
        return label is None or not self.labels or label.shape == self.labels[0].shape

    def _index(self, size: int) -> int | None:
        """Return the index of the newest unit by reservoir sampling; None if it is left out."""
        most = min(self.most, max(MIN_SHUFFLED, SHUFFLED_BYTES // max(size, 1)))
        index = self.seen - 1 if self.seen <= most else int(self.random.integers(0, self.seen))
        return index if index < most else None


@dataclass(frozen=True, slots=True)
class _ShuffleTest:
    """Scores of the reference's outputs, unchanged and shuffled across samples."""

    score: float
    best_shuffled: float
    notices_order: bool  # scores changed otherwise than by moving with their outputs

    @property
    def is_above_chance(self) -> bool:
        return self.score > self.best_shuffled + ROUNDING


def chance_failure(metric: Metric, drawn: Drawn) -> str:
    """Return a failure if the reference scores no better than its outputs when shuffled; else "".

    PlanError or DataError if the metric cannot tell right answers from wrong ones.
    """
    if len(drawn.outputs) < MIN_SHUFFLED:
        return ""
    outputs = np.concatenate(drawn.outputs)
    labels = np.concatenate(drawn.labels) if drawn.labels else None
    test = _shuffle_test(metric, outputs, labels)
    if test.is_above_chance:
        return ""
    up_to = "down to" if metric.lower_is_better else "up to"
    figures = (
        f"{metric.name} {metric.shown(test.score):.4f}, and {up_to}"
        f" {metric.shown(test.best_shuffled):.4f} with its outputs shuffled across the samples"
    )
    if test.notices_order and labels is not None:
        return f"the reference itself scores at chance: {figures}; a drop from there says nothing"
    message = (
        f"metric '{metric.name}' cannot tell right answers from wrong ones: the reference scores"
        f" {figures}"
    )
    if metric.is_function:
        raise PlanError(
            message,
            "compare each sample's output with its own label or reference, higher is better;"
            " docs/howto/own-metric.md",
        )
    raise DataError(
        message, "give samples with different answers, or choose another `accuracy.output`"
    )


def _shuffle_test(metric: Metric, outputs: Array, labels: Array | None) -> _ShuffleTest:
    """Score the reference's outputs as they are, and SHUFFLES times in another order."""
    random = np.random.default_rng(0)
    scores = _scores(metric, outputs, labels, outputs)
    best_shuffled, notices_order = -np.inf, False
    for _ in range(SHUFFLES):
        order = random.permutation(len(outputs))
        shuffled = _scores(metric, outputs[order], labels, outputs)
        best_shuffled = max(best_shuffled, float(shuffled.mean()))  # ignores NaN
        moved = scores[order] if scores.ndim else scores
        if not _are_close(shuffled, moved) and not _are_close(shuffled, scores):
            notices_order = True
    return _ShuffleTest(float(scores.mean()), best_shuffled, notices_order)


def _scores(metric: Metric, outputs: Array, labels: Array | None, reference: Array) -> Floats:
    """Return scores of shape [samples], or () if the metric is for the whole set."""
    records = metric.record(outputs, labels, reference)
    expected = metric.record(reference, labels, reference)
    evaluation = metric.evaluate([records], None if labels is None else [labels], [expected])
    if isinstance(evaluation, SampleScores):
        return evaluation.scores
    return np.asarray(evaluation.score(np.arange(evaluation.units)))


def _are_close(scores: Floats, others: Floats) -> bool:
    return bool(np.allclose(scores, others, equal_nan=True))
