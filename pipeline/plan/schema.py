"""The plan: one YAML file with the model, the data and the limits of a compile.

`load_plan` reads it once. Paths inside are relative to the plan's own folder. An unknown key is an
error that suggests a similar one.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationError,
    model_validator,
)

from pipeline.core import (
    CompileMode,
    DimRange,
    Frozen,
    OrtProvider,
    Precision,
    Preprocess,
    Profile,
    ProgramForm,
    TensorRTOptions,
    TensorSpec,
)
from pipeline.errors import PlanError
from pipeline.serving_inputs import ServingConfig

LOG = logging.getLogger(__name__)
ONNX_SUFFIXES = (".onnx",)
METRICS, NEED_LABELS = ("top1", "top5", "cosine"), ("top1", "top5")


def _profiles_by_symbol(value: object) -> object:
    """Convert profiles written as `[{batch: [1, 8, 64]}]` to the stored form `{dims: ...}`."""
    if isinstance(value, list | tuple):
        return [
            _profile_by_symbol(item) if isinstance(item, Mapping) and "dims" not in item else item
            for item in value
        ]
    return value


def _profile_by_symbol(item: Mapping[str, object]) -> dict[str, object]:
    """Convert one profile. `values: {k: ...}` holds ranges of values by input.

    All other keys are symbols, and so is `values` itself if it holds min, opt and max.
    """
    values = item.get("values")
    if not isinstance(values, Mapping) or set(values) == set(DimRange.model_fields):
        return {"dims": dict(item)}
    return {
        "dims": {name: sizes for name, sizes in item.items() if name != "values"},
        "values": values,
    }


Profiles = Annotated[tuple[Profile, ...], BeforeValidator(_profiles_by_symbol)]


def _renamed(old: str, new: str) -> Any:
    """Return the field of a key that was called `old`.

    Both names are read. Stored plans and reports are written with the old one.
    """
    return Field(validation_alias=AliasChoices(new, old), serialization_alias=old)


Fallback = Annotated[bool, _renamed("rescue", "fallback")]


class ModelConfig(Frozen):
    """The source: `path:`, or `entrypoint:` with `weights:`."""

    path: Path | None = None  # .onnx or .pt2
    entrypoint: str | None = None  # module:function returning an nn.Module
    python_path: Path = Path()  # where the module is imported from
    weights: Path | None = None  # .safetensors
    # where the weights come from when there is no file, in words; goes into the report
    weights_from: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    seed: int = 0

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.entrypoint is None):
            raise ValueError("expected exactly one of `path` and `entrypoint`")
        if self.entrypoint is not None and self.entrypoint.count(":") != 1:
            raise ValueError(f"expected entrypoint `module:function`, got '{self.entrypoint}'")
        if self.entrypoint is not None and self.weights is None and not self.weights_from:
            raise ValueError(
                "entrypoint without `weights`: give a .safetensors file, or say in `weights_from:`"
                " where the weights come from"
            )
        if self.path is not None and self.path.suffix not in (*ONNX_SUFFIXES, ".pt2"):
            raise ValueError(f"expected a .onnx or .pt2 file, got '{self.path}'")
        if (
            self.entrypoint is not None or (self.path is not None and self.path.suffix == ".pt2")
        ) and not self.inputs:
            raise ValueError(
                "`inputs` is needed: name, dtype and shape of each input, in the order of the call"
            )
        return self


class GeneratedData(Frozen):
    """Random samples: for speed only, never for accuracy."""

    generate: Literal["random"]
    samples: int = Field(gt=0)
    because: str = Field(min_length=1)  # why random data is acceptable here; goes into the report
    seed: int = Field(default=0, ge=0)


DataPaths = tuple[Path, ...] | GeneratedData


def _paths(value: object) -> object:
    return (value,) if isinstance(value, str | Path) else value


def _files_or_generated(value: object) -> str:
    """Choose the form of a data source, so that only the errors of this form are reported.

    A mapping is generated data, anything else is files.
    """
    return "(generated)" if isinstance(value, Mapping | GeneratedData) else "(files)"


_EitherSource = (
    Annotated[tuple[Path, ...], Tag("(files)")] | Annotated[GeneratedData, Tag("(generated)")]
)
DataSource = Annotated[_EitherSource, Discriminator(_files_or_generated), BeforeValidator(_paths)]


class DataConfig(Frozen):
    """Three disjoint sets: each a .npz file, a list of .npz files, or `generate: random`.

    Samples of different shapes can be given as several files.
    """

    calibration: DataSource | None = None
    selection: DataSource | None = None
    validation: DataSource | None = None


class Thresholds(Frozen):
    """Largest tensor error allowed against the reference; None = not checked."""

    max_abs: float | None = None
    mean_abs: float | None = None
    min_cosine: float | None = 0.99
    min_snr_db: float | None = None


class AccuracyConfig(Frozen):
    """The accuracy gate: the metric and its limits."""

    # top1, top5, cosine, module:function, or auto: top1 with labels, else cosine
    metric: str = "auto"
    output: str | None = None  # the output the metric reads; None = the first
    python_path: Path = Path()  # where the module of a user metric is imported from
    max_drop: float = Field(default=0.01, ge=0)  # in units of the metric, against the reference
    thresholds: Thresholds = Thresholds()
    per_output: dict[str, Thresholds] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known_metric(self) -> AccuracyConfig:
        if self.metric not in ("auto", *METRICS) and self.metric.count(":") != 1:
            raise ValueError(
                f"expected metric auto, {', '.join(METRICS)} or module:function, got"
                f" '{self.metric}'"
            )
        return self


def _word_or_names(value: object) -> str:
    """Choose the form of `keep_fp32`, so that only the errors of this form are reported.

    A text is the word `auto`, anything else is node names.
    """
    return "(word)" if isinstance(value, str) else "(names)"


_EitherKept = Annotated[Literal["auto"], Tag("(word)")] | Annotated[tuple[str, ...], Tag("(names)")]
KeptNodes = Annotated[_EitherKept, Discriminator(_word_or_names)]
Method = Literal["auto", "entropy", "minmax", "percentile"]


def _as_tuple(value: object) -> object:
    return value if isinstance(value, list | tuple) else (value,)


def _as_written(values: tuple[Any, ...]) -> Any:
    return values if len(values) > 1 else values[0]


_Choice = (Field(min_length=1), BeforeValidator(_as_tuple))
Methods = Annotated[
    tuple[Method, ...],
    *_Choice,
    PlainSerializer(_as_written, return_type=Method | tuple[Method, ...]),
]
Switch = Annotated[
    tuple[bool, ...], *_Choice, PlainSerializer(_as_written, return_type=bool | tuple[bool, ...])
]
"""One value, or a list of values to try."""


class PlacementConfig(Frozen):
    """The switches of core.Placement; a list tries each of its values."""

    conv: Switch = (True,)
    matmul_weight: Switch = (True,)
    matmul_activations: Switch = (False,)
    residual_add: Switch = (True,)
    first_layer: Switch = (True,)
    last_layer: Switch = (False,)
    per_channel: Switch = (True,)


class CandidateConfig(Frozen):
    """One candidate, or one for every combination if it lists several values.

    Missing keys get the value that suits this host.
    """

    backend: str
    precision: Precision
    method: Methods = ("auto",)  # int8 only
    activation: Literal["auto", "int8", "uint8"] = "auto"
    weight_bits: Literal[7, 8] | None = None
    # TensorRT: written into the graph, or by builder flags (int8: implicit)
    precision_from: Annotated[
        Literal["auto", "graph", "flags"], _renamed("realised_in", "precision_from")
    ] = "auto"
    quantizer: Literal["crucible", "nncf", "modelopt"] = "crucible"
    weight_only: bool = False  # int8 and int4; int4 is nothing else
    block_size: Literal[32, 64, 128] | None = None  # weight_only
    smooth_quant: bool | None = None  # nncf, int8
    placement: PlacementConfig = PlacementConfig()
    keep_fp32: KeptNodes = ()  # auto: the worst nodes, as few as bring it within the limits
    compute_capability: str | None = None
    hardware_compatible: bool = False
    version_compatible: bool = False
    form: ProgramForm | None = None  # torch: aoti where it is left out
    mode: CompileMode | None = None  # torch, form compile
    provider: OrtProvider = "cpu"  # onnxruntime


class ExportConfig(Frozen):
    opset: int = Field(default=20, ge=13, le=26)
    exporter: Literal["auto", "dynamo", "torchscript"] = "auto"


class SimplifyConfig(Frozen):
    """Simplification of the graph, and the user's own surgery before it."""

    enabled: bool = True
    timeout_s: float = Field(default=600, gt=0)  # for surgery and for simplification
    surgery: str | None = None  # module:function, takes and returns an onnx.ModelProto
    python_path: Path = Path()  # where the module of the surgery is imported from
    # rewritten into the form that fused kernels match; discarded if that changes an output
    rewrite_attention: Annotated[bool, _renamed("plain_attention", "rewrite_attention")] = True

    @model_validator(mode="after")
    def _function(self) -> SimplifyConfig:
        if self.surgery is None:
            return self
        parts = self.surgery.split(":")
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"expected surgery `module:function`, got '{self.surgery}'")
        return self


