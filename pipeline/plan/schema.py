"""The plan: one frozen model with the model, the data and the limits of a compile.

`pipeline/plan/files.py` reads it from one YAML file. docs/reference/plan.md is generated from the
descriptions here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    model_validator,
)

from pipeline.core import (
    CompileMode,
    DimRange,
    Frozen,
    OrtProvider,
    Postprocess,
    Precision,
    Preprocess,
    Profile,
    ProgramForm,
    TensorRTOptions,
    TensorSpec,
    ValueRange,
    Values,
)
from pipeline.serving_inputs import ServingConfig

ONNX_SUFFIXES = (".onnx",)
METRICS = ("top1", "top5", "cosine", "agreement")
NEED_LABELS = ("top1", "top5")


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


_WrittenRange = int | tuple[int, int, int] | DimRange
_WrittenValues = int | tuple[Values, Values, Values] | ValueRange
_WrittenProfile = dict[str, _WrittenRange | dict[str, _WrittenValues]]
Profiles = Annotated[
    tuple[Profile, ...],
    BeforeValidator(_profiles_by_symbol, json_schema_input_type=tuple[_WrittenProfile, ...]),
]


def _renamed(old: str, new: str, description: str) -> Any:
    """Return the field of a key that was called `old`.

    Both names are read. Stored plans and reports are written with the old one.
    """
    return Field(
        validation_alias=AliasChoices(new, old), serialization_alias=old, description=description
    )


Fallback = Annotated[
    bool,
    _renamed(
        "rescue",
        "fallback",
        "Try some candidates that fail their accuracy in other ways: those in fp16, with"
        " `keep_fp32: auto`, and in int8 with `method: auto`. This takes a few more builds.",
    ),
]


class ModelConfig(Frozen):
    """The source: `path:`, or `entrypoint:` with `weights:`."""

    path: Path | None = Field(
        default=None,
        description=(
            "A .onnx file, with external data only inside its own folder, or a .pt2 file from"
            " torch.export.save."
        ),
    )
    entrypoint: str | None = Field(
        default=None,
        description=(
            "`module:function` that returns an nn.Module. Give exactly one of `path` and"
            " `entrypoint`."
        ),
    )
    python_path: Path = Field(
        default=Path(),
        description=(
            "Folder from which the module is imported. Its source text is part of the cache key."
            " Default: the plan's folder."
        ),
    )
    weights: Path | None = Field(
        default=None, description="A .safetensors file with the module's state dict."
    )
    weights_from: str = Field(
        default="",
        description=(
            "The source of the weights in words, if there is no file. The report repeats it."
        ),
    )
    inputs: tuple[TensorSpec, ...] = Field(
        default=(),
        description="The inputs in the order of the call. For .onnx they are read from the graph.",
    )
    outputs: tuple[str, ...] = Field(
        default=(), description="Names of the outputs. Default: the exporter's."
    )
    seed: int = Field(default=0, description="Seed of random weights and of generated inputs.")

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

    generate: Literal["random"] = Field(description="The only kind of generated data.")
    samples: int = Field(gt=0, description="Number of samples.")
    because: str = Field(
        min_length=1, description="Why random data is good enough here. The report repeats it."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the samples.")


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
DataSource = Annotated[
    _EitherSource,
    Discriminator(_files_or_generated),
    BeforeValidator(_paths, json_schema_input_type=Path | tuple[Path, ...] | GeneratedData),
]


class DataConfig(Frozen):
    """Three disjoint sets: each a .npz file, a list of .npz files, or `generate: random`.

    Samples of different shapes can be given as several files.
    """

    calibration: DataSource | None = Field(
        default=None, description="Chooses the int8 ranges. A model with its own Q/DQ needs none."
    )
    selection: DataSource | None = Field(default=None, description="Chooses the winner.")
    validation: DataSource | None = Field(
        default=None, description="Read once, for the winner and the reference."
    )


class Thresholds(Frozen):
    """Limits of the tensor error against the reference; null: not checked."""

    max_abs: float | None = Field(default=None, description="Largest absolute error of an element.")
    mean_abs: float | None = Field(default=None, description="Largest mean absolute error.")
    min_cosine: float | None = Field(
        default=0.99, description="Smallest cosine of an output and the reference's, of any sample."
    )
    min_snr_db: float | None = Field(
        default=None, description="Smallest ratio of signal to noise, dB."
    )
    min_agreement: float | None = Field(
        default=0.99,
        description=(
            "Smallest agreement of an output of indices. The other limits do not apply to indices."
        ),
    )


class AccuracyConfig(Frozen):
    """The accuracy gate: the metric and its limits."""

    metric: str = Field(
        default="auto",
        description=(
            "`top1`, `top5`, `cosine`, `agreement` (of indices from `postprocess`),"
            " `module:function`, or `auto`: top-1 with labels, else agreement for indices and"
            " cosine for other outputs."
        ),
    )
    output: str | None = Field(
        default=None, description="The output that the metric reads. Default: the first."
    )
    python_path: Path = Field(
        default=Path(),
        description=(
            "Folder from which the metric's module is imported. Default: the plan's folder."
        ),
    )
    max_drop: float = Field(
        default=0.01,
        ge=0,
        description=(
            "Largest allowed drop of the metric against the reference, in units of the metric."
        ),
    )
    thresholds: Thresholds = Field(
        default=Thresholds(), description="Limits of the tensor error, for every output."
    )
    per_output: dict[str, Thresholds] = Field(
        default_factory=dict, description="Other thresholds for single outputs, by name."
    )

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


Methods = Annotated[
    tuple[Method, ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple, json_schema_input_type=Method | tuple[Method, ...]),
    PlainSerializer(_as_written, return_type=Method | tuple[Method, ...]),
]
Switch = Annotated[
    tuple[bool, ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple, json_schema_input_type=bool | tuple[bool, ...]),
    PlainSerializer(_as_written, return_type=bool | tuple[bool, ...]),
]
"""One value, or a list of values to try."""


class PlacementConfig(Frozen):
    """Which nodes get Q/DQ pairs. A list tries each of its values."""

    conv: Switch = Field(default=(True,), description="Convolutions.")
    matmul_weight: Switch = Field(
        default=(True,), description="Gemm, and MatMul with a weight on one side."
    )
    matmul_activations: Switch = Field(
        default=(False,), description="MatMul of two activations, as in attention scores."
    )
    residual_add: Switch = Field(
        default=(True,),
        description=(
            "Add of two activations. For TensorRT only the input that does not come from the"
            " fusing kernel."
        ),
    )
    first_layer: Switch = Field(
        default=(True,), description="The nodes that read the model's inputs."
    )
    last_layer: Switch = Field(default=(False,), description="The classifier.")
    per_channel: Switch = Field(
        default=(True,),
        description=(
            "One scale for each output channel of a weight. Activations have one scale per tensor."
        ),
    )


class CandidateConfig(Frozen):
    """One candidate, or one for every combination if it lists several values.

    Missing keys get the value that suits this host.
    """

    backend: str = Field(
        description="`onnxruntime`, `openvino`, `tensorrt_rtx`, `tensorrt` or `torch`."
    )
    precision: Precision = Field(
        description=(
            "`fp32`, `fp16`, `bf16` or `int8`. Also `tf32` on `tensorrt` and `torch`, `fp8` on"
            " `tensorrt`, and `int4` on `onnxruntime` and `openvino`, for weights only."
        )
    )
    method: Methods = Field(
        default=("auto",),
        description=(
            "int8 ranges: `entropy`, `minmax`, `percentile`, `auto`, or a list of them. `auto` is"
            " min-max for language models, else entropy. If that fails the gate, the other two are"
            " tried, unless `fallback` is false."
        ),
    )
    activation: Literal["auto", "int8", "uint8"] = Field(
        default="auto",
        description=(
            "`int8` (zero point 0) or `uint8` (asymmetric). `auto`: what suits the backend; floats"
            " with `weight_only`."
        ),
    )
    weight_bits: Literal[7, 8] | None = Field(
        default=None,
        description=(
            "8, or 7 where 8-bit products can saturate (x86 without VNNI). Default: what suits the"
            " CPU."
        ),
    )
    precision_from: Annotated[
        Literal["auto", "graph", "flags"],
        _renamed(
            "realised_in",
            "precision_from",
            "`tensorrt`: with `graph` the precision is written into the graph, and each layer runs"
            " as written. With `flags` TensorRT chooses the precision of each layer; int8 is then"
            " implicit, with TensorRT's own calibrator. Try `flags` if a quantised graph is slower"
            " than fp16, or for fp16 if a few layers should stay in fp32. Not in TensorRT 11."
            " `auto` is `graph`.",
        ),
    ] = "auto"
    quantizer: Literal["crucible", "nncf", "modelopt"] = Field(
        default="crucible",
        description=(
            "The tool that places Q/DQ pairs and chooses ranges: `crucible`, `nncf` (`openvino`"
            " only), or `modelopt` (NVIDIA's; `tensorrt` only, and the only one for fp8). Enter"
            " the same candidate with each, and let the measurement decide."
        ),
    )
    weight_only: bool = Field(
        default=False,
        description=(
            "int8 for the weights only; activations stay floats. For `onnxruntime` and `openvino`,"
            " without calibration data. int4 is always weight-only. With `activation: int8`"
            " (`onnxruntime` only) the kernel quantises activations at run time."
        ),
    )
    block_size: Literal[32, 64, 128] | None = Field(
        default=None,
        description=(
            "With `weight_only`: the number of weights that share a scale. `openvino` has blocks"
            " in int4 only. Default: 32."
        ),
    )
    smooth_quant: bool | None = Field(
        default=None,
        description=(
            "`quantizer: nncf` in int8: true moves outliers of activations into the weights, false"
            " leaves them. Enter both to compare. Default: on if NNCF knows that the model is a"
            " transformer."
        ),
    )
    placement: PlacementConfig = Field(
        default=PlacementConfig(), description="Which nodes get Q/DQ pairs."
    )
    keep_fp32: KeptNodes = Field(
        default=(),
        description=(
            "Names of nodes to keep in fp32, where `*` matches anything. Or `auto`: if the"
            " candidate fails its accuracy, its worst nodes are kept in fp32, as few as bring it"
            " within the limits. `auto` is for fp16, bf16, and int8 by the quantizer `crucible`."
            " If the plan has no `candidates`, int8 uses `auto`."
        ),
    )
    compute_capability: str | None = Field(
        default=None, description='`tensorrt_rtx`: the GPU to build for, such as `"8.9"`.'
    )
    hardware_compatible: bool = Field(
        default=False,
        description=(
            "`tensorrt`: one engine for every GPU generation from Ampere (8.0) on. It is slower"
            " than an engine for one GPU: enter both to see by how much."
        ),
    )
    version_compatible: bool = Field(
        default=False,
        description=(
            "`tensorrt`: an engine that later versions of TensorRT also load. It runs code from"
            " within the engine, so `CRUCIBLE_ALLOW_HOST_CODE=1` must allow the load. The build"
            " needs TensorRT's lean runtime."
        ),
    )
    form: ProgramForm | None = Field(
        default=None,
        description=(
            "`torch`: `aoti` (a package of machine code), `exported` (the program, run operator by"
            " operator) or `compile` (torch.compile at every load). Default: `aoti`."
        ),
    )
    mode: CompileMode | None = Field(
        default=None, description="`torch` with `form: compile`: the mode of torch.compile."
    )
    provider: OrtProvider = Field(
        default="cpu",
        description="`onnxruntime`: the execution provider, if the installed build has it.",
    )


class ExportConfig(Frozen):
    """Export of a PyTorch model to ONNX."""

    opset: int = Field(default=20, ge=13, le=26, description="ONNX opset of the exported graph.")
    exporter: Literal["auto", "dynamo", "torchscript"] = Field(
        default="auto", description="`auto`: dynamo, then torchscript if that fails."
    )


class SimplifyConfig(Frozen):
    """Simplification of the graph, and the user's own surgery before it."""

    enabled: bool = Field(
        default=True,
        description="Make the graph smaller. A change that breaks the graph is rolled back.",
    )
    timeout_s: float = Field(
        default=600, gt=0, description="Time limit of surgery and of simplification, each, s."
    )
    surgery: str | None = Field(
        default=None,
        description=(
            "`module:function` that takes the exported model, an onnx.ModelProto, and returns it"
            " changed. It runs before simplification. `pipeline.folding:fold_strides` is included."
        ),
    )
    python_path: Path = Field(
        default=Path(),
        description=(
            "Folder from which the module of the surgery is imported. Its source text is part of"
            " the cache key. Default: the plan's folder."
        ),
    )
    rewrite_attention: Annotated[
        bool,
        _renamed(
            "plain_attention",
            "rewrite_attention",
            "Rewrite attention so that fused kernels recognise it, whether `enabled` or not. If"
            " that would change a result on the samples, the masks, or the whole attention, stay"
            " as they are.",
        ),
    ] = True

    @model_validator(mode="after")
    def _function(self) -> SimplifyConfig:
        if self.surgery is None:
            return self
        parts = self.surgery.split(":")
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"expected surgery `module:function`, got '{self.surgery}'")
        return self


