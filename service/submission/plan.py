"""The plan in a client's request, which cannot refer to anything outside the upload.

It consists of the sections of an ordinary plan, but may contain only the keys that ALLOWED lists,
and no paths. Model and data are the uploaded parts; architectures and metrics are names from the
service's lists. It is converted to an ordinary Plan over the uploaded files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from pipeline.core.artifacts import TensorRTOptions
from pipeline.core.frozen import Frozen
from pipeline.core.processing import ImageResize, Postprocess, Preprocess
from pipeline.core.shapes import DimRange, Profile, TensorSpec, ValueRange
from pipeline.plan.files import PlanLoader, explain, old_name_warnings
from pipeline.plan.schema import (
    ROLES,
    STAGE_TIMEOUT_S,
    AccuracyConfig,
    BenchmarkConfig,
    CalibrationConfig,
    CandidateConfig,
    DataConfig,
    ExportConfig,
    Fallback,
    GeneratedData,
    LabelFiles,
    LatencyLimit,
    Objective,
    PlacementConfig,
    Plan,
    Profiles,
    SimplifyConfig,
    StageTimeout,
    TargetConfig,
    Targets,
    Thresholds,
    WaitForNode,
)
from pipeline.serving_inputs import InputRecipe, Packing, Padding, ServingConfig
from pipeline.text_inputs import TextConfig
from service.architectures import check_functions, entrypoint_of
from service.errors import Unprocessable
from service.settings import Settings
from service.submission.uploads import TOKENIZER, Limits, Part, is_archive, unpack

MAX_DEPTH = 12  # levels of a plan; our schema needs 6
MAX_ITEMS = 10_000  # scalars, lists and mappings of a plan together
MAX_NAME = 100
NAME = rf"^([A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}})?$"
SEE = "docs/reference/plan.md lists the keys of a submitted plan"
SAFETENSORS = ".safetensors"
CODE = ".pt2"
UNPACKED = "unpacked"
LABELS_SUFFIX = "_labels"  # of the part with the labels of a set
LABEL_FORMATS = (".json", ".jsonl")
PICKLES = (".pt", ".pth", ".pt2", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib")


class NamedConfig(Frozen):
    """A request to compile one of the server's own plans."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"config": "digits"}]})

    config: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$")


class SubmittedPlan(Frozen):
    """The plan in a client's request.

    Keys have the same meaning as in a plan (docs/reference/plan.md).
    """

    name: str = Field(default="", pattern=NAME)
    architecture: str | None = None  # for safetensors weights
    classes: int = 1000  # outputs of the architecture
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    profiles: Profiles = ()
    preprocess: dict[str, Preprocess] = Field(default_factory=dict)
    postprocess: dict[str, Postprocess] = Field(default_factory=dict)
    data: DataConfig = DataConfig()
    accuracy: AccuracyConfig = AccuracyConfig()
    candidates: tuple[CandidateConfig, ...] = Field(default=(), max_length=64)
    measure_profile_width: bool = False
    advise: bool = False
    fallback: Fallback = True
    export: ExportConfig = ExportConfig()
    simplify: SimplifyConfig = SimplifyConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    tensorrt: TensorRTOptions = TensorRTOptions()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    objective: Objective = "latency"
    serving: ServingConfig = ServingConfig()
    stage_timeout_s: StageTimeout = STAGE_TIMEOUT_S
    targets: Targets = ()
    wait_for_node_s: WaitForNode = 0.0

    @model_validator(mode="after")
    def _allowed_only(self) -> SubmittedPlan:
        if refusals := list(_refusals(self)):
            raise ValidationError.from_exception_data("plan", refusals)
        return self


