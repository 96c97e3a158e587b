"""The plan: one frozen model with the model, the data and the limits of a compile.

`pipeline/plan/files.py` reads it from one YAML file. docs/reference/plan.md is generated from the
descriptions here and in `sections/`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.core.artifacts import TensorRTOptions
from pipeline.core.frozen import Frozen
from pipeline.core.processing import Postprocess, Preprocess
from pipeline.plan.sections.accuracy import METRICS, AccuracyConfig, Thresholds
from pipeline.plan.sections.benchmark import (
    BASELINE,
    BaselineName,
    Baselines,
    BenchmarkConfig,
    LatencyLimit,
    Objective,
)
from pipeline.plan.sections.candidates import (
    CandidateConfig,
    KeptNodes,
    Method,
    Methods,
    PlacementConfig,
    Switch,
)
from pipeline.plan.sections.data import (
    ROLES,
    DataConfig,
    DataPaths,
    DataSource,
    GeneratedData,
    LabelFiles,
)
from pipeline.plan.sections.graph import CalibrationConfig, ExportConfig, SimplifyConfig
from pipeline.plan.sections.model import ONNX_SUFFIXES, ModelConfig, Profiles
from pipeline.plan.sections.targets import TargetConfig, Targets
from pipeline.plan.sections.written import renamed
from pipeline.serving_inputs import ServingConfig

__all__ = [
    "AccuracyConfig",
    "BASELINE",
    "BaselineName",
    "Baselines",
    "BenchmarkConfig",
    "CalibrationConfig",
    "CandidateConfig",
    "DataConfig",
    "DataPaths",
    "DataSource",
    "ExportConfig",
    "Fallback",
    "GeneratedData",
    "KeptNodes",
    "LabelFiles",
    "LatencyLimit",
    "METRICS",
    "Method",
    "Methods",
    "ModelConfig",
    "ONNX_SUFFIXES",
    "Objective",
    "PlacementConfig",
    "Plan",
    "Profiles",
    "ROLES",
    "STAGE_TIMEOUT_S",
    "SimplifyConfig",
    "StageTimeout",
    "Switch",
    "TargetConfig",
    "Targets",
    "Thresholds",
    "WaitForNode",
    "plan_for_target",
]

Fallback = Annotated[
    bool,
    renamed(
        "rescue",
        "fallback",
        "Try some candidates that fail their accuracy in other ways: those in fp16, with"
        " `keep_fp32: auto`, and in int8 with `method: auto`. This takes a few more builds.",
    ),
]

# below the limit of a job in the service, so that the message names the stage
STAGE_TIMEOUT_S = 4 * 3600.0
StageTimeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WaitForNode = Annotated[float, Field(ge=0, allow_inf_nan=False)]


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
    advise: bool = Field(
        default=False,
        description=(
            "Try changes that may make the fastest accurate candidate faster, and report what each"
            " gains, as `crucible advise` does. Each change that fits adds a build; all are"
            " measured together, and the batches once more."
        ),
    )
    fallback: Fallback = True
    keep_fp32_builds: Annotated[
        int,
        Field(ge=1),
        renamed(
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
    targets: Targets = Field(
        default=(),
        description=(
            "The devices to compile for, each with a report of its own: a list of texts such as"
            " `cpu`, `gpu:H200` or `cpu, avx512_vnni`, or of the keys below. Default: this host,"
            " or the device that the service chooses."
        ),
    )
    wait_for_node_s: WaitForNode = Field(
        default=0.0,
        description=(
            "How long a job of the service waits until a server or a node has its device, s. Then"
            " it fails."
        ),
    )


def plan_for_target(plan: Plan, target: TargetConfig) -> Plan:
    """Return the plan of one target alone."""
    threads = target.threads or plan.benchmark.threads
    benchmark = plan.benchmark.model_copy(update={"threads": threads})
    return plan.model_copy(update={"targets": (), "benchmark": benchmark})