class CalibrationConfig(Frozen):
    samples: int | None = Field(default=None, gt=0)  # None = all of the set
    batch: int = Field(default=16, gt=0)
    percentile: float = Field(default=99.99, gt=50, le=100)
    language_model: bool = False  # `auto` then means min-max


BASELINE = re.compile(
    r"(eager|traced|compile(?: (reduce-overhead|max-autotune))?)(?: (fp32|tf32|fp16|bf16))?",
)
"""Name of a baseline: kind, mode of torch.compile, precision."""


def _known_baseline(name: str) -> str:
    if name not in ("default", "best") and not BASELINE.fullmatch(name):
        kinds = "expected default, best, or eager, traced or compile"
        rest = "mode (reduce-overhead, max-autotune) and precision (fp32, tf32, fp16, bf16)"
        raise ValueError(f"{kinds}, with {rest}, as in `compile max-autotune fp16`")
    return name


BaselineName = Annotated[str, AfterValidator(_known_baseline)]
Baselines = Annotated[tuple[BaselineName, ...], BeforeValidator(_as_tuple)]


class LatencyLimit(Frozen):
    """The objective `{max_latency_ms: 15}`: the highest throughput within a limit of the p99."""

    max_latency_ms: float = Field(gt=0, allow_inf_nan=False)

    @property
    def limit_s(self) -> float:
        return self.max_latency_ms / 1e3


