"""Messages between the server and a job's child: one line of JSON each, over a shared socket.

    server -> child   Start, once; Granted, for each Wants; Returned, for each Returns
    child -> server   Stage ...; Wants before it measures, Returns after it; Finished or Failed,
                      last

The child runs untrusted models, so the server trusts no message. A line that is too long, not JSON,
of another form, or one too many raises BadMessage and ends the child. Finished carries no result:
the server reads the result from the report, which it verifies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.core import Frozen
from pipeline.errors import CrucibleError
from pipeline.execution.stage_runner import StageEvent

# the longest message: two texts of LONG_TEXT; a character may take six bytes in JSON
LINE_BYTES = 128 * 1024
# of one attempt, besides progress: a compile of 64 candidates sends about 2,000
MAX_MESSAGES = 20_000
PROGRESS_EVERY_S = 0.5
TEXT, LONG_TEXT = 500, 8_000
MAX_S = 1e9

Seconds = Annotated[float, Field(ge=0, le=MAX_S, allow_inf_nan=False)]
Short = Annotated[str, Field(max_length=TEXT)]
State = Literal["started", "progress", "finished", "reused", "waiting", "failed", "cancelled"]


class BadMessage(Exception):
    """The other side violates the protocol."""


class HostIdentity(Frozen):
    """The properties of a host that decide the result of a compile."""

    devices: dict[str, str]  # "cpu", "gpu:0", ... with the name of each
    # of devices, targets and tool versions: an equal request on another digest makes a new job
    digest: str


class Start(Frozen):
    """The plan to compile, or the engine to measure again, and the folders to use."""

    kind: Literal["start"] = "start"
    plan: Path
    work: Path
    shared: Path  # a second store, read-only
    # folder with the plan's report and engine to measure again; None: compile the plan
    compiled: Path | None = None
    command: str  # origin of the request, for the report


class Granted(Frozen):
    """The child may measure on the device."""

    kind: Literal["granted"] = "granted"
    contended: bool = False  # engines serve there: the figures prove nothing about speed


class Returned(Frozen):
    """The server has taken the device back."""

    kind: Literal["returned"] = "returned"
    contended: bool = False  # engines served there meanwhile


class Stage(Frozen):
    """State and progress of a stage."""

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
    """The report is in the work directory's out/."""

    kind: Literal["finished"] = "finished"


class Failed(Frozen):
    """The job has no report."""

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
    """Encode a message as one line, with its line end."""
    return message.model_dump_json().encode() + b"\n"


def from_child(line: bytes) -> FromChild:
    """Parse a message of a child. BadMessage if it is none."""
    if len(line) > LINE_BYTES:
        raise BadMessage(f"expected a message of at most {LINE_BYTES} bytes, got {len(line)}")
    try:
        return _FROM_CHILD.validate_json(line, strict=True)
    except ValidationError as error:
        raise BadMessage(f"not a message: {line[:100]!r} ({error.error_count()} faults)") from error


def from_server(line: bytes) -> FromServer:
    """Parse a message of the server. EOFError if the server is gone."""
    if not line.endswith(b"\n"):
        raise EOFError("the server has closed the connection")
    return _FROM_SERVER.validate_json(line)


def stage_from_event(event: StageEvent) -> Stage:
    """Convert a pipeline event. Texts that are too long are cut."""
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
    """Convert an error. Texts that are too long are cut."""
    return Failed(
        code=error.code,
        message=_cut(error.message, LONG_TEXT),
        next_step=_cut(error.next_step, LONG_TEXT),
    )


def _cut(text: str, most: int) -> str:
    """Cut a text to `most` characters, and replace what UTF-8 cannot encode (half of a surrogate
    pair, from a file's name).
    """
    return text[:most].encode("utf-8", "replace").decode()


class Pace:
    """Limits progress of one stage to one message every PROGRESS_EVERY_S, and passes all else. Used
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
