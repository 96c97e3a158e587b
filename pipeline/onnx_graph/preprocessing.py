"""Write the preprocessing of images into a graph, before its first nodes.

Each step is a node of its own, which quantisation and 16-bit conversion leave in fp32
(`kept_nodes`).
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from pipeline.core import ImageResize, Preprocess, TensorSpec
from pipeline.errors import ModelError
from pipeline.onnx_graph.inspect import specs_of
from pipeline.onnx_graph.rewriting import exported, imported, initializer
from pipeline.preprocess import NODE_PREFIX, Steps, raw_specs


def with_preprocessing(proto: onnx.ModelProto, steps: Steps) -> onnx.ModelProto:
    """Return the model with the steps of each input inside: these inputs are uint8 [N, H, W, C].

    A resize needs opset 13. PlanError for steps that do not fit the inputs, ModelError for an
    input that is an output too.
    """
    raw = {spec.name: spec for spec in raw_specs(specs_of(proto)[0], steps)}
    model = imported(proto)
    inputs = model.graph.inputs
    for index, value in enumerate(inputs):
        if value.name is not None and value.name in steps:
            inputs[index] = _raw_input(model.graph, value, raw[value.name], steps[value.name])
    return exported(model)


def _raw_input(graph: ir.Graph, value: ir.Value, spec: TensorSpec, step: Preprocess) -> ir.Value:
    """Add the steps between a new raw input, which takes the name, and the readers of the old."""
    if value.is_graph_output():
        raise ModelError(
            f"'{spec.name}' is an input and an output, so it cannot be preprocessed inside",
            f"remove the output '{spec.name}' from the model",
        )
    raw = ir.Value(
        name=spec.name, type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape(spec.shape)
    )
    writer = _Writer(graph, f"{NODE_PREFIX}{spec.name}/")
    pixels = writer.add("Cast", raw, to=ir.DataType.FLOAT)
    if step.layout == "NCHW":
        pixels = writer.add("Transpose", pixels, perm=[0, 3, 1, 2])
    if step.resize:
        pixels = writer.resized(pixels, step.resize, step.layout)
    # x * factor + shift, computed in float64 and rounded once
    by_channel = (-1,) if step.layout == "NHWC" else (-1, 1, 1)
    std = np.array(step.std).reshape(by_channel)
    factor = (step.scale / std).astype(np.float32)
    shift = (-np.array(step.mean).reshape(by_channel) / std).astype(np.float32)
    pixels = writer.add("Mul", pixels, writer.constant("factor", factor))
    pixels = writer.add("Add", pixels, writer.constant("shift", shift))
    pixels.type, pixels.shape = value.type, value.shape
    value.replace_all_uses_with(pixels)
    return raw


class _Writer:
    """Appends the nodes of one input to a graph."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self._graph, self._prefix = graph, prefix

    def add(
        self, operator: str, *inputs: ir.Value | None, **attributes: int | str | list[int]
    ) -> ir.Value:
        name = f"{self._prefix}{operator.lower()}"
        node = ir.node(operator, inputs, attributes, outputs=[ir.Value(name=f"{name}_out")])
        node.name = name
        self._graph.append(node)
        return node.outputs[0]

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        return initializer(self._graph, f"{self._prefix}{name}", array)

    def resized(self, pixels: ir.Value, resize: ImageResize, layout: str) -> ir.Value:
        scales = np.ones(4, np.float32)
        first = layout.index("H")
        for axis, (size, target) in enumerate(
            zip(resize.source, resize.target, strict=True), start=first
        ):
            scales[axis] = _factor(size, target)
        return self.add(
            "Resize",
            pixels,
            None,
            self.constant("scales", scales),
            mode="linear",
            coordinate_transformation_mode="half_pixel",
        )


def _factor(size: int, target: int) -> np.float32:
    """Return the fp32 factor for which backends compute exactly `target`: they round down."""
    factor = np.float32(target / size)
    while int(factor * np.float32(size)) < target:
        factor = np.nextafter(factor, np.float32(np.inf))
    return factor
