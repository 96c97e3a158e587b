"""Validate: does an engine still give the right answers? Streams samples through it and compares
with stored reference outputs.

The reference runs once, in a process of its own (`run_reference`), and its outputs go to disk: so
no candidate ever runs beside torch, and both passes hold one batch in memory. A wrong engine is a
report with `failures`, never an exception.

All samples run at one batch size. The sizes that `pipeline.accuracy.gate` names come after that,
each with some of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

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
    silent,
    sizes_from_shapes,
)
from pipeline.data.samples import Batch, GeneratedPart, SampleSet
from pipeline.errors import DataError, InternalError, PlanError
from pipeline.execution.exit_causes import first_line
from pipeline.plan.schema import AccuracyConfig, Thresholds
from pipeline.results.report import (
    MetricResult,
    OutputError,
    SizeCheck,
    ValidationReport,
    size_text,
)

ENOUGH_SAMPLES = (
    200  # below, the 95 % interval of a rate near 98 % is wider than plus or minus 2 points
)
JOINED_SAMPLES = 64  # of small batches that are compared together
JOINED_VALUES = 100_000  # and of all outputs of these


Role = Literal["selection", "validation", "generated"]


class PointOutputs(Frozen):
    """What the reference answers at one size of the gate."""

    point: GatePoint
    files: tuple[str, ...]
    not_run: str = ""  # why there is no answer


class ReferenceOutputs(Artifact):
    """What the reference answers to every sample of one set. `file` is the folder of the
    batches.
    """

    digest: str  # of all output values
    set_digest: str
    batch: int
    samples: int
    outputs: tuple[TensorSpec, ...]
    files: tuple[str, ...]  # one .npz per batch, in order, outputs by position
    points: tuple[PointOutputs, ...] = ()  # other sizes


@dataclass(slots=True)
class _Sessions:
    """The session whose profile holds a batch, opened when first needed."""

    engine: Engine
    loaded: Loaded
    stack: contextlib.ExitStack
    opened: dict[int, Session]

    def run(self, feeds: Tensors, profile: int | None = None) -> Tensors:
        """The answers, in this profile or in the first one that holds the feeds."""
        return run_session(
            self._session(self._profile(feeds) if profile is None else profile), feeds
        )

    def _profile(self, feeds: Tensors) -> int:
        shapes = {name: array.shape for name, array in feeds.items()}
        known = set(shapes) >= {spec.name for spec in self.engine.inputs}
        sizes = sizes_from_shapes(self.engine.inputs, shapes) if known else ""
        if isinstance(sizes, str):
            return 0  # bind says what is wrong
        return next(
            (index for index, profile in enumerate(self.engine.profiles) if profile.holds(sizes)), 0
        )

    def _session(self, profile: int) -> Session:
        if profile not in self.opened:
            self.opened[profile] = self.stack.enter_context(
                contextlib.closing(self.loaded.session(profile))
            )
        return self.opened[profile]


@contextlib.contextmanager
def _open(engine: Engine) -> Iterator[_Sessions]:
    with contextlib.ExitStack() as stack:
        loaded = stack.enter_context(contextlib.closing(backends.load(engine)))
        yield _Sessions(engine, loaded, stack, {})


def run_reference(
    engine: Engine,
    samples: SampleSet,
    batch: int,
    points: tuple[GatePoint, ...],
    out: Path,
    progress: Progress = silent,
) -> ReferenceOutputs:
    """Run the reference over a set, then at other sizes, and store its outputs under `out`, one
    file per batch.
    """
    (out / "batches").mkdir()
    answers = _Answers(engine.outputs, out)
    done = 0
    with _open(engine) as sessions:
        for item in samples.batches(batch):
            answers.add(sessions.run(item.feeds))
            done += item.samples
            progress(done / samples.samples, f"{done} of {samples.samples} samples")
        files = tuple(answers.files)
        elsewhere = []
        for number, point in enumerate(points):
            progress(number / len(points), f"at {size_text(point.sizes)}")
            elsewhere.append(_reference_at(point, sessions, samples, answers))
    return ReferenceOutputs(
        root=out,
        file="batches",
        digest=answers.content.hexdigest(),
        set_digest=samples.digest,
        batch=batch,
        samples=samples.samples,
        outputs=engine.outputs,
        files=files,
        points=tuple(elsewhere),
    )


def _reference_at(
    point: GatePoint, sessions: _Sessions, samples: SampleSet, answers: _Answers
) -> PointOutputs:
    """Its answers at one size, or why it has none there: a size that the plan allows may be beyond
    the model.
    """
    before = len(answers.files)
    try:
        for item in feeds_at(point, samples):
            answers.add(sessions.run(item.feeds))
    except Exception as error:  # of the user's code: anything may come
        if _is_of_host(error):
            raise
        return PointOutputs(
            point=point, files=(), not_run=f"the reference fails there: {first_line(error)}"
        )
    return PointOutputs(point=point, files=tuple(answers.files[before:]))


def _is_of_host(error: Exception) -> bool:
    """Whether an error is a bug of ours, or of this host, so that it says nothing about the
    size.
    """
    return (
        isinstance(error, InternalError | MemoryError) or getattr(error, "errno", None) is not None
    )


@dataclass(slots=True)
class _Answers:
    """The files of a reference's outputs, and what their digest is of."""

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
    return (
        array.astype(np.float32) if array.dtype.kind == "V" else array
    )  # bfloat16: .npz has no name for it


