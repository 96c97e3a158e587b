"""Preprocess: write the plan's preprocessing of images into the exported graph.

The result is compared with the graph before, behind the same steps in numpy.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.core.artifacts import Note, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import InternalError
from pipeline.onnx_graph.compare import compare_graphs
from pipeline.onnx_graph.feeds import feeds_of
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.preprocess import Steps, preprocessed, raw_specs
from pipeline.quantization.existing_qdq import QUANTISED_TOLERANCE, given_precision
from pipeline.quantization.half_precision import raise_opset

STAGE = "preprocess"
FILE = "model.onnx"
RESIZE_OPSET = 13  # the first in which Resize takes a size without a region
TOLERANCE = 1e-4  # as compare_graphs takes it


def preprocess(
    model: OnnxModel,
    profiles: tuple[Profile, ...],
    steps: Steps,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """Write the model with the steps inside under `out`. `samples` are raw.

    InternalError if its outputs differ from those of `model` behind the steps in numpy, on the
    samples and on generated inputs at min, opt, max and an odd size of every profile.
    """
    from pipeline.onnx_graph.processing import with_preprocessing

    progress(None, "writing the preprocessing into the graph")
    proto = read_proto(model.path)
    tolerance = TOLERANCE if given_precision(proto.graph) is None else QUANTISED_TOLERANCE
    if any(step.resize for step in steps.values()):
        proto = raise_opset(proto, RESIZE_OPSET)
    write_proto(with_preprocessing(proto, steps), out / FILE)
    after = onnx_model(out, FILE, model.precision)
    raw = raw_specs(model.inputs, steps)
    if after.inputs != raw:
        raise InternalError(f"expected the inputs {raw}, the graph has {after.inputs}")
    progress(None, "comparing with the steps in numpy")
    feeds = feeds_of(after, profiles, samples)
    prepare = partial(preprocessed, steps=steps)
    if fault := compare_graphs(model.path, after.path, feeds, tolerance, prepare):
        raise InternalError(f"the preprocessing in the graph differs from that in numpy: {fault}")
    notes = tuple(
        Note(
            stage=STAGE,
            text=(
                f"'{spec.name}' comes in as {spec.dtype} [{', '.join(map(str, spec.shape))}], and"
                " its preprocessing in the graph computes the same as in numpy"
            ),
            level="info",
        )
        for spec in raw
        if spec.name in steps
    )
    return after.model_copy(update={"notes": notes})
