"""Advice on an engine: what was tried to make it faster, and what each attempt gains."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal

from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.measurement.statistics import Interval

MIN_GAIN = 0.02  # of the latency; less is not worth advice
MAX_WIDTH = 0.10  # of the latency: a wider interval promises nothing


class Outcome(StrEnum):
    """What an attempt has shown."""

    ADVISED = "advised"
    TOO_SMALL = "no gain above 2 %"
    TOO_WIDE = "interval too wide"
    UNFIT = "fails the accuracy"
    FAILED = "cannot be built"
    UNMEASURED = "not measurable"
    NOT_NEEDED = "nothing to change"


UNKNOWN = (Outcome.TOO_WIDE, Outcome.FAILED, Outcome.UNMEASURED)


class Attempt(Frozen):
    """One change, tried on the engine."""

    rule: str = Field(description="Name of the rule that proposed the change.")
    reason: str = Field(description="What the rule found.")
    how: str = Field(description="How to make the change: keys of the plan.")
    nodes: tuple[str, ...] = Field(default=(), description="Nodes of the graph that it concerns.")
    share: float | None = Field(
        default=None, description="Of the time of all layers, those with these nodes."
    )
    outcome: Outcome
    detail: str = Field(default="", description="Why it is not advised, or has no interval.")
    per: Literal["run", "sample"] = Field(
        default="run", description="Whether the ratio is of the latency, or of the time per sample."
    )
    ratio: Interval | None = Field(
        default=None,
        description=(
            "Latency now over latency after the change, with the interval in which a new"
            " measurement falls with 95 % probability."
        ),
    )

    @property
    def gain(self) -> Interval | None:
        """The share of the latency, or of the time per sample, that the change saves."""
        return None if self.ratio is None else gain_of(self.ratio)


class Advice(Frozen):
    """All attempts on one engine, those with the largest gain first."""

    label: str = Field(description="The engine.")
    sizes: dict[str, int] = Field(description="The sizes at which all was measured.")
    latency_s: float | None = Field(description="Its median end to end in the same run.")
    attempts: tuple[Attempt, ...] = ()
    note: str = Field(
        default="",
        description="Which engine is delivered instead, if another one is, and what is not known.",
    )

    @property
    def advised(self) -> tuple[Attempt, ...]:
        return tuple(each for each in self.attempts if each.outcome is Outcome.ADVISED)

    @property
    def conclusion(self) -> str:
        """What follows from all attempts, in one sentence."""
        if self.advised:
            return f"{len(self.advised)} of {len(self.attempts)} changes are advised."
        if not self.attempts:
            return "No rule found anything to change."
        unmeasured = [each for each in self.attempts if each.outcome in UNKNOWN]
        if unmeasured:
            return (
                f"No change is known to save more than 2 %: {len(unmeasured)} of"
                f" {len(self.attempts)} could not be measured."
            )
        return f"Nothing above 2 %: {len(self.attempts)} changes were tried."


def gain_of(ratio: Interval) -> Interval:
    """Return the share of the latency that is saved, from latency now over latency after."""
    return Interval(value=1 - 1 / ratio.value, low=1 - 1 / ratio.low, high=1 - 1 / ratio.high)


def promise(ratio: Interval) -> Interval:
    """Return the interval of a ratio that is measured again, from that of the ratio itself.

    Both measurements have the same error, so its width is that of their difference.
    """
    centre = math.log(ratio.value)
    low, high = (
        centre + math.sqrt(2) * (math.log(edge) - centre) for edge in (ratio.low, ratio.high)
    )
    return Interval(value=ratio.value, low=math.exp(low), high=math.exp(high))


def judged(attempt: Attempt, ratio: Interval, why_wide: str) -> Attempt:
    """Add a measured ratio to an attempt, and the outcome that follows from it.

    `why_wide`: why the interval of the ratio is no narrower.
    """
    found = attempt.model_copy(update={"ratio": promise(ratio)})
    gain = found.gain
    assert gain is not None
    outcome, detail = Outcome.ADVISED, ""
    if gain.high <= MIN_GAIN:
        outcome = Outcome.TOO_SMALL  # however wide the interval is
    elif gain.high - gain.low > MAX_WIDTH:
        outcome = Outcome.TOO_WIDE
        detail = f"the interval is wider than 10 % of the latency: {why_wide}"
    elif gain.low <= MIN_GAIN:
        outcome = Outcome.TOO_SMALL
    return found.model_copy(update={"outcome": outcome, "detail": detail})


def sort_key(attempt: Attempt) -> tuple[bool, float]:
    """Sort advice first, then by falling gain; what was not measured last."""
    gain = attempt.gain.low if attempt.gain else -math.inf
    return attempt.outcome is not Outcome.ADVISED, -gain
