"""The plan in a client's request: its own type, which cannot refer to anything outside the upload.

It has no paths, no `module:function` and no output folder. Model and data are the uploaded parts;
architectures and metrics are names from the service's lists. It is converted to an ordinary Plan
over the uploaded files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, Field, ValidationError

from pipeline.core import Frozen, TensorSpec
from pipeline.plan.schema import (
    BenchmarkConfig,
    CalibrationConfig,
    CandidateConfig,
    ExportConfig,
    GeneratedData,
    Plan,
    PlanLoader,
    Profiles,
    Thresholds,
    explain,
)
from pipeline.serving_inputs import ServingConfig
from service.architectures import check_metric, entrypoint_of
from service.errors import Unprocessable
from service.settings import Settings
from service.submission.uploads import Limits, Part, is_archive, unpack

DATA = ("calibration", "selection", "validation")
MAX_DEPTH = 12  # levels of a plan; our schema needs 6
MAX_ITEMS = 10_000  # scalars, lists and mappings of a plan together
MAX_NAME = 100
NAME = rf"^([A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}})?$"
SEE = "docs/service.md lists the keys of a submitted plan"
SAFETENSORS = ".safetensors"
PICKLES = (".pt", ".pth", ".pt2", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib")


class NamedConfig(Frozen):
    """A request to compile one of the server's own plans."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"config": "digits"}]})

    config: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$")


class SubmittedAccuracy(Frozen):
    """The accuracy gate, with Crucible's own metrics by name."""

    metric: str = "auto"
    output: str | None = None
    max_drop: float = Field(default=0.01, ge=0)
    thresholds: Thresholds = Thresholds()
    per_output: dict[str, Thresholds] = Field(default_factory=dict)


class SubmittedData(Frozen):
    """Random samples that replace a set that is not uploaded. They suffice for speed only, and the
    report says so.
    """

    calibration: GeneratedData | None = None
    selection: GeneratedData | None = None


class SubmittedSimplify(Frozen):
    enabled: bool = True
    plain_attention: bool = True


class SubmittedTensorRT(Frozen):
    workspace_mib: int | None = Field(default=None, gt=0)
    optimization_level: int = Field(default=3, ge=0, le=5)
    timing_iterations: int = Field(default=8, ge=1, le=100)


class SubmittedPlan(Frozen):
    """The plan in a client's request. Keys have the same meaning as in a plan (docs/plan.md)."""

    name: str = Field(default="", pattern=NAME)
    architecture: str | None = None  # for safetensors weights
    classes: int = 1000  # outputs of the architecture
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    profiles: Profiles = ()
    data: SubmittedData = SubmittedData()
    accuracy: SubmittedAccuracy = SubmittedAccuracy()
    candidates: tuple[CandidateConfig, ...] = Field(default=(), max_length=64)
    rescue: bool = True
    export: ExportConfig = ExportConfig()
    simplify: SubmittedSimplify = SubmittedSimplify()
    calibration: CalibrationConfig = CalibrationConfig()
    tensorrt: SubmittedTensorRT = SubmittedTensorRT()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    serving: ServingConfig = ServingConfig()


# -- parsing --------------------------------------------------------------


def parse(text: bytes) -> SubmittedPlan:
    """Parse YAML or JSON. Unprocessable names the invalid key or line."""
    try:
        _check_form(text.decode("utf-8"))
        document = yaml.load(text, PlanLoader) or {}
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise Unprocessable(f"the plan is neither YAML nor JSON: {error}", SEE) from error
    if not isinstance(document, dict):
        raise Unprocessable(
            f"expected a plan of `key: value` lines, got {type(document).__name__}", SEE
        )
    try:
        plan = SubmittedPlan.model_validate(document)
    except ValidationError as error:
        raise Unprocessable(explain(error, SubmittedPlan), SEE) from error
    check_metric(plan.accuracy.metric)
    return plan


