"""Models, calibration tables and engines, with what they were made from and for, and notes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.processing import Postprocess, Preprocess
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Profile, TensorSpec


class Target(Frozen):
    """The host and library of an engine. It runs only on a host that `accepts` allows."""

    backend: str
    version: str  # of the backend's library
    device: str  # CPU model or GPU name
    cpu_flags: tuple[str, ...] = ()  # the instruction sets that change generated code, sorted
    # "8.9"; "8.0+" of an engine for 8.0 or later; None on CPU
    compute_capability: str | None = None
    driver: str | None = None

    def accepts(self, host: Target) -> tuple[str, ...]:
        """Return why `host` cannot run an engine built for this target; empty if it can.

        "8.0+" means 8.0 or later.
        """
        reasons = []
        for field in ("backend", "version", "compute_capability"):
            mine, theirs = getattr(self, field), getattr(host, field)
            if mine != theirs and not _is_later(theirs, mine, same_major=field == "version"):
                needs = f"{mine[:-1]} or later" if mine and mine.endswith("+") else mine
                reasons.append(
                    f"engine needs {field.replace('_', ' ')} {needs}, this host has"
                    f" {theirs or 'none'}"
                )
        missing = sorted(set(self.cpu_flags) - set(host.cpu_flags))
        if missing:
            reasons.append(
                f"engine was built for CPU flags {', '.join(missing)}, which this host lacks"
            )
        return tuple(reasons)


def _is_later(theirs: str | None, mine: str | None, same_major: bool) -> bool:
    """Return whether `theirs` satisfies `mine`, such as "8.0+". 12.0 is later than 8.9."""
    if not (mine and theirs and mine.endswith("+")):
        return False
    here, least = (
        [int(part) for part in version.removesuffix("+").split(".")] for version in (theirs, mine)
    )
    return here >= least and (here[0] == least[0] or not same_major)


class Provenance(Frozen):
    """Origin of an artifact, with everything needed to make it again."""

    stage: str
    stage_version: int
    inputs: tuple[str, ...]  # digests of what went in
    options: str  # canonical JSON
    tools: dict[str, str]  # library -> version
    target: Target | None = None
    created: str  # UTC, ISO 8601
    seconds: float


class ModelSource(Frozen):
    """A trained model as its user has it. Exactly one of `path` and `entrypoint`."""

    path: Path | None = None  # .onnx or .pt2
    entrypoint: str | None = None  # module:function, returns an nn.Module
    python_path: Path | None = None  # folder the module is imported from
    # .safetensors; None = the weights the entrypoint returns (the plan must say so in words)
    weights: Path | None = None
    inputs: tuple[TensorSpec, ...] = ()  # empty for .onnx: read from the graph
    # names for the outputs; empty: the keys of a dict or dataclass, else output_0, output_1, ...
    outputs: tuple[str, ...] = ()
    seed: int = 0
    # by input: what the loaded module does with an image before the user's own module gets it
    preprocess: dict[str, Preprocess] = Field(default_factory=dict)
    # by output: what becomes of it behind the user's own module
    postprocess: dict[str, Postprocess] = Field(default_factory=dict)
    digest: str = ""  # of all content: file, weights, source text of the entrypoint's package

    @property
    def kind(self) -> Literal["entrypoint", "pt2", "onnx"]:
        if self.path is None:
            return "entrypoint"
        return "pt2" if self.path.suffix == ".pt2" else "onnx"


class Artifact(Frozen):
    """A value with files. `root` is its folder in the store and no part of its content."""

    root: Path = Field(exclude=True)
    file: str  # the main file, relative to root

    @property
    def path(self) -> Path:
        return self.root / self.file


class NoteCode(StrEnum):
    """What a note says, for notes that programs act on."""

    SATURATES = "saturates"  # products of 8-bit weights can saturate on this CPU
    GPU_SHARED = "gpu_shared"  # another process used the GPU during a build, or may have used it
    REMEASURED = "remeasured"  # the latencies are newer than the rest of the report
    CONTENDED = "contended"  # latency was measured while engines served on the device
    CHOSEN_CONTENDED = "chosen_contended"  # the candidate was chosen by such latencies


class Note(Frozen):
    """A note to the user: a fallback, a discarded step, a warning."""

    stage: str
    text: str
    level: Literal["info", "warning"] = "warning"
    code: NoteCode | None = None


class KeptNode(Frozen):
    """A node that the conversion left in fp32 although the recipe does not name it."""

    node: str
    operator: str
    reason: str  # in words: "values up to 1e+06 in 'x'"
    # its kernels carry no node's name, as in the loop that TensorRT makes of a GRU
    unnamed: bool = False


class OnnxModel(Artifact):
    """An ONNX file with its interface; external data lies beside it."""

    digest: str  # of the graph and all its weights
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: Precision = Precision.FP32
    kept_fp32: tuple[KeptNode, ...] = ()
    notes: tuple[Note, ...] = ()
    provisional: bool = False  # the result of a transient failure: valid for this run only


class TensorRange(Frozen):
    """Calibration statistics of one tensor: signed bounds (never only amax) and a histogram."""

    minimum: float  # smallest value seen
    maximum: float
    low: float  # the range the method chose; equals minimum and maximum for min-max
    high: float
    # counts in equal bins over [-l, l), l a power of two; of large tensors a part of the values
    histogram: tuple[int, ...] = ()
    count: int = 0  # values seen
    nonfinite: int = 0


class CalibrationTable(Artifact):
    """Ranges of every float activation, by tensor name. `file` is table.json, for readers."""

    method: CalibrationMethod
    set_digest: str
    samples: int
    ranges: dict[str, TensorRange]
    notes: tuple[Note, ...] = ()


class TensorRTOptions(Frozen):
    """Options of TensorRT's builder."""

    workspace_mib: int | None = Field(
        default=None,
        gt=0,
        description=(
            "Largest memory for the intermediate results of one kernel, MiB. Kernels that need"
            " more are not considered. Limit it if the GPU is shared. Default: all of the GPU's"
            " memory."
        ),
    )
    optimization_level: int = Field(
        default=3,
        ge=0,
        le=5,
        description=(
            "How many kernels are tried. A lower level builds faster. 5 may find a faster engine,"
            " and builds for much longer. TensorRT's own default is 3."
        ),
    )
    timing_iterations: int = Field(
        default=8,
        ge=1,
        le=100,
        description=(
            "How often each kernel is timed before one is chosen. The default is that of trtexec;"
            " TensorRT's own is 1."
        ),
    )
    plugins: tuple[Path, ...] = Field(
        default=(),
        description=(
            "Libraries (.so) with TensorRT plugins that the model's operators need. Loading them"
            " runs their code: name only libraries that you trust."
        ),
    )


