"""Messages between the server and a job's child: a frame each, without a body, over a socket.

    server -> child   Start, once; Granted, for each Wants; Returned, for each Returns; Sought, for
                      each Seeks
    child -> server   Stage ...; Wants before it measures, Returns after it; Seeks before it makes
                      an artifact, Made after it; Finished or Failed, last

The child runs untrusted models, so the server trusts no message: one that is invalid, or one too
many, ends the child. Finished carries no result: the server reads the result from the report, which
it verifies.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from pipeline.core.frozen import Frozen
from pipeline.core.progress import CandidateFigures
from pipeline.execution.stage_event import StageEvent
from service.sandbox.framing import Failed, cut

# of one attempt, besides progress: a compile of 64 candidates sends about 2,000
MAX_MESSAGES = 20_000
PROGRESS_EVERY_S = 0.5
# of candidates, of one attempt: a long race of 64 candidates reports about 2,000
MAX_FIGURES = 4_000
NAME, LABEL, TEXT = 100, 200, 500
MEASURING = ("benchmark", "throughput", "width")  # stages whose figures other work falsifies
StageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.]{0,99}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class HostIdentity(Frozen):
    """The properties of a host that decide the result of a compile."""

    devices: dict[str, str]  # "cpu", "gpu:0", ... with the name of each
    # of devices, targets and tool versions: an equal request on another digest makes a new job
    digest: str
    # every `backend precision`, with why this host refuses it; empty if it does not
    candidates: dict[str, str] = Field(default_factory=dict)
    # of each device, for targets; what they say of tools is in the digest too
    labels: dict[str, dict[str, str]] = Field(default_factory=dict)
    language_models: str = ""  # why this host compiles none; empty if it does

    @property
    def possible_candidates(self) -> tuple[str, ...]:
        """Return every `backend precision` that this host does not refuse."""
        return tuple(name for name, refusal in self.candidates.items() if not refusal)


class Start(Frozen):
    """The plan to compile, or the engine to measure again, and the folders to use."""

    kind: Literal["start"] = "start"
    plan: Path
    work: Path
    shared: Path  # a second store, read-only
    # folder with the plan's report and engine to measure again; None: compile the plan
    compiled: Path | None = None
    command: str  # origin of the request, for the report
    shares_builds: bool = False  # the child sends Seeks and Made


class Granted(Frozen):
    """The child may measure on the device."""

    kind: Literal["granted"] = "granted"
    contended: bool = False  # engines serve there: the figures prove nothing about speed


class Returned(Frozen):
    """The server has taken the device back."""

    kind: Literal["returned"] = "returned"
    contended: bool = False  # engines served there meanwhile


def within_limits(event: StageEvent) -> StageEvent:
    """Cut texts that are too long for a message, and move the fraction to 0 to 1."""
    return replace(
        event,
        stage=cut(event.stage, NAME),
        subject=cut(event.subject, TEXT),
        text=cut(event.text, TEXT),
        fraction=None if event.fraction is None else min(max(event.fraction, 0.0), 1.0),
        figures=None if event.figures is None else _figures_within_limits(event.figures),
    )


def _figures_within_limits(figures: CandidateFigures) -> CandidateFigures:
    accuracy, latency = figures.accuracy, figures.latency
    return replace(
        figures,
        label=cut(figures.label, LABEL),
        accuracy=accuracy and replace(accuracy, measure=cut(accuracy.measure, NAME)),
        latency=latency and replace(latency, shape=cut(latency.shape, LABEL)),
    )


def _check_limits(event: StageEvent) -> StageEvent:
    if event != within_limits(event):
        raise ValueError("a text is too long")
    if event.figures is not None and event.state != "progress":
        raise ValueError("figures come only with progress")
    return event


class Stage(Frozen):
    """An event of a stage."""

    kind: Literal["stage"] = "stage"
    event: Annotated[StageEvent, AfterValidator(_check_limits)]


class Wants(Frozen):
    """The child is about to measure, and waits for Granted."""

    kind: Literal["wants"] = "wants"


class Returns(Frozen):
    """The child has measured."""

    kind: Literal["returns"] = "returns"


class Seeks(Frozen):
    """The child needs this artifact, and waits for Sought."""

    kind: Literal["seeks"] = "seeks"
    stage: StageName
    key: Digest


class Sought(Frozen):
    """The artifact is in the shared store, or the child may make it, or has to ask again later."""

    kind: Literal["sought"] = "sought"
    answer: Literal["there", "make", "wait"]


class Made(Frozen):
    """The child has made the artifact, or failed to."""

    kind: Literal["made"] = "made"
    stage: StageName
    key: Digest


class Finished(Frozen):
    """The report is in the work directory's out/."""

    kind: Literal["finished"] = "finished"


FromChild = Annotated[
    Stage | Wants | Returns | Seeks | Made | Finished | Failed, Field(discriminator="kind")
]
FromServer = Annotated[Start | Granted | Returned | Sought, Field(discriminator="kind")]
FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(FromChild)
FROM_SERVER: TypeAdapter[FromServer] = TypeAdapter(FromServer)


class Pace:
    """Limits progress of one stage to one message every PROGRESS_EVERY_S, and figures to
    MAX_FIGURES, and passes all else. Used on both sides.
    """

    def __init__(self) -> None:
        self._last: tuple[str, str, float] | None = None  # one stage runs at a time
        self._figures = 0

    def lets(self, event: StageEvent, now_s: float) -> bool:
        if event.figures is not None:
            self._figures += 1
            return self._figures <= MAX_FIGURES
        if event.state != "progress":
            self._last = None
            return True
        if (
            self._last
            and self._last[:2] == (event.stage, event.subject)
            and now_s - self._last[2] < PROGRESS_EVERY_S
        ):
            return False
        self._last = (event.stage, event.subject, now_s)
        return True
