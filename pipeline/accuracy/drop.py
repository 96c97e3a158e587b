"""The drop between two evaluations of the same samples, of the set and of the worst class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.accuracy.metrics.arithmetic import Floats, paired_interval
from pipeline.accuracy.metrics.metric import Evaluation, Metric, Picks, SampleScores
from pipeline.measurement.statistics import Interval, bootstrap, bootstrap_mean
from pipeline.results.accuracy import ClassDrop

MIN_CLASS_SAMPLES = 20
"""Samples that a class needs to be judged: with fewer, one wrong answer is over 5 points."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The reference and the candidate, on the same samples."""

    metric: Metric
    before: Evaluation
    after: Evaluation

    @property
    def everything(self) -> Picks:
        return np.arange(self.before.units)

    def drop(self) -> Interval:
        """Return the drop of the score, with its 95 % interval over samples."""
        if isinstance(self.before, SampleScores) and isinstance(self.after, SampleScores):
            return paired_drop(self.before.scores, self.after.scores)
        before, after = self.before, self.after
        return bootstrap(
            lambda picks: before.score(picks) - after.score(picks),
            before.units,
            resamples=self.metric.resamples,
        )

    def worst_class(self) -> ClassDrop | None:
        """Return the class with the largest drop, of those with MIN_CLASS_SAMPLES; None without."""
        judged = self.judged_classes()
        if not judged:
            return None
        before = self.before.class_scores(judged, self.everything)
        after = self.after.class_scores(judged, self.everything)
        # NaN is worse than any drop
        worst = int(np.nan_to_num(before - after, nan=np.inf).argmax())
        number = judged[worst]
        interval = self._class_drop(number)
        return ClassDrop(
            name=self.metric.class_name(number),
            samples=self.before.classes[number],
            reference=self.metric.shown(float(before[worst])),
            candidate=self.metric.shown(float(after[worst])),
            drop=interval.value,
            interval=interval,
        )

    def judged_classes(self) -> list[int]:
        """Return the classes with enough samples."""
        counts = self.before.classes.items()
        return [number for number, count in counts if count >= MIN_CLASS_SAMPLES]

    def _class_drop(self, number: int) -> Interval:
        before, after = self.before, self.after
        if isinstance(before, SampleScores) and isinstance(after, SampleScores):
            own = before.of_class(number, self.everything)
            return paired_drop(before.scores[own], after.scores[own])

        def drop(picks: Picks) -> float:
            scores = before.class_scores([number], picks) - after.class_scores([number], picks)
            return float(scores[0])

        return bootstrap(drop, before.units, resamples=self.metric.resamples)


def paired_drop(before: Floats, after: Floats) -> Interval:
    """Return the mean difference of paired scores with its 95 % interval.

    If all scores are 0 or 1, the interval is computed exactly, else by a bootstrap.
    """
    if not np.isin((before, after), (0.0, 1.0)).all():
        return bootstrap_mean((before - after).tolist())
    low, high = paired_interval(
        int((before > after).sum()), int((before < after).sum()), before.size
    )
    return Interval(value=float((before - after).mean()), low=low, high=high)
