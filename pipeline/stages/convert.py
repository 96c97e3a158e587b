"""Convert: one recipe, one graph. Precision is written into it as Casts and Q/DQ pairs; names,
dtypes and shapes of the interface stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from pipeline.core import (
    CalibrationTable,
    Note,
    OnnxModel,
    Precision,
    Progress,
    Recipe,
    Tensors,
    silent,
)
from pipeline.errors import PlanError, UnsupportedError
from pipeline.onnx_graph.activations import Bounds, observe, open_probe
from pipeline.onnx_graph.files import copy_model, onnx_model, read_proto, write_proto
from pipeline.onnx_graph.inspect import kept_nodes, with_same_interface
from pipeline.onnx_graph.recurrent import parser_reasons
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
from pipeline.quantization.placement import KERNELS, Kernels, place

LOW = (Precision.FP16, Precision.BF16)
QUANTISED = (Precision.INT8, Precision.FP8)
TENSORRTS = ("tensorrt", "tensorrt_rtx")
HALF_STEP = 1 / 255  # of the largest value: as far as int8 itself rounds that


def convert(
    model: OnnxModel,
    recipe: Recipe,
    table: CalibrationTable | None,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """`model` as `recipe` wants it, in folder `out`.

    Which nodes fp16 would break is read off `table`, else off runs of `samples`; with neither, a
    note says that nobody looked. A model that holds Q/DQ already keeps every one of its scales.
    Raises PlanError, UnsupportedError.
    """
    proto = read_proto(model.path)
    quantised = holds_qdq(proto.graph)
    quantise = (
        recipe.precision is Precision.INT8 and recipe.quantizer == "crucible" and not quantised
    )
    around = (
        recipe.rest if quantise or (quantised and recipe.quantizer == "given") else None
    )  # what surrounds the pairs
    low = next((each for each in (recipe.precision, around) if each in LOW), None)
    proto = flatten(raise_opset(proto, _least_opset(low, quantise, quantised)))
    kept = kept_nodes(proto.graph, recipe.keep_fp32)
    if recipe.realised_in == "runtime" or not (quantise or low):
        return _unchanged(model, recipe, quantised, out)
    notes: list[Note] = []
    reasons: dict[str, str] = {}
    if low is Precision.FP16:
        progress(0.1, "looking for values that fp16 cannot hold")
        reasons = reasons_for_fp32(proto.graph, _bounds(model, table, samples, notes))
        notes += overflow_notes(proto.graph, reasons)
    if low and recipe.backend in TENSORRTS:
        untyped = {
            name: why
            for name, why in parser_reasons(proto.graph, low).items()
            if name not in reasons
        }
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
    made = with_same_interface(model, onnx_model(out, "model.onnx", recipe.precision, tuple(notes)))
    return made.model_copy(update={"kept_fp32": kept_in_fp32(proto.graph, unnamed)})


def _least_opset(low: Precision | None, quantise: bool, quantised: bool) -> int:
    """The oldest operator set in which the converted graph can be said; 0 where nothing is asked of
    it.
    """
    return max(
        QDQ_OPSET if quantise else 0,
        MIN_OPSET[low] if low else 0,
        SCALES_OPSET if low and (quantise or quantised) else 0,
    )


def _unchanged(model: OnnxModel, recipe: Recipe, quantised: bool, out: Path) -> OnnxModel:
    """The same graph again; one that holds Q/DQ is int8 if the recipe calls it so."""
    copy_model(model.path, out / model.file)
    if not quantised:
        return onnx_model(out, model.file, model.precision)
    note = Note(
        stage="convert",
        text="the model holds Q/DQ pairs: every scale is kept, nothing is calibrated",
        level="info",
    )
    return onnx_model(
        out,
        model.file,
        recipe.precision if recipe.precision in QUANTISED else model.precision,
        (note,),
    )


def _rounded(
    exact: Mapping[str, Scale], rounded: Mapping[str, Scale], low: Precision
) -> list[Note]:
    """How far the model's own scales moved, where the operators around them are in 16 bits and the
    scales must be too.
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
    """What every activation reaches: from the table, or from runs of real samples."""
    if table is not None:
        return {
            name: Bounds(seen.minimum, seen.maximum, seen.count, seen.nonfinite)
            for name, seen in table.ranges.items()
        }
    if not samples:
        notes.append(
            Note(stage="convert", text="no data: nobody looked whether activations overflow fp16")
        )
        return {}
    return observe(open_probe(model), samples)


def _quantise(
    proto: onnx.ModelProto, recipe: Recipe, table: CalibrationTable | None, kept: frozenset[str]
) -> list[Note]:
    """Insert Q/DQ in place. UnsupportedError if there is no place for any, or the graph is not
    fp32.
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
            "nothing can be quantised: no operator of this graph falls under the placement rules,"
            " so int8 would only be its name"
        )
        raise UnsupportedError(
            message,
            "choose another precision, or switch on more rules, for example `placement:"
            " {last_layer: true}`",
        )
    weights = {site.tensor for site in sites.weights}
    if narrow := [
        tensor.name
        for tensor in proto.graph.initializer
        if tensor.name in weights and tensor.data_type != onnx.TensorProto.FLOAT
    ]:
        raise UnsupportedError(
            f"int8 is made from an fp32 graph, and the weight '{narrow[0]}' is not fp32",
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
