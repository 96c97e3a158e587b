"""From the plan's candidates, or from what this host can run, to recipes. Pure: no files, no libraries."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config import CandidateConfig, Plan
from pipeline.core import CalibrationMethod, Note, Precision, Recipe, Target
from pipeline.errors import PlanError

VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Any of these multiplies 8-bit numbers without saturating at 16 bits in between."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def default_candidates(targets: Mapping[str, Target], calibrated: bool) -> tuple[CandidateConfig, ...]:
    """All that is worth trying on this host: every backend that is here, in every precision that it really runs."""
    candidates = []
    for backend in ("onnxruntime", "openvino"):
        if backend not in targets:
            continue
        candidates.append(CandidateConfig(backend=backend, precision=Precision.FP32))
        if backend == "openvino" and BF16_FLAGS & set(targets[backend].cpu_flags):
            candidates.append(CandidateConfig(backend=backend, precision=Precision.BF16))
        if calibrated:
            candidates += _int8_candidates(backend)
    return tuple(candidates)


def _int8_candidates(backend: str) -> list[CandidateConfig]:
    if backend == "onnxruntime":
        return [CandidateConfig(backend=backend, precision=Precision.INT8)]
    return [
        CandidateConfig(backend=backend, precision=Precision.INT8, activation="uint8"),
        CandidateConfig(backend=backend, precision=Precision.INT8, activation="int8"),
        CandidateConfig(backend=backend, precision=Precision.INT8, quantizer="nncf"),
    ]


def recipe_from_candidate(candidate: CandidateConfig, target: Target, plan: Plan, calibrated: bool) -> Recipe:
    """The full recipe for this host; PlanError if int8 is asked for without calibration data."""
    backend, precision = candidate.backend, candidate.precision
    base = Recipe(backend=backend, precision=precision, keep_fp32=candidate.keep_fp32, compute_capability=candidate.compute_capability)
    if precision is not Precision.INT8:
        in_runtime = backend == "openvino" and precision is Precision.BF16
        return base.model_copy(update={"realised_in": "runtime"}) if in_runtime else base
    if not calibrated:
        raise PlanError(
            f"candidate '{backend} int8' needs calibration data, the plan has none",
            "give data.calibration, or leave int8 out of `candidates`",
        )
    by_nncf = candidate.quantizer == "nncf"
    if by_nncf and backend != "openvino":
        raise PlanError(f"candidate '{backend} int8': the quantizer `nncf` places Q/DQ for OpenVINO only", "leave `quantizer` out, or take openvino")
    return base.model_copy(
        update={
            "method": None if by_nncf else resolve_method(candidate.method, plan.calibration.language_model),
            "activation": _activation(candidate),
            "weight_bits": candidate.weight_bits or weight_bits(target),
            "quantizer": candidate.quantizer,
            "placement": candidate.placement,
            "rest": Precision.FP16 if backend.startswith("tensorrt") else Precision.FP32,
        }
    )


def resolve_method(method: str, language_model: bool) -> CalibrationMethod:
    """`auto` is min-max for language models, whose outliers carry meaning, else entropy."""
    if method != "auto":
        return CalibrationMethod(method)
    return CalibrationMethod.MINMAX if language_model else CalibrationMethod.ENTROPY


def weight_bits(target: Target) -> int:
    """7 on an x86 CPU whose 8-bit dot product adds pairs in 16 bits and can saturate there, else 8."""
    on_cpu = target.compute_capability is None and bool(target.cpu_flags)
    return 7 if on_cpu and not VNNI_FLAGS & set(target.cpu_flags) else 8


def _activation(candidate: CandidateConfig) -> str:
    if candidate.activation != "auto":
        return candidate.activation
    return "int8" if candidate.backend.startswith("tensorrt") else "uint8"


def missing_backend_note(backend: str, reason: str) -> Note:
    return Note(stage="candidates", text=f"{backend} is left out: {reason}", level="info")
