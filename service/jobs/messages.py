"""Everything that crosses between the server and a job's child: one line of JSON each, over a
socket that both hold.

    server -> child   Start, once; Granted, for each Wants; Returned, for each Returns
    child -> server   Stage ...; Wants before it measures, Returns after it; Finished or Failed,
                      last

The child runs what strangers sent, so the server believes none of it: a line that is too long, no
JSON, of another form, or one too many is BadMessage, and ends the child. Finished says nothing but
that: what was found is read from the report, which the server verifies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.core import Frozen
from pipeline.errors import CrucibleError
from pipeline.execution.stage_runner import StageEvent

LINE_BYTES = (
    128 * 1024
)  # the longest message: two texts of LONG_TEXT, of which each character may take six bytes in JSON
MAX_MESSAGES = (
    20_000  # of one attempt, besides progress: a compile of 64 candidates sends about 2,000
)
PROGRESS_EVERY_S = 0.5
TEXT, LONG_TEXT = 500, 8_000
MAX_S = 1e9

Seconds = Annotated[float, Field(ge=0, le=MAX_S, allow_inf_nan=False)]
Short = Annotated[str, Field(max_length=TEXT)]
State = Literal["started", "progress", "finished", "reused", "waiting", "failed"]


class BadMessage(Exception):
    """The other side does not keep to the protocol."""


class HostIdentity(Frozen):
    """What of a host decides the result of a compile."""

    devices: dict[str, str]  # "cpu", "gpu:0", ... with the name of each
    # of devices, targets and versions of tools: another one makes another job of an equal request
    digest: str


class Start(Frozen):
    """What to compile or to measure again, and where."""

    kind: Literal["start"] = "start"
    plan: Path
    work: Path
    shared: Path  # the store to read from, besides the work's own
    compiled: Path | None = (
        None  # the plan's report and engine, to be measured again; None: the plan is compiled
    )
    command: str  # for the report: how the compile was asked for


class Granted(Frozen):
    """The device is the child's to measure on."""

    kind: Literal["granted"] = "granted"
    contended: bool = False  # something serves there: the figures decide nothing about speed


class Returned(Frozen):
    """The device is the child's no longer."""

    kind: Literal["returned"] = "returned"
    contended: bool = False  # something served there meanwhile


class Stage(Frozen):
    """How far a stage is."""

    kind: Literal["stage"] = "stage"
    stage: Annotated[str, Field(max_length=100)]
    subject: Short = ""
    state: State
    fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    text: Short = ""
    seconds: Seconds = 0.0
    elapsed_s: Seconds = 0.0
    estimate_s: Seconds | None = None


class Wants(Frozen):
    """The child is about to measure, and waits for Granted."""

    kind: Literal["wants"] = "wants"
    use: Literal["measure"] = "measure"


class Returns(Frozen):
    """The child has measured."""

    kind: Literal["returns"] = "returns"
    use: Literal["measure"] = "measure"


class Finished(Frozen):
    """The report lies in the work's out/."""

    kind: Literal["finished"] = "finished"


class Failed(Frozen):
    """There is no report."""

    kind: Literal["failed"] = "failed"
    code: Annotated[str, Field(max_length=100, pattern=r"^[a-z_.]+$")]
    message: Annotated[str, Field(max_length=LONG_TEXT)]
    next_step: Annotated[str, Field(max_length=LONG_TEXT)] = ""


FromChild = Stage | Wants | Returns | Finished | Failed
FromServer = Start | Granted | Returned
_FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="kind")])
_FROM_SERVER: TypeAdapter[FromServer] = TypeAdapter(
    Annotated[FromServer, Field(discriminator="kind")]
)


def line_of(message: FromChild | FromServer) -> bytes:
    """One line, with its end."""
    return message.model_dump_json().encode() + b"\n"


def from_child(line: bytes) -> FromChild:
    """What a child said; BadMessage if it is nothing that a child may say."""
    if len(line) > LINE_BYTES:
        raise BadMessage(f"a message of {len(line)} bytes, at most {LINE_BYTES} are allowed")
    try:
        return _FROM_CHILD.validate_json(line, strict=True)
    except ValidationError as error:
        raise BadMessage(f"not a message: {line[:100]!r} ({error.error_count()} faults)") from error


def from_server(line: bytes) -> FromServer:
    """What the server said; EOFError if it is gone."""
    if not line.endswith(b"\n"):
        raise EOFError("the server has hung up")
    return _FROM_SERVER.validate_json(line)


def stage_from_event(event: StageEvent) -> Stage:
    """A pipeline's event, with what does not fit cut off."""
    return Stage(
        stage=event.stage,
        subject=_cut(event.subject, TEXT),
        state=event.state,
        fraction=None if event.fraction is None else min(max(event.fraction, 0.0), 1.0),
        text=_cut(event.text, TEXT),
        seconds=event.seconds,
        elapsed_s=event.elapsed_s,
        estimate_s=event.estimate_s,
    )


def failed_from_error(error: CrucibleError) -> Failed:
    """A failure, with what does not fit cut off."""
    return Failed(
        code=error.code,
        message=_cut(error.message, LONG_TEXT),
        next_step=_cut(error.next_step, LONG_TEXT),
    )


def _cut(text: str, most: int) -> str:
    """Not longer, and nothing in it that UTF-8 cannot say (half of a pair, from the name of a
    file).
    """
    return text[:most].encode("utf-8", "replace").decode()


class Pace:
    """Lets progress of one stage through at most every PROGRESS_EVERY_S, and all else always. Used
    on both sides.
    """

    def __init__(self) -> None:
        self._last: tuple[str, str, float] | None = None  # one stage runs at a time

    def lets(self, stage: Stage, now_s: float) -> bool:
        if stage.state != "progress":
            self._last = None
            return True
        if (
            self._last
            and self._last[:2] == (stage.stage, stage.subject)
            and now_s - self._last[2] < PROGRESS_EVERY_S
        ):
            return False
        self._last = (stage.stage, stage.subject, now_s)
        return True
