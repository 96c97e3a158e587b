"""Write the plan's steps into a graph: preprocessing before its first nodes, postprocessing behind
its last.

Each step is a node of its own, which quantisation and 16-bit conversion leave in fp32
(`kept_nodes`).
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from pipeline import postprocess, preprocess
from pipeline.core.processing import ImageResize, Postprocess, Preprocess
from pipeline.core.shapes import TensorSpec
from pipeline.errors import ModelError
from pipeline.onnx_graph.inspect import specs_of
from pipeline.onnx_graph.rewriting import exported, imported, initializer

DTYPES = {"int64": ir.DataType.INT64, "float32": ir.DataType.FLOAT}


# --- preprocessing ---


def with_preprocessing(proto: onnx.ModelProto, steps: preprocess.Steps) -> onnx.ModelProto:
    """Return the model with the steps of each input inside: these inputs are uint8 [N, H, W, C].

    A resize needs opset 13. PlanError for steps that do not fit the inputs, ModelError for an
    input that is an output too.
    """
    raw = {spec.name: spec for spec in preprocess.raw_specs(specs_of(proto)[0], steps)}
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
    writer = _Writer(graph, f"{preprocess.NODE_PREFIX}{spec.name}/")
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
    """Appends the nodes of one input or output to a graph."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self._graph, self._prefix = graph, prefix

    def add(
        self, operator: str, *inputs: ir.Value | None, **attributes: int | str | list[int]
    ) -> ir.Value:
        return self.add_all(operator, 1, *inputs, **attributes)[0]

    def add_all(
        self,
        operator: str,
        count: int,
        *inputs: ir.Value | None,
        **attributes: int | str | list[int],
    ) -> tuple[ir.Value, ...]:
        """Add a node with `count` outputs, and return these."""
        name = f"{self._prefix}{operator.lower()}"
        outputs = [ir.Value(name=f"{name}_out{number or ''}") for number in range(count)]
        node = ir.node(operator, inputs, attributes, outputs=outputs)
        node.name = name
        self._graph.append(node)
        return tuple(node.outputs)

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


# --- postprocessing ---


def with_postprocessing(proto: onnx.ModelProto, steps: postprocess.Steps) -> onnx.ModelProto:
    """Return the model with reduced outputs. It needs opset 13.

    PlanError for steps that do not fit the outputs.
    """
    specs = {spec.name: spec for spec in postprocess.reduced_specs(specs_of(proto)[1], steps)}
    model = imported(proto)
    outputs = list(model.graph.outputs)
    model.graph.outputs.clear()
    for value in outputs:
        name = value.name or ""
        if name in steps:
            reduced = _reduced(model.graph, value, steps[name])
            for new, own_name in zip(reduced, postprocess.names_of(name, steps[name]), strict=True):
                _rename(new, specs[own_name])
            model.graph.outputs.extend(reduced)
        else:
            model.graph.outputs.append(value)
    return exported(model)


def _rename(value: ir.Value, spec: TensorSpec) -> None:
    value.name, value.shape = spec.name, ir.Shape(spec.shape)
    value.type = ir.TensorType(DTYPES[spec.dtype])


def _reduced(graph: ir.Graph, scores: ir.Value, step: Postprocess) -> tuple[ir.Value, ...]:
    """Add the steps behind an output. Return the indices and, for `top_k`, the values.

    Indices are chosen from the scores before a softmax, whose rounding could make them equal.
    """
    writer, axis = _Writer(graph, f"{postprocess.NODE_PREFIX}{scores.name}/"), step.axis
    if scores.dtype is not ir.DataType.FLOAT:
        scores = writer.add("Cast", scores, to=ir.DataType.FLOAT)
    if step.argmax:
        return (writer.add("ArgMax", scores, axis=axis, keepdims=0),)
    top_k = writer.constant("k", np.array([step.top_k], np.int64))
    values, indices = writer.add_all("TopK", 2, scores, top_k, axis=axis)
    if step.softmax:
        shares = writer.add("Softmax", scores, axis=axis)
        values = writer.add("GatherElements", shares, indices, axis=axis)
    return indices, values