ALLOWED: dict[type[BaseModel], str] = {
    SubmittedPlan: " ".join(SubmittedPlan.model_fields),
    TensorSpec: "name dtype shape location kind",
    Profile: "dims values",
    DimRange: "min opt max",
    ValueRange: "min opt max",
    Preprocess: "scale mean std layout resize",
    Postprocess: "top_k argmax axis softmax",
    ImageResize: "source target filter",
    DataConfig: "calibration selection",
    GeneratedData: "generate samples because seed",
    AccuracyConfig: (
        "metric output decode tokens mask max_drop max_class_drop thresholds per_output"
    ),
    Thresholds: "max_abs mean_abs min_cosine min_snr_db min_agreement",
    CandidateConfig: (
        "backend precision method activation weight_bits precision_from quantizer weight_only"
        " block_size smooth_quant placement keep_fp32 compute_capability hardware_compatible"
        " version_compatible form mode provider"
    ),
    PlacementConfig: (
        "conv matmul_weight matmul_activations residual_add first_layer last_layer per_channel"
    ),
    ExportConfig: "opset exporter",
    SimplifyConfig: "enabled rewrite_attention rewrites",
    CalibrationConfig: "samples batch percentile language_model",
    TensorRTOptions: "workspace_mib optimization_level timing_iterations",
    BenchmarkConfig: "sizes duration_s budget_s warmup_s warmup_runs threads baselines",
    ServingConfig: "padding packing image text labels",
    TextConfig: "input mask types output pooling normalize",
    Padding: "input axis value",
    Packing: "axis mask positions",
    LatencyLimit: "max_latency_ms",
    TargetConfig: "name device threads labels",
    InputRecipe: "input size resize colour layout scale mean std",
}
"""The keys that a client may write, by section. Every other key of a plan is refused.

Before adding one, consider what a stranger could do with it.
"""

HOST_PATH = PydanticCustomError(
    "host_path", "no path of the server is allowed; upload the file as a part of the request"
)


def allowed_keys(section: type[BaseModel]) -> list[str]:
    """Return the keys of a section that a client may write; none if ALLOWED lacks the section."""
    return ALLOWED.get(section, "").split()


def _refusals(value: object, location: tuple[int | str, ...] = ()) -> Iterator[InitErrorDetails]:
    """Yield an error for each key that is not allowed, for each path, and for a set of no paths."""
    items: Iterable[tuple[int | str, object]] = ()
    if isinstance(value, BaseModel):
        allowed = allowed_keys(type(value))
        for refused in sorted(value.model_fields_set.difference(allowed)):
            yield InitErrorDetails(type="extra_forbidden", loc=(*location, refused), input=None)
        items = ((key, getattr(value, key)) for key in allowed)
    elif isinstance(value, Path) or (value == () and location[0] == "data"):
        yield InitErrorDetails(type=HOST_PATH, loc=location, input=str(value))
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Collection) and not isinstance(value, str):
        items = enumerate(value)
    for key, item in items:
        yield from _refusals(item, (*location, key))


# -- parsing --------------------------------------------------------------


def parse(text: bytes) -> SubmittedPlan:
    """Parse YAML or JSON. Unprocessable names the invalid key or line."""
    document = document_from(text)
    try:
        plan = SubmittedPlan.model_validate(document)
    except ValidationError as error:
        raise Unprocessable(explain(error, SubmittedPlan, allowed_keys), SEE) from error
    check_functions(plan.accuracy)
    return plan


def document_from(text: bytes) -> dict[Any, Any]:
    """Read the keys of a plan as YAML or JSON. Unprocessable names the invalid line."""
    try:
        _check_form(text.decode("utf-8"))
        document = yaml.load(text, PlanLoader) or {}
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise Unprocessable(f"the plan is neither YAML nor JSON: {error}", SEE) from error
    if not isinstance(document, dict):
        raise Unprocessable(
            f"expected a plan of `key: value` lines, got {type(document).__name__}", SEE
        )
    return document


def warnings_of(text: bytes) -> tuple[str, ...]:
    """Return the warnings for a plan that `parse` accepts."""
    return old_name_warnings(yaml.load(text, PlanLoader), SubmittedPlan)


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
    sections = {key: value for key, value in submitted if key in Plan.model_fields}
    sections |= {
        "name": submitted.name or name_of(parts["model"].filename),
        "model": _model(submitted, parts["model"], settings),
        "data": {
            **{role: _data(role, submitted, parts) for role in ROLES},
            "labels": _labels(parts),
        },
        "serving": _serving(submitted.serving, parts.get(TOKENIZER)),
    }
    try:
        return Plan.model_validate(sections)
    except ValidationError as error:
        raise Unprocessable(explain(error, Plan), SEE) from error


def is_code(part: Part) -> bool:
    """Return True for a model that runs code of its sender when it is read."""
    return part.filename.lower().endswith(CODE)


