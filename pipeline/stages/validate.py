"""Validate: compare an engine's outputs with stored reference outputs, sample by sample.

The reference runs once, in its own process (`run_reference`), and writes its outputs to disk. So
no candidate ever runs beside torch, and both passes hold one batch in memory. A wrong engine gives
a report with `failures`, never an exception.

An engine with reduced outputs is compared with the reference's whole outputs behind the same steps
in numpy. Its indices are compared by the scores that the reference gives them, so equal scores may
change places.

All samples run at one batch size. The sizes of `pipeline.accuracy.gate` follow, each with some of
the samples.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import backends
from pipeline.accuracy.gate import GatePoint, feeds_at
from pipeline.accuracy.judge import ENOUGH_SAMPLES, Judge, is_generated, judge_of
from pipeline.accuracy.metrics.from_plan import check_metric
from pipeline.backends.base import Loaded, Session, run_session
from pipeline.core.artifacts import Artifact, Engine, Note
from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Tensors, TensorSpec, nearest_profile, sizes_from_shapes
from pipeline.data.batch import Batch
from pipeline.data.samples import SampleSet
from pipeline.errors import DataError, InternalError, PlanError
from pipeline.execution.exit_causes import first_line
from pipeline.plan.schema import AccuracyConfig
from pipeline.postprocess import IndexOutput, index_outputs, postprocessed, reduced_specs
from pipeline.postprocess import Steps as Postprocessing
from pipeline.preprocess import Steps, preprocessed
from pipeline.results.accuracy import SizeCheck, ValidationReport, size_text

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
    steps: Postprocessing,
    batch: int,
    progress: Progress = silent,
) -> ValidationReport:
    """Compare an engine with the reference, sample by sample.

    Both must run the same set in the same batches. `steps`: what the engine does with the model's
    outputs. An engine that fails on the set is not checked at other sizes. Raises PlanError for an
    output that the model lacks, and DataError for a metric that cannot be computed from the set.
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
    check_outputs(options, reference.outputs, steps)
    expected = _Expected(reference, steps)
    role = "generated" if generated else samples.role
    judge = judge_of(expected.outputs, expected.indices, samples, options)
    failures = _interface_failures(engine.outputs, expected.outputs)
    if failures:
        return judge.report(role, samples, failures)
    with _open(engine) as sessions:
        failures = _stream(sessions, expected, samples, judge, progress)
        report = judge.report(role, samples, failures)
        if not report.passed:
            return report
        checks = tuple(_at_sizes(sessions, expected, samples, options, progress))
    return with_sizes(report, checks, len(engine.profiles))


