"""Validate: compare an engine's outputs with stored reference outputs, sample by sample.

The reference runs once, in its own process (`run_reference`), and writes its outputs to disk. So
no candidate ever runs beside torch, and both passes hold one batch in memory. A wrong engine gives
a report with `failures`, never an exception.

All samples run at one batch size. The sizes of `pipeline.accuracy.gate` follow, each with some of
the samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pipeline import backends
from pipeline.accuracy.gate import GatePoint, feeds_at
from pipeline.accuracy.metrics import (
    Floats,
    by_sample,
    cosine_per_sample,
    mask_nonfinite,
    rows,
    snr_db,
)
from pipeline.accuracy.task_metric import TaskMetric, open_metric
from pipeline.backends.base import Loaded, Session, run_session
from pipeline.backends.feed_checks import torch_hidden
from pipeline.core import (
    Artifact,
    Engine,
    Frozen,
    Note,
    Progress,
    Tensors,
    TensorSpec,
    nearest_profile,
    silent,
    sizes_from_shapes,
)
from pipeline.data.batch import Batch
from pipeline.data.generated import GeneratedPart
from pipeline.data.samples import SampleSet
from pipeline.errors import DataError, InternalError, PlanError
from pipeline.execution.exit_causes import first_line
from pipeline.plan.schema import AccuracyConfig, Thresholds
from pipeline.preprocess import Steps, preprocessed
from pipeline.results.report import (
    DataFault,
    MetricResult,
    OutputError,
    SetRole,
    SizeCheck,
    ValidationReport,
    size_text,
)

ENOUGH_SAMPLES = 200
"""With fewer, the 95 % interval of a rate near 98 % is wider than plus or minus 2 points."""

JOINED_SAMPLES = 64
"""Maximum number of samples in small batches that are compared together."""

JOINED_VALUES = 100_000
"""Maximum number of output values in small batches that are compared together."""


class PointOutputs(Frozen):
    """The reference's outputs at one size of the gate."""

    point: GatePoint
    files: tuple[str, ...]
    not_run: str = ""  # why there are no outputs


class ReferenceOutputs(Artifact):
    """The reference's outputs for every sample of one set. `file` is the folder of the batches."""

    digest: str  # of all output values
    set_digest: str
    batch: int
    samples: int
    outputs: tuple[TensorSpec, ...]
    files: tuple[str, ...]  # one .npz per batch, in order, outputs by position
    points: tuple[PointOutputs, ...] = ()  # other sizes


@dataclass(slots=True)
class _Sessions:
    """Sessions of one engine by profile, each opened at its first use."""

    engine: Engine
    loaded: Loaded
    stack: contextlib.ExitStack
    opened: dict[int, Session]

    def run(self, feeds: Tensors, profile: int | None = None) -> Tensors:
        """Run the feeds in `profile`, or in the one that is tuned nearest to them if it is None."""
        if profile is None:
            profile = self._profile(feeds)
        return run_session(self._session(profile), feeds)

    def _profile(self, feeds: Tensors) -> int:
        shapes = {name: array.shape for name, array in feeds.items()}
        known = set(shapes) >= {spec.name for spec in self.engine.inputs}
        sizes = sizes_from_shapes(self.engine.inputs, shapes) if known else ""
        if isinstance(sizes, str):
            return 0  # the session reports the error when it binds the feeds
        return nearest_profile(self.engine.profiles, sizes) or 0

    def _session(self, profile: int) -> Session:
        if profile not in self.opened:
            session = contextlib.closing(self.loaded.session(profile))
            self.opened[profile] = self.stack.enter_context(session)
        return self.opened[profile]


@contextlib.contextmanager
def _open(engine: Engine) -> Iterator[_Sessions]:
    with contextlib.ExitStack() as stack:
        loaded = stack.enter_context(contextlib.closing(backends.load(engine)))
        yield _Sessions(engine, loaded, stack, {})


