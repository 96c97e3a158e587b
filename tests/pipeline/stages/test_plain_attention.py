"""Attention is written plainly in the stage `simplify`, all of it or what gives the same, and
otherwise stays.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import silent
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import ChildKilled, DiskFull
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.files import onnx_model, operator_histogram
from pipeline.plan.schema import SimplifyConfig
from pipeline.stages.simplify import attention_rewrite, simplify
from tests.builders.attention import packed, written_out

ONLY = SimplifyConfig(enabled=False)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def model_of(folder: Path, proto: onnx.ModelProto) -> OnnxModel:
    (folder / "source.onnx").write_bytes(proto.SerializeToString())
    return onnx_model(folder, "source.onnx")


def keep(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def sample(visible: bool) -> Tensors:
    random = np.random.default_rng(0)
    return {name: random.standard_normal((2, 4, 3, 5)).astype(np.float32) for name in "qkv"} | {
        "seen": np.full((2, 1, 1, 4), visible)
    }


def test_it_comes_after_the_users_own_surgery(tmp_path: Path, out: Path) -> None:
    options = SimplifyConfig(surgery="test_plain_attention:keep", python_path=Path(__file__).parent)
    result = simplify(
        model_of(tmp_path, written_out()), (), options, (sample(visible=True),), out, silent
    )
    assert [note.level for note in result.notes] == ["info"] * 3
    assert result.notes[0].text.startswith(
        "surgery by 'test_plain_attention:keep' changed no operator"
    )
    assert result.notes[1].text.startswith("attention is written plainly (")
    assert result.notes[1].text.endswith(") and computes the same")
    assert "Reshape -2" in result.notes[1].text
    assert operator_histogram(result.path)["Mul"] == 1, "the scale"
    assert [file.name for file in out.iterdir()] == ["model.onnx"]


def test_it_can_be_left_out(tmp_path: Path, out: Path) -> None:
    options = SimplifyConfig(enabled=False, rewrite_attention=False)
    assert simplify(model_of(tmp_path, written_out()), (), options, (), out, silent).notes == ()
    assert operator_histogram(out / "model.onnx")["Reshape"] == 2


def test_a_sample_without_any_token_keeps_its_answer(tmp_path: Path, out: Path) -> None:
    result = simplify(
        model_of(tmp_path, written_out()), (), ONLY, (sample(visible=False),), out, silent
    )
    (note,) = result.notes
    assert (
        "computes the same, but for its masks and what they hide: with new ones output 'y'"
        " differs by" in note.text
    )
    counts = operator_histogram(result.path)
    assert (counts.get("Reshape", 0), counts["IsNaN"]) == (
        0,
        1,
    ), "keys are transposed at once, and the guard stays"


@pytest.mark.parametrize("dtype", [TensorProto.BOOL, TensorProto.INT64])
@pytest.mark.parametrize("least", [1, 2])
def test_generated_masks_hide_no_row_whole(
    tmp_path: Path, out: Path, dtype: int, least: int
) -> None:
    profiles = (Profile.model_validate({"dims": {"t": [least, 4, 8]}}),)
    result = simplify(model_of(tmp_path, of_any_length(dtype)), profiles, ONLY, (), out, silent)
    assert [note.text.partition(" (")[0] for note in result.notes] == [
        "attention is written plainly"
    ]
    assert "but for" not in result.notes[0].text
    assert "IsNaN" not in operator_histogram(result.path)


def of_any_length(dtype: int) -> onnx.ModelProto:
    """`written_out` for any number of tokens, with a mask of this type."""
    model = written_out()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.CopyFrom(
                onnx.TensorShapeProto.Dimension(dim_param="t") if dim.dim_value == 4 else dim
            )
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    constants["four"].CopyFrom(onnx.numpy_helper.from_array(np.array([2, 3, 5, -1]), "four"))
    constants["three"].CopyFrom(onnx.numpy_helper.from_array(np.array([6, -1, 5]), "three"))
    constants["all"].CopyFrom(onnx.numpy_helper.from_array(np.full((1, 1, 1, 1), True), "all"))
    if dtype != TensorProto.BOOL:
        (mask,) = [value for value in model.graph.input if value.name == "seen"]
        mask.name, mask.type.tensor_type.elem_type = "ids", dtype
        model.graph.node.insert(0, helper.make_node("Cast", ["ids"], ["seen"], to=TensorProto.BOOL))
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float16, 8e-3)])
def test_16_bits_within_may_round_elsewhere_whatever_comes_out(
    tmp_path: Path, dtype: type, tolerance: float
) -> None:
    model = written_out(-65504, dtype=dtype)
    model.graph.node[-1].output[0] = "half"
    model.graph.node.append(helper.make_node("Cast", ["half"], ["y"], to=TensorProto.FLOAT))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    assert attention_rewrite.rewrite_tolerance(model_of(tmp_path, model)) == tolerance


def test_what_only_a_simplified_graph_shows_is_rewritten_after_simplification(
    tmp_path: Path, out: Path
) -> None:
    """TorchScript's exports know no shapes, and compute constants."""
    proto = packed("rows")
    del proto.graph.value_info[:]
    for node in proto.graph.node:
        if node.output[0] == "v5":
            node.input[1] = "computed"
    proto.graph.node.insert(0, helper.make_node("Neg", ["negated"], ["computed"]))
    (apart,) = [tensor for tensor in proto.graph.initializer if tensor.name == "apart"]
    apart.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(apart), "negated"))
    profiles = (Profile.model_validate({"dims": {"N": [1, 2, 4]}}),)
    for enabled, products in ((False, 3), (True, 5)):
        folder = tmp_path / str(enabled)
        folder.mkdir()
        result = simplify(
            model_of(tmp_path, proto), profiles, SimplifyConfig(enabled=enabled), (), folder, silent
        )
        assert operator_histogram(result.path)["MatMul"] == products
        assert [file.name for file in folder.iterdir()] == ["model.onnx"]
    assert [note.text.partition(" (")[0] for note in result.notes][1:] == [
        "attention is written plainly"
    ]
    assert " nodes became " in result.notes[0].text


