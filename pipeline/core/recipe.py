"""A recipe: which backend, which precision, and how the graph is rewritten for it."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Literal

from pydantic import Field

from pipeline.core.frozen import Frozen


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
