"""Refuse a candidate with a key that its backend, precision or model cannot honour. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.core.recipe import Precision
from pipeline.errors import PlanError
from pipeline.plan.precisions import PROVIDER_PRECISIONS, WEIGHT_QUANTIZERS
from pipeline.plan.schema import ONNX_SUFFIXES, CandidateConfig, PlacementConfig, Plan

FOR_TENSORRT = ("hardware_compatible", "version_compatible")
"""Keys of a candidate that only TensorRT has: where its engine may run."""

UNUSED_BY_WEIGHT_ONLY = (
    "method",
    "activation",
    "weight_bits",
    "quantizer",
    "placement",
    "smooth_quant",
    "precision_from",
)
"""Keys of a candidate that have no effect with quantised weights only, except some values."""

DECIDED_BY_QDQ = (
    "method",
    "activation",
    "weight_bits",
    "precision_from",
    "quantizer",
    "placement",
    "weight_only",
    "block_size",
    "smooth_quant",
)
"""Keys of a candidate that a model's own Q/DQ decide."""


def check_candidate(candidate: CandidateConfig, plan: Plan, given: Precision | None) -> None:
    """Raise PlanError for a candidate that nothing can build, or with a key without effect.

    `given`: precision of the model's own Q/DQ.
    """
    _check_for_backend(candidate)
    _check_program(candidate, plan)
    _check_provider(candidate)
    if given:
        _check_given(candidate, given)
    _check_kept(candidate)
    if given:
        return
    if is_weight_only(candidate):
        _check_weight_only(candidate)
    else:
        _check_smooth_quant(candidate)


def check_choices(candidate: CandidateConfig, methods: bool, switches: Sequence[str]) -> None:
    """Raise PlanError for a list whose values would all give the same engine."""
    precision, quantizer = candidate.precision, candidate.quantizer
    by_itself = ""
    if quantizer != "crucible":
        by_itself = f"the quantizer `{quantizer}`"
    elif candidate.precision_from == "flags":
        by_itself = "TensorRT's own calibrator (`precision_from: flags`)"
    no_method = no_switch = ""
    if precision is not Precision.INT8:
        no_method = no_switch = f"{precision} has none"
    elif by_itself:
        no_method = f"{by_itself} chooses ranges by itself" if quantizer == "nncf" else ""
        no_switch = f"{by_itself} places Q/DQ by itself"
    for has_choice, key, reason in (
        (methods, "method", no_method),
        (bool(switches), f"placement.{', '.join(switches)}", no_switch),
    ):
        if has_choice and reason:
            raise refusal(
                candidate,
                f"a list under `{key}` changes nothing: {reason}",
                "give one value, or none",
            )


def is_weight_only(candidate: CandidateConfig) -> bool:
    """Return whether only weights are quantised."""
    return candidate.weight_only or candidate.precision is Precision.INT4


def refusal(candidate: CandidateConfig, reason: str, next_step: str) -> PlanError:
    """Return the error that names the candidate."""
    return PlanError(f"candidate '{candidate.backend} {candidate.precision}': {reason}", next_step)


def _check_for_backend(candidate: CandidateConfig) -> None:
    """Raise PlanError for a key that the backend would ignore but the label would show."""
    backend, precision = candidate.backend, candidate.precision
    if candidate.block_size and not is_weight_only(candidate):
        raise refusal(
            candidate,
            "`block_size` is for weight-only quantisation",
            "leave `block_size` out, or add `weight_only: true`",
        )
    by_itself = _quantizer_by_itself(candidate)
    if by_itself and candidate.method != ("auto",):
        raise refusal(candidate, f"{by_itself} chooses ranges by itself", "leave `method` out")
    if by_itself and candidate.placement != PlacementConfig():
        raise refusal(candidate, f"{by_itself} places Q/DQ by itself", "leave `placement` out")
    if precision is Precision.FP8 and candidate.activation != "auto":
        raise refusal(candidate, "fp8 has one form of activations", "leave `activation` out")
    if backend == "tensorrt":
        return
    foreign = {key: key for key in FOR_TENSORRT if getattr(candidate, key)}
    if candidate.precision_from == "flags":
        foreign["precision_from"] = "precision_from: flags"
    for key, text in foreign.items():
        raise refusal(
            candidate, f"only TensorRT has `{text}`", f"leave `{key}` out, or take tensorrt"
        )
    if precision is Precision.FP8:
        raise refusal(candidate, "only TensorRT has fp8", "take int8, or tensorrt")
    if candidate.compute_capability and backend != "tensorrt_rtx":
        raise refusal(
            candidate,
            f"`compute_capability` names a GPU, and {backend} builds for this CPU",
            "leave `compute_capability` out, or take tensorrt_rtx",
        )


def _quantizer_by_itself(candidate: CandidateConfig) -> str:
    """Return the quantizer that chooses ranges and placement by itself, for a message, or ""."""
    if candidate.quantizer == "nncf":
        return "the quantizer `nncf`"
    return "ModelOpt's fp8" if candidate.precision is Precision.FP8 else ""


def _check_program(candidate: CandidateConfig, plan: Plan) -> None:
    """Raise PlanError for a PyTorch program of an ONNX file, or for a key that does not fit."""
    if candidate.backend != "torch":
        for key in ("form", "mode"):
            if getattr(candidate, key):
                raise refusal(
                    candidate, f"only torch has `{key}`", f"leave `{key}` out, or take torch"
                )
        return
    path = plan.model.path
    if path is not None and path.suffix in ONNX_SUFFIXES:
        raise refusal(
            candidate,
            "the model is an ONNX file, which has no PyTorch program",
            "leave it out, or give the PyTorch model as `entrypoint` or .pt2",
        )
    plain = CandidateConfig(
        backend="torch", precision=candidate.precision, form=candidate.form, mode=candidate.mode
    )
    for key in _differences(candidate, plain, CandidateConfig.model_fields):
        raise refusal(
            candidate,
            f"`{key}` has no effect on a PyTorch program, which is cast as a whole",
            f"leave `{key}` out",
        )


