"""Judge: the errors and the metric of one engine against the reference, over all batches.

An output of indices is judged by the scores that the reference gives them, so equal scores may
change places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pipeline.accuracy.drop import MIN_CLASS_SAMPLES
from pipeline.accuracy.metrics.arithmetic import (
    Floats,
    by_sample,
    chosen_scores,
    cosine_per_sample,
    index_agreement,
    mask_nonfinite,
    rows,
    snr_db,
)
from pipeline.accuracy.metrics.from_plan import metric_from_plan
from pipeline.accuracy.task_metric import Limits, TaskMetric
from pipeline.core.artifacts import Note
from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.data.batch import Batch
from pipeline.data.generated import GeneratedPart
from pipeline.data.samples import SampleSet
from pipeline.host.environment import torch_hidden
from pipeline.plan.schema import AccuracyConfig, Thresholds
from pipeline.postprocess import IndexOutput
from pipeline.results.accuracy import (
    DataFault,
    MetricResult,
    OutputError,
    SetRole,
    SizeCheck,
    ValidationReport,
    smallest_cosine,
)

ENOUGH_SAMPLES = 200
"""With fewer, the 95 % interval of a rate near 98 % is wider than plus or minus 2 points."""


def judge_of(
    outputs: tuple[TensorSpec, ...],
    indices: tuple[IndexOutput, ...],
    samples: SampleSet,
    options: AccuracyConfig,
) -> Judge:
    """Return a judge with empty tallies of every output, and the metric if the set allows one.

    `indices` are those of the outputs that hold indices.
    """
    names = [index.name for index in indices]
    tallies = tuple(
        _Tally(
            spec.name,
            options.per_output.get(spec.name, options.thresholds),
            holds_indices=spec.name in names,
        )
        for spec in outputs
    )
    if is_generated(samples):
        return Judge(tallies, None, indices)
    output = options.output or outputs[0].name
    metric = metric_from_plan(options, output, samples, indices)
    limits = Limits(options.max_drop, options.max_class_drop)
    return Judge(tallies, TaskMetric(metric, output, limits, options.mask), indices)


def is_generated(samples: SampleSet) -> bool:
    """Return True if all samples of a set are generated."""
    return all(isinstance(part, GeneratedPart) for part in samples.parts)


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Polygraphy's figures for one output of one batch."""

    max_abs: float
    mean_abs: float
    max_rel: float


def _compare(
    outputs: Tensors, expected: Tensors, tallies: tuple[_Tally, ...]
) -> dict[str, _Statistics]:
    """Compare one batch by Polygraphy.

    The tallies count values that are not finite; they are masked here. The call sets every option
    with a lenient default: by default, the element-wise check passes on absolute *or* relative
    error, outputs are matched by position if their names differ, and the log prints whole arrays.
    """
    from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    pairs = {
        name: mask_nonfinite(outputs[name].astype(np.float64), array.astype(np.float64))
        for name, array in expected.items()
        if array.size
    }
    if not pairs:
        return {}
    tolerances = {"": math.inf}
    for tally in tallies:
        limit = tally.limits.max_abs
        tolerances[tally.name] = math.inf if limit is None else limit
    check = SimpleCompareFunc(
        check_shapes=True,
        check_error_stat="max",
        atol=tolerances,
        rtol=0.0,
        infinities_compare_equal=True,
        find_output_func=lambda name, index, result: [name],
    )
    with torch_hidden(), G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        runs = RunResults()
        runs.add([{name: pair[0] for name, pair in pairs.items()}], runner_name="candidate")
        # Relative errors refer to the second run.
        runs.add([{name: pair[1] for name, pair in pairs.items()}], runner_name="reference")
        results = Comparator.compare_accuracy(runs, compare_func=check)
    by_output = results[0]["candidate", "reference"][0]
    statistics = {}
    for name in pairs:
        errors = by_output[name]
        statistics[name] = _Statistics(errors.max_absdiff, errors.mean_absdiff, errors.max_reldiff)
    return statistics


