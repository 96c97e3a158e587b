"""The core types: every value that crosses from one part of the pipeline to another.

Imports no other module of the pipeline.

    ModelSource -> OnnxModel -> OnnxModel (simplified) -> OnnxModel (converted, by a Recipe) ->
    Engine

Values written to disk are frozen pydantic models; values that stay in memory are frozen
dataclasses.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

Tensors = Mapping[str, NDArray[Any]]
"""Tensors by name, as host arrays."""


class Frozen(BaseModel):
    """Base of all values that are written to disk: immutable, and unknown keys are errors."""

    # by alias: a renamed key of the plan is written with its old name, which programs read
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=False,
        serialize_by_alias=True,
        defer_build=True,
    )


class Precision(StrEnum):
    """The precision in which the heavy operators of an engine run."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"  # of weights only
    FP8 = "fp8"


ITEM_BYTES = {
    Precision.FP32: 4,
    Precision.TF32: 4,
    Precision.FP16: 2,
    Precision.BF16: 2,
    Precision.INT8: 1,
    Precision.FP8: 1,
    Precision.INT4: 0.5,
}
"""Bytes of one value."""


class CalibrationMethod(StrEnum):
    """How activation ranges are chosen from the calibration samples."""

    ENTROPY = "entropy"
    MINMAX = "minmax"
    PERCENTILE = "percentile"


Dim = Annotated[int, Field(ge=0)] | str
"""One dimension: a size, or the name of a symbol."""


class TensorSpec(Frozen):
    """Name, dtype and shape of one input or output."""

    name: str = Field(description="Name of the input or output.")
    dtype: str = Field(
        description="The name in NumPy, such as `float32`, `int64` or `bool`; or `bfloat16`."
    )
    shape: tuple[Dim, ...] = Field(
        description=(
            "One entry for each axis. A number is fixed. A string is a symbolic dimension. `[]` is"
            " a scalar."
        )
    )
    location: Literal["device", "host"] = Field(
        default="device", description="`host`: a shape tensor, which the builder reads on the CPU."
    )
    kind: Literal["static", "dynamic", "data-dependent"] = Field(
        default="static",
        description="`data-dependent`: the size is known only after a run, as of NonZero.",
    )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbolic dimensions, in order, each once."""
        return tuple(dict.fromkeys(dim for dim in self.shape if isinstance(dim, str)))

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the concrete shape. KeyError names a symbol without a size."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


class _Range(Frozen):
    """Fields min, opt and max. Written as {min, opt, max}, as [min, opt, max], or as one number for
    all three.
    """

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: object) -> object:
        triple = [value] * 3 if isinstance(value, int) else value
        if isinstance(triple, list | tuple) and len(triple) != 3:
            raise ValueError(f"expected [min, opt, max], got {list(triple)}")
        return (
            dict(zip(("min", "opt", "max"), triple, strict=True))
            if isinstance(triple, list | tuple)
            else triple
        )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, usual, high = (np.atleast_1d(value) for _, value in self)
        if not (
            low.shape == usual.shape == high.shape
            and (low <= usual).all()
            and (usual <= high).all()
        ):
            raise ValueError(
                "expected min <= opt <= max, got"
                f" {', '.join(f'{point} {value}' for point, value in self)}"
            )
        return self


class DimRange(_Range):
    """Smallest, most usual and largest size of one symbolic dimension."""

    min: int = Field(ge=0)
    opt: int = Field(ge=1)
    max: int


def dtype_of(name: str) -> np.dtype[np.generic]:
    """The numpy dtype of a spec's dtype name; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


Point = Literal["min", "opt", "max"]
Values = Annotated[
    tuple[int, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, int) else value,
        json_schema_input_type=int | tuple[int, ...],
    ),
]


class ValueRange(_Range):
    """Smallest, most usual and largest values of an input with values that decide a shape.

    Examples are the target of a Reshape and the k of a TopK.
    """

    min: Values
    opt: Values
    max: Values

    def holds(self, values: Sequence[int]) -> bool:
        """Return whether the number of values fits and each lies within its range."""
        return len(values) == len(self.min) and all(
            low <= value <= high
            for low, value, high in zip(self.min, values, self.max, strict=True)
        )