class CalibrationConfig(Frozen):
    """How int8 ranges are chosen."""

    samples: int | None = Field(
        default=None, gt=0, description="How many samples to use, from the first on. Default: all."
    )
    batch: int = Field(
        default=16, gt=0, description="Samples per batch during calibration. It limits the memory."
    )
    percentile: float = Field(
        default=99.99,
        gt=50,
        le=100,
        description="Share of values inside the range, for `method: percentile`.",
    )
    language_model: bool = Field(default=False, description="Makes `method: auto` mean min-max.")


BASELINE = re.compile(
    r"(eager|traced|compile(?: (reduce-overhead|max-autotune))?)(?: (fp32|tf32|fp16|bf16))?"
)
"""Name of a baseline: kind, mode of torch.compile, precision."""


def _known_baseline(name: str) -> str:
    if name not in ("default", "best") and not BASELINE.fullmatch(name):
        kinds = "expected default, best, or eager, traced or compile"
        rest = "mode (reduce-overhead, max-autotune) and precision (fp32, tf32, fp16, bf16)"
        raise ValueError(f"{kinds}, with {rest}, as in `compile max-autotune fp16`")
    return name


BaselineName = Annotated[str, AfterValidator(_known_baseline)]
Baselines = Annotated[
    tuple[BaselineName, ...],
    BeforeValidator(_as_tuple, json_schema_input_type=BaselineName | tuple[BaselineName, ...]),
]