def run_reference(
    engine: Engine,
    samples: SampleSet,
    steps: Steps,
    batch: int,
    points: tuple[GatePoint, ...],
    out: Path,
    progress: Progress = silent,
) -> ReferenceOutputs:
    """Run the reference over a set, then at other sizes. Store its outputs under `out`.

    It gets each sample after `steps`, in numpy. There is one file for each batch.
    """
    (out / "batches").mkdir()
    writer = _OutputWriter(engine.outputs, out)
    done = 0
    with _open(engine) as sessions:
        for item in samples.batches(batch):
            writer.add(sessions.run(preprocessed(item.feeds, steps)))
            done += item.samples
            progress(done / samples.samples, f"{done} of {samples.samples} samples")
        files = tuple(writer.files)
        point_outputs = []
        for number, point in enumerate(points):
            progress(number / len(points), f"at {size_text(point.sizes)}")
            point_outputs.append(_reference_at(point, sessions, samples, steps, writer))
    return ReferenceOutputs(
        root=out,
        file="batches",
        digest=writer.content.hexdigest(),
        set_digest=samples.digest,
        batch=batch,
        samples=samples.samples,
        outputs=engine.outputs,
        files=files,
        points=tuple(point_outputs),
    )


def _reference_at(
    point: GatePoint,
    sessions: _Sessions,
    samples: SampleSet,
    steps: Steps,
    writer: _OutputWriter,
) -> PointOutputs:
    """Run the reference at one size. The result holds its outputs, or why it has none.

    A size that the plan allows may be too large or too small for the model.
    """
    before = len(writer.files)
    try:
        for item in feeds_at(point, samples):
            writer.add(sessions.run(preprocessed(item.feeds, steps)))
    except Exception as error:  # the user's code may raise anything
        if _is_host_error(error):
            raise
        return PointOutputs(
            point=point, files=(), not_run=f"the reference fails there: {first_line(error)}"
        )
    return PointOutputs(point=point, files=tuple(writer.files[before:]))


def _is_host_error(error: Exception) -> bool:
    """Return True for our own bugs and errors of this host: they do not depend on the size."""
    if isinstance(error, InternalError | MemoryError):
        return True
    return getattr(error, "errno", None) is not None


@dataclass(slots=True)
class _OutputWriter:
    """Writer of a reference's outputs: one file for each batch, and the digest of all."""

    outputs: tuple[TensorSpec, ...]
    out: Path
    files: list[str] = field(default_factory=list)
    content: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, outputs: Tensors) -> None:
        arrays = [_storable(outputs[spec.name]) for spec in self.outputs]
        for array in arrays:
            self.content.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        self.files.append(f"batches/{len(self.files):06d}.npz")
        with (self.out / self.files[-1]).open("wb") as file:
            np.savez(file, *arrays)


def _storable(array: NDArray[np.generic]) -> NDArray[np.generic]:
    if array.dtype.kind == "V":  # bfloat16, which .npz cannot store
        return array.astype(np.float32)
    return array


def validate(
    engine: Engine,
    reference: ReferenceOutputs,
    samples: SampleSet,
    options: AccuracyConfig,
    batch: int,
    progress: Progress = silent,
) -> ValidationReport:
    """Compare an engine with the reference, sample by sample.

    Both must run the same set in the same batches. An engine that fails on the set is not checked
    at other sizes. Raises PlanError for an output that the model lacks, and DataError for a metric
    that cannot be computed from the set.
    """
    if (reference.set_digest, reference.batch) != (samples.digest, batch):
        raise InternalError(
            "the reference outputs belong to another set or batch size than the candidate's samples"
        )
    generated = is_generated(samples)
    if samples.samples < 2 and not generated:
        raise DataError(
            f"expected at least 2 samples in the {samples.role} set, got {samples.samples}",
            f"give {ENOUGH_SAMPLES} samples or more",
        )
    check_outputs(options, reference.outputs)
    role = "generated" if generated else samples.role
    judge = _judge(reference, samples, options)
    failures = _interface_failures(engine.outputs, reference.outputs)
    if failures:
        return judge.report(role, samples, failures)
    with _open(engine) as sessions:
        failures = _stream(sessions, reference, samples, judge, progress)
        report = judge.report(role, samples, failures)
        if not report.passed:
            return report
        checks = tuple(_at_sizes(sessions, reference, samples, options, progress))
    return with_sizes(report, checks, len(engine.profiles))


