"""The task metric: scores of reference and candidate, by a built-in or user function, and the drop.

A user's metric is `module:function`, called as `function(outputs, labels, reference)` on the whole
set at once:

    outputs    [samples, ...]  of the output the metric reads, from the engine that is scored
    labels     [samples, ...]  or None where the set has none
    reference  [samples, ...]  the same output of the reference
    returns    one score per sample, shape [samples], or one number for the set; higher is better
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.accuracy.metrics import (
    Array,
    Floats,
    cosine_per_sample,
    index_hits,
    paired_interval,
    rows,
    topk_hits,
)
from pipeline.core import TensorSpec
from pipeline.errors import DataError, PlanError
from pipeline.measurement.statistics import Interval, bootstrap, bootstrap_mean
from pipeline.plan.schema import METRICS, NEED_LABELS, AccuracyConfig
from pipeline.postprocess import IndexOutput
from pipeline.results.report import MetricResult

MetricFunction = Callable[[Array, Array | None, Array], object]

# bootstrap resamples of a metric for the whole set: each calls the user's function twice
RESAMPLES = 200
ROUNDING = 1e-9  # so that 3 of 300 is within a max_drop of 0.01, whatever the last bit is
# the reference must beat every shuffle: outputs unrelated to the samples do so in 1 set of 40
SHUFFLES = 39
MIN_SHUFFLED = 8  # samples; with fewer, a shuffle may return the same order
MAX_SHUFFLED = 1024  # samples; more take time and do not change the result
SHUFFLED_BYTES = 64 * 2**20


def open_metric(
    options: AccuracyConfig,
    outputs: tuple[TensorSpec, ...],
    has_labels: bool,
    indices: tuple[IndexOutput, ...] = (),
) -> TaskMetric:
    """Return the metric of the plan. `indices`: those of `outputs` that hold indices.

    PlanError if the metric does not exist. DataError if it needs labels and there are none.
    """
    output = options.output or outputs[0].name
    index = next((each for each in indices if each.name == output), None)
    name = options.metric
    if name == "auto":
        without_labels = "agreement" if index else "cosine"
        name = "top1" if has_labels else without_labels
    check_labels(options, has_labels)
    function = None if name in METRICS else _load_function(name, options.python_path)
    return TaskMetric(name, output, options.max_drop, function, index)


def check_metric(
    options: AccuracyConfig, outputs: tuple[TensorSpec, ...], indices: tuple[IndexOutput, ...]
) -> None:
    """Raise PlanError for a built-in metric or a limit that its output cannot have."""
    of_indices = {each.name: each for each in indices}
    output, metric = options.output or outputs[0].name, options.metric
    index = of_indices.get(output)
    if index and metric == "cosine":
        raise PlanError(
            f"accuracy.metric is cosine, and '{output}' holds indices, whose size means nothing",
            "set `accuracy.metric` to auto, top1, top5 or agreement, or `accuracy.output` to"
            " another output",
        )
    if index and metric == "top5" and (index.top_k or 1) < 5:
        raise PlanError(
            f"accuracy.metric is top5, and '{output}' holds {index.top_k or 1} indices per place",
            f"set `postprocess.{index.source}.top_k` to 5 or more, or `accuracy.metric: top1`",
        )
    if metric == "agreement" and not index:
        raise PlanError(
            f"accuracy.metric is agreement, and '{output}' holds no indices of `postprocess`;"
            f" outputs that do: {', '.join(of_indices) or 'none'}",
            "name one of these as `accuracy.output`, or set `accuracy.metric: cosine`",
        )
    for name, limits in options.per_output.items():
        given = limits.model_fields_set
        misfits = given - {"min_agreement"} if name in of_indices else given & {"min_agreement"}
        if misfits:
            kind = "indices" if name in of_indices else "no indices of `postprocess`"
            key = min(misfits)
            raise PlanError(
                f"accuracy.per_output.{name} has {key}, and '{name}' holds {kind}",
                "indices take `min_agreement` only, and other outputs every other threshold",
            )


def check_labels(options: AccuracyConfig, has_labels: bool, role: str = "") -> None:
    """Raise DataError if the metric needs labels and the set, called `role`, has none."""
    if options.metric in NEED_LABELS and not has_labels:
        named = f"{role} set" if role else "set"
        raise DataError(
            f"accuracy.metric is {options.metric}, but the {named} has no labels",
            "add an array `labels` to each .npz, or set `accuracy.metric: cosine`",
        )


def _load_function(name: str, python_path: Path) -> MetricFunction:
    module, _, function_name = name.partition(":")
    sys.path.insert(0, str(python_path))
    try:
        function = getattr(importlib.import_module(module), function_name)
    except (ImportError, AttributeError) as error:
        next_step = (
            "correct `accuracy.metric`, or set `accuracy.python_path` to the folder of its module"
        )
        raise PlanError(
            f"accuracy.metric '{name}' cannot be imported from '{python_path}': {error}", next_step
        ) from error
    finally:
        sys.path.remove(str(python_path))
    if not callable(function):
        raise PlanError(
            f"accuracy.metric '{name}' is a {type(function).__name__}, expected a function",
            "correct `accuracy.metric`",
        )
    return function  # type: ignore[no-any-return]  # user code; its result is checked


def _top1(outputs: Array, labels: Array | None, reference: Array) -> Floats:
    return topk_hits(outputs, np.asarray(labels), 1)


def _top5(outputs: Array, labels: Array | None, reference: Array) -> Floats:
    return topk_hits(outputs, np.asarray(labels), 5)


def _cosine(outputs: Array, labels: Array | None, reference: Array) -> Floats:
    return cosine_per_sample(rows(outputs, len(outputs)), rows(reference, len(reference)))


_STREAMED: dict[str, Callable[[Array, Array | None, Array], Floats]] = {
    "top1": _top1,
    "top5": _top5,
    "cosine": _cosine,
}


def _top1_of_indices(indices: Array, labels: Array | None, reference: Array) -> Floats:
    return index_hits(indices, np.asarray(labels), 1)


def _top5_of_indices(indices: Array, labels: Array | None, reference: Array) -> Floats:
    return index_hits(indices, np.asarray(labels), 5)


def _equal_indices(indices: Array, labels: Array | None, reference: Array) -> Floats:
    same = indices == reference
    return np.asarray(same.reshape(len(same), -1).mean(axis=1))


_OF_INDICES: dict[str, Callable[[Array, Array | None, Array], Floats]] = {
    "top1": _top1_of_indices,
    "top5": _top5_of_indices,
    "agreement": _equal_indices,  # of shuffled outputs; candidates are scored in `add`
}


@dataclass(slots=True)
class Drawn:
    """Reference outputs for a random part of the samples, with their labels.

    Every sample of a set of any length has the same chance. All have the shape of the first one.
    """

    outputs: list[Array] = field(default_factory=list)
    labels: list[Array] = field(default_factory=list)
    seen: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(self, outputs: Array, labels: Array | None) -> None:
        """Add one batch, [samples, ...]. Labels that do not fit the rows are ignored here."""
        labelled = labels if labels is not None and len(labels) == len(outputs) else None
        for row, output in enumerate(outputs):
            label = None if labelled is None else np.asarray(labelled[row])
            if not self._fits(output, label):
                continue
            self.seen += 1
            index = self._index(output.nbytes)
            if index is None:
                continue
            self.outputs[index : index + 1] = [output.copy()]
            if label is not None:
                self.labels[index : index + 1] = [label]

    def _fits(self, output: Array, label: Array | None) -> bool:
        """Return whether output and label have the shapes of the first ones."""
        if self.outputs and output.shape != self.outputs[0].shape:
            return False
        return label is None or not self.labels or label.shape == self.labels[0].shape

    def _index(self, size: int) -> int | None:
        """Return the index of the newest row by reservoir sampling; None if it is left out."""
        most = min(MAX_SHUFFLED, max(MIN_SHUFFLED, SHUFFLED_BYTES // max(size, 1)))
        index = self.seen - 1 if self.seen <= most else int(self.random.integers(0, self.seen))
        return index if index < most else None


@dataclass(frozen=True, slots=True)
class ShuffleTest:
    """Scores of the reference's outputs, unchanged and shuffled across samples."""

    score: float
    best_shuffled: float
    notices_order: bool  # scores changed otherwise than by moving with their outputs

    @property
    def is_above_chance(self) -> bool:
        return self.score > self.best_shuffled + ROUNDING