class BuildOptions(Frozen):
    """Options of a backend for build and run."""

    profiles: tuple[Profile, ...]
    threads: int = Field(default=0, ge=0)  # 0 = all cores this process may use
    tensorrt: TensorRTOptions = TensorRTOptions()
    source: ModelSource | None = None  # torch: what it captures its program from


CODE_BACKENDS = frozenset({"torch", "pytorch"})
"""Backends with engines that are code: a load executes code from the engine's files."""


class Engine(Artifact):
    """A built engine, with everything that a load, or its refusal, needs."""

    digest: str
    target: Target
    recipe: Recipe
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    threads: int
    size_bytes: int
    cold_start_s: float | None = None  # of compiled programs: from no process to an answer
    notes: tuple[Note, ...] = ()

    @property
    def is_on_gpu(self) -> bool:
        return self.target.compute_capability is not None

    @property
    def shares_weights(self) -> bool:
        """True if several instances are sessions of one loaded engine: those on a GPU are.

        On a CPU each is an engine of its own, with its own threads. So is each PyTorch program:
        its CUDA graphs belong to one thread.
        """
        return self.is_on_gpu and self.target.backend not in CODE_BACKENDS


class Refusal(Frozen):
    """One node that a backend cannot run, with a remedy."""

    node: str
    operator: str  # domain::type
    opset: int
    reason: str
    remedy: str
