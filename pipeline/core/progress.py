"""The progress of long work, and the figures of candidates that it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import ConfigDict, Field

from pipeline.core.recipe import Precision

MAX_LATENCY_S = 1e9
PERPLEXITY = "perplexity"  # a measure that gets worse as it increases: 0.02 is 2 %
MAX_DROP = 1e30  # a metric may be any number; the plot subtracts and scales them


@dataclass(frozen=True, slots=True)
class AccuracyFigures:
    """The accuracy of one candidate on the selection set, as a plot shows it."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    # name of the task metric, or PERPLEXITY; empty: 1 - the smallest cosine to the reference
    measure: str
    drop: Annotated[float, Field(ge=-MAX_DROP, le=MAX_DROP, allow_inf_nan=False)]
    # 95 % interval of the drop; both the drop if the measure has none
    low: Annotated[float, Field(ge=-MAX_DROP, le=MAX_DROP, allow_inf_nan=False)]
    high: Annotated[float, Field(ge=-MAX_DROP, le=MAX_DROP, allow_inf_nan=False)]
    passed: bool


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """The latency of one candidate, end to end, from the runs so far at the first shape."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    median_s: Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False)]
    # quartiles; both the median of too few values
    low_s: Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False)]
    high_s: Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False)]
    shape: str  # in words
    is_eliminated: bool = False  # it gets no further runs


@dataclass(frozen=True, slots=True)
class CandidateFigures:
    """What a stage has just measured of one candidate or baseline. None: not by this stage."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    label: str
    precision: Precision
    is_baseline: bool = False
    accuracy: AccuracyFigures | None = None
    latency: LatencyFigures | None = None


class Progress(Protocol):
    """Called by long work with the fraction done (0 to 1, or None if unknown), a short text, and
    the figures of a candidate that it has just measured.
    """

    def __call__(
        self, fraction: float | None, text: str, figures: CandidateFigures | None = None, /
    ) -> None: ...


def silent(fraction: float | None, text: str, figures: CandidateFigures | None = None) -> None:
    """Ignore progress: the default of every stage."""