def _judge(reference: ReferenceOutputs, samples: SampleSet, options: AccuracyConfig) -> _Judge:
    """Return empty tallies of every output, and the metric if the set allows one."""
    tallies = tuple(
        _Tally(spec.name, options.per_output.get(spec.name, options.thresholds))
        for spec in reference.outputs
    )
    if is_generated(samples):
        return _Judge(tallies, None)
    return _Judge(tallies, open_metric(options, reference.outputs, samples.has_labels))


def is_generated(samples: SampleSet) -> bool:
    """Return True if all samples of a set are generated."""
    return all(isinstance(part, GeneratedPart) for part in samples.parts)


def check_outputs(options: AccuracyConfig, outputs: tuple[TensorSpec, ...]) -> None:
    """Raise PlanError if the plan's limits or metric name an output that the model lacks."""
    known = [spec.name for spec in outputs]
    key_of = dict.fromkeys(options.per_output, "accuracy.per_output")
    if options.output is not None:
        key_of[options.output] = "accuracy.output"
    for name, key in key_of.items():
        if name not in known:
            raise PlanError(
                f"{key} names '{name}', which is no output; the model has {', '.join(known)}",
                "name one of these",
            )


def _interface_failures(
    candidate: tuple[TensorSpec, ...], reference: tuple[TensorSpec, ...]
) -> list[str]:
    """Describe missing, additional and reordered outputs, and outputs of another dtype."""
    ours = {spec.name: spec for spec in candidate}
    theirs = {spec.name: spec for spec in reference}
    has = ", ".join(ours) or "none"
    failures = [
        f"output '{name}' is missing; the engine has {has}" for name in theirs if name not in ours
    ]
    failures += [
        f"output '{name}' is not an output of the reference, which has {', '.join(theirs)}"
        for name in ours
        if name not in theirs
    ]
    failures += [
        f"output '{name}' is {ours[name].dtype}, the reference gives {spec.dtype}"
        for name, spec in theirs.items()
        if name in ours and ours[name].dtype != spec.dtype
    ]
    if not failures and list(ours) != list(theirs):
        failures = [f"outputs come in the order {has}, the reference has {', '.join(theirs)}"]
    return failures


def _stream(
    sessions: _Sessions,
    reference: ReferenceOutputs,
    samples: SampleSet,
    judge: _Judge,
    progress: Progress,
) -> list[str]:
    """Compare all samples batch by batch. Return the failures that ended the comparison."""

    def compared_batches() -> Iterator[_BatchOutputs]:
        done = 0
        for item, file in zip(samples.batches(reference.batch), reference.files, strict=True):
            yield _BatchOutputs(sessions.run(item.feeds), _load(reference, file), item)
            done += item.samples
            progress(done / samples.samples, f"{done} of {samples.samples} samples")

    _, failures = _compare_all(compared_batches(), judge)
    return failures


def _compare_all(batches: Iterable[_BatchOutputs], judge: _Judge) -> tuple[int, list[str]]:
    """Compare batches. Return the number of compared samples and the shape failures.

    An output of another shape ends the comparison. Small batches are compared together: that takes
    as long as comparing one of them.
    """
    compared, pending = 0, None
    for batch in batches:
        if failures := batch.shape_failures():
            return compared, failures
        compared += batch.item.distinct_samples
        if pending is None:
            pending = batch
        elif batch.may_join(pending):
            pending = pending.with_next(batch)
        else:
            pending.judge(judge)
            pending = batch
    if pending is not None:
        pending.judge(judge)
    return compared, []


