"""The section `candidates`: what to build, and which nodes get Q/DQ pairs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer, Tag

from pipeline.core.frozen import Frozen
from pipeline.core.recipe import CompileMode, OrtProvider, Precision, ProgramForm
from pipeline.plan.sections.written import as_tuple, as_written, renamed


def _word_or_names(value: object) -> str:
    """Choose the form of `keep_fp32`, so that only the errors of this form are reported.

    A text is the word `auto`, anything else is node names.
    """
    return "(word)" if isinstance(value, str) else "(names)"


_EitherKept = Annotated[Literal["auto"], Tag("(word)")] | Annotated[tuple[str, ...], Tag("(names)")]
KeptNodes = Annotated[_EitherKept, Discriminator(_word_or_names)]
Method = Literal["auto", "entropy", "minmax", "percentile"]


Methods = Annotated[
    tuple[Method, ...],
    Field(min_length=1),
    BeforeValidator(as_tuple, json_schema_input_type=Method | tuple[Method, ...]),
    PlainSerializer(as_written, return_type=Method | tuple[Method, ...]),
]
Switch = Annotated[
    tuple[bool, ...],
    Field(min_length=1),
    BeforeValidator(as_tuple, json_schema_input_type=bool | tuple[bool, ...]),
    PlainSerializer(as_written, return_type=bool | tuple[bool, ...]),
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
        renamed(
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
