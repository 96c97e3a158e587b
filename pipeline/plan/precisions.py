"""The precisions that devices and backends support, and where a backend realises them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pipeline.core.artifacts import Target
from pipeline.core.recipe import OrtProvider, Precision

VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""CPU flags of 8-bit products without saturation at 16 bits; one of them is enough."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})

FLOATS = (Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16)
AMPERE, FROM_AMPERE = (8, 0), (Precision.TF32, Precision.BF16)

PROVIDER_PRECISIONS: Mapping[OrtProvider, tuple[Precision, ...]] = {
    "cuda": (Precision.FP32, Precision.TF32, Precision.FP16),
    "tensorrt": (Precision.TF32, Precision.FP16),  # it cannot be told to leave TF32 out
}
"""Precisions of ONNX Runtime's GPU providers."""

WEIGHT_QUANTIZERS: Mapping[str, Literal["onnxruntime", "nncf"]] = {
    "onnxruntime": "onnxruntime",
    "openvino": "nncf",
}
"""The library that quantises only weights, for each backend that can run such a model."""


def floats_of(target: Target) -> list[Precision]:
    """Return the floating-point precisions of a GPU. tf32 and bf16 need Ampere or later."""
    if _generation(target) >= AMPERE:
        return list(FLOATS)
    return [precision for precision in FLOATS if precision not in FROM_AMPERE]


def _generation(target: Target) -> tuple[int, ...]:
    return tuple(int(part) for part in (target.compute_capability or "0.0").split("."))


def realised_in(backend: str, precision: Precision) -> Literal["graph", "runtime"]:
    """Return whether a precision is written into the graph or is an option of the backend."""
    by_option = precision is Precision.TF32 or (backend, precision) == ("openvino", Precision.BF16)
    return "runtime" if by_option or backend == "torch" else "graph"


def weight_bits(target: Target) -> int:
    """Return the bits of int8 weights: 7 on an x86 CPU without VNNI, else 8.

    Without VNNI the 8-bit dot product adds pairs in 16 bits and can saturate.
    """
    on_cpu = target.compute_capability is None and bool(target.cpu_flags)
    return 7 if on_cpu and not VNNI_FLAGS & set(target.cpu_flags) else 8
