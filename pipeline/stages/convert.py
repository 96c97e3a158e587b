"""Convert: write a recipe's precision into a graph, as Casts and Q/DQ pairs.

Names, dtypes and shapes of the interface do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from pipeline.core.artifacts import CalibrationTable, Note, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.errors import PlanError, UnsupportedError
from pipeline.onnx_graph.activations import Bounds, observe, open_probe
from pipeline.onnx_graph.files import copy_model, onnx_model, read_proto, write_proto
from pipeline.onnx_graph.inspect import kept_nodes, with_same_interface
from pipeline.onnx_graph.recurrent import parser_reasons
from pipeline.plan.baselines import AS_GIVEN
from pipeline.quantization.existing_qdq import Scale, scales_by_node
from pipeline.quantization.half_precision import (
    MIN_OPSET,
    NAMED,
    QDQ_OPSET,
    SCALES_OPSET,
    flatten,
    fp32_notes,
    kept_in_fp32,
    lower,
    overflow_notes,
    raise_opset,
    reasons_for_fp32,
)
from pipeline.quantization.insert_qdq import Scheme, holds_qdq, insert_qdq
from pipeline.quantization.lint.fixes import mend
from pipeline.quantization.placement import KERNELS, Kernels, place

LOW = (Precision.FP16, Precision.BF16)
QUANTISED = (Precision.INT8, Precision.FP8)
TENSORRTS = ("tensorrt", "tensorrt_rtx")
EVERY_SCALE = "the model has Q/DQ pairs: every scale is kept, nothing is calibrated"
HALF_STEP = 1 / 255  # of the largest value: the rounding error of int8 itself


def convert(
    model: OnnxModel,
    recipe: Recipe,
    table: CalibrationTable | None,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """Convert `model` by `recipe`, into folder `out`.

    The nodes that overflow in fp16 are found by the ranges in `table`, or else by runs of
    `samples`. Without both, a note says that overflow was not checked. A model with Q/DQ nodes
    keeps all its scales; its pairs are repaired as by `crucible lint --fix`, unless the recipe is
    "as given". Raises PlanError, UnsupportedError.
    """
    proto = read_proto(model.path)
    quantised = holds_qdq(proto.graph)
    quantise = (
        recipe.precision is Precision.INT8 and recipe.quantizer == "crucible" and not quantised
    )
    # Precision of the operators around the Q/DQ pairs.
    around = recipe.rest if quantise or (quantised and recipe.quantizer == "given") else None
    precisions = (recipe.precision, around)
    low = next((precision for precision in precisions if precision in LOW), None)
    proto = flatten(raise_opset(proto, _least_opset(low, quantise, quantised)))
    kept = kept_nodes(proto.graph, recipe.keep_fp32)
    notes: list[Note] = []
    if quantised and recipe.quantizer == "given" and recipe.variant != AS_GIVEN:
        notes += _repair(proto, recipe.backend)
    if recipe.realised_in == "runtime":
        quantise, low = False, None
    if not (quantise or low or notes):
        return _unchanged(model, recipe, quantised, out)
    reasons: dict[str, str] = {}
    if low is Precision.FP16:
        progress(0.1, "checking for values that overflow fp16")
        reasons = reasons_for_fp32(proto.graph, _bounds(model, table, samples, notes))
        notes += overflow_notes(proto.graph, reasons)
    if low and recipe.backend in TENSORRTS:
        untyped = parser_reasons(proto.graph, low)
        untyped = {name: why for name, why in untyped.items() if name not in reasons}
        notes += fp32_notes(proto.graph, untyped, f"TensorRT takes them in {low} no other way")
        reasons |= untyped
    high = kept | reasons.keys()
    if quantise:
        progress(0.4, "placing Q/DQ pairs")
        notes += _quantise(proto, recipe, table, kept)
    if low:
        progress(0.6, f"casting to {low}")
        exact = {} if quantise else scales_by_node(proto.graph)
        lower(proto, low, high)
        notes += _rounded(exact, scales_by_node(proto.graph), low)
    progress(0.8, "writing")
    write_proto(proto, out / "model.onnx")
    unnamed = {name: why for name, why in reasons.items() if name not in kept}
    converted = onnx_model(out, "model.onnx", recipe.precision, tuple(notes))
    converted = with_same_interface(model, converted)
    return converted.model_copy(update={"kept_fp32": kept_in_fp32(proto.graph, unnamed)})


def _repair(proto: onnx.ModelProto, backend: str) -> list[Note]:
    """Repair the model's own Q/DQ pairs for a backend in place; return a note if any needed it."""
    applied = mend(proto, backend)
    if not applied:
        return []
    repairs = ", ".join(f"{rule} {count}x" for rule, count in applied.items())
    text = f"{EVERY_SCALE}; repairs that do not change the arithmetic: {repairs}"
    return [Note(stage="convert", text=text, level="info")]