class Profile(Frozen):
    """A range of shapes that an engine accepts: one DimRange per symbol.

    Inputs that share a symbol always have the same size there.
    """

    dims: dict[str, DimRange] = Field(default_factory=dict)
    # by input name, for inputs with values that decide a shape
    values: dict[str, ValueRange] = Field(default_factory=dict)

    def sizes(self, point: Point) -> dict[str, int]:
        """Return the size of every symbol at min, opt or max."""
        return {name: int(getattr(dim, point)) for name, dim in self.dims.items()}

    def values_at(self, point: Point) -> dict[str, tuple[int, ...]]:
        """Return the values at min, opt or max, for every input with values that decide a shape."""
        return {name: tuple(getattr(values, point)) for name, values in self.values.items()}

    def odd_sizes(self) -> dict[str, int]:
        """Return sizes inside the ranges, odd and none of min, opt and max if possible."""
        return {name: _odd_size(dim.min, dim.opt, dim.max) for name, dim in self.dims.items()}

    def odd_values(self) -> dict[str, tuple[int, ...]]:
        """Return values by the rule of `odd_sizes`.

        A value with the same range as a symbol equals the odd size of that symbol.
        """
        return {
            name: tuple(map(_odd_size, values.min, values.opt, values.max))
            for name, values in self.values.items()
        }

    def holds(
        self, sizes: Mapping[str, int], values: Mapping[str, Sequence[int]] | None = None
    ) -> bool:
        """Return whether all sizes, and the values if there are any, lie within their ranges.

        A symbol or an input that is missing does not count.
        """
        for name, values_range in self.values.items():
            if values is not None and name in values and not values_range.holds(values[name]):
                return False
        return all(
            dim.min <= sizes.get(name, dim.opt) <= dim.max for name, dim in self.dims.items()
        )

    def distance(self, sizes: Mapping[str, int]) -> float:
        """Return how far these sizes are from opt, in doublings: opt is what kernels are tuned for.

        It is the sum over symbols of |log2(size / opt)|: half of opt is as far as twice opt. Sizes
        below 1 count as 1.
        """
        return sum(
            abs(math.log2(max(sizes.get(name, dim.opt), 1) / max(dim.opt, 1)))
            for name, dim in self.dims.items()
        )

    def in_words(self) -> str:
        """Return every range as text for messages."""
        texts = [f"{symbol} from {dim.min} to {dim.max}" for symbol, dim in self.dims.items()]
        for name, values in self.values.items():
            texts.append(f"{name} from {list(values.min)} to {list(values.max)}")
        return ", ".join(texts)


def nearest_profile(
    profiles: Sequence[Profile],
    sizes: Mapping[str, int],
    values: Mapping[str, Sequence[int]] | None = None,
) -> int | None:
    """Return the index of the profile that is tuned nearest to the sizes; None if none holds them.

    Among equally near ones it is the first.
    """
    holding = [number for number, each in enumerate(profiles) if each.holds(sizes, values)]
    return min(holding, key=lambda number: profiles[number].distance(sizes), default=None)