class LatencyLimit(Frozen):
    """The objective `{max_latency_ms: 15}`: the highest throughput within a limit of the p99."""

    max_latency_ms: float = Field(
        gt=0, allow_inf_nan=False, description="Largest p99 of a request, ms."
    )

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

    sizes: tuple[dict[str, int], ...] = Field(
        default=(),
        description=(
            "The shapes to measure: a list of `{symbol: size}`. The first decides which candidate"
            " is fastest. Default: the opt of each profile."
        ),
    )
    duration_s: float = Field(
        default=3.0,
        gt=0,
        description=(
            "Measuring time per candidate and shape, s. Six processes share it. An engine that is"
            " far behind gets fewer processes. An engine that is hard to tell from another gets"
            " more."
        ),
    )
    budget_s: float = Field(
        default=60.0,
        gt=0,
        description=(
            "Time of the whole benchmark, s. It ends earlier once the verdict rests on narrow"
            " intervals. It may take twice as long to run the four processes that a ratio needs."
            " If the ratio is still unclear then, the verdict is `unproven`."
        ),
    )
    warmup_s: float = Field(
        default=0.2, ge=0, description="Warm-up by time, s. The processes share it."
    )
    warmup_runs: int = Field(
        default=10, ge=0, description="Warm-up by count. Both warm-ups are met."
    )
    threads: int = Field(
        default=0, ge=0, description="Threads per engine. 0: all cores that this process may use."
    )
    baselines: Baselines = Field(
        default=("default",),
        description=(
            "What you run today: a list of names. For a PyTorch model, eager in fp32 is always"
            " measured."
        ),
    )


