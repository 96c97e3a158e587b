"""Turn the plan's candidates, or the defaults for this host, into recipes. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from pipeline.core import (
    CalibrationMethod,
    CompileMode,
    Note,
    OrtProvider,
    Placement,
    Precision,
    Recipe,
    Target,
)
from pipeline.errors import PlanError
from pipeline.plan.schema import BASELINE, ONNX_SUFFIXES, CandidateConfig, PlacementConfig, Plan

VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""CPU flags of 8-bit products without saturation at 16 bits; one of them is enough."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})

FOR_TENSORRT = ("hardware_compatible", "version_compatible")
"""Keys of a candidate that only TensorRT has: where its engine may run."""

MAX_RECIPES = 32
"""Limit per candidate of the plan: each recipe is built, checked and measured for seconds."""

QUANTIZER_BACKENDS = {"nncf": "openvino", "modelopt": "tensorrt"}
"""The backend that each foreign quantizer places Q/DQ for."""

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

USUAL_BLOCK = 32
"""Weights per scale if the plan gives no `block_size`: the smallest, which is most accurate."""


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
    targets: Mapping[str, Target],
    calibrated: bool,
    providers: Collection[OrtProvider],
) -> tuple[CandidateConfig, ...]:
    """Return the default candidates on a GPU; empty if no backend uses one."""
    candidates: list[CandidateConfig] = []
    if "tensorrt" in targets:
        candidates += _tensorrt_candidates(targets["tensorrt"], calibrated)
    torch = targets.get("torch")
    if torch and torch.compute_capability:
        candidates += [
            CandidateConfig(
                backend="torch",
                precision=precision,
                form="aoti",
            )
            for precision in _floats(torch)
        ]
    for provider in providers:
        candidates += [
            CandidateConfig(
                backend="onnxruntime",
                precision=precision,
                provider=provider,
            )
            for precision in PROVIDER_PRECISIONS[provider]
        ]
    return tuple(candidates)


def _tensorrt_candidates(target: Target, calibrated: bool) -> tuple[CandidateConfig, ...]:
    """Return all floats, and with calibration data explicit and implicit int8.

    TensorRT 11 and later have no implicit int8.
    """
    precisions = _floats(target)
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


def _floats(target: Target) -> list[Precision]:
    """Return the floating-point precisions of a GPU. tf32 and bf16 need Ampere or later."""
    if _generation(target) >= AMPERE:
        return list(FLOATS)
    return [precision for precision in FLOATS if precision not in FROM_AMPERE]


def _generation(target: Target) -> tuple[int, ...]:
    return tuple(int(part) for part in (target.compute_capability or "0.0").split("."))


def recipes_from_candidate(
    candidate: CandidateConfig,
    target: Target,
    plan: Plan,
    calibrated: bool,
    given: Precision | None = None,
) -> tuple[Recipe, ...]:
    """Return a recipe for every combination of the candidate's methods and switches, each once.

    PlanError as in `expand` and `recipe_from_candidate`.
    """
    # a model's own Q/DQ leave nothing to combine
    candidates = (candidate,) if given else expand(candidate)
    return distinct(
        recipe_from_candidate(single, target, plan, calibrated, given) for single in candidates
    )


def expand(candidate: CandidateConfig) -> tuple[CandidateConfig, ...]:
    """Return one candidate per combination: methods in the plan's order, then the switches.

    PlanError if a choice would change nothing, or if there are too many combinations.
    """
    methods = tuple(dict.fromkeys(candidate.method))
    switches = {name: tuple(dict.fromkeys(values)) for name, values in candidate.placement}
    _check_choices(
        candidate, len(methods) > 1, [name for name, values in switches.items() if len(values) > 1]
    )
    count = len(methods) * math.prod(map(len, switches.values()))
    if count > MAX_RECIPES:
        raise PlanError(
            f"candidate '{candidate.backend} {candidate.precision}' stands for {count} engines,"
            f" expected at most {MAX_RECIPES}",
            "name fewer methods, or fewer switches of `placement` with both values: each engine is"
            " built, checked and measured",
        )
    placements = [
        dict(zip(switches, values, strict=True)) for values in itertools.product(*switches.values())
    ]
    return tuple(
        candidate.model_copy(
            update={"method": (method,), "placement": PlacementConfig.model_validate(placement)}
        )
        for method in methods
        for placement in placements
    )


def _check_choices(candidate: CandidateConfig, methods: bool, switches: Sequence[str]) -> None:
    """Raise PlanError for a list whose values would all give the same engine."""
    precision, quantizer = candidate.precision, candidate.quantizer
    in_flags = candidate.precision_from == "flags"
    by_itself = ""
    if quantizer != "crucible":
        by_itself = f"the quantizer `{quantizer}`"
    elif in_flags:
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
            raise PlanError(
                f"candidate '{candidate.backend} {precision}': a list under `{key}` changes"
                f" nothing: {reason}",
                "give one value, or none",
            )


def recipe_from_candidate(
    candidate: CandidateConfig,
    target: Target,
    plan: Plan,
    calibrated: bool,
    given: Precision | None = None,
) -> Recipe:
    """Return the recipe for this host. Of several methods or switch values, the first counts.

    `given`: precision of the model's own Q/DQ. PlanError for int8 without calibration data, for a
    feature of another backend, and for a precision other than `given`.
    """
    _check_for_backend(candidate)
    _check_program(candidate, plan)
    _check_provider(candidate)
    if given:
        _check_given(candidate, given)
    _check_kept(candidate)
    if given:
        return _given_qdq_recipe(candidate)
    if candidate.weight_only or candidate.precision is Precision.INT4:
        return _weight_only_recipe(candidate)
    _check_smooth_quant(candidate)
    if candidate.precision in (Precision.INT8, Precision.FP8):
        return _quantised_recipe(candidate, target, plan, calibrated)
    return _float_recipe(candidate)


def _float_recipe(candidate: CandidateConfig) -> Recipe:
    """Return the recipe of a float precision. The other families change some of its fields."""
    backend, precision = candidate.backend, candidate.precision
    in_flags = candidate.precision_from == "flags"
    return Recipe(
        backend=backend,
        precision=precision,
        realised_in="flags" if in_flags else realised_in(backend, precision),
        form=candidate.form or ("aoti" if backend == "torch" else None),
        mode=candidate.mode,
        provider=candidate.provider,
        keep_fp32=() if candidate.keep_fp32 == "auto" else candidate.keep_fp32,
        keep_worst=candidate.keep_fp32 == "auto",
        compute_capability=candidate.compute_capability,
        hardware_compatible=candidate.hardware_compatible,
        version_compatible=candidate.version_compatible,
    )


def _given_qdq_recipe(candidate: CandidateConfig) -> Recipe:
    """Return the recipe of a model with its own Q/DQ."""
    return _float_recipe(candidate).model_copy(
        update={"quantizer": "given", "rest": _rest(candidate.backend)}
    )


def _quantised_recipe(
    candidate: CandidateConfig, target: Target, plan: Plan, calibrated: bool
) -> Recipe:
    """Return the recipe of int8 or fp8 weights and activations. Needs calibration data."""
    backend, precision = candidate.backend, candidate.precision
    if not calibrated:
        raise PlanError(
            f"candidate '{backend} {precision}' needs calibration data, the plan has none",
            f"give data.calibration, or leave {precision} out of `candidates`",
        )
    quantizer = _quantizer(candidate)
    method: CalibrationMethod | None = None
    try_methods = False
    if quantizer != "nncf" and precision is not Precision.FP8:  # both choose ranges by themselves
        method = resolve_method(candidate.method[0], plan.calibration.language_model)
        try_methods = candidate.method[0] == "auto"
    placement = {name: values[0] for name, values in candidate.placement}
    return _float_recipe(candidate).model_copy(
        update={
            "method": method,
            "try_methods": try_methods,
            "activation": _activation(candidate),
            "weight_bits": candidate.weight_bits or weight_bits(target),
            "quantizer": quantizer,
            "smooth_quant": candidate.smooth_quant,
            "placement": Placement.model_validate(placement),
            "rest": _rest(backend),
        }
    )


def _quantizer(candidate: CandidateConfig) -> str:
    """Return the quantizer of int8 or fp8. PlanError if it is for another backend."""
    quantizer: str = candidate.quantizer
    if candidate.precision is Precision.FP8 and quantizer == "crucible":
        quantizer = "modelopt"
    if quantizer == "crucible" or candidate.backend == QUANTIZER_BACKENDS[quantizer]:
        return quantizer
    only = QUANTIZER_BACKENDS[quantizer]
    raise PlanError(
        f"candidate '{candidate.backend} {candidate.precision}': the quantizer `{quantizer}` is for"
        f" {only} only",
        f"leave it out, or take {only}",
    )


def _check_smooth_quant(candidate: CandidateConfig) -> None:
    """Raise PlanError for `smooth_quant` without NNCF in int8."""
    has_it = candidate.precision is Precision.INT8 and candidate.quantizer == "nncf"
    if candidate.smooth_quant is not None and not has_it:
        raise PlanError(
            f"candidate '{candidate.backend} {candidate.precision}': only NNCF in int8 has"
            " `smooth_quant`",
            "leave it out, or take openvino in int8 with `quantizer: nncf`",
        )


def _weight_only_recipe(candidate: CandidateConfig) -> Recipe:
    """Return the recipe of 4- or 8-bit weights with float activations. Needs no data.

    PlanError for a backend that cannot run it, or for a key without effect.
    """
    backend, precision = candidate.backend, candidate.precision
    _check_weight_only(candidate)
    in_blocks = backend == "onnxruntime" or precision is Precision.INT4
    return _float_recipe(candidate).model_copy(
        update={
            "weight_only": True,
            "block_size": candidate.block_size or (USUAL_BLOCK if in_blocks else 0),
            "quantizer": WEIGHT_QUANTIZERS[backend],
            "activation": "int8" if candidate.activation == "int8" else "float",
        }
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


def _rest(backend: str) -> Precision:
    """Return the precision of layers that are not quantised.

    fp16 for TensorRT: a strongly typed int8 engine with the rest in fp32 is slower than fp16.
    """
    return Precision.FP16 if backend.startswith("tensorrt") else Precision.FP32


def _check_given(candidate: CandidateConfig, given: Precision) -> None:
    """Check a candidate of a model with its own Q/DQ.

    PlanError for another precision, or for a key that the Q/DQ decide already.
    """
    name = f"candidate '{candidate.backend} {candidate.precision}'"
    if candidate.precision is not given:
        raise PlanError(
            f"{name}: the model brings its own Q/DQ, so it would run {given} under the name of"
            f" {candidate.precision}",
            f"ask for `precision: {given}`, or give the model without Q/DQ",
        )
    unused = CandidateConfig(backend=candidate.backend, precision=given)
    decided = [
        "method",
        "activation",
        "weight_bits",
        "precision_from",
        "quantizer",
        "placement",
        "weight_only",
        "block_size",
        "smooth_quant",
    ]
    if candidate.keep_fp32 == "auto" or not candidate.backend.startswith("tensorrt"):
        decided.append("keep_fp32")
    for key in decided:
        if getattr(candidate, key) != getattr(unused, key):
            raise PlanError(
                f"{name}: the model brings its own Q/DQ, which decide `{key}`",
                f"leave `{key}` out, or give the model without Q/DQ",
            )


def _quantizer_by_itself(candidate: CandidateConfig) -> str:
    """Return the quantizer that chooses ranges and placement by itself, for a message, or ""."""
    if candidate.quantizer == "nncf":
        return "the quantizer `nncf`"
    return "ModelOpt's fp8" if candidate.precision is Precision.FP8 else ""


def _check_for_backend(candidate: CandidateConfig) -> None:
    """Raise PlanError for a key that the backend would ignore but the label would show."""
    backend, precision = candidate.backend, candidate.precision
    if candidate.block_size and not candidate.weight_only and precision is not Precision.INT4:
        raise PlanError(
            f"candidate '{backend} {precision}': `block_size` is for weight-only quantisation",
            "leave `block_size` out, or add `weight_only: true`",
        )
    by_itself = _quantizer_by_itself(candidate)
    if by_itself and candidate.method != ("auto",):
        raise PlanError(
            f"candidate '{backend} {precision}': {by_itself} chooses ranges by itself",
            "leave `method` out",
        )
    if by_itself and candidate.placement != PlacementConfig():
        raise PlanError(
            f"candidate '{backend} {precision}': {by_itself} places Q/DQ by itself",
            "leave `placement` out",
        )
    if precision is Precision.FP8 and candidate.activation != "auto":
        raise PlanError(
            f"candidate '{backend} {precision}': fp8 has one form of activations",
            "leave `activation` out",
        )
    if backend == "tensorrt":
        return
    foreign = {key: key for key in FOR_TENSORRT if getattr(candidate, key)}
    foreign |= (
        {"precision_from": "precision_from: flags"} if candidate.precision_from == "flags" else {}
    )
    for key, text in foreign.items():
        raise PlanError(
            f"candidate '{backend} {precision}': only TensorRT has `{text}`",
            f"leave `{key}` out, or take tensorrt",
        )
    if precision is Precision.FP8:
        raise PlanError(
            f"candidate '{backend} {precision}': only TensorRT has fp8", "take int8, or tensorrt"
        )
    if candidate.compute_capability and backend != "tensorrt_rtx":
        raise PlanError(
            f"candidate '{backend} {precision}': `compute_capability` names a GPU, and {backend}"
            " builds for this CPU",
            "leave `compute_capability` out, or take tensorrt_rtx",
        )


def _check_program(candidate: CandidateConfig, plan: Plan) -> None:
    """Raise PlanError for a PyTorch program of an ONNX file, or for a key that does not fit."""
    name, path = f"candidate '{candidate.backend} {candidate.precision}'", plan.model.path
    if candidate.backend != "torch":
        for key in ("form", "mode"):
            if getattr(candidate, key):
                raise PlanError(
                    f"{name}: only torch has `{key}`",
                    f"leave `{key}` out, or take torch",
                )
        return
    if path is not None and path.suffix in ONNX_SUFFIXES:
        raise PlanError(
            f"{name}: the model is an ONNX file, which has no PyTorch program",
            "leave it out, or give the PyTorch model as `entrypoint` or .pt2",
        )
    unused = CandidateConfig(
        backend="torch",
        precision=candidate.precision,
        form=candidate.form,
        mode=candidate.mode,
    )
    for key in CandidateConfig.model_fields:
        if getattr(candidate, key) != getattr(unused, key):
            raise PlanError(
                f"{name}: `{key}` has no effect on a PyTorch program, which is cast as a whole",
                f"leave `{key}` out",
            )


def _check_provider(candidate: CandidateConfig) -> None:
    """Raise PlanError for a provider of another backend, or for a precision that it lacks."""
    name, provider = f"candidate '{candidate.backend} {candidate.precision}'", candidate.provider
    if provider == "cpu":
        return
    if candidate.backend != "onnxruntime":
        raise PlanError(
            f"{name}: only onnxruntime has `provider`",
            "leave `provider` out, or take onnxruntime",
        )
    if candidate.precision not in PROVIDER_PRECISIONS[provider]:
        known = ", ".join(PROVIDER_PRECISIONS[provider])
        raise PlanError(
            f"{name}: expected the provider {provider} with {known}",
            "take one of these, or the backend tensorrt",
        )


def _check_kept(candidate: CandidateConfig) -> None:
    """Raise PlanError if `keep_fp32: auto` has no nodes to choose from."""
    if candidate.keep_fp32 != "auto":
        return
    name = f"candidate '{candidate.backend} {candidate.precision}'"
    if candidate.precision in (Precision.FP32, Precision.TF32):
        raise PlanError(
            f"{name}: `keep_fp32: auto` is for fp16, bf16 and int8", "leave `keep_fp32` out"
        )
    by_library = (
        candidate.quantizer != "crucible"
        or candidate.precision in (Precision.FP8, Precision.INT4)
        or candidate.weight_only
        or (candidate.precision is Precision.INT8 and candidate.precision_from == "flags")
    )
    if by_library:
        raise PlanError(
            f"{name}: `keep_fp32: auto` looks at Crucible's own Q/DQ pairs, and here another"
            " library places them",
            "name the nodes in `keep_fp32`, or take `quantizer: crucible` and"
            " `precision_from: graph`",
        )


def distinct(recipes: Iterable[Recipe]) -> tuple[Recipe, ...]:
    """Return each recipe once, in order.

    Recipes that differ only in `try_methods` and `keep_worst` are merged: a flag of the result is
    set if one of them sets it.
    """
    flags_by_recipe: dict[Recipe, dict[str, bool]] = {}
    for recipe in recipes:
        flags = {name: bool(getattr(recipe, name)) for name in ("try_methods", "keep_worst")}
        plain = recipe.model_copy(update=dict.fromkeys(flags, False))
        known = flags_by_recipe.setdefault(plain, flags)
        flags_by_recipe[plain] = {name: known[name] or value for name, value in flags.items()}
    return tuple(plain.model_copy(update=flags) for plain, flags in flags_by_recipe.items())


def realised_in(backend: str, precision: Precision) -> Literal["graph", "runtime"]:
    """Return whether a precision is written into the graph or is an option of the backend."""
    by_option = precision is Precision.TF32 or (backend, precision) == ("openvino", Precision.BF16)
    return "runtime" if by_option or backend == "torch" else "graph"


def resolve_method(method: str, language_model: bool) -> CalibrationMethod:
    """Return the calibration method. `auto` is min-max for language models, else entropy.

    The outliers of language models carry meaning, and entropy would clip them.
    """
    if method != "auto":
        return CalibrationMethod(method)
    return CalibrationMethod.MINMAX if language_model else CalibrationMethod.ENTROPY


def weight_bits(target: Target) -> int:
    """Return the bits of int8 weights: 7 on an x86 CPU without VNNI, else 8.

    Without VNNI the 8-bit dot product adds pairs in 16 bits and can saturate.
    """
    on_cpu = target.compute_capability is None and bool(target.cpu_flags)
    return 7 if on_cpu and not VNNI_FLAGS & set(target.cpu_flags) else 8


def _activation(candidate: CandidateConfig) -> str:
    if candidate.activation != "auto":
        return candidate.activation
    return "int8" if candidate.backend.startswith("tensorrt") else "uint8"


def missing_backend_note(backend: str, reason: str) -> Note:
    return Note(stage="candidates", text=f"{backend} is left out: {reason}", level="info")


# -- baselines ----------------------------------------------------------------------------------

AS_GIVEN = "as given"
AS_WRITTEN = "as written"
"""Variant of a recipe of ONNX Runtime: Q/DQ nodes are computed in fp32, as they are in the graph.

