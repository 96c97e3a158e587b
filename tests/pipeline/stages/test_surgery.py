"""The user's own function on the graph: it runs first, is compared like simplification, and is
refused where it changes an answer.
"""

import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline import backends
from pipeline.core.artifacts import OnnxModel, Target
from pipeline.core.progress import silent
from pipeline.core.shapes import Profile
from pipeline.errors import ChildDied, ModelError, PlanError
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import onnx_model, operator_histogram
from pipeline.plan.files import load_plan
from pipeline.plan.schema import SimplifyConfig
from pipeline.stages.simplify import simplify

ROOT = Path(__file__).parents[3]
PROFILES = (Profile.model_validate({"dims": {"N": [1, 4, 8]}}),)
DETERMINANTS = "g (float[N, 2, 2] x) => (float[N] y) <float k = {2}> { d = Det(x)  y = Mul(d, k) }"
RTX = Target(backend="tensorrt_rtx", version="1", device="any")


@pytest.fixture
def model(tmp_path: Path) -> OnnxModel:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{DETERMINANTS}')
    (tmp_path / "source.onnx").write_bytes(proto.SerializeToString())
    return onnx_model(tmp_path, "source.onnx")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def surgery_of_the_example() -> SimplifyConfig:
    return load_plan(ROOT / "configs" / "surgery.yaml").simplify


def own(function: str) -> SimplifyConfig:
    """A function of this file as surgery."""
    return SimplifyConfig(surgery=f"test_surgery:{function}", python_path=Path(__file__).parent)


# --- surgery as a user may write it ---


def keep(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def change_value(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.node[1].op_type = "Div"
    return model


def rename_output(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.output[0].name = model.graph.node[-1].output[0] = "renamed"
    return model


def lose_a_tensor(model: onnx.ModelProto) -> onnx.ModelProto:
    del model.graph.node[0]
    return model


def forget_to_return(model: onnx.ModelProto) -> None:
    del model.graph.node[0]


def raise_error(model: onnx.ModelProto) -> onnx.ModelProto:
    raise KeyError("no such node")


def hang(model: onnx.ModelProto) -> onnx.ModelProto:
    time.sleep(600)
    return model


NOT_A_FUNCTION = 5


# --- what comes of it ---


def test_a_node_that_tensorrt_refuses_is_replaced_and_the_answers_stay(
    model: OnnxModel, out: Path
) -> None:
    rtx = backends.backend("tensorrt_rtx")
    (refused,) = rtx.unsupported(model, RTX)
    assert (refused.operator, refused.reason) == (
        "Det",
        "TensorRT has no importer for this operator",
    )
    result = simplify(model, PROFILES, surgery_of_the_example(), (), out, silent)
    assert rtx.unsupported(result, RTX) == ()
    assert "Det" not in operator_histogram(result.path)
    assert [note.level for note in result.notes] == ["info", "info"]
    assert "surgery by 'ink.surgery:write_out_det' changed" in result.notes[0].text
    assert "Det -1" in result.notes[0].text
    assert (result.inputs, result.outputs) == (model.inputs, model.outputs)
    assert [file.name for file in out.iterdir()] == ["model.onnx"]
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 2, 2)).astype(np.float32)}
    np.testing.assert_allclose(
        open_reference(result.path)(feeds)["y"], 2 * np.linalg.det(feeds["x"]), rtol=1e-4, atol=1e-6
    )


def test_surgery_runs_where_simplification_is_off(model: OnnxModel, out: Path) -> None:
    result = simplify(
        model,
        PROFILES,
        surgery_of_the_example().model_copy(update={"enabled": False}),
        (),
        out,
        silent,
    )
    assert operator_histogram(result.path) == {"Gather": 6, "Mul": 3, "Sub": 1}
    assert len(result.notes) == 1
    assert [file.name for file in out.iterdir()] == ["model.onnx"]


def test_a_surgery_that_changes_nothing_says_so(model: OnnxModel, out: Path) -> None:
    result = simplify(model, PROFILES, own("keep"), (), out, silent)
    assert "changed no operator" in result.notes[0].text


def test_larger_matrices_are_refused_by_the_example(tmp_path: Path, out: Path) -> None:
    text = DETERMINANTS.replace("2, 2", "3, 3")
    (tmp_path / "source.onnx").write_bytes(
        onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 17]>\n{text}'
        ).SerializeToString()
    )
    with pytest.raises(ModelError, match=r"raised ValueError: Det .* expected 2x2"):
        simplify(
            onnx_model(tmp_path, "source.onnx"), PROFILES, surgery_of_the_example(), (), out, silent
        )


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("change_value", ModelError, "changed the model: output 'y' differs by"),
        ("rename_output", ModelError, r"outputs were y float32\[N\] and became renamed"),
        (
            "lose_a_tensor",
            ModelError,
            "left a faulty model: node .* reads 'd', which no earlier node produces",
        ),
        ("forget_to_return", ModelError, "returned NoneType, expected an onnx.ModelProto"),
        ("raise_error", ModelError, "raised KeyError: 'no such node'"),
        ("no_such_function", PlanError, "has no attribute 'no_such_function'"),
        ("NOT_A_FUNCTION", PlanError, "is of type int, expected a function"),
    ],
)
def test_a_surgery_that_fails_is_refused_with_its_reason(
    model: OnnxModel, out: Path, function: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as refusal:
        simplify(model, PROFILES, own(function), (), out, silent)
    assert isinstance(refusal.value, ModelError | PlanError)
    assert refusal.value.next_step


def test_a_surgery_that_hangs_is_stopped(model: OnnxModel, out: Path) -> None:
    with pytest.raises(ChildDied, match="longer than its limit of 3 s"):
        simplify(model, PROFILES, own("hang").model_copy(update={"timeout_s": 3}), (), out, silent)


def test_the_parent_imports_none_of_the_users_code(model: OnnxModel, out: Path) -> None:
    simplify(model, PROFILES, surgery_of_the_example(), (), out, silent)
    assert "ink" not in sys.modules