@dataclass(frozen=True, slots=True)
class _BatchOutputs:
    """The outputs of an engine and of the reference for one batch."""

    outputs: Tensors
    expected: Tensors
    item: Batch

    def shape_failures(self) -> list[str]:
        where = f"samples {self.item.first} to {self.item.first + self.item.samples - 1}"
        failures = []
        for name, array in self.expected.items():
            shape = self.outputs[name].shape
            if shape != array.shape:
                expected = f"the reference {array.shape}"
                failures.append(f"output '{name}' has shape {shape} for {where}, {expected}")
        return failures

    def may_join(self, before: _BatchOutputs) -> bool:
        """Return True if both batches are small, have rows, and this one directly follows."""
        return (
            self._has_rows()
            and before._has_rows()
            and self._row_shapes() == before._row_shapes()
            and self.item.first == before.item.first + before.item.samples
            and self.item.samples + before.item.samples <= JOINED_SAMPLES
            and self._values() + before._values() <= JOINED_VALUES
        )

    def with_next(self, after: _BatchOutputs) -> _BatchOutputs:
        """Return both batches as one."""
        return _BatchOutputs(
            _concatenated(self.outputs, after.outputs),
            _concatenated(self.expected, after.expected),
            Batch(
                feeds={},  # no longer needed: the engine has run them
                labels=_joined_labels(self.item, after.item),
                first=self.item.first,
                samples=self.item.samples + after.item.samples,
            ),
        )

    def judge(self, judge: _Judge) -> None:
        judge.add(self.outputs, self.expected, self.item)

    def _has_rows(self) -> bool:
        """Return True if each sample is a row of every output, and no sample occurs twice."""
        if self.item.whole or self.item.distinct is not None:
            return False
        return all(array.shape[:1] == (self.item.samples,) for array in self.expected.values())

    def _row_shapes(self) -> list[tuple[int, ...]]:
        return [array.shape[1:] for array in self.expected.values()]

    def _values(self) -> int:
        return sum(array.size for array in self.expected.values())


def _concatenated(before: Tensors, after: Tensors) -> Tensors:
    return {name: np.concatenate([array, after[name]]) for name, array in before.items()}


def _joined_labels(before: Batch, after: Batch) -> NDArray[np.generic] | None:
    if before.labels is None or after.labels is None:
        return None
    return np.concatenate([before.labels, after.labels])


# -- other sizes -------------------------------------------------------------


def with_sizes(
    report: ValidationReport, checks: Sequence[SizeCheck], profiles: int
) -> ValidationReport:
    """Add the checks at other sizes to a report. An engine that fails at one of them fails."""
    failures, notes = [], []
    for check in checks:
        where = check.in_words(profiles)
        failures += [f"at {where}: {failure}" for failure in check.failures]
        if check.not_checked:
            text = f"{report.role}: not checked at {where}: {check.not_checked}"
            notes.append(Note(stage="validate", text=text))
    return report.model_copy(
        update={
            "sizes": tuple(checks),
            "failures": (*report.failures, *failures),
            "notes": (*report.notes, *notes),
        },
    )


def _at_sizes(
    sessions: _Sessions,
    reference: ReferenceOutputs,
    samples: SampleSet,
    options: AccuracyConfig,
    progress: Progress,
) -> Iterator[SizeCheck]:
    """Check the engine at each other size of the reference's outputs."""
    for number, expected in enumerate(reference.points):
        point = expected.point
        progress(number / len(reference.points), f"at {size_text(point.sizes)}")
        check = SizeCheck(profile=point.profile, sizes=point.sizes, inputs=point.inputs, samples=0)
        if is_generated(samples):
            check = check.model_copy(update={"inputs": "generated"})
        if expected.not_run:
            yield check.model_copy(update={"not_checked": expected.not_run})
            continue
        judge = _judge(reference, samples, options)
        if point.inputs == "generated":
            judge = replace(judge, metric=None)
        try:
            compared, failures = _compare_at(expected, sessions, reference, samples, judge)
        except Exception as error:  # of a library, or of the user's code
            if _is_host_error(error):
                raise
            compared, failures = 0, [f"the engine fails there: {first_line(error)}"]
        yield judge.check(check, compared, samples.samples, failures)