def _check_form(text: str) -> None:
    """Refuse aliases, which let a small text expand to a large one, and too many levels or items.
    Checks event by event, before any value is built.
    """
    depth = items = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        where = f" (line {event.start_mark.line + 1})" if event.start_mark else ""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise Unprocessable(
                f"the plan uses YAML anchors and aliases{where}", "write the value out each time"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.NodeEvent):
            items += 1
        if depth > MAX_DEPTH or items > MAX_ITEMS:
            raise Unprocessable(
                f"the plan is deeper than {MAX_DEPTH} levels, or has more than {MAX_ITEMS}"
                f" items{where}",
                SEE,
            )


# -- conversion ---------------------------------------------------------


def plan_from(submitted: SubmittedPlan, parts: Mapping[str, Part], settings: Settings) -> Plan:
    """Convert to a plan over the uploaded files. An archive is unpacked beside them."""
    document = submitted.model_dump(
        mode="json",
        exclude={
            "architecture",
            "classes",
            "inputs",
            "outputs",
            "data",
            "accuracy",
            "simplify",
            "tensorrt",
        },
    )
    document |= {
        "name": submitted.name or _name_of(parts["model"].filename),
        "model": _model(submitted, parts["model"], settings),
        "data": {role: _data(role, submitted, parts) for role in DATA},
        "accuracy": submitted.accuracy.model_dump(mode="json"),
        "simplify": submitted.simplify.model_dump(mode="json"),
        "tensorrt": submitted.tensorrt.model_dump(mode="json"),
    }
    try:
        return Plan.model_validate(document)
    except ValidationError as error:
        raise Unprocessable(explain(error, Plan), SEE) from error


def _name_of(filename: str) -> str:
    """Derive a name from the file's name: `resnet50` of `resnet50.onnx` or `resnet50.tar.gz`."""
    stem = Path(filename).stem.removesuffix(".tar")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).lstrip(".")[:MAX_NAME] or "model"


def _data(role: str, submitted: SubmittedPlan, parts: Mapping[str, Part]) -> object:
    """Return the path of an uploaded set, renamed to the suffix of its format; else the plan's
    random data.
    """
    if part := parts.get(role):
        return str(_named(part, ".npz"))
    generated = getattr(submitted.data, role, None)
    return generated.model_dump(mode="json") if generated else None


def _model(submitted: SubmittedPlan, part: Part, settings: Settings) -> dict[str, Any]:
    """Return the plan's `model` section for the uploaded file, by its content as well as its
    name.
    """
    shape = {
        "inputs": [spec.model_dump(mode="json") for spec in submitted.inputs],
        "outputs": list(submitted.outputs),
    }
    name = part.filename.lower()
    if name.endswith(PICKLES):
        if name.endswith(".pt2") and settings.allow_code:
            return {"path": str(_named(part, ".pt2")), **shape}
        message = (
            f"'{part.filename}' is a pickle: loading it would run code of its author, and this"
            " service does not"
        )
        raise Unprocessable(message, "send ONNX, or safetensors weights with `architecture`")
    if submitted.architecture is not None:
        return {
            "entrypoint": entrypoint_of(submitted.architecture, submitted.classes),
            "weights": str(_named(part, SAFETENSORS)),
            **shape,
        }
    if name.endswith(SAFETENSORS):
        raise Unprocessable(
            "safetensors are weights without a model",
            "name its `architecture` in the plan, or send ONNX",
        )
    if not is_archive(name):
        return {"path": str(_named(part, ".onnx")), **shape}
    limits = Limits(settings.max_upload_bytes, settings.max_plan_bytes, settings.max_unpacked_bytes)
    return {"path": str(unpack(part, part.path.with_name("unpacked"), limits)), **shape}


def _named(part: Part, suffix: str) -> Path:
    """Rename the part's file to this suffix, because its readers choose the format by it."""
    path = part.path.with_name(part.name + suffix)
    return part.path.rename(path) if part.path.exists() else path


def identity(submitted: SubmittedPlan, parts: Mapping[str, Part], owner: str, host: str) -> str:
    """Return a digest that is equal for equal requests: of content, plan, owner, and the host with
    its tools (as one digest).
    """
    content = sorted((part.name, part.sha256) for part in parts.values() if part.name != "plan")
    suffix = Path(parts["model"].filename).suffix.lower()  # decides the model's format
    plan = json.dumps(submitted.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(json.dumps([owner, host, content, suffix, plan]).encode()).hexdigest()
