"""The inference interface shared by HTTP, the Open Inference Protocol and gRPC: `Serving`.

    answer = await serving.infer(InferRequest(caller, "resnet50", {"image": array}))

The answer has `outputs` and `timing`. Arrays have the engine's own dtypes;
bfloat16 is `ml_dtypes.bfloat16`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.serving_inputs import BatchSpec, InputRecipe
from pipeline.text_inputs import TextRecipe
from service.auth import Caller
from service.regions import Inputs

ModelState = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request. Inputs have their batch axis, also for a single row."""

    caller: Caller
    model: str | None  # None: the only one that is deployed
    inputs: Inputs
    version: int | None = None  # None: the current one
    outputs: tuple[str, ...] = ()  # empty: all
    timeout_s: float | None = None  # None: the deployment's
    id: str = ""  # returned with the answer


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one request.

    `compute_s` is measured by the device's clock, for the batch of the request.
    """

    queue_s: float
    copy_in_s: float
    compute_s: float
    copy_out_s: float
    batch_size: int  # rows that ran together, without padding


@dataclass(frozen=True, slots=True)
class InferAnswer:
    """The requested outputs. The receiver owns the arrays."""

    model: str
    version: int
    device: str
    outputs: Tensors
    timing: Timing
    id: str = ""


class ServedDevice(Frozen):
    """One device of a deployed version."""

    device: str = Field(description="`cpu`, `gpu:0`, ...; empty: not chosen yet")
    state: ModelState = Field(description="`ready` if one of its instances is")
    reason: str = Field(default="", description="Why none is ready")
    memory_bytes: int = Field(default=0, description="Memory of the device that its instances hold")


class ServedText(Frozen):
    """How an encoder serves texts."""

    recipe: TextRecipe
    tokenizer_sha256: str = Field(description="Of the tokenizer.json beside the engine")


@dataclass(frozen=True, slots=True)
class Served:
    """One deployed version, as clients see it."""

    model: str
    version: int
    owner: str
    devices: tuple[ServedDevice, ...]
    backend: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch: BatchSpec  # the result of the proof
    state: ModelState
    reason: str = ""  # of `failed`
    max_batch: int = 1  # rows that run together, as it is deployed
    instances: int = 1  # on each device
    image: InputRecipe | None = None
    # class names by output, in the order of the class indices
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    text: ServedText | None = None  # None: it takes tensors only
    lengths: tuple[tuple[int, int], ...] = ()  # ranges of tokens of a text; empty: any
    created_s: int = 0  # of the version; UTC, since 1970

    @property
    def device(self) -> str:
        """The names of its devices, for people."""
        return ", ".join(each.device for each in self.devices)


@dataclass(frozen=True, slots=True)
class Total:
    """A number of events, and their total time."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one deployed version since its load. Only `rows` counts rows."""

    model: str
    version: int
    succeeded: Total
    failed: Total
    queue: Total
    copy_in: Total
    compute: Total
    copy_out: Total
    executions: int  # batches
    rows: int
    dropped: int  # requests whose client left before they ran
    batches: Mapping[int, Total] = field(default_factory=dict)  # by their rows
    last_request_ms: int = 0  # UTC, since 1970


class Serving(Protocol):
    """All deployed models."""

    def served(self, caller: Caller) -> tuple[Served, ...]:
        """The models that this caller may see, by name."""
        ...

    def find(self, caller: Caller, model: str | None, version: int | None = None) -> Served:
        """Find a deployed model, or the only one if `model` is None.

        NotFound: it is not deployed, or belongs to another owner. Unprocessable, with the names:
        `model` is None and several are deployed.
        """
        ...

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Run a request. Cancelling drops a request that still waits.

        Unprocessable: the inputs do not fit; TooMany: the queue is full; TimedOut: no answer in
        time; Unavailable: the model is not ready, or its worker was lost.
        """
        ...

    def statistics(self, caller: Caller) -> tuple[Statistics, ...]: ...

    async def load(self, caller: Caller, model: str) -> Served:
        """Deploy the current version with its last options, or with defaults.

        It is ready on return.
        """
        ...

    async def unload(self, caller: Caller, model: str) -> None:
        """Answer the waiting requests, then free the device; NotFound if it is not loaded."""
        ...
