"""Small graphs for calibrating and converting, as text; weights that the text leaves open are
drawn. And what tests of conversion compare by.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from pipeline.core.artifacts import CalibrationTable, OnnxModel, TensorRange
from pipeline.core.recipe import CalibrationMethod, Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.onnx_graph.activations import observe, open_probe
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import onnx_model
from pipeline.stages.convert import convert

FP16 = Recipe(backend="tensorrt", precision=Precision.FP16)
BF16 = Recipe(backend="tensorrt", precision=Precision.BF16)

RESIDUAL = """
<ir_version: 9, opset_import: ["" : 20]>
net (float[N, 3, 8, 8] x) => (float[N, 5] y)
<float[4, 3, 3, 3] w1, float[4] b1, float[4, 4, 3, 3] w2, float[4] b2, float[4, 4, 3, 3] w4,
  float[4, 5] w3, float[5] b3>
{
    [conv1] c1 = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    [relu1] r1 = Relu (c1)
    [conv2] c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2, b2)
    [add] s = Add (c2, r1)
    [relu2] r2 = Relu (s)
    [conv3] c3 = Conv <pads = [1, 1, 1, 1]> (r2, w4)
    [pool] p = GlobalAveragePool (c3)
    [flat] f = Flatten (p)
    [fc] y = Gemm (f, w3, b3)
}
"""

DOWNSAMPLE = """
<ir_version: 9, opset_import: ["" : 20]>
net (float[N, 3, 8, 8] x) => (float[N, 5] y)
<float[4, 3, 3, 3] w1, float[4] b1, float[6, 4, 3, 3] w2, float[6, 6, 3, 3] w3,
  float[6, 4, 1, 1] w4, float[6, 6, 3, 3] w5, float[6, 6, 3, 3] w6,
 float[6, 5] w7>
{
    [stem] c = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    [relu0] r0 = Relu (c)
    [conv1] c1 = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (r0, w2)
    [relu1] r1 = Relu (c1)
    [conv2] c2 = Conv <pads = [1, 1, 1, 1]> (r1, w3)
    [down] d = Conv <strides = [2, 2]> (r0, w4)
    [add1] s1 = Add (c2, d)
    [relu2] r2 = Relu (s1)
    [conv3] c3 = Conv <pads = [1, 1, 1, 1]> (r2, w5)
    [relu3] r3 = Relu (c3)
    [conv4] c4 = Conv <pads = [1, 1, 1, 1]> (r3, w6)
    [add2] s2 = Add (r2, c4)
    [relu4] r4 = Relu (s2)
    [pool] p = GlobalAveragePool (r4)
    [flat] f = Flatten (p)
    [fc] y = Gemm (f, w7)
}
"""
"""Two residual blocks as in a ResNet: one that halves the image, with a convolution on both ways,
and the last one before the classifier.
"""

ATTENTION = """
<ir_version: 9, opset_import: ["" : 20]>
net (float[N, T, 8] x, float[N, 1, T] mask) => (float[N, T, 8] y)
<float[8, 8] wq, float[8, 8] wk, float[8, 8] wo, float[8] bo, float[8] g>
{
    [q] q = MatMul (x, wq)
    [k] k = MatMul (x, wk)
    [kt] t = Transpose <perm = [0, 2, 1]> (k)
    [scores] a = MatMul (q, t)
    [masked] m = Add (a, mask)
    [softmax] p = Softmax (m)
    [mix] v = MatMul (p, x)
    [o] o = MatMul (v, wo)
    [bias] ob = Add (o, bo)
    [skip] s = Add (ob, x)
    [norm] y = LayerNormalization (s, g)
}
"""


def proto_from_text(text: str) -> onnx.ModelProto:
    """The parsed model, with normal random numbers for every initializer without values."""
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(text)
    for value in list(proto.graph.value_info):
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        weights = (random.standard_normal(dims) / np.sqrt(max(1, np.prod(dims[1:])))).astype(
            np.float32
        )
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, value.name))
        proto.graph.value_info.remove(value)
    return proto


def model_from_text(folder: Path, text: str) -> OnnxModel:
    """Write a model in the text form of ONNX as a file of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(proto_from_text(text), str(folder / "source.onnx"))
    return onnx_model(folder, "source.onnx")


def images(count: int, seed: int = 0) -> Tensors:
    """Random images x [count, 3, 8, 8]."""
    return {"x": np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)}


def table_of(ranges: dict[str, tuple[float, float]]) -> CalibrationTable:
    """A table with these ranges, as min-max would give them."""
    entries = {
        name: TensorRange(minimum=low, maximum=high, low=low, high=high, count=1)
        for name, (low, high) in ranges.items()
    }
    return CalibrationTable(
        root=Path(),
        file="table.json",
        method=CalibrationMethod.MINMAX,
        set_digest="",
        samples=1,
        ranges=entries,
    )


def ranges_on(model: OnnxModel, feeds: Tensors) -> CalibrationTable:
    """Table with the ranges of every tensor on these feeds."""
    return table_of(
        {
            name: (values.minimum, values.maximum)
            for name, values in observe(open_probe(model), [feeds]).items()
        }
    )


def converted(
    folder: Path, text: str, recipe: Recipe, feeds: Tensors
) -> tuple[OnnxModel, OnnxModel, onnx.GraphProto]:
    """The source, the converted model, and its graph, checked by ONNX's strict checker."""
    model = model_from_text(folder / "source", text)
    out = folder / "out"
    out.mkdir()
    result = convert(model, recipe, ranges_on(model, feeds), (), out)
    proto = onnx.load(str(result.path))
    onnx.checker.check_model(proto, full_check=True)
    assert [(s.name, s.dtype, s.shape) for s in (*result.inputs, *result.outputs)] == [
        (s.name, s.dtype, s.shape) for s in (*model.inputs, *model.outputs)
    ]
    return model, result, proto.graph


def error_of(before: OnnxModel, after: OnnxModel, feeds: Tensors) -> float:
    """Largest difference in units of the largest magnitude, over all outputs."""
    expected, got = open_reference(before.path)(feeds), open_reference(after.path)(feeds)
    return max(
        float(np.abs(np.subtract(got[name], want)).max() / np.abs(want).max())
        for name, want in expected.items()
    )


def operators(graph: onnx.GraphProto) -> Counter[str]:
    """Count the nodes of each operator."""
    return Counter(node.op_type for node in graph.node)


def dtypes(graph: onnx.GraphProto) -> dict[str, int]:
    """Map the name of each initializer to its dtype."""
    return {tensor.name: tensor.data_type for tensor in graph.initializer}
