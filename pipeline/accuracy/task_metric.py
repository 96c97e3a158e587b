"""The task metric of one engine: it collects batches, and judges the drop from the reference.

What a metric is: `pipeline.accuracy.metrics.metric`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.accuracy.drop import MIN_CLASS_SAMPLES, Sides
from pipeline.accuracy.metrics.arithmetic import Array, Floats
from pipeline.accuracy.metrics.metric import ROUNDING, Metric, SampleScores
from pipeline.accuracy.shuffle import Drawn, chance_failure
from pipeline.errors import DataError
from pipeline.measurement.statistics import Interval
from pipeline.results.accuracy import MetricResult

Compared = tuple[MetricResult | None, list[str]]
"""The metric, None if a score is NaN, and the failures of its drop."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest drops that the plan allows; None: not limited."""

    max_drop: float
    max_class_drop: float | None = None


@dataclass(slots=True)
class TaskMetric:
    """Collects the records of all batches, of the candidate and of the reference."""

    metric: Metric
    output: str
    limits: Limits
    mask: str | None = None  # the input with the positions that count
    candidate: list[Array] = field(default_factory=list)
    reference: list[Array] = field(default_factory=list)
    labels: list[Array] = field(default_factory=list)
    drawn: Drawn = field(init=False)
    nan_samples: list[int] = field(default_factory=list)  # of the candidate, or of the reference
    nan_reference: bool = False
    samples: int = 0

    def __post_init__(self) -> None:
        self.drawn = Drawn(self.metric.unit, self.metric.most_shuffled)

    @property
    def name(self) -> str:
        return self.metric.name

    def add(
        self,
        outputs: Array,
        labels: Array | None,
        reference: Array,
        agreement: Floats | None = None,
        mask: Array | None = None,
    ) -> None:
        """Add one batch, [samples, ...] each.

        `agreement` is that of indices, [samples]. `mask` is 1 where a position counts.
        """
        metric = self.metric
        metric.check(reference, labels)
        expected = metric.decode(reference, mask)
        self.drawn.add(expected, labels)
        if labels is not None and metric.keeps(labels):
            self.labels.append(labels)
        if metric.name == "agreement" and agreement is not None:
            self.candidate.append(agreement)
            self.reference.append(np.ones(len(agreement)))
            return
        self._note_nan(outputs, reference)
        self.reference.append(metric.record(expected, labels, expected))
        decoded = metric.decode(outputs, mask)
        self.candidate.append(metric.record(decoded, labels, expected))

    def _note_nan(self, outputs: Array, reference: Array) -> None:
        """Note the samples with NaN, which a decoder would take for an answer."""
        if self.metric.hides_nan:
            nan = np.isnan(_flat(outputs)).any(axis=1)
            self.nan_samples += (np.flatnonzero(nan) + self.samples).tolist()
            self.nan_reference |= bool(np.isnan(_flat(reference)).any())
        self.samples += len(outputs)

    def compared(self, certain: bool = False) -> Compared:
        """Return the metric and the failures of its drop.

        `certain`: a drop fails only if its whole interval exceeds the limit. Use it for a part of a
        set.
        """
        labels = self.labels or None
        before = self.metric.evaluate(self.reference, labels, self.reference)
        if before.units < 2:
            message = (
                f"metric {self.name} has {before.units} score for the whole set: output"
                f" '{self.output}' has no row per sample"
            )
            raise DataError(
                message, "choose an output whose first axis is the samples with `accuracy.output`"
            )
        after = self.metric.evaluate(self.candidate, labels, self.reference)
        sides = Sides(self.metric, before, after)
        if certain and not np.isfinite(before.score(sides.everything)):
            return None, []  # such as a part without a true box
        return self._nan_failure(sides) or self._verdict(sides, certain)

    def chance(self) -> str:
        """Return a failure if the reference scores no better than its outputs when shuffled.

        PlanError or DataError if the metric cannot tell right answers from wrong ones.
        """
        return chance_failure(self.metric, self.drawn)

    def _nan_failure(self, sides: Sides) -> Compared | None:
        """Return the failure of a score that is no number; DataError if it is the reference's."""
        before, after = sides.before, sides.after
        score = before.score(sides.everything)
        if self.nan_reference or not np.isfinite(score):
            message = (
                f"metric {self.name} is not a number on the reference itself: no engine can be"
                " compared with it"
            )
            raise DataError(message, "correct the metric or the labels")
        bad = self.nan_samples
        if isinstance(after, SampleScores):
            bad = np.flatnonzero(~np.isfinite(after.scores)).tolist()
        if bad:
            return None, [
                f"metric {self.name} is not a number on {len(bad)} of"
                f" {max(self.samples, after.units)} samples (first: {bad[0]})"
            ]
        found = after.score(sides.everything)
        if np.isfinite(found):
            return None
        shown = self.metric.shown(score)
        return None, [f"metric {self.name} is {found} where the reference has {shown}"]

    def _verdict(self, sides: Sides, certain: bool) -> Compared:
        shown = self.metric.shown
        before = shown(sides.before.score(sides.everything))
        after = shown(sides.after.score(sides.everything))
        drop = sides.drop()
        # the report of a part has no classes
        worst = None if certain and self.limits.max_class_drop is None else sides.worst_class()
        if worst is None and self.limits.max_class_drop is not None and not certain:
            raise self._no_class(sides)
        limit = self._limit("max_drop", self.limits.max_drop, certain)
        failures = [limit.failure(self.name, before, after, drop)]
        if worst is not None and self.limits.max_class_drop is not None:
            limit = self._limit("max_class_drop", self.limits.max_class_drop, certain)
            name = f"{self.name} of class {worst.name}"
            failures.append(limit.failure(name, worst.reference, worst.candidate, worst.interval))
        broken = [failure for failure in failures if failure]
        result = MetricResult(
            name=self.name,
            reference=before,
            candidate=after,
            lower_is_better=self.metric.lower_is_better,
            drop=drop.value,
            interval=drop,
            max_drop=self.limits.max_drop,
            worst_class=worst,
            judged_classes=len(sides.judged_classes()),
            small_classes=len(sides.before.classes) - len(sides.judged_classes()),
            max_class_drop=self.limits.max_class_drop,
            passed=not broken,
        )
        return result, broken

    def _limit(self, key: str, largest: float, certain: bool) -> _Limit:
        verb = "rises" if self.metric.lower_is_better else "drops"
        return _Limit(key, largest, certain, verb)

    def _no_class(self, sides: Sides) -> DataError:
        counts = sides.before.classes.values()
        if not counts:
            return DataError(
                f"accuracy.max_class_drop is given, and metric {self.name} has no classes here:"
                " they need one integer label per sample",
                "leave `max_class_drop` out, or give such labels",
            )
        return DataError(
            f"accuracy.max_class_drop is given, and no class has {MIN_CLASS_SAMPLES} samples; the"
            f" largest has {max(counts)}",
            "give more samples, or leave `max_class_drop` out",
        )


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit of the plan."""

    key: str
    largest: float
    certain: bool  # only a whole interval over the limit fails
    verb: str

    def failure(self, name: str, before: float, after: float, drop: Interval) -> str:
        """Return the failure of a drop that is over the limit, or an empty text."""
        if (drop.low if self.certain else drop.value) <= self.largest + ROUNDING:
            return ""
        interval = f"95 % {drop.low:+.4f} to {drop.high:+.4f}"
        return (
            f"{name} {self.verb} by {drop.value:.4f} ({before:.4f} to {after:.4f}; {interval}),"
            f" over {self.key} {self.largest:g}"
        )


def _flat(array: Array) -> Floats:
    """Return the array as [samples, values]."""
    return array.astype(np.float64).reshape(len(array), -1)
