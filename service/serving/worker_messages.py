"""All messages between the server and a worker, except tensors: one packet of JSON each.

    server -> worker   Load, once; Run, for each batch, with the descriptors of new buffers
    worker -> server   Ready, or Failed as its last; for each Run: Done, Short (the outputs need
                       more room: the server sends the batch again) or Refused

The socket keeps the packets apart (SOCK_SEQPACKET). A worker runs an untrusted model, so the server
trusts none of its messages: an invalid message or an impossible answer is BadMessage, and ends the
worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pipeline.errors import CrucibleError
from pipeline.execution.stage_event import Seconds
from service.jobs.messages import LONG_TEXT
from service.jobs.messages import BadMessage as BadMessage

PACKET_BYTES = 128 * 1024  # for the longest: a Run of 1,000 tensors, or two texts of LONG_TEXT
MAX_DIMS = 64
MAX_TENSORS = 1000

Count = Annotated[int, Field(ge=0, le=2**48)]
Text = Annotated[str, Field(max_length=LONG_TEXT)]
Part = Literal["inputs", "outputs"]
"""The two buffers of a slot."""
CONFIG = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, config=CONFIG)
class Placed:
    """The place of a tensor in its buffer; the engine's spec of this index has name and dtype."""

    shape: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]
    offset: Count


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Load:
    """The engine to load, and the symbol sizes for warming up."""

    engine: Path  # file of an Engine in JSON, with its root
    warm: tuple[dict[str, int], ...]
    runs: int  # of each size
    name: str  # of the engine, in messages
    sessions: int = 1  # they take turns
    kind: Literal["load"] = "load"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Run:
    """One batch. Its inputs are in the slot.

    The descriptors of the `new` buffers come with the packet, in this order.
    """

    number: Count
    slot: Count
    inputs: Annotated[tuple[Placed, ...], Field(max_length=MAX_TENSORS)]
    new: tuple[Part, ...] = ()
    kind: Literal["run"] = "run"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Ready:
    """The engine is loaded and warm."""

    memory_bytes: Count  # of the device's memory
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Done:
    """The outputs are in the slot, which belongs to the server again."""

    number: Count
    outputs: Annotated[tuple[Placed, ...], Field(max_length=MAX_TENSORS)]
    copy_in_s: Seconds
    compute_s: Seconds  # by the device's clock
    copy_out_s: Seconds
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Short:
    """The outputs need more bytes than their buffer has."""

    number: Count
    output_bytes: Count
    kind: Literal["short"] = "short"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Refused:
    """The engine cannot run on these inputs; the worker goes on."""

    number: Count
    message: Text
    next_step: Text = ""
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Failed:
    """The worker cannot go on."""

    code: Annotated[str, Field(max_length=100, pattern=r"^[a-z_.]+$")]
    message: Text
    next_step: Text = ""
    kind: Literal["failed"] = "failed"


FromWorker = Ready | Done | Short | Refused | Failed
FromServer = Load | Run
_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(
    Annotated[FromWorker, Field(discriminator="kind")]
)
_FROM_SERVER: TypeAdapter[FromServer] = TypeAdapter(
    Annotated[FromServer, Field(discriminator="kind")]
)


def packet_of(message: FromWorker | FromServer) -> bytes:
    """Encode a message as one packet."""
    adapter: TypeAdapter[FromWorker] | TypeAdapter[FromServer] = (
        _FROM_SERVER if isinstance(message, Load | Run) else _FROM_WORKER
    )
    return adapter.dump_json(message)  # type: ignore[arg-type]


def from_worker(packet: bytes) -> FromWorker:
    """Decode a message of a worker; BadMessage if it is invalid."""
    if len(packet) > PACKET_BYTES:
        raise BadMessage(f"expected a message of at most {PACKET_BYTES} bytes, got {len(packet)}")
    try:
        return _FROM_WORKER.validate_json(packet)
    except ValidationError as error:
        raise BadMessage(
            f"not a message: {packet[:100]!r} ({error.error_count()} errors)"
        ) from error


def from_server(packet: bytes) -> FromServer:
    """Decode a message of the server; EOFError if the server is gone."""
    if not packet:
        raise EOFError("the server closed the connection")
    return _FROM_SERVER.validate_json(packet)


def failed_from_error(error: CrucibleError) -> Failed:
    """Describe an error, cut to the length of a message."""
    return Failed(error.code, cut(error.message), cut(error.next_step))


def cut(text: str) -> str:
    """Cut a text to the length of a message, and replace what UTF-8 cannot encode."""
    return text[:LONG_TEXT].encode("utf-8", "replace").decode()