def _word_or_limit(value: object) -> str:
    """Choose the form of `objective`, so that only the errors of this form are reported."""
    return "(limit)" if isinstance(value, Mapping | LatencyLimit) else "(word)"


def _known_objective(value: object) -> object:
    if value not in ("latency", "throughput"):
        raise ValueError("expected latency, throughput or {max_latency_ms: 15}")
    return value


_ObjectiveWord = Annotated[
    Literal["latency", "throughput"], BeforeValidator(_known_objective), Tag("(word)")
]
Objective = Annotated[
    _ObjectiveWord | Annotated[LatencyLimit, Tag("(limit)")], Discriminator(_word_or_limit)
]


class BenchmarkConfig(Frozen):
    """Duration and sizes of the measurement."""

    sizes: tuple[dict[str, int], ...] = ()  # sizes of the symbols; empty: every profile's opt
    # per candidate and size, shared by six processes
    duration_s: float = Field(default=3.0, gt=0)
    # for the whole benchmark; a ratio needs four processes, for which it may take twice as long
    budget_s: float = Field(default=60.0, gt=0)
    warmup_s: float = Field(default=0.2, ge=0)
    warmup_runs: int = Field(default=10, ge=0)
    threads: int = Field(default=0, ge=0)  # 0 = all cores
    baselines: Baselines = ("default",)


class Plan(Frozen):
    """All settings of `crucible compile`."""

    # never `..`, which is another folder
    name: str = Field(default="", pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*)?$")
    model: ModelConfig
    profiles: Profiles = ()
    # by input: the steps from a raw image to what the model takes, done inside the engine
    preprocess: dict[str, Preprocess] = Field(default_factory=dict)
    data: DataConfig = DataConfig()
    accuracy: AccuracyConfig = AccuracyConfig()
    candidates: tuple[CandidateConfig, ...] = ()  # empty: all that this host can build and run
    ablate: bool = False  # the best int8 candidate again with each switch of its placement reversed
    # try fp16, and candidates with `keep_fp32: auto`, in other ways if they exceed the limits; this
    # takes a few more builds
    fallback: Fallback = True
    # most engines built, per candidate, to find the nodes that must stay in fp32
    keep_fp32_builds: Annotated[int, Field(ge=1), _renamed("keep_builds", "keep_fp32_builds")] = 6
    export: ExportConfig = ExportConfig()
    simplify: SimplifyConfig = SimplifyConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    tensorrt: TensorRTOptions = TensorRTOptions()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    # what the winner is best at; latency: at the first benchmarked shape
    objective: Objective = "latency"
    serving: ServingConfig = ServingConfig()


class PlanLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, where YAML lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key '{key}'", node.start_mark
                )
        return super().construct_mapping(node, deep)


def home() -> Path:
    """Return the store's folder: $CRUCIBLE_HOME, else the user's data directory."""
    return Path(
        os.environ.get("CRUCIBLE_HOME") or platformdirs.user_data_dir("crucible")
    ).expanduser()


def load_plan(path: Path, overrides: Iterable[str] = ()) -> Plan:
    """Read a plan and apply `a.b=value` overrides, whose values are YAML.

    PlanError names the faulty line or key.
    """
    if not path.is_file():
        raise PlanError(
            f"no plan at '{path}'",
            "give the path of a YAML plan or of an .onnx model; configs/ holds examples",
        )
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), PlanLoader)
    except UnicodeDecodeError as error:
        advice = "write a plan that names it: `model: {path: ...}` takes .onnx and .pt2"
        raise PlanError(f"'{path}' is not a text file, so it is no plan", advice) from error
    except yaml.YAMLError as error:
        raise PlanError(
            f"'{path}' is not valid YAML: {error}", "correct the line named above"
        ) from error
    return plan_from_document(
        document, base=path.resolve().parent, name=path.stem, overrides=overrides
    )


def plan_from_model(path: Path, overrides: Iterable[str] = ()) -> Plan:
    """Return the plan of `crucible compile model.onnx`: all defaults, no data."""
    document = {"model": {"path": str(path.resolve())}}
    return plan_from_document(document, base=Path.cwd(), name=path.stem, overrides=overrides)


def plan_from_document(
    document: object, base: Path, name: str = "", overrides: Iterable[str] = ()
) -> Plan:
    """Check a parsed plan; relative paths are taken from `base`."""
    if not isinstance(document, dict):
        raise PlanError(
            f"expected a plan of `key: value` lines, got {type(document).__name__}",
            "see configs/digits.yaml for an example",
        )
    for override in overrides:
        _apply_override(document, override)
    document.setdefault("name", re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("."))
    try:
        plan = Plan.model_validate(document)
    except ValidationError as error:
        raise PlanError(
            explain(error, Plan), "correct the plan; docs/plan.md lists every key"
        ) from error
    for text in old_name_warnings(document, Plan):
        LOG.warning("plan '%s': %s", plan.name, text)
    return _with_absolute_paths(plan, base)


def override_plan(plan: Plan, overrides: Iterable[str]) -> Plan:
    """Apply `a.b=value` overrides to a checked plan.

    Relative paths in overrides are taken from the working folder.
    """
    document = plan.model_dump(mode="json", by_alias=False)
    document["profiles"] = [_written_profile(profile) for profile in document["profiles"]]
    return plan_from_document(document, base=Path.cwd(), overrides=overrides)