def _least_opset(low: Precision | None, quantise: bool, quantised: bool) -> int:
    """Return the lowest opset that can express the converted graph; 0 without a conversion."""
    return max(
        QDQ_OPSET if quantise else 0,
        MIN_OPSET[low] if low else 0,
        SCALES_OPSET if low and (quantise or quantised) else 0,
    )


def _unchanged(model: OnnxModel, recipe: Recipe, quantised: bool, out: Path) -> OnnxModel:
    """Copy the graph. One with Q/DQ nodes gets the recipe's precision if that is quantised."""
    copy_model(model.path, out / model.file)
    if not quantised:
        return onnx_model(out, model.file, model.precision)
    note = Note(stage="convert", text=EVERY_SCALE, level="info")
    precision = recipe.precision if recipe.precision in QUANTISED else model.precision
    return onnx_model(out, model.file, precision, (note,))


def _rounded(
    exact: Mapping[str, Scale], rounded: Mapping[str, Scale], low: Precision
) -> list[Note]:
    """Return a note on how far the model's own scales moved.

    If the operators around the pairs are in 16 bits, the scales must be in 16 bits too.
    """
    moves = {
        name: np.abs(rounded[name] - scale).max() / np.abs(scale).max()
        for name, scale in exact.items()
        if name in rounded
    }
    far = {name: move for name, move in moves.items() if move > 0}
    if not far:
        return []
    worst = max(far, key=far.__getitem__)
    text = (
        f"{len(far)} of {len(moves)} scales of the model are rounded to {low}, by {far[worst]:.2g}"
        f" at most ('{worst}')"
    )
    return [Note(stage="convert", text=text, level="info" if far[worst] < HALF_STEP else "warning")]


def _bounds(
    model: OnnxModel,
    table: CalibrationTable | None,
    samples: tuple[Tensors, ...],
    notes: list[Note],
) -> Mapping[str, Bounds]:
    """Return the bounds of every activation, from the table or from runs of real samples."""
    if table is not None:
        return {
            name: Bounds(seen.minimum, seen.maximum, seen.count, seen.nonfinite)
            for name, seen in table.ranges.items()
        }
    if not samples:
        text = "no data: not checked whether activations overflow fp16"
        notes.append(Note(stage="convert", text=text))
        return {}
    return observe(open_probe(model), samples)


def _quantise(
    proto: onnx.ModelProto, recipe: Recipe, table: CalibrationTable | None, kept: frozenset[str]
) -> list[Note]:
    """Insert Q/DQ pairs into the graph in place.

    UnsupportedError if no operator can be quantised, or if the graph is not fp32.
    """
    if table is None:
        raise PlanError(
            "int8 needs ranges of the activations, and there is no calibration table",
            "give data.calibration in the plan",
        )
    ranged = frozenset(name for name, seen in table.ranges.items() if seen.count > seen.nonfinite)
    sites = place(
        proto.graph, recipe.placement, ranged, kept, KERNELS.get(recipe.backend, Kernels())
    )
    if not sites.weights and not sites.activations:
        message = (
            "nothing can be quantised: no operator of this graph matches the placement rules,"
            " so the engine would not run in int8"
        )
        raise UnsupportedError(
            message,
            "choose another precision, or enable more rules, for example `placement:"
            " {last_layer: true}`",
        )
    weights = {site.tensor for site in sites.weights}
    for tensor in proto.graph.initializer:
        if tensor.name in weights and tensor.data_type != onnx.TensorProto.FLOAT:
            raise UnsupportedError(
                f"int8 needs an fp32 graph, and the weight '{tensor.name}' is not fp32",
                "give the model in fp32",
            )
    insert_qdq(
        proto,
        sites,
        table.ranges,
        Scheme(recipe.activation == "uint8", recipe.weight_bits, recipe.rest is Precision.FP16),
    )
    notes = []
    if sites.unseen:
        text = (
            f"{len(sites.unseen)} nodes are not quantised, calibration saw no values of their"
            f" inputs: {', '.join(sites.unseen[:NAMED])}"
        )
        notes.append(Note(stage="convert", text=text))
    return notes
