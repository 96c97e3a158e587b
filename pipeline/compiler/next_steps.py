"""What to try after a candidate that failed, cheapest first, and after faulty data. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from pipeline.core.artifacts import NoteCode
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.results.accuracy import DataFault
from pipeline.results.candidates import Candidate, Origin

MIN_BLOCK = 32  # weights that share a scale
TRAIN_IN_16_BITS = (
    "train or fine-tune the model in fp16 or bf16 (mixed precision), then export it again"
)
FIX_LABELS = (
    "check that the labels belong to these samples, row by row, and that the weights are trained:"
    " a reference at chance level proves nothing about an engine"
)
FIX_CALIBRATION = (
    "calibrate on samples of the same kind as those of the selection set, prepared in the same way"
    " (scale, mean, colour order, tokens)"
)
FIXES = {DataFault.LABELS: FIX_LABELS, DataFault.CALIBRATION: FIX_CALIBRATION}
KEEP_WORST = "the worst layers unquantised: `keep_fp32: auto`"
AFTER_INT8 = (
    "bf16 or fp16 instead of int8",
    "quantisation-aware training, then compile the Q/DQ model",
)
FIND_LAYERS = "see the layer table of the report: it names the layers in another precision"
SEE_LAYERS = f"{FIND_LAYERS}; call the candidate by that precision, or leave it out"
QUANTISE_MORE = (
    "run more of the model in 8 bits: `placement: {last_layer: true}`, fewer nodes in `keep_fp32`,"
    " and on onnxruntime `activation: uint8`"
)
FIX_PAIRS = (
    "run `crucible lint MODEL --backend {backend}`: it lists the Q/DQ that prevent 8 bits; the"
    " compile has repaired those with an exact fix, so change the others in the model"
)
SEVEN_BITS = (
    "use a CPU with VNNI or AMX, or train with weights limited to 7 bits (-64 to 63, with twice the"
    " scale)"
)
RAISE_LIMIT = "raise `objective.max_latency_ms`, or give other candidates or smaller batches"


def after_none(candidates: Sequence[Candidate], miss: Candidate | None) -> tuple[str, ...]:
    """Return the next steps if there is no winner.

    The layers of a mislabelled engine come first, because they tell more than a near miss.
    """
    mismatches = [candidate.recipe for candidate in candidates if candidate.state == "mislabelled"]
    if mismatches:
        return (*_after_mislabelled(mismatches), *(next_steps(miss) if miss else ()))
    reports = [candidate.selection for candidate in candidates if candidate.selection]
    faults = set(chain.from_iterable(report.data_faults for report in reports))
    if DataFault.LABELS in faults:  # the data is at fault, not an engine
        return fix_data(faults)
    if miss and miss.state == "over the limit":
        return (RAISE_LIMIT,)
    in_16_bits = [
        candidate
        for candidate in candidates
        if candidate.recipe.precision in (Precision.FP16, Precision.BF16)
    ]
    steps = next_steps(miss)
    if miss in in_16_bits and any(each.origin is Origin.FALLBACK for each in in_16_bits):
        steps = (TRAIN_IN_16_BITS,)  # a rescue has tried all other steps already
    return (*fix_data(faults), *steps)


def _after_mislabelled(recipes: Sequence[Recipe]) -> tuple[str, ...]:
    """Return the next steps for engines that do not run the precision of their label.

    A model with its own Q/DQ has no other label and no placement to choose.
    """
    backends = dict.fromkeys(recipe.backend for recipe in recipes if recipe.quantizer == "given")
    if backends:
        return (FIND_LAYERS, *(FIX_PAIRS.format(backend=backend) for backend in backends))
    if any(recipe.precision is Precision.INT8 for recipe in recipes):
        return SEE_LAYERS, QUANTISE_MORE
    return (SEE_LAYERS,)


def fix_data(faults: Collection[DataFault]) -> tuple[str, ...]:
    """Return the next steps for faulty data, in the order of FIXES."""
    return tuple(advice for fault, advice in FIXES.items() if fault in faults)


def _other_ranges(recipe: Recipe) -> list[str]:
    """Return the settings of an int8 or fp8 recipe that are worth a change.

    Left out are those that its quantizer decides by itself, and those that were tried already.
    """
    steps = []
    if recipe.method is not None and not recipe.try_methods:
        method = "percentile" if recipe.method is CalibrationMethod.MINMAX else "minmax"
        steps.append(f"another calibration method: `method: {method}`")
    own = recipe.quantizer == "crucible" and recipe.realised_in == "graph"
    if own and not recipe.keep_worst:
        steps.append(KEEP_WORST)
    if own and recipe.activation == "uint8" and recipe.weight_bits == 8:
        steps.append("7-bit weights: `weight_bits: 7`")
    return steps


def next_steps(miss: Candidate | None) -> tuple[str, ...]:
    """Return the next steps after this failure, cheapest first."""
    if miss is None:
        return (
            (
                "run `crucible doctor` to see what this host can build, and `crucible inspect MODEL"
                " --backend B` for unsupported nodes"
            ),
        )
    recipe = miss.recipe
    if recipe.quantizer == "given":
        return _after_own_qdq(miss)
    if recipe.weight_only:
        return _after_weight_only(recipe)
    if recipe.precision in (Precision.INT8, Precision.FP8):
        return (*_other_ranges(recipe), *AFTER_INT8)
    if recipe.precision in (Precision.FP16, Precision.BF16):
        return (
            "keep the overflowing nodes in fp32: `keep_fp32: [NODE]`",
            "bf16 instead of fp16, or fp32",
            TRAIN_IN_16_BITS,
        )
    return (
        (
            "check the export: compare `crucible inspect` before and after simplification, or set"
            " `simplify.enabled: false`"
        ),
    )


def _after_own_qdq(miss: Candidate) -> tuple[str, ...]:
    steps = [
        (
            f"run `crucible lint MODEL --backend {miss.recipe.backend}`: it lists the model's own"
            " Q/DQ that do not suit this backend"
        ),
        "train longer with Q/DQ",
    ]
    if any(note.code is NoteCode.SATURATES for note in miss.notes):
        steps.insert(0, SEVEN_BITS)
    return tuple(steps)


def _after_weight_only(recipe: Recipe) -> tuple[str, ...]:
    steps = ["keep the worst or the last layer unquantised: `keep_fp32: [NODE]`"]
    if recipe.block_size > MIN_BLOCK:
        steps.insert(0, f"smaller blocks: `block_size: {recipe.block_size // 2}`")
    if recipe.precision is Precision.INT4:
        steps.append("8 bits instead of 4: `precision: int8, weight_only: true`")
    return tuple(steps)