# below the limit of a job in the service, so that the message names the stage
STAGE_TIMEOUT_S = 4 * 3600.0
StageTimeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Plan(Frozen):
    """All settings of `crucible compile`."""

    name: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*)?$",
        description="Names the report and its folder. Default: the plan's file name.",
    )
    model: ModelConfig = Field(description="The trained model.")
    profiles: Profiles = Field(
        default=(),
        description="The shapes that engines accept: a list of `{symbol: [min, opt, max]}`.",
    )
    preprocess: dict[str, Preprocess] = Field(
        default_factory=dict,
        description=(
            "By input: the steps from a raw image to what the model takes, done inside the engine."
        ),
    )
    postprocess: dict[str, Postprocess] = Field(
        default_factory=dict,
        description="By output: the reduction of a large output, done inside the engine.",
    )
    data: DataConfig = Field(
        default=DataConfig(), description="The calibration, selection and validation sets."
    )
    accuracy: AccuracyConfig = Field(
        default=AccuracyConfig(), description="The metric and its limits."
    )
    candidates: tuple[CandidateConfig, ...] = Field(
        default=(),
        description="What to build and compare. Default: all that this host can build and run.",
    )
    ablate: bool = Field(
        default=False,
        description=(
            "Build the best int8 candidate again with one switch of `placement` reversed each"
            " time. The report shows what each switch does. This adds up to five engines."
        ),
    )
    measure_profile_width: bool = Field(
        default=False,
        description=(
            "Build the fastest accurate candidate again for single shapes, to show what a wide"
            " profile costs. This adds up to two builds and two benchmarks."
        ),
    )
    fallback: Fallback = True
    keep_fp32_builds: Annotated[
        int,
        Field(ge=1),
        _renamed(
            "keep_builds",
            "keep_fp32_builds",
            "Most engines that are built, per candidate, to find the nodes that must stay in fp32."
            " They keep 1, 2, 4, ... of the ranked nodes, and the last of several engines keeps all"
            " of them. An engine costs seconds on a CPU and up to minutes on a GPU.",
        ),
    ] = 6
    export: ExportConfig = Field(
        default=ExportConfig(), description="Export of a PyTorch model to ONNX."
    )
    simplify: SimplifyConfig = Field(
        default=SimplifyConfig(),
        description="Simplification of the graph, and your own surgery before it.",
    )
    calibration: CalibrationConfig = Field(
        default=CalibrationConfig(), description="How int8 ranges are chosen."
    )
    tensorrt: TensorRTOptions = Field(
        default=TensorRTOptions(),
        description="Options of TensorRT's builder. Other backends ignore them.",
    )
    benchmark: BenchmarkConfig = Field(
        default=BenchmarkConfig(), description="Duration and sizes of the measurement."
    )
    objective: Objective = Field(
        default="latency",
        description=(
            "What the winner is best at: `latency`, `throughput` or `{max_latency_ms: 15}`."
        ),
    )
    serving: ServingConfig = Field(
        default=ServingConfig(),
        description="Facts about the model that the service needs. They do not change the engine.",
    )
    stage_timeout_s: StageTimeout = Field(
        default=STAGE_TIMEOUT_S,
        description=(
            "Time limit of each stage, s. The time that a stage waits for a device does not count."
        ),
    )