@dataclass(slots=True)
class TaskMetric:
    """Collects the scores of all batches.

    A user's function takes the whole set, so all outputs are stored. Built-in metrics store only
    scores.
    """

    name: str
    output: str
    max_drop: float
    function: MetricFunction | None = None
    index: IndexOutput | None = None  # where the output holds indices
    candidate: list[Array] = field(default_factory=list)
    reference: list[Array] = field(default_factory=list)
    labels: list[Array] = field(default_factory=list)
    drawn: Drawn = field(default_factory=Drawn)
    certain: bool = False  # a drop fails only if its whole interval exceeds the limit

    def add(
        self,
        outputs: Array,
        labels: Array | None,
        reference: Array,
        agreement: Floats | None = None,
    ) -> None:
        """Add one batch, [samples, ...] each. `agreement` is that of indices, [samples]."""
        self.drawn.add(reference, labels)
        if self.name == "agreement" and agreement is not None:
            self.candidate.append(agreement)
            self.reference.append(np.ones(len(agreement)))
            return
        if self.function is None:
            self.candidate.append(self._built_in(outputs, labels, reference))
            self.reference.append(self._built_in(reference, labels, reference))
            return
        self.candidate.append(outputs)
        self.reference.append(reference)
        if labels is not None:
            self.labels.append(labels)

    def compared(self, certain: bool = False) -> tuple[MetricResult | None, list[str]]:
        """Return the metric and the failures of its drop. The metric is None if a score is NaN.

        `certain`: a drop fails only if its whole interval exceeds the limit. Use it for a part of a
        set.
        """
        self.certain = certain
        if self.function is None:
            return self._judge(_joined(self.reference), _joined(self.candidate))
        candidate, reference = _joined(self.candidate), _joined(self.reference)
        labels = _joined(self.labels) if self.labels else None
        after = self._call(candidate, labels, reference)
        before = self._call(reference, labels, reference)
        if after.ndim == 1 and before.ndim == 1:
            return self._judge(before, after)

        def drop(picks: Array) -> float:
            picked_labels = None if labels is None else labels[picks]
            picked_reference = reference[picks]
            score_before = self._call(picked_reference, picked_labels, picked_reference)
            score_after = self._call(candidate[picks], picked_labels, picked_reference)
            return float(score_before) - float(score_after)

        if not np.isfinite([after, before]).all():
            return None, [f"metric {self.name} is {after} where the reference has {before}"]
        return self._verdict(
            float(before), float(after), bootstrap(drop, len(reference), resamples=RESAMPLES)
        )

    def _call(self, outputs: Array, labels: Array | None, reference: Array) -> Floats:
        """Call the user's function and check its result: shape [samples] or ()."""
        assert self.function is not None
        next_step = (
            "the function takes (outputs, labels, reference) and returns one score per sample or"
            " one number; docs/howto/own-metric.md"
        )
        try:
            value = self.function(outputs, labels, reference)
            scores = np.asarray(value, dtype=np.float64)
        except (Exception, SystemExit) as error:
            raise DataError(
                f"metric '{self.name}' failed: {type(error).__name__}: {error}", next_step
            ) from error
        if value is None:  # numpy takes it for NaN
            raise DataError(f"metric '{self.name}' returned None", next_step)
        if scores.shape not in ((), (len(outputs),)):
            raise DataError(
                f"metric '{self.name}' returned shape {scores.shape} for {len(outputs)} samples",
                next_step,
            )
        return scores

    def _judge(self, reference: Array, candidate: Array) -> tuple[MetricResult | None, list[str]]:
        if candidate.size < 2:
            message = (
                f"metric {self.name} has {candidate.size} score for the whole set: output"
                f" '{self.output}' has no row per sample"
            )
            raise DataError(
                message, "choose an output whose first axis is the samples with `accuracy.output`"
            )
        bad = np.flatnonzero(~np.isfinite(candidate.astype(np.float64)))
        if bad.size:
            return None, [
                f"metric {self.name} is not a number on {bad.size} of {candidate.size} samples"
                f" (first: {bad[0]})"
            ]
        before, after = reference.astype(np.float64), candidate.astype(np.float64)
        if not np.isfinite(before).all():
            message = (
                f"metric {self.name} is not a number on the reference itself: no engine can be"
                " compared with it"
            )
            raise DataError(message, "correct the metric or the labels")
        return self._verdict(float(before.mean()), float(after.mean()), _paired_drop(before, after))

    def chance(self) -> str:
        """Return a failure if the reference scores no better than its outputs when shuffled.

        PlanError or DataError if the metric cannot tell right answers from wrong ones.
        """
        outputs = np.stack(self.drawn.outputs)
        if len(outputs) < MIN_SHUFFLED:
            return ""
        labels = np.stack(self.drawn.labels) if self.drawn.labels else None
        test = self._shuffle_test(outputs, labels)
        if test.is_above_chance:
            return ""
        figures = (
            f"{self.name} {test.score:.4f}, and up to {test.best_shuffled:.4f} with its outputs"
            " shuffled across the samples"
        )
        if test.notices_order and labels is not None:
            return (
                f"the reference itself scores at chance: {figures}; a drop from there says nothing"
            )
        message = (
            f"metric '{self.name}' cannot tell right answers from wrong ones: the reference scores"
            f" {figures}"
        )
        if self.function is not None:
            raise PlanError(
                message,
                "compare each sample's output with its own label or reference, higher is better;"
                " docs/howto/own-metric.md",
            )
        raise DataError(
            message, "give samples with different answers, or choose another `accuracy.output`"
        )

    def _shuffle_test(self, outputs: Array, labels: Array | None) -> ShuffleTest:
        """Score the reference's outputs as they are, and SHUFFLES times in another order."""
        random = np.random.default_rng(0)
        scores = self._score(outputs, labels, outputs)
        best_shuffled, notices_order = -np.inf, False
        for _ in range(SHUFFLES):
            order = random.permutation(len(outputs))
            shuffled = self._score(outputs[order], labels, outputs)
            best_shuffled = max(best_shuffled, float(shuffled.mean()))  # ignores NaN
            moved = scores[order] if scores.ndim else scores
            if not _are_close(shuffled, moved) and not _are_close(shuffled, scores):
                notices_order = True
        return ShuffleTest(float(scores.mean()), best_shuffled, notices_order)

    def _score(self, outputs: Array, labels: Array | None, reference: Array) -> Floats:
        """Return scores of shape [samples], or () if the metric is for the whole set."""
        if self.function is None:
            return self._built_in(outputs, labels, reference)
        return self._call(outputs, labels, reference)

    def _built_in(self, outputs: Array, labels: Array | None, reference: Array) -> Floats:
        if self.index is None:
            return _STREAMED[self.name](outputs, labels, reference)
        first, second = self.index.with_last(outputs), self.index.with_last(reference)
        return _OF_INDICES[self.name](first, labels, second)

    def _verdict(
        self, reference: float, candidate: float, drop: Interval
    ) -> tuple[MetricResult, list[str]]:
        passed = (drop.low if self.certain else drop.value) <= self.max_drop + ROUNDING
        result = MetricResult(
            name=self.name,
            reference=reference,
            candidate=candidate,
            drop=drop.value,
            interval=drop,
            max_drop=self.max_drop,
            passed=passed,
        )
        interval = f"95 % {drop.low:+.4f} to {drop.high:+.4f}"
        text = (
            f"{self.name} drops by {drop.value:.4f} ({reference:.4f} to {candidate:.4f};"
            f" {interval}), over max_drop {self.max_drop:g}"
        )
        return result, [] if passed else [text]


def _are_close(scores: Floats, others: Floats) -> bool:
    return bool(np.allclose(scores, others, equal_nan=True))


def _paired_drop(before: Floats, after: Floats) -> Interval:
    """Return the mean difference of paired scores with its 95 % interval.

    If all scores are 0 or 1, the interval is computed exactly, else by a bootstrap.
    """
    if not np.isin((before, after), (0.0, 1.0)).all():
        return bootstrap_mean((before - after).tolist())
    low, high = paired_interval(
        int((before > after).sum()), int((before < after).sum()), before.size
    )
    return Interval(value=float((before - after).mean()), low=low, high=high)


def _joined(arrays: list[Array]) -> Array:
    """Join all batches to one array, [samples, ...]. DataError if samples differ in shape."""
    try:
        return np.concatenate(arrays)
    except ValueError as error:
        next_step = (
            "choose an output whose shape is the same for all samples with `accuracy.output`, or"
            " set `accuracy.metric: cosine`"
        )
        raise DataError(f"the metric needs samples of one shape: {error}", next_step) from error
