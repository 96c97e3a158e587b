"""Events of stages: the one form for the terminal, a job's messages, its stored events and clients.

Only messages from other processes are checked against the limits of the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from pipeline.core.progress import CandidateFigures

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
StageState = Literal["started", "progress", "finished", "reused", "waiting", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class StageStatus:
    """How far a stage is."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    stage: str
    subject: str = ""  # a candidate's label
    fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    text: str = ""
    elapsed_s: Seconds = 0.0  # since it started
    estimate_s: Seconds | None = None  # usual duration; None: the stage never ran on this host


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEvent(StageStatus):
    """What happened to a stage, and how far it is."""

    state: StageState
    seconds: Seconds = 0.0  # of a finished stage
    figures: CandidateFigures | None = None  # of a candidate that it has just measured