def test_a_model_that_is_plain_already_is_left_alone(tmp_path: Path, out: Path) -> None:
    """In the oldest form that is read, whose initializers are inputs too."""
    proto = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["" : 11]>
    g (float[N, 4, 5] q, float[N, 5, 4] k, float[N, 4, 5] v, float[1] d) => (float[N, 4, 5] y)
      <float[1] d = {2.0}>
    { s = MatMul(q, k)  t = Div(s, d)  p = Softmax<axis = 2>(t)  y = MatMul(p, v) }""")
    profiles = (Profile.model_validate({"dims": {"N": [1, 2, 4]}}),)
    result = simplify(model_of(tmp_path, proto), profiles, SimplifyConfig(), (), out, silent)
    assert [(note.level, note.text.partition(" ")[2][:12]) for note in result.notes] == [
        ("info", "nodes became")
    ]


def test_it_does_not_become_an_operator_of_one_library(tmp_path: Path, out: Path) -> None:
    weights = ", ".join(
        f"float[8, 8] w{name} = {{{', '.join(['0.5'] * 64)}}}, float[8] b{name} ="
        f" {{{', '.join(['0.1'] * 8)}}}"
        for name in "qkv"
    )
    projections = "".join(
        f"m{name} = MatMul(x, w{name})  a{name} = Add(m{name}, b{name})  r{name} = Reshape(a{name},"
        f" heads)  {name} = Transpose<perm = {order}>(r{name})  "
        for name, order in {"q": [0, 2, 1, 3], "k": [0, 2, 3, 1], "v": [0, 2, 1, 3]}.items()
    )
    graph = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N, 5, 8] x) => (float[N, 5, 8] y)
    <{weights}, int64[4] heads = {{0, 0, 2, 4}}, int64[3] back = {{0, 0, 8}},
      float scale = {{0.5}}> {{
        {projections} s = MatMul(q, k)  t = Mul(s, scale)  p = Softmax<axis = -1>(t)
          c = MatMul(p, v)
        o = Transpose<perm = [0, 2, 1, 3]>(c)  y = Reshape(o, back)
    }}"""
    profiles = (Profile.model_validate({"dims": {"N": [1, 2, 4]}}),)
    result = simplify(
        model_of(tmp_path, onnx.parser.parse_model(graph)),
        profiles,
        SimplifyConfig(),
        (),
        out,
        silent,
    )
    assert [note.level for note in result.notes] == ["info"]
    assert operator_histogram(result.path)["Softmax"] == 1


def test_an_old_model_is_written_without_initializers_among_its_inputs(
    tmp_path: Path, out: Path
) -> None:
    model = written_out()
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 17))
    model.ir_version = 3
    model.metadata_props.add(key="author", value="somebody")
    for tensor in model.graph.initializer:
        model.graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    result = simplify(model_of(tmp_path, model), (), ONLY, (sample(visible=True),), out, silent)
    assert [note.text.partition(" (")[0] for note in result.notes] == [
        "attention is written plainly"
    ]
    after = onnx.load(result.path)
    onnx.checker.check_model(after, full_check=True)
    assert [each.value for each in after.metadata_props] == ["somebody"]


def test_a_transient_failure_of_the_last_try_is_retried_at_the_next_compile(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def fail_at_last(function: Any, *arguments: Any, **named: Any) -> Any:
        tries.append(named["name"])
        if named["name"] == "plain attention" and tries.count("plain attention") == 2:
            raise ChildKilled("it was killed", "try again")
        return call_in_child(function, *arguments, **named)

    monkeypatch.setattr(attention_rewrite, "call_in_child", fail_at_last)
    result = simplify(model_of(tmp_path, written_out()), (), SimplifyConfig(), (), out, silent)
    assert [note.level for note in result.notes] == ["info", "info", "warning"]
    assert (
        result.notes[-1].text
        == "attention stays as it was written, and the next compile tries again: it was killed"
    )
    assert result.provisional
    assert operator_histogram(result.path)["Softmax"] == 1
    assert [file.name for file in out.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("failure", [ChildKilled, DiskFull])
def test_what_may_pass_is_tried_again_by_the_next_compile(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise failure("there was no room", "make some")

    monkeypatch.setattr(attention_rewrite, "call_in_child", fail)
    result = simplify(model_of(tmp_path, written_out()), (), ONLY, (), out, silent)
    (note,) = result.notes
    assert (
        note.text
        == "attention stays as it was written, and the next compile tries again: there was no room"
    )
    assert (note.level, result.provisional) == ("warning", True)
    assert [file.name for file in out.iterdir()] == ["model.onnx"]


def test_a_rewrite_that_failed_is_not_repeated_after_simplification(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def fail(*arguments: object, name: str, **named: object) -> None:
        attempts.append(name)
        raise ChildKilled("it was killed", "try again")

    monkeypatch.setattr(attention_rewrite, "call_in_child", fail)
    result = simplify(model_of(tmp_path, written_out()), (), SimplifyConfig(), (), out, silent)
    assert attempts == ["plain attention"]
    assert [note.level for note in result.notes] == ["warning", "info"]
