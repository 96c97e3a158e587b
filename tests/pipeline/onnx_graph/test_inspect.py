"""Inputs and outputs as a graph declares them."""

from pathlib import Path

import onnx
import pytest

from pipeline.errors import ModelError
from pipeline.onnx_graph.files import onnx_model
from pipeline.onnx_graph.inspect import specs_of
from tests.pipeline.onnx_graph.builders import parse, save


def test_specs_names_dtypes_and_dynamic_dims(tmp_path: Path) -> None:
    save(
        tmp_path,
        """g (float[batch, ?, 3] x, int64 step, bool[2] flags, bfloat16[?] b)
          => (float[batch, ?, 3] y, bool[2] f, bfloat16[?] c, int64 s)
        { y = Relu(x)  f = Not(flags)  c = Identity(b)  s = Identity(step) }""",
    )
    model = onnx_model(tmp_path, "model.onnx")
    assert [(spec.name, spec.dtype, spec.shape, spec.kind) for spec in model.inputs] == [
        ("x", "float32", ("batch", "x_1", 3), "dynamic"),
        ("step", "int64", (), "static"),
        ("flags", "bool", (2,), "static"),
        ("b", "bfloat16", ("b_0",), "dynamic"),
    ]
    assert [(spec.name, spec.shape, spec.kind) for spec in model.outputs][1:] == [
        ("f", (2,), "static"),
        ("c", ("c_0",), "data-dependent"),
        ("s", (), "static"),
    ]
    assert model.opset == 17
    assert model.root == tmp_path


def test_an_output_dim_left_open_is_inferred_from_the_inputs() -> None:
    _, outputs = specs_of(parse("g (float[N, 3] x) => (float[?, ?] y) { y = Relu(x) }"))
    assert (outputs[0].shape, outputs[0].kind) == (("N", 3), "dynamic")


def test_an_output_without_any_shape_is_inferred() -> None:
    proto = parse("g (float[N, 3] x) => (float[N] y) { y = Relu(x) }")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    assert specs_of(proto)[1][0].shape == ("N", 3)


def test_a_dim_of_minus_one_is_dynamic() -> None:
    proto = parse("g (float[1, 3] x) => (float[1, 3] y) { y = Relu(x) }")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert specs_of(proto)[0][0].shape == ("x_0", 3)


@pytest.mark.parametrize(
    ("graph", "shape"),
    [
        ("g (float[N] x) => (int64[1, ?] y) { y = NonZero(x) }", (1, "y_1")),
        (
            "g (float[N] x) => (int64[1, N] y) { y = NonZero(x) }",
            (1, "N"),
        ),  # the file says N: it cannot know
        ("g (float[N] x) => (float[M] y) { y, i, j, k = Unique(x) }", ("M",)),
        (
            (
                "g (float[N] x, bool[N] c) => (float[M] y) { h = Compress<axis = 0>(x, c)  y ="
                " Relu(h) }"
            ),
            ("M",),
        ),
        (
            "g (int64 n) => (int64[M] y) <int64 a = {0}, int64 b = {1}> { y = Range(a, n, b) }",
            ("M",),
        ),
    ],
)
def test_sizes_that_depend_on_values_are_said_so(graph: str, shape: tuple[int | str, ...]) -> None:
    _, outputs = specs_of(parse(graph))
    assert (outputs[0].shape, outputs[0].kind) == (shape, "data-dependent")


def test_a_scatter_by_nonzero_has_the_shape_of_its_data() -> None:
    graph = (
        "g (float[N] x, float[M] u) => (float[N] y) { i = NonZero(x)  t = Transpose(i)  y ="
        " ScatterND(x, t, u) }"
    )
    assert specs_of(parse(graph))[1][0].kind == "dynamic"


def test_initializers_listed_as_inputs_are_no_inputs() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 17]>\ng (float[N] x, float[1] w) => (float[N] y)'
        " <float[1] w = {2}> { y = Mul(x, w) }"
    )
    assert [spec.name for spec in specs_of(proto)[0]] == ["x"]


@pytest.mark.parametrize("kind", ["string", "complex64", "complex128", "float8e4m3fn", "int4"])
def test_unsupported_element_types_are_refused_by_name(kind: str) -> None:
    value = onnx.helper.make_tensor_value_info(
        "odd", getattr(onnx.TensorProto, kind.upper()), ["N"]
    )
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N"])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Cast", ["odd"], ["y"], to=1)], "g", [value], [result]
    )
    with pytest.raises(ModelError, match=f"input 'odd' holds {kind}"):
        specs_of(onnx.helper.make_model(graph))


@pytest.mark.parametrize(
    ("kind", "type_proto"),
    [
        (
            "sequence",
            onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(1, ["N"])),
        ),
        (
            "optional",
            onnx.helper.make_optional_type_proto(onnx.helper.make_tensor_type_proto(1, ["N"])),
        ),
        ("map", onnx.helper.make_map_type_proto(7, onnx.helper.make_tensor_type_proto(1, ["N"]))),
        ("sparse_tensor", onnx.helper.make_sparse_tensor_type_proto(1, ["N"])),
        ("no type", onnx.TypeProto()),
    ],
)
def test_other_kinds_of_values_are_refused_by_name(kind: str, type_proto: onnx.TypeProto) -> None:
    value = onnx.helper.make_value_info("odd", type_proto)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["odd"])], "g", [], [value]
    )
    graph.input.append(onnx.helper.make_tensor_value_info("x", 1, ["N"]))
    with pytest.raises(ModelError, match=f"output 'odd' is of kind {kind}"):
        specs_of(onnx.helper.make_model(graph))


def test_an_input_without_rank_is_refused() -> None:
    proto = parse("g (float[3] x) => (float[3] y) { y = Relu(x) }")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match="input 'x' has no shape"):
        specs_of(proto)
