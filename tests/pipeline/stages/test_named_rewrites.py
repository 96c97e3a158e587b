"""The rewrites of a plan: applied in order, compared, and left out if an output would change."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from pydantic import ValidationError

from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import silent
from pipeline.core.shapes import Profile
from pipeline.onnx_graph.files import external_files, onnx_model, operator_histogram, write_proto
from pipeline.onnx_graph.rewrites import Rewrite
from pipeline.plan.schema import SimplifyConfig
from pipeline.stages.simplify import simplify
from tests.pipeline.onnx_graph.rewrites.graphs import model

PROFILES = (Profile.model_validate({"dims": {"batch": [1, 2, 4]}}),)
ADAPTER = """g (float[batch, 6, 16] x) => (float[batch, 16] y)
  { m = MatMul(x, w)  d = MatMul(x, a)  u = MatMul(d, b)  h = Add(m, u)
    y = Gather<axis=1>(h, i) }"""
WEIGHTS = {"w": (16, 16), "a": (16, 2), "b": (2, 16)}
BOTH = SimplifyConfig(rewrites=(Rewrite.MERGED_PRODUCTS, Rewrite.EARLY_ROWS))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def adapter(folder: Path, weights: np.ndarray | None = None, external: bool = False) -> OnnxModel:
    """Write the model; `weights`: of its layer, else random ones."""
    proto = model(ADAPTER, WEIGHTS, i=np.array(0, np.int64))
    if weights is not None:
        (layer,) = (each for each in proto.graph.initializer if each.name == "w")
        layer.CopyFrom(numpy_helper.from_array(weights, "w"))
    folder.mkdir(exist_ok=True)
    write_proto(proto, folder / "source.onnx", external_above_bytes=100 if external else 2**30)
    return onnx_model(folder, "source.onnx")


def texts(result: OnnxModel) -> list[tuple[str, str]]:
    return [(note.level, note.text) for note in result.notes]


@pytest.mark.parametrize("external", [False, True])
def test_rewrites_follow_each_other(tmp_path: Path, out: Path, external: bool) -> None:
    source = adapter(tmp_path / "in", external=external)
    result = simplify(source, PROFILES, BOTH, (), out, silent)
    assert operator_histogram(result.path)["MatMul"] == 1
    first, *_ = onnx.load(result.path, load_external_data=False).graph.node
    assert first.op_type == "Gather"
    assert [text.split(" changed ")[0] for _, text in texts(result)[1:]] == [
        "the rewrite merged_products",
        "the rewrite early_rows",
    ]
    assert {level for level, _ in texts(result)} == {"info"}
    kept = {out / "model.onnx", *external_files(result.path)}
    assert {path.resolve() for path in out.iterdir()} == {path.resolve() for path in kept}


def test_a_rewrite_that_fits_nothing_is_told(tmp_path: Path, out: Path) -> None:
    options = SimplifyConfig(enabled=False, rewrites=(Rewrite.FOLDED_STRIDES,))
    source = adapter(tmp_path / "in")
    result = simplify(source, PROFILES, options, (), out, silent)
    assert ("info", "the rewrite folded_strides fits no node") in texts(result)
    assert operator_histogram(result.path) == operator_histogram(source.path)


def test_rows_are_taken_early_by_default(tmp_path: Path, out: Path) -> None:
    source = adapter(tmp_path / "in")
    result = simplify(source, PROFILES, SimplifyConfig(), (), out, silent)
    text = "the rewrite early_rows changed 4 nodes, and the model computes the same"
    assert texts(result)[-1] == ("info", text)
    shutil.rmtree(out)
    out.mkdir()
    kept = simplify(source, PROFILES, SimplifyConfig(rewrites=()), (), out, silent)
    first, *_ = onnx.load(kept.path, load_external_data=False).graph.node
    assert first.op_type == "MatMul"


def test_a_default_rewrite_that_fits_nothing_leaves_no_note(tmp_path: Path, out: Path) -> None:
    write_proto(
        model("g (float[batch, 4] x) => (float[batch, 2] y) { y = MatMul(x, w) }", {"w": (4, 2)}),
        tmp_path / "source.onnx",
    )
    source = onnx_model(tmp_path, "source.onnx")
    options = SimplifyConfig(enabled=False)
    assert texts(simplify(source, PROFILES, options, (), out, silent)) == []


def test_a_rewrite_that_changes_an_output_is_left_out(tmp_path: Path, out: Path) -> None:
    """A layer that undoes its adapter leaves only rounding, which the merged weights lose."""
    proto = model(ADAPTER, WEIGHTS, i=np.array(0, np.int64))
    arrays = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    undoing = -(arrays["a"].astype(np.float64) @ arrays["b"]).astype(np.float32)
    source = adapter(tmp_path / "in", undoing)
    options = SimplifyConfig(rewrites=(Rewrite.MERGED_PRODUCTS,))
    result = simplify(source, PROFILES, options, (), out, silent)
    level, text = texts(result)[-1]
    assert level == "warning"
    assert text.startswith("the rewrite merged_products is left out: ")
    assert operator_histogram(result.path)["MatMul"] == 3
    assert not result.provisional


def test_a_rewrite_that_takes_too_long_is_left_out(tmp_path: Path, out: Path) -> None:
    options = SimplifyConfig(rewrites=(Rewrite.EARLY_ROWS,), timeout_s=1e-3)
    result = simplify(adapter(tmp_path / "in"), PROFILES, options, (), out, silent)
    assert texts(result)[-1][0] == "warning"
    assert operator_histogram(result.path)["MatMul"] == 3


def test_an_unknown_rewrite_is_refused() -> None:
    with pytest.raises(ValidationError, match="early_rows"):
        SimplifyConfig.model_validate({"rewrites": ["faster"]})