def _odd_size(low: int, usual: int, high: int) -> int:
    inside = [n for n in range(low + 1, min(high, low + 64)) if n != usual]
    candidates = [n for n in inside if n % 2 == 1] or inside or [high]
    return candidates[len(candidates) // 2]


def sizes_from_shapes(
    specs: tuple[TensorSpec, ...], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int] | str:
    """Return the size of every symbol from concrete shapes, or a message if they do not fit."""
    sizes: dict[str, int] = {}
    for spec in specs:
        shape = shapes[spec.name]
        if len(shape) != len(spec.shape):
            return (
                f"input '{spec.name}' has rank {len(shape)} {shape}, expected rank"
                f" {len(spec.shape)} {spec.shape}"
            )
        for dim, size in zip(spec.shape, shape, strict=True):
            if isinstance(dim, int) and dim != size:
                return f"input '{spec.name}' has shape {shape}, expected {spec.shape}"
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                return (
                    f"input '{spec.name}' gives '{dim}' = {size}, another input gives {sizes[dim]}"
                )
    return sizes


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


ProgramForm = Literal["aoti", "exported", "compile"]
"""Form of a delivered PyTorch program.

aoti: compiled by AOTInductor; exported: as torch.export wrote it; compile: compiled at every load.
"""

CompileMode = Literal["reduce-overhead", "max-autotune"]
"""A mode of torch.compile besides its default."""

OrtProvider = Literal["cpu", "cuda", "tensorrt"]
"""An execution provider of ONNX Runtime."""


class Placement(Frozen):
    """Placement of Q/DQ pairs. Each switch is one rule of docs/explain/int8-arithmetic.md."""

    conv: bool = True
    matmul_weight: bool = True  # Gemm, and MatMul with a weight on one side
    matmul_activations: bool = False  # MatMul of two activations (attention scores)
    # an Add of two activations: both inputs; for TensorRT the residual only
    residual_add: bool = True
    first_layer: bool = True  # what reads the model's inputs
    last_layer: bool = False  # the classifier
    per_channel: bool = True  # weights; activations are always per tensor


class Recipe(Frozen):
    """One candidate: which backend, which precision, and how the graph is rewritten for it."""

    backend: str
    precision: Precision
    # runtime: an option of the backend; flags: TensorRT chooses (int8: implicit)
    realised_in: Literal["graph", "runtime", "flags"] = "graph"
    method: CalibrationMethod | None = None  # int8 only
    # int8: zero point 0; uint8: asymmetric; float: as they are, weight_only
    activation: Literal["int8", "uint8", "float"] = "int8"
    weight_bits: Literal[7, 8] = 8  # 7 where 8-bit dot products can saturate (x86 without VNNI)
    # given: the model brings its own Q/DQ
    quantizer: Literal["crucible", "nncf", "modelopt", "onnxruntime", "given"] = "crucible"
    # int4 and int8: only weights have few bits; the products are of floats unless `activation` says
    # int8
    weight_only: bool = False
    block_size: int = 0  # weight_only: weights that share a scale; 0: all of one output channel
    # NNCF, int8: outliers of activations moved into the weights; None: where NNCF sees a
    # transformer
    smooth_quant: bool | None = None
    rest: Precision = Precision.FP32  # precision of what is not quantised
    placement: Placement = Placement()
    keep_fp32: tuple[str, ...] = ()  # node names kept in fp32 (fnmatch patterns)
    # if it fails, choose ranges by the other methods: what follows it too
    try_methods: bool = Field(default=False, exclude=True)
    # if it fails, keep its worst nodes in fp32: what follows it, no part of what it is
    keep_worst: bool = Field(default=False, exclude=True)
    compute_capability: str | None = None  # for a backend that builds for a GPU that is not here
    hardware_compatible: bool = False  # TensorRT: runs on every GPU generation from Ampere on
    version_compatible: bool = False  # TensorRT: runs on later versions of the library too
    form: ProgramForm | None = None  # torch: how the program is kept and run
    mode: CompileMode | None = None  # of torch.compile, in programs and baselines; None: its own
    provider: OrtProvider = "cpu"  # onnxruntime: which execution provider comes first
    # pytorch: eager, traced or compile; onnxruntime: whether Q/DQ are computed as written; of other
    # recipes a word of the label, which tells recipes apart that are equal in all other fields
    variant: str = ""

    @property
    def label(self) -> str:
        """The unique short name for tables: `onnxruntime int8 entropy u8s8`."""
        provider = self.provider if self.provider != "cpu" else ""
        parts = [
            self.backend,
            provider,
            self.form or "",
            self.variant,
            self.mode or "",
            str(self.precision),
        ]
        if self.quantizer not in ("crucible", self.backend) and self.variant != "as given":
            parts.append(self.quantizer)
        if self.weight_only:
            parts += [
                "weight-only",
                f"b{self.block_size}" if self.block_size else "",
                "a8" if self.activation == "int8" else "",
            ]
        elif self.realised_in == "flags":
            parts += (
                ["implicit", str(self.method)] if self.precision is Precision.INT8 else ["flags"]
            )
        elif self.precision is Precision.INT8 and self.quantizer != "given":
            parts += [
                str(self.method or ""),
                f"{'u' if self.activation == 'uint8' else 's'}8s{self.weight_bits}",
            ]
            usual = Placement()
            parts += [
                f"{'+' if on else '-'}{rule}"
                for rule, on in self.placement
                if on != getattr(usual, rule)
            ]
        if self.smooth_quant is not None:
            parts.append(f"{'+' if self.smooth_quant else '-'}smooth_quant")
        if kept := self.keep_fp32:  # a digest tells one long list from another
            digest = hashlib.sha256("\n".join(kept).encode()).hexdigest()
            names = ",".join(kept)
            if len(kept) > 2:
                names = f"{kept[0]} and {len(kept) - 1} more ({digest[:6]})"
            parts.append(f"keep {names}")
        if self.compute_capability:
            parts.append(f"sm_{self.compute_capability.replace('.', '')}")
        parts += [
            name for name in ("hardware_compatible", "version_compatible") if getattr(self, name)
        ]
        return " ".join(part for part in parts if part)


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


class ImageResize(Frozen):
    """Resizing of an image inside the engine, from one fixed size to another.

    `linear` interpolates between the two nearest pixels of each axis, without antialiasing. The
    centres of pixels count, as in OpenCV's INTER_LINEAR.
    """

    source: tuple[PositiveInt, PositiveInt] = Field(
        description="Height and width of the image that comes in."
    )
    target: tuple[PositiveInt, PositiveInt] = Field(
        description="Height and width of the model's input."
    )
    filter: Literal["linear"] = Field(
        description="The only filter that all backends compute alike."
    )

    @field_validator("filter", mode="before")
    @classmethod
    def _known_filter(cls, value: object) -> object:
        if value != "linear":
            raise ValueError(
                "expected filter linear, which all backends compute alike; TensorRT has none with"
                " antialiasing. For another filter leave `resize` out and resize the images before"
                " the engine, as `serving.image` does with JPEG and PNG"
            )
        return value


PerChannel = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    Field(min_length=1),
    BeforeValidator(
        lambda value: (value,) if isinstance(value, int | float) else value,
        json_schema_input_type=float | tuple[float, ...],
    ),
]
"""One number for each channel, or one for all."""


