"""Models that were promoted, as they are stored and as clients are told of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from pipeline.core import DimRange, Frozen, Precision, Profile, TensorSpec
from pipeline.results.report import Verdict
from pipeline.serving_inputs import BatchSpec, InputRecipe

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$"
RESERVED = frozenset({"stats"})
"""Names that no model may get: a path of a wire, GET /v2/models/stats, would hide it."""

ModelState = Literal["unloaded", "loading", "ready", "draining", "failed"]


class PromoteRequest(Frozen):
    """Which report's engine is to be the model's next version."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"report": "01931f3a5b2c07d1e9a44c6f2"}]},
    )

    report: str = Field(max_length=100, description="The id of the job that made it")
    override: bool = Field(
        default=False,
        description=(
            "Take it although its verdict is `unproven`; logged. A rejected one is never taken"
        ),
    )


class BenchmarkRequest(Frozen):
    """Which version is to be measured again."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 2}]})

    version: int | None = Field(
        default=None,
        ge=1,
        description="Null: the one that is loaded, or the current one where none is",
    )


class DeploymentOptions(Frozen):
    """How a model is served. What is left out is chosen."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"instances": 2, "max_batch": 8}]})

    version: int | None = Field(
        default=None,
        ge=1,
        description="Null: the current one, also after a promotion or a rollback",
    )
    device: str | None = Field(
        default=None, description="`cpu`, `gpu:0`, ...; null: the first one that the engine runs on"
    )
    instances: int = Field(
        default=1, ge=1, le=64, description="Processes, each with an engine of its own"
    )
    overlap: bool = Field(
        default=False,
        description=(
            "Copy a batch while another one computes; each instance takes more memory for that"
        ),
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        description="Rows that may run together; null: as many as the BatchSpec allows",
    )
    max_delay_s: float = Field(
        default=0.002,
        ge=0,
        le=10,
        description="How long a request waits for others while all instances are busy",
    )
    queue_limit: int = Field(
        default=256,
        ge=1,
        le=100_000,
        description="Requests that may wait; one more is answered 429",
    )
    timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="Of a request, which may bring a shorter one"
    )


class Version(Frozen):
    """One promoted engine. Never changed, but `before` where that version is pruned, and
    `memory_bytes` when it has been loaded.
    """

    model: str
    version: int = Field(ge=1)
    owner: str
    job: str = Field(description="Whose report proves it")
    created: str = Field(description="UTC")
    verdict: Verdict
    override: bool = Field(description="It was taken although its verdict was `unproven`")
    before: int | None = Field(
        description="The version that was current before it; a rollback leads there"
    )
    label: str = Field(description="The candidate that won")
    backend: str
    precision: Precision
    target: str = Field(description="The CPU or GPU that it was built for")
    on_gpu: bool
    size_bytes: int
    peak_bytes: int = Field(
        default=0,
        description="The most that a process held in the benchmark; 0: not known, or on a GPU",
    )
    memory_bytes: int | None = Field(
        default=None,
        description=(
            "Of the device, held by one instance when it was loaded, the least so far; null: not"
            " known"
        ),
    )
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    batch: BatchSpec
    image: InputRecipe | None = None
    labels: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @property
    def most_together(self) -> int:
        """Rows that may run together."""
        return self.batch.maximum if self.batch.proved else 1


class DeploymentView(Frozen):
    """How a model is served now."""

    state: ModelState
    reason: str = Field(default="", description="Why it failed")
    version: int | None = Field(description="The version that answers; null: none does")
    device: str | None
    options: DeploymentOptions | None = Field(description="As they were asked for last")
    memory_bytes: int | None = Field(
        default=None, description="Of the device, held by its instances"
    )


class ModelView(Frozen):
    """A model as its owner sees it."""

    name: str
    owner: str
    current: Version
    versions: tuple[Version, ...] = Field(description="All that are kept, the newest first")
    deployment: DeploymentView


class ModelPage(Frozen):
    models: tuple[ModelView, ...]


class SeenShape(Frozen):
    """Sizes of the symbols in requests, and how many had them."""

    sizes: dict[str, int]
    requests: int


class ShapesView(Frozen):
    """What requests were like since the model was loaded, and the profile they suggest for the next
    compile.
    """

    version: int
    shapes: tuple[SeenShape, ...] = Field(description="The most frequent first")
    profiles: tuple[dict[str, DimRange], ...] = Field(
        description="For `profiles` of a plan; empty while nothing was seen"
    )


# -- decisions ---------------------------------------------------------------


def version_name(model: str, version: int) -> str:
    """What messages call a version of a model."""
    return f"version {version} of '{model}'"


def prunable(versions: Sequence[Version], used: Collection[int], keep: int) -> tuple[int, ...]:
    """Versions that need not be kept: all but the newest `keep`, those in use, and those that a
    rollback from one in use leads to next.
    """
    kept = {each.version for each in sorted(versions, key=lambda each: -each.version)[:keep]} | set(
        used
    )
    kept |= {each.before for each in versions if each.version in used and each.before is not None}
    return tuple(sorted(each.version for each in versions if each.version not in kept))


def suggested(
    shapes: Mapping[tuple[tuple[str, int], ...], int], version: Version
) -> tuple[dict[str, DimRange], ...]:
    """One profile that holds all sizes seen, the most frequent as opt. What counts rows reaches as
    far as rows run together.
    """
    counts: dict[str, Counter[int]] = {}
    for shape, requests in shapes.items():
        for symbol, size in shape:
            counts.setdefault(symbol, Counter())[size] += requests
    rows = {
        spec.shape[axis]
        for spec in version.inputs
        if (axis := version.batch.axes.get(spec.name)) is not None
    }
    profile = {}
    for symbol, seen in counts.items():
        opt = max(seen, key=lambda size: (seen[size], size))
        most = max(seen) if symbol not in rows else max(*seen, version.batch.maximum)
        profile[symbol] = DimRange(min=min(seen), opt=max(opt, 1), max=max(most, 1))
    return (profile,) if profile else ()
