"""State machine of a job, be it a compile or a benchmark. `step(job, event, now)` is pure;
store.py, queue.py and attempt.py do the persistence and the processes.

queued ── Started ──> running ── Succeeded ──> succeeded
  │  ▲                 │  │ └──── Died ──────> failed
  │  └──── Requeued ───┘  └ CancelAsked ─> cancelling ── Died, Succeeded ──> cancelled
  └───── CancelAsked ──────────────────────────────────────────────────────> cancelled
"""

from __future__ import annotations

import datetime as dt
import secrets
from dataclasses import dataclass
from typing import Literal

from pipeline.core.frozen import Frozen
from pipeline.execution.stage_event import StageEvent, StageStatus
from pipeline.results.report import Verdict

State = Literal["queued", "running", "cancelling", "succeeded", "failed", "cancelled"]
FINAL: frozenset[State] = frozenset({"succeeded", "failed", "cancelled"})
ID_DIGITS = 13  # milliseconds since 1970 in hexadecimal; ids sort by creation time


class Failure(Frozen):
    """Why a job has no report."""

    code: str  # of the error, as pipeline.errors has it
    message: str
    next_step: str = ""


class ModelVersion(Frozen):
    """A version of a model on this service."""

    model: str
    version: int


class Job(Frozen):
    """One request to compile or to measure again, and its current state."""

    id: str
    owner: str
    identity: str  # equal for equal requests of one owner
    name: str  # of the plan
    device: str  # on which it runs; before that, what it requires of a device
    measures: ModelVersion | None = None  # None: it compiles
    # whose model and data it compiles again for the shapes that the version has run
    recompiles: ModelVersion | None = None
    target: str = ""  # what it requires of a device; "": `device`, by its name
    wait_for_node_s: float = 0.0
    waits_for_node: str = ""  # why no node can run it now
    state: State = "queued"
    created: str  # UTC
    started: str | None = None  # of the last attempt
    finished: str | None = None
    attempt: int = 0  # number of starts
    interruptions: int = 0  # number of server crashes while it ran
    # usual time of the owner's jobs of this name on this device, at submission; None: none has
    # succeeded
    estimate_s: float | None = None
    progress: StageStatus | None = None  # of the current stage
    # set for a job that succeeded: its report exists, also with the verdict `rejected`
    verdict: Verdict | None = None
    winner: str | None = None
    engine: str | None = None  # digest of its engine; None: no engine, or not known
    failure: Failure | None = None
    # process id of the running child, with its start time, because the system reuses ids
    pid: int | None = None
    pid_started: float | None = None
    sandbox: tuple[str, ...] = ()  # layers that held during its last attempt
    # W3C `traceparent` of the request that made the job; None: traces are off
    trace: str | None = None

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    @property
    def queue(self) -> str:
        """What it requires of a device: the jobs with one requirement have a queue."""
        return self.target or self.device

    @property
    def took_s(self) -> float:
        """Duration of the last attempt of a job that has ended; 0 if it never ran."""
        if self.started is None or self.finished is None:
            return 0.0
        started = dt.datetime.fromisoformat(self.started)
        finished = dt.datetime.fromisoformat(self.finished)
        return max(0.0, (finished - started).total_seconds())


@dataclass(frozen=True, slots=True)
class Started:
    """A child process has started the job."""

    pid: int
    pid_started: float
    layers: tuple[str, ...] = ()  # as Job.sandbox
    device: str | None = None  # None: that of the job


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The report is published."""

    verdict: Verdict
    winner: str | None
    engine: str | None = None  # as Job.engine


@dataclass(frozen=True, slots=True)
class Died:
    """The child has ended without a report."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Somebody has cancelled the job."""


@dataclass(frozen=True, slots=True)
class Requeued:
    """The server stopped while the job ran. The job starts again from its stored artifacts."""

    why: str
    interrupted: bool = False  # the server crashed instead of stopping in order


@dataclass(frozen=True, slots=True)
class NodeAwaited:
    """No server and no node can run the job now, and it waits for one."""

    why: str


JobEvent = Started | NodeAwaited | StageEvent | Succeeded | Died | CancelAsked | Requeued


class StaleEvent(Exception):
    """An event that does not fit the job's state: it came too late, or twice."""


def new_id(now: dt.datetime) -> str:
    """Make an id that sorts by time and cannot be guessed."""
    return f"{int(now.timestamp() * 1000):0{ID_DIGITS}x}{secrets.token_hex(6)}"


def step(job: Job, event: JobEvent, now: dt.datetime) -> Job:
    """Return the job after an event. StaleEvent if the event does not fit the job's state."""
    at = now.astimezone(dt.UTC).isoformat(timespec="milliseconds")
    match event, job.state:
        case Started(), "queued":
            start = {
                "state": "running",
                "started": at,
                "attempt": job.attempt + 1,
                "device": event.device or job.device,
                "waits_for_node": "",
                "pid": event.pid,
                "pid_started": event.pid_started,
                "sandbox": event.layers,
            }
            return job.model_copy(update=start)
        case StageEvent(), "running" | "cancelling":
            # Stored and shown as a StageStatus: pydantic leaves out the fields of a subclass.
            return job.model_copy(update={"progress": event})
        case NodeAwaited(), "queued" if job.waits_for_node != event.why:  # told once
            return job.model_copy(update={"waits_for_node": event.why})
        case CancelAsked(), "queued":
            return _end(job, "cancelled", at)
        case CancelAsked(), "running" | "cancelling":
            return job.model_copy(update={"state": "cancelling"})
        case Succeeded(), "running":
            result = {"verdict": event.verdict, "winner": event.winner, "engine": event.engine}
            return _end(job, "succeeded", at).model_copy(update=result)
        case Died(), "running" | "queued":  # queued: its child could not start
            return _end(job, "failed", at).model_copy(update={"failure": event.failure})
        case Died() | Succeeded() | Requeued(), "cancelling":  # as requested
            return _end(job, "cancelled", at)
        case Requeued(), "running":
            count = job.interruptions + (1 if event.interrupted else 0)
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
    """Return the event for a job during which the server crashed. The job is queued again, unless
    it has been interrupted `most` times: then it may be the cause, and it fails.
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
