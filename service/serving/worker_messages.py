"""Everything that crosses between the server and a worker, besides tensors: one packet of JSON
each, over a socket that both hold.

    server -> worker   Load, once; Run, for each batch, with the descriptors of buffers that are new
    worker -> server   Ready, or Failed as its last; for each Run: Done, Short (the outputs need
                       more room: it is sent again) or Refused

The socket keeps the packets apart (SOCK_SEQPACKET). A worker runs a model that a stranger sent, so
the server believes nothing of it: what is no message, or not a possible answer to what was asked,
is BadMessage, and ends the worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pipeline.errors import CrucibleError
from service.jobs.messages import LONG_TEXT, Seconds
from service.jobs.messages import BadMessage as BadMessage

PACKET_BYTES = 128 * 1024  # the longest: 1,000 tensors of a Run, or two texts of LONG_TEXT
MAX_DIMS = 64
MAX_TENSORS = 1000

Count = Annotated[int, Field(ge=0, le=2**48)]
Text = Annotated[str, Field(max_length=LONG_TEXT)]
Part = Literal["inputs", "outputs"]
"""Of a slot."""
CONFIG = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, config=CONFIG)
class Placed:
    """Where a tensor lies in its buffer; name and dtype are those of the engine's spec of the same
    place.
    """

    shape: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]
    offset: Count


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Load:
    """Which engine, and the sizes of its symbols to run before the first batch."""

    engine: Path  # file of an Engine in JSON, with its root
    warm: tuple[dict[str, int], ...]
    runs: int  # of each size
    name: str  # of the engine, in messages
    sessions: int = 1  # which take turns
    kind: Literal["load"] = "load"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Run:
    """One batch. Its inputs lie in the slot; descriptors of `new` buffers come with the packet, in
    this order.
    """

    number: Count
    slot: Count
    inputs: Annotated[tuple[Placed, ...], Field(max_length=MAX_TENSORS)]
    new: tuple[Part, ...] = ()
    kind: Literal["run"] = "run"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Ready:
    """Loaded and warm."""

    memory_bytes: Count  # of the device's memory
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Done:
    """The outputs lie in the slot, which is the server's again."""

    number: Count
    outputs: Annotated[tuple[Placed, ...], Field(max_length=MAX_TENSORS)]
    copy_in_s: Seconds
    compute_s: Seconds  # by the device's clock
    copy_out_s: Seconds
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Short:
    """The outputs need so many bytes."""

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
    """One packet."""
    adapter: TypeAdapter[FromWorker] | TypeAdapter[FromServer] = (
        _FROM_SERVER if isinstance(message, Load | Run) else _FROM_WORKER
    )
    return adapter.dump_json(message)  # type: ignore[arg-type]


def from_worker(packet: bytes) -> FromWorker:
    """What a worker said; BadMessage if it is nothing that a worker may say."""
    if len(packet) > PACKET_BYTES:
        raise BadMessage(f"a message of {len(packet)} bytes, at most {PACKET_BYTES} are allowed")
    try:
        return _FROM_WORKER.validate_json(packet)
    except ValidationError as error:
        raise BadMessage(
            f"not a message: {packet[:100]!r} ({error.error_count()} faults)"
        ) from error


def from_server(packet: bytes) -> FromServer:
    """What the server said; EOFError if it is gone."""
    if not packet:
        raise EOFError("the server has hung up")
    return _FROM_SERVER.validate_json(packet)


def failed_from_error(error: CrucibleError) -> Failed:
    """A failure, with what does not fit cut off."""
    return Failed(error.code, cut(error.message), cut(error.next_step))


def cut(text: str) -> str:
    """Not longer than a message may be, and nothing in it that UTF-8 cannot say."""
    return text[:LONG_TEXT].encode("utf-8", "replace").decode()
