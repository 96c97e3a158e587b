"""Promoted models: the types that are stored, and the types that clients see. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from pipeline.core.frozen import Frozen
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.results.benchmarks import LoadPoint
from pipeline.results.report import Verdict
from pipeline.serving_inputs import BatchSpec, InputRecipe
from service.inference import ModelState, ServedDevice, ServedText

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$"
RESERVED = frozenset({"stats"})
"""Names that no model may have: the path GET /v2/models/stats would hide the model."""
ALL_DEVICES = "all"
LANGUAGE_BATCH = 8
"""Answers of a language model that are generated together, if nobody says otherwise."""


class PromoteRequest(Frozen, defer_build=False):
    """The report whose engine becomes the next version of the model."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"report": "01931f3a5b2c07d1e9a44c6f2"}]},
    )

    report: str = Field(max_length=100, description="The id of the job of this report")
    override: bool = Field(
        default=False,
        description=(
            "Promote a report with the verdict `unproven`, too; logged. A rejected report is never"
            " promoted"
        ),
    )


class BenchmarkRequest(Frozen, defer_build=False):
    """The version to measure again."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 2}]})

    version: int | None = Field(
        default=None,
        ge=1,
        description="Null: the loaded version, or the current one if none is loaded",
    )


class RecompileRequest(Frozen, defer_build=False):
    """How to compile a model again."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"dry_run": True}]})

    profiles: Literal["traffic", "same"] = Field(
        default="traffic",
        description=(
            "`traffic`: for the shapes that the loaded version has run; `same`: those of its plan,"
            " for libraries or a device that have changed since"
        ),
    )
    dry_run: bool = Field(default=False, description="Return the new profiles, and add no job")


