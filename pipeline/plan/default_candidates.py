"""The candidates of a plan that names none. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeline.core.artifacts import Target
from pipeline.core.recipe import OrtProvider, Precision
from pipeline.plan.precisions import BF16_FLAGS, PROVIDER_PRECISIONS, floats_of
from pipeline.plan.schema import CandidateConfig


def default_candidates(
    targets: Mapping[str, Target],
    calibrated: bool,
    given: Precision | None = None,
    providers: Collection[OrtProvider] = (),
) -> tuple[CandidateConfig, ...]:
    """Return the default candidates: every installed backend in every precision it supports.

    `given`: precision of the model's own Q/DQ. Such a model gets only this precision, on every
    backend that supports it. `providers`: ONNX Runtime's providers that use a GPU.
    """
    if given:
        quantised = [name for name in targets if name != "torch"]
        able = [name for name in quantised if given is Precision.INT8 or name == "tensorrt"]
        return tuple(
            CandidateConfig(backend=name, precision=given)
            for name in (["tensorrt"] if "tensorrt" in able else able)
        )
    if on_gpu := _gpu_candidates(targets, calibrated, providers):
        return on_gpu
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
        return [CandidateConfig(backend=backend, precision=Precision.INT8, keep_fp32="auto")]
    return [
        CandidateConfig(
            backend=backend, precision=Precision.INT8, activation="uint8", keep_fp32="auto"
        ),
        CandidateConfig(
            backend=backend, precision=Precision.INT8, activation="int8", keep_fp32="auto"
        ),
        CandidateConfig(backend=backend, precision=Precision.INT8, quantizer="nncf"),
    ]


def _gpu_candidates(
    targets: Mapping[str, Target], calibrated: bool, providers: Collection[OrtProvider]
) -> tuple[CandidateConfig, ...]:
    """Return the default candidates on a GPU; empty if no backend uses one."""
    candidates: list[CandidateConfig] = []
    if "tensorrt" in targets:
        candidates += _tensorrt_candidates(targets["tensorrt"], calibrated)
    torch = targets.get("torch")
    if torch and torch.compute_capability:
        candidates += [
            CandidateConfig(backend="torch", precision=precision, form="aoti")
            for precision in floats_of(torch)
        ]
    for provider in providers:
        candidates += [
            CandidateConfig(backend="onnxruntime", precision=precision, provider=provider)
            for precision in PROVIDER_PRECISIONS[provider]
        ]
    return tuple(candidates)


def _tensorrt_candidates(target: Target, calibrated: bool) -> tuple[CandidateConfig, ...]:
    """Return all floats, and with calibration data explicit and implicit int8.

    TensorRT 11 and later have no implicit int8.
    """
    precisions = floats_of(target)
    candidates = [
        CandidateConfig(backend="tensorrt", precision=precision) for precision in precisions
    ]
    if calibrated:
        candidates.append(
            CandidateConfig(backend="tensorrt", precision=Precision.INT8, keep_fp32="auto")
        )
    if calibrated and int(target.version.split(".")[0]) < 11:
        candidates.append(
            CandidateConfig(backend="tensorrt", precision=Precision.INT8, precision_from="flags")
        )
    return tuple(candidates)
