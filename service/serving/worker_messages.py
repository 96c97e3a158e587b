"""All messages between the server and a worker, except tensors: one packet of JSON each.

    server -> worker   Load, once; Run, for each batch, with the descriptors of new buffers
    worker -> server   Ready, or Failed as its last; for each Run: Done, Short (the outputs need
                       more room: the server sends the batch again) or Refused

A worker runs an untrusted model, so the server trusts none of its messages: an invalid message or
an impossible answer is BadMessage, and ends the worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from pipeline.execution.stage_event import Seconds
from service.sandbox.framing import Failed, LongText

MAX_DIMS = 64
MAX_TENSORS = 1000

Count = Annotated[int, Field(ge=0, le=2**48)]
Part = Literal["inputs", "outputs", "body"]
"""The two buffers of a slot, and that of a request's body."""
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
    """One batch. Its inputs are in the slot, or in the body of its only request.

    The descriptors of the `new` buffers come with the packet, in this order.
    """

    number: Count
    slot: Count
    inputs: Annotated[tuple[Placed, ...], Field(max_length=MAX_TENSORS)]
    new: tuple[Part, ...] = ()
    body: Count | None = None  # the buffer that holds the inputs, if it is not the slot's
    freed: tuple[Count, ...] = ()  # buffers of bodies that come no more
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
    message: LongText
    next_step: LongText = ""
    kind: Literal["refused"] = "refused"


FromWorker = Annotated[Ready | Done | Short | Refused | Failed, Field(discriminator="kind")]
FromServer = Annotated[Load | Run, Field(discriminator="kind")]
FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(FromWorker)
FROM_SERVER: TypeAdapter[FromServer] = TypeAdapter(FromServer)
