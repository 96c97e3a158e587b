"""Postprocess: write the plan's reduction of outputs into a graph.

The result is compared with the graph before, in front of the same steps in numpy.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import InternalError
from pipeline.onnx_graph.compare import compare_graphs
from pipeline.onnx_graph.feeds import feeds_of
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.postprocess import Steps, postprocessed
from pipeline.quantization.half_precision import raise_opset

FILE = "model.onnx"
OPSET = 13  # the first in which Softmax takes one axis


def postprocess(
    model: OnnxModel,
    profiles: tuple[Profile, ...],
    steps: Steps,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """Write the model with the steps inside under `out`.

    InternalError if its outputs differ from those of `model` in front of the steps in numpy, on the
    samples and on generated inputs at min, opt, max and an odd size of every profile.
    """
    from pipeline.onnx_graph.processing import with_postprocessing

    progress(None, "writing the postprocessing into the graph")
    proto = raise_opset(read_proto(model.path), OPSET)
    write_proto(with_postprocessing(proto, steps), out / FILE)
    after = onnx_model(out, FILE, model.precision)
    progress(None, "comparing with the steps in numpy")
    feeds = feeds_of(after, profiles, samples)
    finish = partial(postprocessed, steps=steps)
    if fault := compare_graphs(model.path, after.path, feeds, finish=finish):
        raise InternalError(f"the postprocessing in the graph differs from that in numpy: {fault}")
    return after.model_copy(update={"notes": model.notes})