def _differences(
    candidate: CandidateConfig, plain: CandidateConfig, keys: Iterable[str]
) -> list[str]:
    """Return the keys with other values than those of a plain candidate."""
    return [key for key in keys if getattr(candidate, key) != getattr(plain, key)]


def _check_provider(candidate: CandidateConfig) -> None:
    """Raise PlanError for a provider of another backend, or for a precision that it lacks."""
    provider = candidate.provider
    if provider == "cpu":
        return
    if candidate.backend != "onnxruntime":
        raise refusal(
            candidate,
            "only onnxruntime has `provider`",
            "leave `provider` out, or take onnxruntime",
        )
    if candidate.precision not in PROVIDER_PRECISIONS[provider]:
        known = ", ".join(PROVIDER_PRECISIONS[provider])
        raise refusal(
            candidate,
            f"expected the provider {provider} with {known}",
            "take one of these, or the backend tensorrt",
        )


def _check_given(candidate: CandidateConfig, given: Precision) -> None:
    """Check a candidate of a model with its own Q/DQ.

    PlanError for another precision, or for a key that the Q/DQ decide already.
    """
    if candidate.precision is not given:
        raise refusal(
            candidate,
            f"the model brings its own Q/DQ, so it would run {given} under the name of"
            f" {candidate.precision}",
            f"ask for `precision: {given}`, or give the model without Q/DQ",
        )
    keys = [*DECIDED_BY_QDQ]
    if candidate.keep_fp32 == "auto" or not candidate.backend.startswith("tensorrt"):
        keys.append("keep_fp32")
    plain = CandidateConfig(backend=candidate.backend, precision=given)
    for key in _differences(candidate, plain, keys):
        raise refusal(
            candidate,
            f"the model brings its own Q/DQ, which decide `{key}`",
            f"leave `{key}` out, or give the model without Q/DQ",
        )


def _check_kept(candidate: CandidateConfig) -> None:
    """Raise PlanError if `keep_fp32: auto` has no nodes to choose from."""
    if candidate.keep_fp32 != "auto":
        return
    if candidate.precision in (Precision.FP32, Precision.TF32):
        raise refusal(
            candidate, "`keep_fp32: auto` is for fp16, bf16 and int8", "leave `keep_fp32` out"
        )
    by_library = (
        candidate.quantizer != "crucible"
        or candidate.precision is Precision.FP8
        or is_weight_only(candidate)
        or (candidate.precision is Precision.INT8 and candidate.precision_from == "flags")
    )
    if by_library:
        raise refusal(
            candidate,
            "`keep_fp32: auto` looks at Crucible's own Q/DQ pairs, and here another library places"
            " them",
            "name the nodes in `keep_fp32`, or take `quantizer: crucible` and"
            " `precision_from: graph`",
        )


def _check_smooth_quant(candidate: CandidateConfig) -> None:
    """Raise PlanError for `smooth_quant` without NNCF in int8."""
    has_it = candidate.precision is Precision.INT8 and candidate.quantizer == "nncf"
    if candidate.smooth_quant is not None and not has_it:
        raise refusal(
            candidate,
            "only NNCF in int8 has `smooth_quant`",
            "leave it out, or take openvino in int8 with `quantizer: nncf`",
        )


def _check_weight_only(candidate: CandidateConfig) -> None:
    """Raise PlanError if backend or precision do not support it, or a key has no effect."""
    backend, precision = candidate.backend, candidate.precision
    name = f"candidate '{backend} {precision}', weights only"
    if precision not in (Precision.INT4, Precision.INT8):
        raise PlanError(
            f"{name}: weights alone have 4 or 8 bits, not {precision}",
            "take int4 or int8, or leave `weight_only` out",
        )
    if backend not in WEIGHT_QUANTIZERS:
        raise PlanError(
            f"{name}: not made for {backend}, only for {' and '.join(WEIGHT_QUANTIZERS)}",
            "take one of these, or another precision",
        )
    unused = _unused_by_weight_only(candidate)
    if unused:
        raise PlanError(
            f"{name}: `{unused}: {_shown(getattr(candidate, unused))}` has no effect",
            f"leave `{unused}` out; docs/explain/int8-arithmetic.md lists the keys that have one",
        )
    if candidate.block_size and (backend, precision) == ("openvino", Precision.INT8):
        raise PlanError(
            f"{name}: NNCF gives 8-bit weights one scale per output channel, no blocks",
            "leave `block_size` out, or take int4",
        )


def _unused_by_weight_only(candidate: CandidateConfig) -> str:
    """Return the first key with a value that has no effect here; empty if there is none."""
    allowed: dict[str, tuple[object, ...]] = {
        key: (CandidateConfig.model_fields[key].default,) for key in UNUSED_BY_WEIGHT_ONLY
    }
    allowed["quantizer"] = ("crucible", WEIGHT_QUANTIZERS[candidate.backend])
    allowed["activation"] = ("auto",)
    if candidate.backend == "onnxruntime":
        allowed["activation"] = ("auto", "int8")
    for key, values in allowed.items():
        if getattr(candidate, key) not in values:
            return key
    return ""


def _shown(value: object) -> str:
    """Format a value of a plan for a message."""
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "..."