class DeploymentOptions(Frozen, defer_build=False):
    """The options for serving a model. Missing options get defaults."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"instances": 2, "max_batch": 8}]})

    @model_validator(mode="before")
    @classmethod
    def _overlap_is_a_second_instance(cls, options: Any) -> Any:
        """Read options that an earlier build has stored."""
        if isinstance(options, dict) and "overlap" in options:
            overlap = options["overlap"]
            options = {name: value for name, value in options.items() if name != "overlap"}
            instances = options.get("instances") or 1
            if overlap is True and isinstance(instances, int):
                options["instances"] = 2 * instances
        return options

    version: int | None = Field(
        default=None,
        ge=1,
        description="Null: always the current one, also after a promotion or a rollback",
    )
    device: str | tuple[str, ...] | None = Field(
        default=None,
        description=(
            "`cpu`, `gpu:0`, ..., or a list of several; `all`: every GPU of the server of the kind"
            " for which the engine was built; null: the first device that fits the engine"
        ),
    )
    instances: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description=(
            "Batches that run at the same time on each device: on a GPU in one process, with one"
            " copy of the weights, otherwise in a process each; null: the sessions of the version's"
            " best point, else 1"
        ),
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Rows that may run together; null: the batch of the version's best point, else as many"
            " as the BatchSpec allows. Of a language model: answers that are generated together;"
            f" null: {LANGUAGE_BATCH}"
        ),
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
        description="Requests that may wait; further requests get status 429",
    )
    timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Time-out of a request; a request may set a shorter one",
    )
    answer_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="The same for a whole answer of a language model, in place of `timeout_s`",
    )
    drain_s: float = Field(
        default=600.0,
        ge=0,
        le=86_400,
        description=(
            "How long a version that is replaced or unloaded may finish its requests. Those that"
            " are left then get status 503"
        ),
    )
    cache_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description=(
            "Language models: tokens for which there is a cache of keys and values, of all answers"
            " together; at least the context. Null: as many as `max_batch` contexts, or fewer if"
            " they do not fit into the memory"
        ),
    )
    prefix_caching: bool = Field(
        default=True,
        description=(
            "Language models: keep the keys and values of earlier prompts, so that a prompt that"
            " begins like one of them is read faster. The log-probabilities of a prompt are known"
            " without it only"
        ),
    )

    @field_validator("device")
    @classmethod
    def _names_each_device_once(
        cls, device: str | tuple[str, ...] | None
    ) -> str | tuple[str, ...] | None:
        if isinstance(device, str) or device is None:
            return device
        if not device:
            raise ValueError("expected at least one device, got an empty list; null: the first one")
        if ALL_DEVICES in device:
            raise ValueError("expected names of devices in a list; `all` stands without a list")
        if repeated := [name for name in dict.fromkeys(device) if device.count(name) > 1]:
            raise ValueError(
                f"'{repeated[0]}' is in the list twice; for several batches at once on each device"
                " set `instances`"
            )
        return device

    @property
    def named_devices(self) -> tuple[str, ...]:
        """The devices that the options name; one empty name if the load chooses them."""
        if isinstance(self.device, tuple):
            return self.device
        return ("" if self.device in (None, ALL_DEVICES) else str(self.device),)


class LanguageSize(Frozen):
    """What a language model takes, and what it needs."""

    context: int = Field(ge=1, description="Tokens of prompt and answer together, at most")
    vocabulary: int = Field(ge=1, description="Number of tokens")
    cache_bytes_per_token: float = Field(gt=0, description="Of keys and values")


class Version(Frozen):
    """One promoted engine.

    Only two fields ever change: `before`, if that version is pruned, and `memory_bytes`, after a
    load.
    """

    model: str
    version: int = Field(ge=1)
    owner: str
    job: str = Field(description="The job whose report proves it")
    created: str = Field(description="UTC")
    verdict: Verdict
    override: bool = Field(description="True if it was promoted with the verdict `unproven`")
    before: int | None = Field(
        description="The version that was current before; a rollback makes it current again"
    )
    label: str = Field(description="The label of the best candidate")
    backend: str
    precision: Precision
    target: str = Field(description="The CPU or GPU for which it was built")
    on_gpu: bool
    size_bytes: int
    peak_bytes: int = Field(
        default=0,
        description="Peak memory of a process in the benchmark; 0: not known, or on a GPU",
    )
    memory_bytes: int | None = Field(
        default=None,
        description=(
            "Device memory of one instance after loading, the lowest value so far; null: not known"
        ),
    )
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    batch: BatchSpec
    best_point: LoadPoint | None = Field(
        default=None,
        description="The best point by the plan's objective; null: the objective is latency",
    )
    image: InputRecipe | None = None
    labels: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    text: ServedText | None = Field(
        default=None, description="How it makes embeddings of texts; null: it takes tensors only"
    )
    language: LanguageSize | None = Field(
        default=None, description="Of a language model, which has no inputs; null: it is none"
    )

    @property
    def has_free_sizes(self) -> bool:
        """Return whether some size of its inputs may vary."""
        return any(dim.min < dim.max for profile in self.profiles for dim in profile.dims.values())

    @property
    def most_together(self) -> int:
        """Rows that may run together."""
        return self.batch.maximum if self.batch.proved else 1


class DeploymentView(Frozen):
    """The current state of a model."""

    state: Literal["unloaded", ModelState]
    reason: str = Field(default="", description="Why it failed")
    version: int | None = Field(description="The version that answers; null: none")
    device: str | None = Field(description="The names of its devices")
    devices: tuple[ServedDevice, ...] = Field(
        default=(), description="Each of them; empty: no version answers"
    )
    note: str = Field(default="", description="The GPUs that `all` has left out, and why")
    options: DeploymentOptions | None = Field(
        description="The options of the last request for a deployment"
    )
    memory_bytes: int | None = Field(default=None, description="Device memory of all instances")


class ServerState(Frozen):
    """The state of a model at one of several servers."""

    server: str = Field(description="The id of the server, as in GET /nodes")
    host: str
    state: Literal["unloaded", ModelState]
    version: int | None = Field(description="The version that answers there; null: none")
    reason: str = Field(default="", description="Why it has not loaded what it should")


class ModelView(Frozen):
    """A model as its owner sees it."""

    name: str
    owner: str
    current: Version
    versions: tuple[Version, ...] = Field(description="All stored versions, the newest first")
    deployment: DeploymentView = Field(description="At the server that answers this request")
    servers: tuple[ServerState, ...] = Field(
        default=(),
        description="At each live server of a shared database, as of its last change there",
    )


class ModelPage(Frozen):
    models: tuple[ModelView, ...]


# -- decisions ---------------------------------------------------------------


def devices_from_text(text: str) -> str | tuple[str, ...]:
    """Read a device, `all`, or several devices with commas between them."""
    names = tuple(map(str.strip, text.split(",")))
    return names if len(names) > 1 else text.strip()


def version_name(model: str, version: int) -> str:
    """The name of a version in messages."""
    return f"version {version} of '{model}'"


def prunable(versions: Sequence[Version], used: Collection[int], keep: int) -> tuple[int, ...]:
    """Return the versions that can be removed.

    The newest `keep` versions stay, and so do those in use and the targets of a rollback from a
    version in use.
    """
    numbers = sorted((version.version for version in versions), reverse=True)
    retained = {*numbers[:keep], *used}
    for version in versions:
        if version.version in used and version.before is not None:
            retained.add(version.before)
    return tuple(sorted(number for number in numbers if number not in retained))