class Preprocess(Frozen):
    """Preprocessing of an image input inside the engine: uint8 [N, H, W, C] comes in.

    It is cast to float32, resized, (x * scale - mean) / std, then transposed to `layout`.
    """

    scale: float = Field(
        default=1 / 255,
        gt=0,
        allow_inf_nan=False,
        description="The factor for each pixel. Default: 1/255.",
    )
    mean: PerChannel = Field(
        default=(0.0,),
        description="Mean of the scaled values: one number for each channel, or one for all.",
    )
    std: PerChannel = Field(
        default=(1.0,),
        description=(
            "Standard deviation of the scaled values, above 0: one number for each channel, or one"
            " for all."
        ),
    )
    layout: Literal["NCHW", "NHWC"] = Field(
        default="NCHW", description="Layout of the model's input."
    )
    resize: ImageResize | None = Field(
        default=None, description="Resizing before the other steps. Default: none."
    )

    @field_validator("std")
    @classmethod
    def _divisible(cls, std: tuple[float, ...]) -> tuple[float, ...]:
        if min(std) <= 0:
            raise ValueError("expected numbers above 0: the image is divided by them")
        return std


class Postprocess(Frozen):
    """Reduction of an output inside the engine: exactly one of `top_k` and `argmax`."""

    top_k: PositiveInt | None = Field(
        default=None,
        description=(
            "The k highest scores, the highest first, and their indices. Give exactly one of"
            " `top_k` and `argmax`."
        ),
    )
    argmax: bool = Field(default=False, description="The index of the highest score only.")
    axis: int = Field(
        default=-1, description="The axis of the classes. Negative numbers count from the last."
    )
    softmax: bool = Field(
        default=False,
        description="`top_k` only. The values are probabilities, from a softmax over all classes.",
    )

    @model_validator(mode="after")
    def _one_reduction(self) -> Self:
        if (self.top_k is not None) == self.argmax:
            raise ValueError("expected exactly one of `top_k: k` and `argmax: true`")
        if self.softmax and self.argmax:
            raise ValueError(
                "expected `softmax` with `top_k` only: it does not change which score is highest"
            )
        return self


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


# -- progress ----------------------------------------------------------------

MAX_LATENCY_S = 1e9
PERPLEXITY = "perplexity"  # a measure that gets worse as it increases: 0.02 is 2 %
MAX_DROP = 1e30  # a metric may be any number; the plot subtracts and scales them


@dataclass(frozen=True, slots=True)
class AccuracyFigures:
    """The accuracy of one candidate on the selection set, as a plot shows it."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    # name of the task metric, or PERPLEXITY; empty: 1 - the smallest cosine to the reference
    measure: str
    drop: Annotated[float, Field(ge=-MAX_DROP, le=MAX_DROP, allow_inf_nan=False)]
    # 95 % interval of the drop; both the drop if the measure has none
    low: Annotated[float, Field(ge=-MAX_DROP, le=MAX_DROP, allow_inf_nan=False)]
    high: Annotated[float, Field(ge=-MAX_DROP, le=MAX_DROP, allow_inf_nan=False)]
    passed: bool


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """The latency of one candidate, end to end, from the runs so far at the first shape."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    median_s: Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False)]
    # quartiles; both the median of too few values
    low_s: Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False)]
    high_s: Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False)]
    shape: str  # in words
    is_eliminated: bool = False  # it gets no further runs


@dataclass(frozen=True, slots=True)
class CandidateFigures:
    """What a stage has just measured of one candidate or baseline. None: not by this stage."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    label: str
    precision: Precision
    is_baseline: bool = False
    accuracy: AccuracyFigures | None = None
    latency: LatencyFigures | None = None


class Progress(Protocol):
    """Called by long work with the fraction done (0 to 1, or None if unknown), a short text, and
    the figures of a candidate that it has just measured.
    """

    def __call__(
        self, fraction: float | None, text: str, figures: CandidateFigures | None = None, /
    ) -> None: ...


def silent(fraction: float | None, text: str, figures: CandidateFigures | None = None) -> None:
    """Ignore progress: the default of every stage."""