def name_of(filename: str) -> str:
    """Derive a name from the file's name: `resnet50` of `resnet50.onnx` or `resnet50.tar.gz`."""
    stem = Path(filename).stem.removesuffix(".tar")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).lstrip(".")[:MAX_NAME] or "model"


def _data(role: str, submitted: SubmittedPlan, parts: Mapping[str, Part]) -> object:
    """Return the path of an uploaded set, renamed to the suffix of its format; else the plan's
    random data.
    """
    if part := parts.get(role):
        return str(_named(part, ".npz"))
    return getattr(submitted.data, role)


def _labels(parts: Mapping[str, Part]) -> dict[str, str]:
    """Return the paths of the uploaded labels by role, renamed to the suffix of their format."""
    labels = {}
    for role in LabelFiles.model_fields:
        part = parts.get(f"{role}{LABELS_SUFFIX}")
        if part is None:
            continue
        suffix = Path(part.filename).suffix.lower()
        if suffix not in LABEL_FORMATS:
            raise Unprocessable(
                f"the part '{part.name}' is '{part.filename}', expected a file that ends in"
                f" {' or '.join(LABEL_FORMATS)}",
                "send boxes as .json, in the format of COCO, and other labels as .jsonl",
            )
        labels[role] = str(_named(part, suffix))
    return labels


def _serving(serving: ServingConfig, tokenizer: Part | None) -> ServingConfig:
    """Return the section with the uploaded tokenizer. Unprocessable if only one of the two came."""
    if (serving.text is None) != (tokenizer is None):
        raise Unprocessable(
            "expected both the part `tokenizer` and `serving.text` in the plan, got"
            f" {'the section' if serving.text else 'the part'} alone",
            "send both for an encoder of texts, or none; `serving: {text: {}}` has the defaults",
        )
    if serving.text is None or tokenizer is None:
        return serving
    file = tokenizer.path  # its form is checked by the job, which runs it in the sandbox
    text = serving.text.model_copy(update={"tokenizer": file})
    return serving.model_copy(update={"text": text})


def _model(submitted: SubmittedPlan, part: Part, settings: Settings) -> dict[str, Any]:
    """Return the plan's `model` section for the uploaded file, by its content as well as its
    name.
    """
    shape = {"inputs": submitted.inputs, "outputs": submitted.outputs}
    name = part.filename.lower()
    if not name.endswith(PICKLES) and submitted.architecture is not None:
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
    return {"path": str(model_file(part, settings)), **shape}


def model_file(part: Part, settings: Settings) -> Path:
    """Return the file of an uploaded model, with the suffix of its format. An archive is unpacked
    into the folder `unpacked` beside it. Unprocessable for a pickle.
    """
    name = part.filename.lower()
    if name.endswith(PICKLES):
        if is_code(part) and settings.allow_code:
            return _named(part, CODE)
        message = (
            f"'{part.filename}' is a pickle: loading it would run code of its author, and this"
            " service does not"
        )
        raise Unprocessable(message, "send ONNX, or safetensors weights with `architecture`")
    if name.endswith(SAFETENSORS):
        return _named(part, SAFETENSORS)
    if not is_archive(name):
        return _named(part, ".onnx")
    limits = Limits(settings.max_upload_bytes, settings.max_plan_bytes, settings.max_unpacked_bytes)
    return unpack(part, part.path.with_name(UNPACKED), limits)


def _named(part: Part, suffix: str) -> Path:
    """Rename the part's file to this suffix, because its readers choose the format by it."""
    path = part.path.with_name(part.name + suffix)
    return part.path.rename(path) if part.path.exists() else path


def identity(submitted: SubmittedPlan, parts: Mapping[str, Part], owner: str, host: str) -> str:
    """Return a digest that is equal for equal requests: of content, plan, owner, and the host with
    its tools (as one digest).
    """
    content = sorted((part.name, part.sha256) for part in parts.values() if part.name != "plan")
    # decides the format
    labels = sorted(name for name in parts if name.endswith(LABELS_SUFFIX))
    suffix = "".join(Path(parts[name].filename).suffix.lower() for name in ("model", *labels))
    plan = json.dumps(submitted.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(json.dumps([owner, host, content, suffix, plan]).encode()).hexdigest()