def validate(
    engine: Engine,
    reference: ReferenceOutputs,
    samples: SampleSet,
    options: AccuracyConfig,
    batch: int,
    progress: Progress = silent,
) -> ValidationReport:
    """Compare an engine with the reference, sample by sample. Both must have seen the same set in
    the same batches.

    An engine that fails on the whole set is not looked at at other sizes.
    Raises PlanError for an output the model lacks, DataError for a metric that the set cannot give.
    """
    if (reference.set_digest, reference.batch) != (samples.digest, batch):
        raise InternalError(
            "the reference outputs are of another set or batch size than the candidate is given"
        )
    generated = is_generated(samples)
    if samples.samples < 2 and not generated:
        raise DataError(
            f"the {samples.role} set holds one sample, which says nothing about others",
            f"give {ENOUGH_SAMPLES} or more",
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
    """Tallies of every output, and the metric where the set can give one."""
    tallies = tuple(
        _Tally(spec.name, options.per_output.get(spec.name, options.thresholds))
        for spec in reference.outputs
    )
    return _Judge(
        tallies,
        (
            None
            if is_generated(samples)
            else open_metric(options, reference.outputs, samples.has_labels)
        ),
    )


def is_generated(samples: SampleSet) -> bool:
    """Whether no sample of a set is the user's."""
    return all(isinstance(part, GeneratedPart) for part in samples.parts)


def check_outputs(options: AccuracyConfig, outputs: tuple[TensorSpec, ...]) -> None:
    """PlanError if the plan's limits or metric name an output that the model lacks."""
    known = [spec.name for spec in outputs]
    asked = dict.fromkeys(options.per_output, "accuracy.per_output")
    if options.output is not None:
        asked[options.output] = "accuracy.output"
    for name, key in asked.items():
        if name not in known:
            raise PlanError(
                f"{key} names '{name}', which is no output; the model has {', '.join(known)}",
                "name one of these",
            )


def _interface_failures(
    candidate: tuple[TensorSpec, ...], reference: tuple[TensorSpec, ...]
) -> list[str]:
    """Missing, extra and moved outputs, and other dtypes."""
    ours, theirs = {spec.name: spec for spec in candidate}, {spec.name: spec for spec in reference}
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
    """Feed the judge batch by batch; stops at the first output of another shape and says so."""

    def answers() -> Iterator[_Answered]:
        done = 0
        for item, file in zip(samples.batches(reference.batch), reference.files, strict=True):
            yield _Answered(sessions.run(item.feeds), _load(reference, file), item)
            done += item.samples
            progress(done / samples.samples, f"{done} of {samples.samples} samples")

    return _compare_all(answers(), judge)[1]


def _compare_all(answers: Iterable[_Answered], judge: _Judge) -> tuple[int, list[str]]:
    """How many samples were compared, and outputs of another shape, which end the comparison.

    Small batches are compared together: that takes as long as comparing one of them.
    """
    compared, waiting = 0, None
    for answered in answers:
        if failures := answered.shape_failures():
            return compared, failures
        compared += answered.item.distinct_samples
        if waiting is None:
            waiting = answered
        elif answered.may_join(waiting):
            waiting = waiting.with_next(answered)
        else:
            waiting.judge(judge)
            waiting = answered
    if waiting is not None:
        waiting.judge(judge)
    return compared, []


@dataclass(frozen=True, slots=True)
class _Answered:
    """One batch, and what an engine and the reference answer to it."""

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

    def may_join(self, before: _Answered) -> bool:
        """Whether both are small, and this one goes on where the other ends, row by row."""
        return (
            self._has_rows()
            and before._has_rows()
            and self._row_shapes() == before._row_shapes()
            and self.item.first == before.item.first + before.item.samples
            and self.item.samples + before.item.samples <= JOINED_SAMPLES
            and self._values() + before._values() <= JOINED_VALUES
        )

    def with_next(self, after: _Answered) -> _Answered:
        """Both as one batch."""
        return _Answered(
            _concatenated(self.outputs, after.outputs),
            _concatenated(self.expected, after.expected),
            Batch(
                feeds={},  # the engine has had them
                labels=_joined_labels(self.item, after.item),
                first=self.item.first,
                samples=self.item.samples + after.item.samples,
            ),
        )

    def judge(self, judge: _Judge) -> None:
        judge.add(self.outputs, self.expected, self.item)

    def _has_rows(self) -> bool:
        """Whether each sample is a row of every output, and none is there twice."""
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
    """The report with what was found at other sizes; an engine that fails at one of them fails."""
    failures, notes = [], []
    for check in checks:
        where = check.in_words(profiles)
        failures += [f"at {where}: {failure}" for failure in check.failures]
        if check.not_checked:
            notes.append(
                Note(
                    stage="validate",
                    text=f"{report.role}: not checked at {where}: {check.not_checked}",
                )
            )
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
    """The gate at each other size of the reference's answers."""
    for number, each in enumerate(reference.points):
        progress(number / len(reference.points), f"at {size_text(each.point.sizes)}")
        check = SizeCheck(
            profile=each.point.profile, sizes=each.point.sizes, inputs=each.point.inputs, samples=0
        )
        if is_generated(samples):
            check = check.model_copy(update={"inputs": "generated"})
        if each.not_run:
            yield check.model_copy(update={"not_checked": each.not_run})
            continue
        judge = _judge(reference, samples, options)
        if each.point.inputs == "generated":
            judge = replace(judge, metric=None)
        try:
            compared, failures = _compare_at(each, sessions, reference, samples, judge)
        except Exception as error:  # of a library, or of the user's code
            if _is_of_host(error):
                raise
            compared, failures = 0, [f"the engine fails there: {first_line(error)}"]
        yield judge.check(check, compared, samples.samples, failures)


def _compare_at(
    answers: PointOutputs,
    sessions: _Sessions,
    reference: ReferenceOutputs,
    samples: SampleSet,
    judge: _Judge,
) -> tuple[int, list[str]]:
    """How many samples were compared, and outputs of another shape."""

    def answered() -> Iterator[_Answered]:
        for item, file in zip(feeds_at(answers.point, samples), answers.files, strict=True):
            outputs = sessions.run(item.feeds, answers.point.profile)
            yield _Answered(outputs, _load(reference, file), item)

    return _compare_all(answered(), judge)


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
    """Polygraphy's comparison of one batch; values that are not finite are counted by the tallies
    and masked here.

    Every setting that has a lenient default is given: the element-wise check would pass on absolute
    *or* relative error, outputs are matched by position when their names differ, and the log prints
    whole arrays.
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
    check = SimpleCompareFunc(
        check_shapes=True,
        check_error_stat="max",
        atol={
            tally.name: math.inf if tally.limits.max_abs is None else tally.limits.max_abs
            for tally in tallies
        }
        | {"": math.inf},
        rtol=0.0,
        infinities_compare_equal=True,
        find_output_func=lambda name, index, result: [name],
    )
    with torch_hidden(), G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        runs = RunResults()
        runs.add([{name: pair[0] for name, pair in pairs.items()}], runner_name="candidate")
        runs.add(
            [{name: pair[1] for name, pair in pairs.items()}], runner_name="reference"
        )  # second: relative errors are taken from it
        results = Comparator.compare_accuracy(runs, compare_func=check)
    found = results[0]["candidate", "reference"][0]
    return {
        name: _Statistics(
            found[name].max_absdiff, found[name].mean_absdiff, found[name].max_reldiff
        )
        for name in pairs
    }


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
        bad = (
            ~np.isfinite(candidate)
            & (candidate != reference)
            & ~(np.isnan(candidate) & np.isnan(reference))
        ).any(axis=1)
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
        self._remember_worst(np.where(bad, np.inf, np.abs(candidate - reference).max(axis=1)), item)

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


def _over(what: str, got: float, limit: float | None) -> str:
    return (
        f"{what} {got:.4g} is over the limit {limit:.4g}"
        if limit is not None and got > limit
        else ""
    )


def _under(what: str, got: float, limit: float | None) -> str:
    return (
        f"{what} {got:.4f} is under the limit {limit:.4g}"
        if limit is not None and got < limit
        else ""
    )


@dataclass(frozen=True, slots=True)
class _Judge:
    """Everything that is gathered over the batches of one engine."""

    tallies: tuple[_Tally, ...]
    metric: TaskMetric | None

    def add(self, outputs: Tensors, expected: Tensors, item: Batch) -> None:
        statistics = _compare(outputs, expected, self.tallies)
        for tally in self.tallies:
            if (
                tally.name in statistics
            ):  # absent: an output without elements, of a shape that depends on the data
                tally.add(outputs[tally.name], expected[tally.name], item, statistics[tally.name])
        if self.metric is not None:
            ours, theirs = (
                _distinct(by_sample(tensors[self.metric.output], item.samples, item.whole), item)
                for tensors in (outputs, expected)
            )
            self.metric.add(
                ours, None if item.labels is None else _distinct(item.labels, item), theirs
            )

    def report(self, role: str, samples: SampleSet, failures: list[str]) -> ValidationReport:
        """The verdict; figures only if all samples were compared."""
        complete = not failures
        outputs, failures = self._errors(failures)
        metric, notes = None, []
        if self.metric is not None and complete:
            metric, metric_failures = self.metric.result()
            failures += metric_failures
            if samples.samples < ENOUGH_SAMPLES:
                between = (
                    f" (95 % {metric.interval.low:+.4f} to {metric.interval.high:+.4f})"
                    if metric
                    else ""
                )
                text = (
                    f"{role}: {samples.samples} samples leave the drop uncertain{between};"
                    f" {ENOUGH_SAMPLES} or more narrow its interval"
                )
                notes.append(Note(stage="validate", text=text))
        return ValidationReport(
            role=cast(Role, role),
            set_digest=samples.digest,
            samples=samples.samples,
            outputs=outputs,
            metric=metric,
            failures=tuple(failures),
            notes=tuple(notes),
        )

    def check(
        self, check: SizeCheck, compared: int, samples: int, failures: list[str]
    ) -> SizeCheck:
        """What was found at one size. `samples`: of the whole set, of which `compared` were run.

        Of a part of the set, only a drop whose whole interval is over the limit counts. A metric of
        the user's own may need the whole set, so of a part it is not asked.
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
        """The errors of all outputs, if all were compared, and what is wrong with them."""
        outputs = () if failures else tuple(tally.result() for tally in self.tallies)
        return outputs, failures + [
            f"output '{error.output}': {failure}" for error in outputs for failure in error.failures
        ]


def _distinct(array: NDArray[np.generic], item: Batch) -> NDArray[np.generic]:
    """The rows that repeat no other; an array without rows as it is."""
    return (
        array[list(item.distinct)]
        if item.distinct is not None and len(array) == item.samples
        else array
    )
