"""What every wire asks of the models that are served, and what it gets: HTTP, the Open Inference
Protocol and gRPC speak to `Serving` alone.

    answer = await serving.infer(InferRequest(caller, "resnet50", {"image": array}))

The answer has `outputs` and `timing`. Arrays are in the engine's own dtypes;
bfloat16 is `ml_dtypes.bfloat16`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.core import Tensors, TensorSpec
from pipeline.serving_inputs import BatchSpec, InputRecipe
from service.auth import Caller

ModelState = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request. Inputs carry their batch axis, also for a single row."""

    caller: Caller
    model: str | None  # None: the only one that is deployed
    inputs: Tensors
    version: int | None = None  # None: the current one
    outputs: tuple[str, ...] = ()  # empty: all
    timeout_s: float | None = None  # None: the deployment's
    id: str = ""  # given back with the answer


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one request went; `compute_s` by the device's clock, of the whole batch it
    was in.
    """

    queue_s: float
    copy_in_s: float
    compute_s: float
    copy_out_s: float
    batch_size: int  # rows that ran together, without padding


@dataclass(frozen=True, slots=True)
class InferAnswer:
    """The outputs that were asked for. The arrays are the receiver's."""

    model: str
    version: int
    device: str
    outputs: Tensors
    timing: Timing
    id: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """One deployed version, as clients are told of it."""

    model: str
    version: int
    owner: str
    device: str
    backend: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch: BatchSpec  # what was proved
    state: ModelState
    reason: str = ""  # of `failed`
    max_batch: int = 1  # rows that run together, as it is deployed
    instances: int = 1
    image: InputRecipe | None = None
    labels: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of outputs, by class index


@dataclass(frozen=True, slots=True)
class Total:
    """How often something happened, and how long it took in all."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one deployed version since it was loaded. Requests count rows nowhere: `rows` does."""

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
    dropped: int  # whose client had gone before they ran
    batches: Mapping[int, Total] = field(default_factory=dict)  # by their rows
    last_request_ms: int = 0  # UTC, since 1970


class Serving(Protocol):
    """All deployed models."""

    def served(self, caller: Caller) -> tuple[Served, ...]:
        """What this caller may see, by name."""
        ...

    def find(self, caller: Caller, model: str | None, version: int | None = None) -> Served:
        """NotFound: not deployed, or another owner's. Unprocessable, listing them: no name is given
        and several are deployed.
        """
        ...

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Cancelling drops a request that still waits.

        Unprocessable: inputs do not fit; TooMany: the queue is full; TimedOut: no answer in time;
        Unavailable: not ready, or its worker was lost.
        """
        ...

    def statistics(self, caller: Caller) -> tuple[Statistics, ...]: ...

    async def load(self, caller: Caller, model: str) -> Served:
        """Deploy the current version, as it was deployed last or with defaults; ready when this
        returns.
        """
        ...

    async def unload(self, caller: Caller, model: str) -> None:
        """Answer what waits, then free the device; what is not loaded is NotFound."""
        ...