@dataclass(frozen=True, slots=True)
class _Expected:
    """The reference's outputs behind the steps in numpy."""

    reference: ReferenceOutputs
    steps: Postprocessing

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs that an engine must give."""
        return reduced_specs(self.reference.outputs, self.steps)

    @property
    def indices(self) -> tuple[IndexOutput, ...]:
        return index_outputs(self.reference.outputs, self.steps)

    def of(self, file: str) -> tuple[dict[str, NDArray[np.generic]], Tensors]:
        """Return the outputs of one batch, and the scores that each output of indices points into.

        Scores are [..., classes].
        """
        with np.load(self.reference.root / file, allow_pickle=False) as archive:
            whole = {
                spec.name: archive[f"arr_{number}"]
                for number, spec in enumerate(self.reference.outputs)
            }
        scores = {index.name: index.classes_last(whole[index.source]) for index in self.indices}
        return postprocessed(whole, self.steps), scores


def check_outputs(
    options: AccuracyConfig, outputs: tuple[TensorSpec, ...], steps: Postprocessing
) -> None:
    """Raise PlanError if the limits or the metric name an output that the engine lacks.

    `outputs` are those of the model. A metric or limit that its output cannot have is one too.
    """
    reduced = reduced_specs(outputs, steps)
    known = [spec.name for spec in reduced]
    key_of = dict.fromkeys(options.per_output, "accuracy.per_output")
    if options.output is not None:
        key_of[options.output] = "accuracy.output"
    for name, key in key_of.items():
        if name not in known:
            raise PlanError(
                f"{key} names '{name}', which is no output; the model has {', '.join(known)}",
                "name one of these",
            )
    check_metric(options, reduced, index_outputs(outputs, steps))


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
    expected: _Expected,
    samples: SampleSet,
    judge: Judge,
    progress: Progress,
) -> list[str]:
    """Compare all samples batch by batch. Return the failures that ended the comparison."""

    def compared_batches() -> Iterator[_BatchOutputs]:
        done, reference = 0, expected.reference
        for item, file in zip(samples.batches(reference.batch), reference.files, strict=True):
            outputs = sessions.run(item.feeds)
            yield _BatchOutputs(outputs, *expected.of(file), item.with_inputs(judge.inputs))
            done += item.samples
            progress(done / samples.samples, f"{done} of {samples.samples} samples")

    _, failures = _compare_all(compared_batches(), judge)
    return failures


def _compare_all(batches: Iterable[_BatchOutputs], judge: Judge) -> tuple[int, list[str]]:
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
    scores: Tensors  # that outputs of indices point into, [..., classes]
    item: Batch  # with the inputs that the judge needs

    def shape_failures(self) -> list[str]:
        """Return the outputs of another shape, and those with indices of no class."""
        where = f"samples {self.item.first} to {self.item.first + self.item.samples - 1}"
        failures = []
        for name, array in self.expected.items():
            shape = self.outputs[name].shape
            if shape != array.shape:
                expected = f"the reference {array.shape}"
                failures.append(f"output '{name}' has shape {shape} for {where}, {expected}")
        for name, scores in self.scores.items():
            indices, classes = self.outputs[name], scores.shape[-1]
            if indices.size and not 0 <= indices.min() <= indices.max() < classes:
                failures.append(
                    f"output '{name}' has indices from {indices.min()} to {indices.max()} for"
                    f" {where}, and there are {classes} classes"
                )
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
            _concatenated(self.scores, after.scores),
            Batch(
                feeds=_concatenated(self.item.feeds, after.item.feeds),
                labels=_joined_labels(self.item, after.item),
                first=self.item.first,
                samples=self.item.samples + after.item.samples,
            ),
        )

    def judge(self, judge: Judge) -> None:
        judge.add(self.outputs, self.expected, self.scores, self.item)

    def _has_rows(self) -> bool:
        """Return True if each sample is a row of every output, and no sample occurs twice."""
        if self.item.whole or self.item.distinct is not None:
            return False
        return all(array.shape[:1] == (self.item.samples,) for array in self._arrays())

    def _row_shapes(self) -> list[tuple[int, ...]]:
        return [array.shape[1:] for array in self._arrays()]

    def _values(self) -> int:
        return sum(array.size for array in self._arrays())

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        return (*self.expected.values(), *self.scores.values(), *self.item.feeds.values())


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
    expected: _Expected,
    samples: SampleSet,
    options: AccuracyConfig,
    progress: Progress,
) -> Iterator[SizeCheck]:
    """Check the engine at each other size of the reference's outputs."""
    points = expected.reference.points
    for number, at_point in enumerate(points):
        point = at_point.point
        progress(number / len(points), f"at {size_text(point.sizes)}")
        check = SizeCheck(profile=point.profile, sizes=point.sizes, inputs=point.inputs, samples=0)
        if is_generated(samples):
            check = check.model_copy(update={"inputs": "generated"})
        if at_point.not_run:
            yield check.model_copy(update={"not_checked": at_point.not_run})
            continue
        judge = judge_of(expected.outputs, expected.indices, samples, options)
        if point.inputs == "generated":
            judge = replace(judge, metric=None)
        try:
            compared, failures = _compare_at(at_point, sessions, expected, samples, judge)
        except Exception as error:  # of a library, or of the user's code
            if _is_host_error(error):
                raise
            compared, failures = 0, [f"the engine fails there: {first_line(error)}"]
        yield judge.check(check, compared, samples.samples, failures)


def _compare_at(
    at_point: PointOutputs,
    sessions: _Sessions,
    expected: _Expected,
    samples: SampleSet,
    judge: Judge,
) -> tuple[int, list[str]]:
    """Compare at one size. Return the number of compared samples and the shape failures."""

    def compared_batches() -> Iterator[_BatchOutputs]:
        for item, file in zip(feeds_at(at_point.point, samples), at_point.files, strict=True):
            outputs = sessions.run(item.feeds, at_point.point.profile)
            yield _BatchOutputs(outputs, *expected.of(file), item.with_inputs(judge.inputs))

    return _compare_all(compared_batches(), judge)
