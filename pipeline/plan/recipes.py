"""Turn candidates of the plan into recipes. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from pipeline.core.artifacts import Target
from pipeline.core.recipe import CalibrationMethod, Placement, Precision, Recipe
from pipeline.errors import PlanError
from pipeline.plan.candidate_checks import check_candidate, check_choices, is_weight_only, refusal
from pipeline.plan.precisions import WEIGHT_QUANTIZERS, realised_in, weight_bits
from pipeline.plan.schema import CandidateConfig, PlacementConfig, Plan

MAX_RECIPES = 32
"""Limit per candidate of the plan: each recipe is built, checked and measured for seconds."""

QUANTIZER_BACKENDS = {"nncf": "openvino", "modelopt": "tensorrt"}
"""The backend that each foreign quantizer places Q/DQ for."""

USUAL_BLOCK = 32
"""Weights per scale if the plan gives no `block_size`: the smallest, which is most accurate."""


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
    check_choices(
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
    check_candidate(candidate, plan, given)
    if given:
        update = {"quantizer": "given", "rest": _rest(candidate.backend)}
        return _float_recipe(candidate).model_copy(update=update)
    if is_weight_only(candidate):
        return _weight_only_recipe(candidate)
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
    raise refusal(
        candidate,
        f"the quantizer `{quantizer}` is for {only} only",
        f"leave it out, or take {only}",
    )


def _weight_only_recipe(candidate: CandidateConfig) -> Recipe:
    """Return the recipe of 4- or 8-bit weights with float activations. Needs no data."""
    backend = candidate.backend
    in_blocks = backend == "onnxruntime" or candidate.precision is Precision.INT4
    return _float_recipe(candidate).model_copy(
        update={
            "weight_only": True,
            "block_size": candidate.block_size or (USUAL_BLOCK if in_blocks else 0),
            "quantizer": WEIGHT_QUANTIZERS[backend],
            "activation": "int8" if candidate.activation == "int8" else "float",
        }
    )


def _rest(backend: str) -> Precision:
    """Return the precision of layers that are not quantised.

    fp16 for TensorRT: a strongly typed int8 engine with the rest in fp32 is slower than fp16.
    """
    return Precision.FP16 if backend.startswith("tensorrt") else Precision.FP32


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


def resolve_method(method: str, language_model: bool) -> CalibrationMethod:
    """Return the calibration method. `auto` is min-max for language models, else entropy.

    The outliers of language models carry meaning, and entropy would clip them.
    """
    if method != "auto":
        return CalibrationMethod(method)
    return CalibrationMethod.MINMAX if language_model else CalibrationMethod.ENTROPY


def _activation(candidate: CandidateConfig) -> str:
    if candidate.activation != "auto":
        return candidate.activation
    return "int8" if candidate.backend.startswith("tensorrt") else "uint8"