@dataclass(slots=True)
class _Tally:
    """Errors of one output, gathered over batches."""

    name: str
    limits: Thresholds
    holds_indices: bool = False
    agreements: list[Floats] = field(default_factory=list)  # of indices, [samples] of each batch
    max_abs: float = 0.0
    sum_abs: float = 0.0
    values: int = 0
    max_rel: float = 0.0
    cosine: float = 1.0
    signal: float = 0.0
    noise: float = 0.0
    nan: int = 0
    inf: int = 0
    worst_error: float = -1.0
    worst_sample: int = 0

    def add(
        self,
        output: NDArray[np.generic],
        expected: NDArray[np.generic],
        item: Batch,
        statistics: _Statistics,
    ) -> None:
        candidate, reference = rows(output, item.samples), rows(expected, item.samples)
        both_nan = np.isnan(candidate) & np.isnan(reference)
        wrong = ~np.isfinite(candidate) & (candidate != reference) & ~both_nan
        wrong_rows = wrong.any(axis=1)
        candidate, reference, nan, inf = mask_nonfinite(candidate, reference)
        self.nan += nan
        self.inf += inf
        self.max_abs = max(self.max_abs, statistics.max_abs)
        self.sum_abs += statistics.mean_abs * output.size
        self.values += output.size
        self.max_rel = max(self.max_rel, statistics.max_rel)
        self.cosine = min(self.cosine, float(cosine_per_sample(candidate, reference).min()))
        self.signal += float(np.square(reference).sum())
        self.noise += float(np.square(candidate - reference).sum())
        errors = np.abs(candidate - reference).max(axis=1)
        self._remember_worst(np.where(wrong_rows, np.inf, errors), item)

    def _remember_worst(self, errors: Floats, item: Batch) -> None:
        row = int(errors.argmax())
        if errors[row] > self.worst_error:
            self.worst_error, self.worst_sample = float(errors[row]), item.first + row

    def result(self) -> OutputError:
        mean_abs = self.sum_abs / self.values if self.values else 0.0
        snr = snr_db(self.signal, self.noise)
        limits = self.limits
        agreement = None
        if self.holds_indices:
            joined = np.concatenate(self.agreements) if self.agreements else np.ones(1)
            agreement = float(joined.mean())
            failures = [_under("agreement of the indices", agreement, limits.min_agreement)]
        else:
            failures = [
                f"{self.nan} values are NaN on one side only" if self.nan else "",
                f"{self.inf} values are infinite on one side only" if self.inf else "",
                _over("largest absolute error", self.max_abs, limits.max_abs),
                _over("mean absolute error", mean_abs, limits.mean_abs),
                _under("smallest cosine", self.cosine, limits.min_cosine),
                _under("signal to noise in dB", snr, limits.min_snr_db),
            ]
        broken = tuple(failure for failure in failures if failure)
        return OutputError(
            output=self.name,
            max_abs=self.max_abs,
            mean_abs=mean_abs,
            max_rel=self.max_rel,
            cosine=self.cosine,
            snr_db=snr,
            nan=self.nan,
            inf=self.inf,
            worst_sample=self.worst_sample,
            agreement=agreement,
            passed=not broken,
            failures=broken,
        )


def _over(figure: str, value: float, limit: float | None) -> str:
    if limit is None or not value > limit:
        return ""
    return f"{figure} {value:.4g} is over the limit {limit:.4g}"


def _under(figure: str, value: float, limit: float | None) -> str:
    if limit is None or not value < limit:
        return ""
    return f"{figure} {value:.4f} is under the limit {limit:.4g}"