The int8 kernels that ONNX Runtime would otherwise use in their place can saturate.
"""
"""Variant of a recipe: the unchanged ONNX file of the user."""

BEST_MODES: tuple[CompileMode | None, ...] = (None, "reduce-overhead", "max-autotune")
FOR_GPUS = ("reduce-overhead",)  # on a CPU there are no launches to save
LOW = (Precision.FP16, Precision.BF16)


def baseline_recipes(
    names: Sequence[str],
    target: Target,
    castable: bool = True,
) -> tuple[Recipe, ...]:
    """Return the baselines of a PyTorch model by the plan's names. Eager fp32 comes first.

    `castable`: whether the module can be cast to 16 bits. PlanError for a 16-bit baseline if not.
    """
    expanded = ["eager"]
    for name in names:
        expanded += _expanded_name(name, target, castable)
    return tuple(dict.fromkeys(_baseline(name, target, castable) for name in expanded))


def _expanded_name(name: str, target: Target, castable: bool) -> tuple[str, ...]:
    """Expand `default` and `best` for this device. Any other name stands for itself."""
    if name not in ("default", "best"):
        return (name,)
    floats = _floats(target) if target.compute_capability else [Precision.FP32]
    able = [precision for precision in floats if castable or precision not in LOW]
    plain = [f"eager {precision}" for precision in able if precision is not Precision.BF16]
    if name == "default":
        return tuple(plain)
    fast = able[1:] or able
    modes = [mode for mode in BEST_MODES if target.compute_capability or mode not in FOR_GPUS]
    compiled = []
    for mode in modes:
        prefix = f"compile {mode}" if mode else "compile"
        compiled += [f"{prefix} {precision}" for precision in fast]
    return (*plain, *compiled)


def _baseline(name: str, target: Target, castable: bool) -> Recipe:
    match = BASELINE.fullmatch(name)
    assert match is not None  # the plan was checked
    kind, mode = match[1].split()[0], match[2]
    precision = Precision(match[3] or Precision.FP32)
    if precision is Precision.TF32 and not target.compute_capability:
        raise PlanError(
            f"benchmark.baselines: '{name}' needs an NVIDIA GPU, and PyTorch runs on the CPU here",
            f"leave '{name}' out",
        )
    if precision in LOW and not castable:
        raise PlanError(
            f"benchmark.baselines: '{name}': the graph has fixed dtypes and cannot be cast",
            f"leave '{name}' out, or give a module without quantisation as `entrypoint`",
        )
    return Recipe.model_validate(
        {"backend": "pytorch", "precision": precision, "variant": kind, "mode": mode},
    )


def call_of(baseline: Recipe) -> str:
    """Return the Python call of a PyTorch baseline."""
    casts = {Precision.FP16: "module.half()", Precision.BF16: "module.bfloat16()"}
    module = casts.get(baseline.precision, "module")
    mode = f', mode="{baseline.mode}"' if baseline.mode else ""
    calls = {
        "eager": f"{module}(...)",
        "traced": f"torch.jit.optimize_for_inference(torch.jit.trace({module}, ...))",
        "compile": f"torch.compile({module}{mode})",
    }
    tf32 = 'torch.set_float32_matmul_precision("high"); '
    return (tf32 if baseline.precision is Precision.TF32 else "") + calls[baseline.variant]


def cpu_recipe_as_given(given: Precision | None) -> Recipe:
    """Return the recipe of an unchanged ONNX file on the CPU. Int8 Q/DQ run in int8."""
    if given is Precision.INT8:
        return Recipe(backend="onnxruntime", precision=given, quantizer="given", variant=AS_GIVEN)
    return Recipe(backend="onnxruntime", precision=Precision.FP32, variant=AS_GIVEN)


def recipe_as_given(backend: str, given: Precision | None, target: Target) -> Recipe:
    """Return the recipe of an unchanged ONNX file on one backend, with ONNX Runtime on the CPU."""
    if backend == "tensorrt":
        return gpu_recipes_as_given(given, target, ())[0]
    return cpu_recipe_as_given(given).model_copy(update={"backend": backend})


def gpu_recipes_as_given(
    given: Precision | None,
    tensorrt: Target | None,
    providers: Collection[OrtProvider],
) -> tuple[Recipe, ...]:
    """Return the recipes of an unchanged ONNX file on a GPU: TensorRT, and ONNX Runtime's CUDA.

    TensorRT builds as trtexec does, with TF32, or in the precision of the file's own Q/DQ.
    """
    recipes = []
    if tensorrt and given:
        recipes.append(
            Recipe(backend="tensorrt", precision=given, quantizer="given", variant=AS_GIVEN),
        )
    elif tensorrt:
        precision = Precision.TF32 if Precision.TF32 in _floats(tensorrt) else Precision.FP32
        recipes.append(
            Recipe(
                backend="tensorrt",
                precision=precision,
                realised_in=realised_in("tensorrt", precision),
                variant=AS_GIVEN,
            ),
        )
    if "cuda" in providers and not given:
        recipes.append(
            Recipe(
                backend="onnxruntime",
                precision=Precision.TF32,
                realised_in="runtime",
                provider="cuda",
                variant=AS_GIVEN,
            ),
        )
    return tuple(recipes)


def deliverable_recipe(baseline: Recipe) -> Recipe:
    """Return the recipe in which a baseline is delivered: a program for PyTorch, else itself."""
    if baseline.backend != "pytorch":
        return baseline
    form = "compile" if baseline.variant == "compile" else "exported"
    return Recipe.model_validate(
        {
            "backend": "torch",
            "precision": baseline.precision,
            "realised_in": "runtime",
            "form": form,
            "mode": baseline.mode,
        },
    )
