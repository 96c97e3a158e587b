"""GRU, LSTM and RNN in 16 bits: what TensorRT's parser would make in fp32 is given to it, and the
answers stay.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from pipeline.backends.tensorrt import rtx as tensorrt_rtx_
from pipeline.core.artifacts import BuildOptions, OnnxModel
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import onnx_model
from pipeline.onnx_graph.recurrent import STATES
from pipeline.quantization.half_precision import LOW
from pipeline.quantization.sensitivity_graph import round_16_bits, tensors_of_16_bits
from pipeline.stages.convert import convert
from tests.builders.recurrent import PROFILE, Form, feeds_of, forms, write

MAX_ERROR = {Precision.FP16: 4e-3, Precision.BF16: 3e-2}  # of an output's largest value
SIXTEEN_BITS = (Precision.FP16, Precision.BF16)


def stays_in_fp32(form: Form, precision: Precision) -> bool:
    return form.lengths or (form.operator == "GRU" and precision is Precision.BF16)


def converted(
    folder: Path, form: Form, precision: Precision, backend: str = "tensorrt"
) -> tuple[OnnxModel, OnnxModel]:
    (folder / "out").mkdir()
    model = write(folder / "source", form)
    return model, convert(
        model, Recipe(backend=backend, precision=precision), None, (feeds_of(form),), folder / "out"
    )


def types_of(proto: onnx.ModelProto) -> dict[str, int]:
    graph = onnx.shape_inference.infer_shapes(proto, strict_mode=True).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def runnable(model: OnnxModel, folder: Path) -> Path:
    """The graph as ONNX Runtime can run it on a CPU, which has no bf16: fp32, rounded to bf16 at
    each tensor.
    """
    if model.precision is not Precision.BF16:
        return model.path
    proto = onnx.load(model.path)
    round_16_bits(proto, tensors_of_16_bits(proto))
    onnx.save(proto, folder / "rounded.onnx")
    return folder / "rounded.onnx"


@pytest.mark.parametrize("precision", SIXTEEN_BITS)
@pytest.mark.parametrize("form", [*forms()], ids=str)
def test_every_input_of_a_recurrent_node_has_one_type_and_the_answers_stay(
    tmp_path: Path, form: Form, precision: Precision
) -> None:
    model, result = converted(tmp_path, form, precision)
    proto = onnx.load(result.path)
    onnx.checker.check_model(proto, full_check=True)
    (node,) = (node for node in proto.graph.node if node.op_type == form.operator)
    types = types_of(proto)
    floats = {
        types[name]
        for name in (*node.input, *node.output)
        if name and types[name] != TensorProto.INT32
    }
    if stays_in_fp32(form, precision):
        assert floats == {TensorProto.FLOAT}
        assert any("'recurrent'" in note.text for note in result.notes)
    else:
        assert floats == {LOW[precision]}
        assert all(node.input[place] for place in STATES[form.operator]), (
            "the parser makes what is missing in fp32"
        )
        assert result.notes == ()
    graph = runnable(result, tmp_path)
    for time, batch in ((6, 3), (1, 1), (9, 4)) if form.dynamic else ((6, 3),):
        feeds = feeds_of(form, time, batch, seed=time)
        expected, got = open_reference(model.path)(feeds), open_reference(graph)(feeds)
        for name, want in expected.items():
            assert np.abs(got[name] - want).max() <= MAX_ERROR[precision] * np.abs(want).max(), name


@pytest.mark.parametrize("precision", [Precision.FP32, *SIXTEEN_BITS])
@pytest.mark.parametrize("form", [*forms()], ids=str)
def test_tensorrt_rtx_builds_every_form(tmp_path: Path, form: Form, precision: Precision) -> None:
    _, result = converted(tmp_path, form, precision, "tensorrt_rtx")
    recipe = Recipe(backend="tensorrt_rtx", precision=precision, compute_capability="8.9")
    options = BuildOptions(profiles=(PROFILE if form.dynamic else Profile(),))
    (tmp_path / "built").mkdir()
    engine = tensorrt_rtx_.build(result, recipe, options, tmp_path / "built")
    assert engine.size_bytes


def test_nodes_of_one_shape_share_their_zeros(tmp_path: Path) -> None:
    _, result = converted(tmp_path, Form("LSTM"), Precision.FP16)
    graph = onnx.load(result.path).graph
    (node,) = (node for node in graph.node if node.op_type == "LSTM")
    assert node.input[5] == node.input[6]
    assert sum(node.op_type == "Expand" for node in graph.node) == 1


def test_another_layout_has_its_batch_in_front(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]>
      net (float[N, T, 4] x, float[1, 12, 4] w, float[1, 12, 4] r) => (float[N, T, 1, 4] y)
    { [recurrent] y = GRU <hidden_size = 4, layout = 1> (x, w, r) }"""
    (tmp_path / "out").mkdir()
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    result = convert(
        onnx_model(tmp_path, "model.onnx"),
        Recipe(backend="tensorrt", precision=Precision.FP16),
        None,
        (),
        tmp_path / "out",
    )
    shape = next(node for node in onnx.load(result.path).graph.node if node.op_type == "Concat")
    assert shape.input[0].endswith("batch")
