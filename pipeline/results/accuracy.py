"""Results of the accuracy gate: one engine on one set, against the reference."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

from pipeline.core.artifacts import Note
from pipeline.core.frozen import Frozen
from pipeline.core.progress import MAX_DROP, AccuracyFigures, CandidateFigures
from pipeline.core.recipe import Recipe
from pipeline.measurement.statistics import Interval


class OutputError(Frozen):
    """Errors of one output over all samples, against the reference."""

    output: str
    max_abs: float
    mean_abs: float
    max_rel: float
    cosine: float  # smallest over samples
    snr_db: float  # signal to noise over all samples; 200 = identical
    nan: int  # values that are NaN on one side only; they count here, not in the errors above
    inf: int  # values that are infinite on one side only, or of the other sign
    worst_sample: int  # index into the set
    # of indices only; their errors above are those of the reference's scores at the indices
    agreement: float | None = None
    passed: bool
    failures: tuple[str, ...] = ()  # each threshold that was exceeded: expected and actual


class ClassDrop(Frozen):
    """The drop of a metric on one class."""

    name: str
    samples: int  # with this class
    reference: float
    candidate: float
    drop: float
    interval: Interval


class MetricResult(Frozen):
    """A task metric on the same samples. The drop is how much worse the candidate is."""

    name: str
    reference: float
    candidate: float
    lower_is_better: bool = False  # an error rate: the drop is candidate minus reference
    drop: float
    interval: Interval  # 95 % interval of the drop, paired by sample
    max_drop: float
    worst_class: ClassDrop | None = None  # of the classes with enough samples; None: there is none
    judged_classes: int = 0  # classes with enough samples
    small_classes: int = 0  # classes with too few
    max_class_drop: float | None = None  # None: classes have no limit
    passed: bool


InputSource = Literal["samples", "generated"]


class SizeCheck(Frozen):
    """Result of the accuracy gate at one size, besides the run over the whole set."""

    profile: int  # counted from 0
    # of all symbols, or of the one that counts rows where samples bring the others
    sizes: dict[str, int]
    inputs: InputSource  # generated: no sample has these sizes
    samples: int  # rows that were compared, without copies; 0: none
    cosine: float | None = None  # smallest over samples and outputs
    drop: float | None = None  # of the metric
    failures: tuple[str, ...] = ()
    not_checked: str = ""  # why nothing could be compared

    def in_words(self, profiles: int) -> str:
        """Return the size for messages, and whether inputs are generated."""
        return self.where(profiles) + (", generated inputs" if self.inputs == "generated" else "")

    def where(self, profiles: int) -> str:
        """Return the size, with the profile if there are several."""
        return size_text(self.sizes) + (f", profile {self.profile + 1}" if profiles > 1 else "")


def size_text(sizes: dict[str, int]) -> str:
    """`batch = 8, sequence = 128`."""
    return (
        ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        or "the sizes of the samples"
    )


class DataFault(StrEnum):
    """A fault of the data, which no other engine can mend."""

    LABELS = "labels"  # the reference itself scores at chance
    CALIBRATION = "calibration"  # the calibration set's ranges do not fit the selection set


SetRole = Literal["selection", "validation", "generated"]


class ValidationReport(Frozen):
    """Accuracy of one engine on one set, against the reference."""

    role: SetRole
    set_digest: str
    samples: int
    outputs: tuple[OutputError, ...]
    metric: MetricResult | None = None  # None: no data, or a score was NaN (then a failure says so)
    sizes: tuple[SizeCheck, ...] = ()  # other sizes of every profile; empty for the validation set
    # missing or renamed outputs, shapes, dtypes, NaN, thresholds, the metric, at any size
    failures: tuple[str, ...] = ()
    data_faults: tuple[DataFault, ...] = ()  # that may explain the failures
    notes: tuple[Note, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def cosine(self) -> float | None:
        """The smallest cosine of all outputs but indices, which have their agreement."""
        return smallest_cosine(self.outputs)

    @property
    def figures(self) -> AccuracyFigures | None:
        """The drop as a plot shows it: of the metric, or else of the cosine. None if there is
        neither, or if it is not finite.
        """
        if self.metric is not None:
            measure, interval = self.metric.name, self.metric.interval
            low, drop, high = interval.low, self.metric.drop, interval.high
        elif self.cosine is not None:
            measure, low = "", 1 - self.cosine
            drop = high = low
        else:
            return None
        if not all(abs(each) <= MAX_DROP for each in (low, drop, high)):  # NaN compares as False
            return None
        return AccuracyFigures(measure, drop, low, high, self.passed)

    def figures_of(self, recipe: Recipe) -> CandidateFigures:
        """Return the accuracy of the candidate that this report is about, for the live plot."""
        return CandidateFigures(recipe.label, recipe.precision, accuracy=self.figures)


def smallest_cosine(outputs: Iterable[OutputError]) -> float | None:
    """Return the smallest cosine of all outputs but indices; None if there is no other output."""
    return min((each.cosine for each in outputs if each.agreement is None), default=None)
