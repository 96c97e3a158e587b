"""One loaded version of a model: its queue, its batches, its workers.

    deployment = await Deployment.start(spec, work)     ready: every worker has loaded the engine and warmed up
    answer = await deployment.infer(request)            cancelling it drops what still waits
    await deployment.drain()                            takes nothing new, and answers what it has
    await deployment.close()                            ends the workers; what still waits is Unavailable
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core import Engine
from pipeline.feeding import BatchSpec, InputRecipe
from service.serving.requests import InferAnswer, InferRequest, Served, Statistics


@dataclass(frozen=True)
class DeploymentSpec:
    """What is to be loaded, and how it is to be served."""

    model: str
    version: int
    owner: str
    engine_folder: Path  # where the engine's files lie
    engine: Engine
    batch: BatchSpec  # unless it is proved, every request runs alone
    device: str  # "cpu", "gpu:0", ...
    instances: int = 1  # workers, each with an engine of its own
    max_batch: int | None = None  # rows that may run together; None: what `batch` allows
    max_delay_s: float = 0.002  # how long the first request of a batch waits for others while every worker has work
    queue_limit: int = 256  # requests that may wait
    timeout_s: float = 30.0
    image: InputRecipe | None = None
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Deployment:
    """One loaded version. Lives in one event loop."""

    @classmethod
    async def start(cls, spec: DeploymentSpec, work: Path, worker: Sequence[str] = ()) -> Deployment:
        """Load and warm up, with logs and temporary files below `work`. What keeps a worker from being ready is raised, and leaves nothing behind."""
        raise NotImplementedError

    async def infer(self, request: InferRequest) -> InferAnswer:
        """As `Serving.infer` says."""
        raise NotImplementedError

    def served(self) -> Served:
        """As clients are told of it: `loading` also while a worker that died is started again and no other is there."""
        raise NotImplementedError

    def statistics(self) -> Statistics:
        """Since it was loaded."""
        raise NotImplementedError

    def shapes(self) -> Mapping[tuple[tuple[str, int], ...], int]:
        """How many requests came with which sizes of the symbols, the batch's among them."""
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """What the workers held of their device's memory once they were ready."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Take nothing new; returns when all that waited is answered."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the workers, and give their memory back. Harmless if repeated."""
        raise NotImplementedError
