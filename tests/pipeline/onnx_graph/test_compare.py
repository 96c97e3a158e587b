"""Two graphs on the same feeds: what counts as equal, and how a difference is told."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from pipeline.core.shapes import Tensors
from pipeline.errors import ModelError
from pipeline.onnx_graph.compare import compare_graphs, compare_outputs, open_reference
from tests.pipeline.onnx_graph.builders import parse


def save(path: Path, graph: str) -> Path:
    path.write_bytes(parse(graph).SerializeToString())
    return path


@pytest.fixture
def double(tmp_path: Path) -> Path:
    return save(tmp_path / "double.onnx", "g (float[N] x) => (float[N] y) { y = Add(x, x) }")


FEEDS: list[Tensors] = [{"x": np.ones(3, np.float32)}, {"x": np.arange(7, dtype=np.float32)}]


def test_every_dtype_goes_in_and_out(tmp_path: Path) -> None:
    dtypes = [
        np.dtype(name)
        for name in (
            "float16",
            "float32",
            "float64",
            "int8",
            "int32",
            "int64",
            "uint8",
            "bool",
            ml_dtypes.bfloat16,
        )
    ]
    values = [
        (onnx.helper.np_dtype_to_tensor_dtype(dtype), f"x{i}", f"y{i}")
        for i, dtype in enumerate(dtypes)
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [x], [y]) for _, x, y in values],
        "g",
        [onnx.helper.make_tensor_value_info(x, elem, [None, None]) for elem, x, _ in values],
        [onnx.helper.make_tensor_value_info(y, elem, [None, None]) for elem, _, y in values],
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(
        onnx.helper.make_model(
            graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]
        ).SerializeToString()
    )
    feeds = {
        f"x{i}": np.arange(6).reshape(3, 2).astype(dtype).T for i, dtype in enumerate(dtypes)
    }  # not contiguous
    results = open_reference(path)(feeds)
    for i, dtype in enumerate(dtypes):
        assert results[f"y{i}"].dtype == dtype
        assert np.array_equal(results[f"y{i}"], feeds[f"x{i}"])


def test_scalars_keep_their_rank(tmp_path: Path) -> None:
    path = save(tmp_path / "scalar.onnx", "g (int64 x) => (int64 y) { y = Neg(x) }")
    result = open_reference(path)({"x": np.array(3)})["y"]
    assert (result.shape, int(result)) == ((), -3)


def test_a_graph_that_does_not_load_is_refused_by_operator(tmp_path: Path) -> None:
    path = save(tmp_path / "odd.onnx", "g (float[N] x) => (float[N] y) { y = NoSuchOperator(x) }")
    with pytest.raises(ModelError, match="NoSuchOperator"):
        open_reference(path)


@pytest.mark.parametrize(
    "feeds",
    [
        {"x": np.ones((2, 2), np.float32)},
        {"x": np.ones(3, np.int64)},
        {"z": np.ones(3, np.float32)},
        {},
    ],
)
def test_feeds_that_do_not_fit_are_refused(double: Path, feeds: Tensors) -> None:
    with pytest.raises(ModelError, match="cannot run"):
        open_reference(double)(feeds)


def test_equal_graphs_compare_equal(double: Path, tmp_path: Path) -> None:
    same = save(
        tmp_path / "same.onnx",
        "g (float[N] x) => (float[N] y) <float two = {2}> { y = Mul(x, two) }",
    )
    assert compare_graphs(double, same, FEEDS) == ""


def test_a_difference_names_output_error_and_shapes(double: Path, tmp_path: Path) -> None:
    other = save(
        tmp_path / "other.onnx",
        "g (float[N] x) => (float[N] y) <float k = {2.2}> { y = Mul(x, k) }",
    )
    assert (
        compare_graphs(double, other, FEEDS)
        == "output 'y' differs by 0.1 of its largest magnitude (allowed 0.0001), on inputs x [3]"
    )
    assert compare_graphs(double, other, FEEDS, tolerance=0.2) == ""


def test_a_baked_size_is_told(double: Path, tmp_path: Path) -> None:
    baked = save(
        tmp_path / "baked.onnx",
        "g (float[N] x) => (float[N] y) <int64[1] s = {3}> { r = Reshape(x, s)  y = Add(r, r) }",
    )
    assert compare_graphs(double, baked, FEEDS[:1]) == ""
    assert "cannot run" in compare_graphs(double, baked, FEEDS)


def test_a_candidate_that_does_not_load_is_a_difference(double: Path, tmp_path: Path) -> None:
    odd = save(tmp_path / "odd.onnx", "g (float[N] x) => (float[N] y) { y = NoSuchOperator(x) }")
    assert "NoSuchOperator" in compare_graphs(double, odd, FEEDS)


def test_feeds_that_the_first_graph_refuses_are_passed_over_but_not_all(double: Path) -> None:
    wrong: Tensors = {"x": np.ones((2, 2), np.float32)}
    assert compare_graphs(double, double, [wrong, *FEEDS]) == ""
    with pytest.raises(ModelError, match="cannot run"):
        compare_graphs(double, double, [wrong])
    with pytest.raises(ModelError, match="no inputs to compare"):
        compare_graphs(double, double, [])


A = np.array([1.0, np.nan, np.inf, -np.inf, 0.0], np.float32)


@pytest.mark.parametrize(
    ("expected", "got", "fault"),
    [
        (A, A.copy(), ""),
        (A, np.array([1.0, 0.0, np.inf, -np.inf, 0.0], np.float32), "differs by inf"),
        (A, np.array([1.0, np.nan, -np.inf, -np.inf, 0.0], np.float32), "differs by inf"),
        (A, np.array([np.nan, np.nan, np.inf, -np.inf, 0.0], np.float32), "differs by inf"),
        (np.zeros(3, np.float32), np.full(3, 1e-5, np.float32), ""),
        (np.zeros(3, np.float32), np.full(3, 1e-3, np.float32), "differs by 0.001"),
        (np.full(3, 1e6, np.float32), np.full(3, 1e6 + 10, np.float32), ""),
        (np.ones(3, np.float16), np.full(3, 1.004, np.float16), ""),
        (np.ones(3, ml_dtypes.bfloat16), np.full(3, 1.5, ml_dtypes.bfloat16), "differs by 0.5"),
        (np.ones(3, np.int64), np.array([1, 1, 2]), "differs by inf"),
        (np.ones(3, np.int64), np.ones(3, np.int32), "expected int64[3], got int32[3]"),
        (np.ones(3, np.int64), np.ones((3, 1), np.int64), "expected int64[3], got int64[3, 1]"),
        (np.ones((0, 2), np.float32), np.ones((0, 2), np.float32), ""),
    ],
)
def test_what_counts_as_equal(expected: np.ndarray, got: np.ndarray, fault: str) -> None:
    difference = compare_outputs({"y": expected}, {"y": got}, 1e-4)
    assert difference == "" if fault == "" else fault in difference


def test_renamed_missing_or_reordered_outputs_are_told() -> None:
    one = np.ones(1)
    for got in ({"z": one}, {}, {"b": one, "a": one}):
        assert compare_outputs({"a": one, "b": one}, got, 1.0).startswith(
            "expected outputs a, b, got"
        )