def _compare_at(
    expected: PointOutputs,
    sessions: _Sessions,
    reference: ReferenceOutputs,
    samples: SampleSet,
    judge: _Judge,
) -> tuple[int, list[str]]:
    """Compare at one size. Return the number of compared samples and the shape failures."""

    def compared_batches() -> Iterator[_BatchOutputs]:
        for item, file in zip(feeds_at(expected.point, samples), expected.files, strict=True):
            outputs = sessions.run(item.feeds, expected.point.profile)
            yield _BatchOutputs(outputs, _load(reference, file), item)

    return _compare_all(compared_batches(), judge)


def _load(reference: ReferenceOutputs, file: str) -> dict[str, NDArray[np.generic]]:
    with np.load(reference.root / file, allow_pickle=False) as archive:
        return {spec.name: archive[f"arr_{index}"] for index, spec in enumerate(reference.outputs)}


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
class _Judge:
    """Errors and the metric of one engine, accumulated over its batches."""

    tallies: tuple[_Tally, ...]
    metric: TaskMetric | None

    def add(self, outputs: Tensors, expected: Tensors, item: Batch) -> None:
        statistics = _compare(outputs, expected, self.tallies)
        for tally in self.tallies:
            # An output whose shape depends on the data may have no elements, and no statistics.
            if tally.name in statistics:
                tally.add(outputs[tally.name], expected[tally.name], item, statistics[tally.name])
        if self.metric is not None:
            output = self.metric.output
            labels = None if item.labels is None else _distinct(item.labels, item)
            self.metric.add(
                _distinct(by_sample(outputs[output], item.samples, item.whole), item),
                labels,
                _distinct(by_sample(expected[output], item.samples, item.whole), item),
            )

    def report(self, role: str, samples: SampleSet, failures: list[str]) -> ValidationReport:
        """Return the report. It has figures only if all samples were compared."""
        complete = not failures
        outputs, failures = self._errors(failures)
        metric, chance, notes = None, "", []
        if self.metric is not None and complete:
            metric, metric_failures = self.metric.compared()
            chance = self.metric.chance() if metric else ""
            failures += [chance, *metric_failures] if chance else metric_failures
            if samples.samples < ENOUGH_SAMPLES:
                interval = ""
                if metric:
                    low, high = metric.interval.low, metric.interval.high
                    interval = f" (95 % {low:+.4f} to {high:+.4f})"
                text = (
                    f"{role}: {samples.samples} samples leave the drop uncertain{interval};"
                    f" {ENOUGH_SAMPLES} or more narrow its interval"
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

        On a part of the set, a drop fails only if its whole interval is over the limit. A metric of
        the user may need the whole set, so it is not computed on a part.
        """
        complete = not failures
        outputs, failures = self._errors(failures)
        metric: MetricResult | None = None
        part = compared < samples
        if (
            self.metric is not None
            and complete
            and compared > 1
            and not (part and self.metric.function)
        ):
            metric, metric_failures = self.metric.compared(certain=part)
            failures = failures + metric_failures
        return check.model_copy(
            update={
                "samples": compared,
                "cosine": min((error.cosine for error in outputs), default=None),
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


def _distinct(array: NDArray[np.generic], item: Batch) -> NDArray[np.generic]:
    """Return the rows that repeat no other row, or an array without rows unchanged."""
    if item.distinct is None or len(array) != item.samples:
        return array
    return array[list(item.distinct)]
