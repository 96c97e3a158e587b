"""Layers of real engines, as TensorRT 10.6 told and timed them on an H200: ResNet-18 at batch 8,
and a BERT encoder of 3 layers at 8 x 128.

tests/data/trt_layers.json.gz holds, per engine, the inspector's JSON (detailed verbosity) and, per
layer, the number of runs and its median in ms.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from pathlib import Path
from typing import Any

from pipeline.backends.tensorrt.layers import layers_from_inspector
from pipeline.core.recipe import Precision
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.stages.inspect_layers import with_operators

CAPTURED = {
    "resnet_fp32": Precision.FP32,
    "resnet_tf32": Precision.TF32,
    "resnet_fp16": Precision.FP16,
    "resnet_fp16weak": Precision.FP16,  # weakly typed, by flag
    "resnet_fp16hw": Precision.FP16,  # hardware-compatible
    "resnet_int8qdq": Precision.INT8,  # explicit, residual Adds quantised on both inputs
    "resnet_int8impl": Precision.INT8,  # implicit, by TensorRT's calibrator
    "enc_fp32": Precision.FP32,
    "enc_fp16": Precision.FP16,
}


@functools.cache
def captured() -> dict[str, dict[str, Any]]:
    """Inspector outputs and times of real engines of TensorRT."""
    content: dict[str, dict[str, Any]] = json.loads(
        gzip.decompress((Path(__file__).parents[1] / "data" / "trt_layers.json.gz").read_bytes())
    )
    return content


def seconds_of(name: str) -> dict[str, list[float]]:
    """Times of the layers of a real engine."""
    return {layer: [ms * 1e-3] for layer, (_, ms) in captured()[name]["times"].items()}


@functools.cache
def real_table(name: str) -> LayerTable:
    """Layer table of a real engine."""
    layers = layers_from_inspector(captured()[name]["inspector"], seconds_of(name))
    sizes = {"b": 8} if name.startswith("resnet") else {"b": 8, "s": 128}
    operators = {node: _operator(node) for layer in layers for node in layer.nodes}
    return with_operators(LayerTable(sizes=sizes, runs=20, layers=layers), operators)


def _operator(node: str) -> str:
    """These two exporters name a node after its operator, ours name the Q/DQ and Cast nodes that
    they add.
    """
    for ending, operator in (
        ("_dq", "DequantizeLinear"),
        ("_q", "QuantizeLinear"),
        ("_to_fp16", "Cast"),
        ("_to_fp32", "Cast"),
    ):
        if node.endswith(ending):
            return operator
    return re.sub(r"_\d+$", "", node.rsplit("/", 1)[-1])


def layer(precision: str, seconds: float | None = 1.0, **fields: object) -> Layer:
    """A heavy layer of its own, known by its kernel."""
    defaults: dict[str, object] = {
        "name": f"{precision} layer",
        "kind": "gemm",
        "evidence": "tactic",
        "heavy": True,
        "seconds": seconds,
    }
    return Layer.model_validate({**defaults, "precision": precision, **fields})


def table(*layers: Layer) -> LayerTable:
    """Layer table of batch 8."""
    return LayerTable(sizes={"batch": 8}, runs=20, layers=layers)