def _written_profile(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a stored profile to the form that users write."""
    written = dict(profile["dims"])
    if profile["values"]:
        written["values"] = profile["values"]
    return written


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise PlanError(
            f"expected --set a.b=value, got '{override}'",
            "for example --set accuracy.max_drop=0.02",
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(
            f"--set {key}: '{text}' is not a YAML value: {error}", "quote it for the shell"
        ) from error
    *parents, last = key.split(".")
    node: Any = document
    for part in parents:
        node = _index(node, part, key) if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise PlanError(
                f"--set {key}: '{part}' is a plain value",
                "check the key; docs/plan.md lists every key",
            )
    if isinstance(node, list):
        _index(node, last, key)
        node[int(last)] = value
    else:
        for names in _old_names(_section_at(Plan, tuple(parents))).items():
            if last in names:  # the override replaces the value under either name
                for name in names:
                    node.pop(name, None)
        node[last] = value


def _index(node: list[Any], part: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise PlanError(
            f"--set {key}: '{part}' is not an index below {len(node)}", "lists are indexed from 0"
        )
    return node[int(part)]


def _with_absolute_paths(plan: Plan, base: Path) -> Plan:
    def absolute(path: Path | None) -> Path | None:
        return None if path is None else (base / path.expanduser()).resolve()

    def source(value: DataPaths | None) -> DataPaths | None:
        return (
            tuple((base / p.expanduser()).resolve() for p in value)
            if isinstance(value, tuple)
            else value
        )

    model = plan.model.model_copy(
        update={
            "path": absolute(plan.model.path),
            "weights": absolute(plan.model.weights),
            "python_path": absolute(plan.model.python_path),
        }
    )
    data = DataConfig(
        **{role: source(getattr(plan.data, role)) for role in DataConfig.model_fields}
    )
    accuracy = plan.accuracy.model_copy(update={"python_path": absolute(plan.accuracy.python_path)})
    simplify = plan.simplify.model_copy(
        update={"python_path": absolute(plan.simplify.python_path)} if plan.simplify.surgery else {}
    )
    tensorrt = plan.tensorrt.model_copy(update={"plugins": source(plan.tensorrt.plugins)})
    for plugin in tensorrt.plugins:
        if not plugin.is_file():
            raise PlanError(
                f"tensorrt.plugins: no file at '{plugin}'",
                "correct the path; paths in a plan are relative to the plan's own folder",
            )
    return plan.model_copy(
        update={
            "model": model,
            "data": data,
            "accuracy": accuracy,
            "simplify": simplify,
            "tensorrt": tensorrt,
        }
    )


# parts of an error's location that no user writes
_UNWRITTEN = ("(files)", "(generated)", "(word)", "(names)", "(limit)", "dims")
_IN_WORDS = {
    "tuple": "list, written [a, b] or with dashes",
    "dictionary": "mapping of `key: value`",
    "path for": "valid path",
}


def _all_keys(model: type[BaseModel]) -> Iterable[str]:
    return model.model_fields


def explain(
    error: ValidationError,
    kind: type[BaseModel],
    keys_of: Callable[[type[BaseModel]], Iterable[str]] = _all_keys,
) -> str:
    """Describe all errors of a plan, one sentence each.

    A misspelt key gets a suggestion among the keys that `keys_of` allows in its section.
    """
    sentences = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"] if part not in _UNWRITTEN) or "plan"
        if fault["type"] == "extra_forbidden":
            section, key = _section_at(kind, fault["loc"][:-1]), str(fault["loc"][-1])
            sentences.append(
                f"unknown key '{where}': {_hint(key, section, sorted(keys_of(section)))}"
            )
        else:
            message = re.sub(
                r"valid (tuple|dictionary|path for).*",
                lambda kind: _IN_WORDS[kind[1]],
                fault["msg"].removeprefix("Value error, "),
            )
            shown = "" if isinstance(fault["input"], dict | list) else f" (got {fault['input']!r})"
            sentences.append(f"{where}: {message}{shown}")
    return "; ".join(dict.fromkeys(sentences))


def _hint(key: str, section: type[BaseModel], known: Sequence[str]) -> str:
    """Describe what to write instead of an unknown key."""
    new = _old_names(section).get(key)
    if new in known:
        return f"it is the old name of '{new}', which is given too"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"


def old_name_warnings(
    document: object, section: type[BaseModel], where: str = ""
) -> tuple[str, ...]:
    """Return a warning for each key that a parsed plan writes with its old name."""
    warnings = []
    for part in document if isinstance(document, list) else [document]:
        if not isinstance(part, dict):
            continue
        for old, new in _old_names(section).items():
            if old in part:
                warnings.append(
                    f"`{where}{old}` is now called `{where}{new}`; the old name still works"
                )
        for name, field in section.model_fields.items():
            for model in _models_in(field.annotation):
                warnings += old_name_warnings(part.get(name), model, f"{where}{name}.")
    return tuple(dict.fromkeys(warnings))


def _old_names(section: type[BaseModel]) -> dict[str, str]:
    """Return the name of each renamed key of a section, by its old name."""
    fields = section.model_fields.items()
    return {field.serialization_alias: name for name, field in fields if field.serialization_alias}


def _section_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the section of the plan at this location, from the models' annotations."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = next(iter(_models_in(field.annotation)), model)
    return model


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _models_in(argument)