@dataclass(frozen=True, slots=True)
class Judge:
    """Errors and the metric of one engine, accumulated over its batches."""

    tallies: tuple[_Tally, ...]
    metric: TaskMetric | None
    indices: tuple[IndexOutput, ...] = ()

    def add(self, outputs: Tensors, expected: Tensors, scores: Tensors, item: Batch) -> None:
        """Add one batch. `scores`, [..., classes], are those that outputs of indices point into."""
        found, wanted = dict(outputs), dict(expected)
        agreements: dict[str, Floats] = {}
        for index in self.indices:
            name = index.name
            pair = index.with_last(outputs[name]), index.with_last(expected[name])
            agreement = index_agreement(*pair, scores[name])
            agreements[name] = rows(agreement, 1 if item.whole else item.samples).mean(axis=1)
            found[name], wanted[name] = (chosen_scores(scores[name], each) for each in pair)
        statistics = _compare(found, wanted, self.tallies)
        for tally in self.tallies:
            # An output whose shape depends on the data may have no elements, and no statistics.
            if tally.name in statistics:
                tally.add(found[tally.name], wanted[tally.name], item, statistics[tally.name])
                if tally.holds_indices:
                    tally.agreements.append(agreements[tally.name])
        if self.metric is not None:
            output = self.metric.output
            labels = None if item.labels is None else _distinct(item.labels, item)
            self.metric.add(
                _distinct(by_sample(outputs[output], item.samples, item.whole), item),
                labels,
                _distinct(by_sample(expected[output], item.samples, item.whole), item),
                _scores_of(agreements.get(output), item),
                self._mask(item),
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that `add` needs of each batch."""
        return (self.metric.mask,) if self.metric and self.metric.mask else ()

    def _mask(self, item: Batch) -> NDArray[np.generic] | None:
        """Return the positions that count, [samples, positions]; None if all do."""
        for name in self.inputs:
            return _distinct(by_sample(item.feeds[name], item.samples, item.whole), item)
        return None

    def report(self, role: str, samples: SampleSet, failures: list[str]) -> ValidationReport:
        """Return the report. It has figures only if all samples were compared."""
        complete = not failures
        outputs, failures = self._errors(failures)
        metric, chance, notes = None, "", []
        if self.metric is not None and complete:
            metric, metric_failures = self.metric.compared()
            chance = self.metric.chance() if metric else ""
            failures += [chance, *metric_failures] if chance else metric_failures
            if metric and samples.samples < ENOUGH_SAMPLES and _straddles_limit(metric):
                interval = f"95 % {metric.interval.low:+.4f} to {metric.interval.high:+.4f}"
                text = (
                    f"{role}: {samples.samples} samples leave the drop uncertain ({interval});"
                    f" {ENOUGH_SAMPLES} or more narrow its interval"
                )
                notes.append(Note(stage="validate", text=text))
            if metric and metric.max_class_drop is not None and metric.small_classes:
                text = (
                    f"{role}: {metric.small_classes} of"
                    f" {metric.small_classes + metric.judged_classes} classes have fewer than"
                    f" {MIN_CLASS_SAMPLES} samples, so max_class_drop does not judge them"
                )
                notes.append(Note(stage="validate", text=text))
        return ValidationReport(
            role=cast(SetRole, role),
            set_digest=samples.digest,
            samples=samples.samples,
            outputs=outputs,
            metric=metric,
            failures=tuple(failures),
            data_faults=(DataFault.LABELS,) if chance else (),
            notes=tuple(notes),
        )

    def check(
        self, check: SizeCheck, compared: int, samples: int, failures: list[str]
    ) -> SizeCheck:
        """Complete the check of one size, at which `compared` of the set's `samples` were run.

        On a part of the set, a drop fails only if its whole interval is over the limit. A metric
        that may need the whole set, as that of the user, is not computed on a part.
        """
        complete = not failures
        outputs, failures = self._errors(failures)
        metric: MetricResult | None = None
        part = compared < samples
        if (
            self.metric is not None
            and complete
            and compared > 1
            and (not part or self.metric.metric.may_be_partial)
        ):
            metric, metric_failures = self.metric.compared(certain=part)
            failures = failures + metric_failures
        return check.model_copy(
            update={
                "samples": compared,
                "cosine": smallest_cosine(outputs),
                "drop": metric.drop if metric else None,
                "failures": tuple(failures),
            },
        )

    def _errors(self, failures: list[str]) -> tuple[tuple[OutputError, ...], list[str]]:
        """Return the errors of all outputs, if there are no failures yet, and all failures."""
        outputs = () if failures else tuple(tally.result() for tally in self.tallies)
        for error in outputs:
            named = [f"output '{error.output}': {failure}" for failure in error.failures]
            failures = failures + named
        return outputs, failures


def _straddles_limit(metric: MetricResult) -> bool:
    """Return True if the interval of the drop does not say on which side of the limit it is."""
    return metric.interval.low <= metric.max_drop < metric.interval.high


def _scores_of(agreement: Floats | None, item: Batch) -> Floats | None:
    return None if agreement is None else _distinct(agreement, item).astype(np.float64)


def _distinct(array: NDArray[np.generic], item: Batch) -> NDArray[np.generic]:
    """Return the rows that repeat no other row, or an array without rows unchanged."""
    if item.distinct is None or len(array) != item.samples:
        return array
    return array[list(item.distinct)]
