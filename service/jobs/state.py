"""A job's life, be it a compile or a benchmark. Pure: `step(job, event, now)` is the whole of it;
what stores, starts and kills stands elsewhere.

queued ── Started ──> running ── Succeeded ──> succeeded
  │  ▲                 │  │ └──── Died ──────> failed
  │  └──── Requeued ───┘  └ CancelAsked ─> cancelling ── Died, Succeeded ──> cancelled
  └───── CancelAsked ──────────────────────────────────────────────────────> cancelled
"""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.core import Frozen
from pipeline.results.report import Verdict

State = Literal["queued", "running", "cancelling", "succeeded", "failed", "cancelled"]
FINAL: frozenset[State] = frozenset({"succeeded", "failed", "cancelled"})
ID_DIGITS = 13  # of milliseconds since 1970, in hexadecimal; ids sort by the time they were made


class Failure(Frozen):
    """Why a job has no report."""

    code: str  # of the error, as pipeline.errors has it
    message: str
    next_step: str = ""


class Progress(Frozen):
    """Where a running job is."""

    stage: str
    subject: str = ""  # a candidate's label
    fraction: float | None = None
    text: str = ""
    elapsed_s: float = 0.0  # of this stage
    estimate_s: float | None = None  # of this stage, from earlier runs; None: it never ran here


class Measures(Frozen):
    """Whose engine a job measures again."""

    model: str
    version: int


class Job(Frozen):
    """One request to compile, or to measure again, as far as it has come."""

    id: str
    owner: str
    identity: str  # equal requests of one owner have the same
    name: str  # of the plan
    device: str  # whose queue it stands in
    measures: Measures | None = None  # None: it compiles
    state: State = "queued"
    created: str  # UTC
    started: str | None = None  # of the last attempt
    finished: str | None = None
    attempt: int = 0  # how often it was started
    interruptions: int = 0  # how often the server died while it ran
    estimate_s: float | None = (
        # how long the owner's jobs of this name took on this device, when it was sent; None: none
        # has succeeded
        None
    )
    progress: Progress | None = None
    verdict: Verdict | None = (
        None  # of a job that succeeded: its report exists, also where it says `rejected`
    )
    winner: str | None = None
    engine: str | None = None  # digest of the engine that it left; None: none, or not known
    failure: Failure | None = None
    pid: int | None = (
        # of the child, while there is one; with the time at which that process started, for pids
        # are used again
        None
    )
    pid_started: float | None = None
    trace: str | None = (
        None  # the request that made it, as W3C's `traceparent`, where traces are kept
    )

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    @property
    def took_s(self) -> float:
        """Of the last attempt of a job that has ended; 0 if it never ran."""
        if self.started is None or self.finished is None:
            return 0.0
        return max(
            0.0,
            (
                dt.datetime.fromisoformat(self.finished) - dt.datetime.fromisoformat(self.started)
            ).total_seconds(),
        )


@dataclass(frozen=True, slots=True)
class Started:
    """A child runs it."""

    pid: int
    pid_started: float


@dataclass(frozen=True, slots=True)
class StageSeen:
    """The child tells of a stage."""

    state: Literal["started", "progress", "finished", "reused", "waiting", "failed"]
    progress: Progress
    seconds: float = 0.0  # of a finished stage


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The report is published."""

    verdict: Verdict
    winner: str | None
    engine: str | None = None  # as of a Job


@dataclass(frozen=True, slots=True)
class Died:
    """The child is gone without a report."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Somebody wants it to end."""


@dataclass(frozen=True, slots=True)
class Requeued:
    """The server stopped under it; it begins again and goes on from what is stored."""

    why: str
    interrupted: bool = False  # the server did not stop in order, but died


JobEvent = Started | StageSeen | Succeeded | Died | CancelAsked | Requeued


class StaleEvent(Exception):
    """An event that a job in this state cannot take: it came too late, or twice."""


def new_id(now: dt.datetime) -> str:
    """Sortable by time, not guessable."""
    return f"{int(now.timestamp() * 1000):0{ID_DIGITS}x}{secrets.token_hex(6)}"


def step(job: Job, event: JobEvent, now: dt.datetime) -> Job:
    """The job after an event; StaleEvent if it cannot take it."""
    at = now.astimezone(dt.UTC).isoformat(timespec="milliseconds")
    match event, job.state:
        case Started(), "queued":
            begun = {
                "state": "running",
                "started": at,
                "attempt": job.attempt + 1,
                "pid": event.pid,
                "pid_started": event.pid_started,
            }
            return job.model_copy(update=begun)
        case StageSeen(), "running" | "cancelling":
            return job.model_copy(update={"progress": event.progress})
        case CancelAsked(), "queued":
            return _end(job, "cancelled", at)
        case CancelAsked(), "running" | "cancelling":
            return job.model_copy(update={"state": "cancelling"})
        case Succeeded(), "running":
            found = {"verdict": event.verdict, "winner": event.winner, "engine": event.engine}
            return _end(job, "succeeded", at).model_copy(update=found)
        case Died(), "running":
            return _end(job, "failed", at).model_copy(update={"failure": event.failure})
        case Died() | Succeeded() | Requeued(), "cancelling":  # it was to end, and has
            return _end(job, "cancelled", at)
        case Died(), "queued":  # it could not even be started
            return _end(job, "failed", at).model_copy(update={"failure": event.failure})
        case Requeued(), "running":
            count = job.interruptions + event.interrupted
            return job.model_copy(
                update={
                    "state": "queued",
                    "progress": None,
                    "pid": None,
                    "pid_started": None,
                    "interruptions": count,
                }
            )
    raise StaleEvent(f"job {job.id} is {job.state} and cannot take {type(event).__name__}")


def _end(job: Job, state: State, at: str) -> Job:
    return job.model_copy(update={"state": state, "finished": at, "pid": None, "pid_started": None})


def after_a_crash(job: Job, most: int) -> JobEvent:
    """What becomes of a job under which the server died: it begins again, unless that happened so
    often that it may be the cause.
    """
    if job.interruptions + 1 < most:
        return Requeued("the server died while it ran", interrupted=True)
    message = f"the server died {job.interruptions + 1} times while this job ran"
    return Died(
        Failure(
            code="job.interrupted",
            message=message,
            next_step="see the server's log for the cause; then retry the job",
        )
    )


def next_of(queued: Iterable[Job]) -> Job | None:
    """Which job of one device's queue is started: one that was interrupted before all others, else
    the oldest.
    """
    return min(queued, key=lambda job: (job.attempt == 0, job.created, job.id), default=None)
