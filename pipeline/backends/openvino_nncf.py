"""NNCF's post-training quantisation, for OpenVINO: an ONNX graph in, an ONNX graph with Q/DQ out, which builds like any other.

NNCF on OpenVINO's IR gives the same kernels at the same speed (ResNet-50: 11.6 ms against 11.2 ms here), but an artifact of a kind of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pipeline.backends.checks import installed_version, torch_hidden
from pipeline.config import CalibrationConfig
from pipeline.core import BuildOptions, Note, OnnxModel, Precision, Progress, Recipe, Tensors, silent
from pipeline.data import CalibrationSet
from pipeline.errors import ModelError, UnsupportedError
from pipeline.graph import kept_nodes, onnx_model, operator_histogram, read_proto, write_proto

FILE = "model.onnx"
MOST_SAMPLES = 300  # NNCF's own default: the means that it takes over samples hardly move after that
ATTENTION = frozenset({"Softmax", "LayerNormalization"})  # both in one graph: NNCF is told that it is a transformer


@dataclass(frozen=True, slots=True)
class Samples:
    """The calibration samples one by one, as often as NNCF asks for them: its ranges are means over samples."""

    source: CalibrationSet
    count: int
    progress: Progress

    def __iter__(self) -> Iterator[Tensors]:
        for index, batch in enumerate(islice(self.source.batches(1), self.count)):
            self.progress(index / self.count, "NNCF: collecting statistics")
            yield batch.feeds


def quantize_with_nncf(
    model: OnnxModel,
    samples: CalibrationSet,
    recipe: Recipe,
    options: CalibrationConfig,
    allowed: BuildOptions,
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """The int8 graph as out/model.onnx, with the interface of `model`. NNCF chooses ranges and placement; `recipe.keep_fp32` is kept out."""
    installed_version("nncf", "pip install 'crucible[openvino]'")
    with torch_hidden():
        return _quantize(model, samples, recipe, options, out, progress)


def _quantize(model: OnnxModel, samples: CalibrationSet, recipe: Recipe, options: CalibrationConfig, out: Path, progress: Progress) -> OnnxModel:
    proto = read_proto(model.path)
    kept = sorted(kept_nodes(proto.graph, recipe.keep_fp32))
    progress(None, "loading NNCF")
    os.environ.setdefault("NNCF_CI", "1")  # nothing about a user's model is sent anywhere
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix

    count = min(options.samples or samples.samples, samples.samples, MOST_SAMPLES)
    transformer = options.language_model or operator_histogram(model.path).keys() >= ATTENTION
    fix = OverflowFix.ENABLE if recipe.weight_bits == 7 else OverflowFix.DISABLE
    try:
        quantized = nncf.quantize(
            proto,
            nncf.Dataset(Samples(samples, count, progress)),
            subset_size=count,
            target_device=nncf.TargetDevice.CPU,
            model_type=nncf.ModelType.TRANSFORMER if transformer else None,
            preset=nncf.QuantizationPreset.MIXED if recipe.activation == "uint8" else None,
            ignored_scope=nncf.IgnoredScope(names=kept) if kept else None,
            advanced_parameters=AdvancedQuantizationParameters(overflow_fix=fix),
        )
    except (nncf.ValidationError, nncf.UnsupportedModelError, nncf.InternalError) as error:
        raise UnsupportedError(f"NNCF cannot quantise this model: {error}", "use the quantizer `crucible`") from error
    write_proto(quantized, out / FILE)
    used = Note(stage="convert", text=f"NNCF took {count} of {samples.samples} calibration samples", level="info")
    made = onnx_model(out, FILE, Precision.INT8, (*model.notes, used))
    if (made.inputs, made.outputs) != (model.inputs, model.outputs):
        raise ModelError("NNCF changed the inputs or outputs of the model", "use the quantizer `crucible`")
    return made
