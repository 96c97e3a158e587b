"""Generated inputs."""

import ml_dtypes
import numpy as np

from pipeline.core.shapes import TensorSpec
from pipeline.onnx_graph.feeds import draw_feeds


def test_generated_inputs_are_valid_for_their_dtype_and_repeatable() -> None:
    dtypes = ("float32", "float16", "bfloat16", "int64", "int32", "uint8", "int8", "bool")
    specs = (
        TensorSpec(name="scalar", dtype="int64", shape=()),
        *(TensorSpec(name=dtype, dtype=dtype, shape=("N", 500)) for dtype in dtypes),
    )
    feeds = draw_feeds(specs, {"N": 3}, seed=1)
    assert all(feeds[spec.name].shape == spec.resolve({"N": 3}) for spec in specs)
    assert feeds["bfloat16"].dtype == ml_dtypes.bfloat16
    assert all(feeds[dtype].dtype.name == dtype for dtype in dtypes)
    assert set(np.unique(feeds["int64"])) == {0, 1}
    assert set(np.unique(feeds["bool"])) == {False, True}
    assert feeds["uint8"].max() > 200
    assert feeds["int8"].min() < -100
    assert 0.9 < feeds["float32"].std() < 1.1
    again = draw_feeds(specs, {"N": 3}, seed=1)
    assert all(np.array_equal(feeds[name], again[name]) for name in feeds)
    assert not np.array_equal(feeds["float32"], draw_feeds(specs, {"N": 3}, seed=2)["float32"])


def test_masks_that_are_seen_begin_every_row_with_1() -> None:
    dtypes = ("bool", "int32", "int64", "float32", "uint8")
    specs = tuple(TensorSpec(name=dtype, dtype=dtype, shape=("N", 1)) for dtype in dtypes)
    feeds = draw_feeds(
        (*specs, TensorSpec(name="k", dtype="int64", shape=())),
        {"N": 99},
        0,
        {"k": (0,), "int32": (0,) * 99},
        seen=True,
    )
    assert [bool(feeds[name].all()) for name in dtypes[:3]] == [
        True,
        False,
        True,
    ], "values decide a shape: they stay"
    assert not (feeds["uint8"] == 1).all()
    assert feeds["k"] == 0
    assert not draw_feeds(specs, {"N": 99}, 0)["int64"].all()


def test_inputs_whose_values_decide_a_shape_hold_the_values_that_are_given() -> None:
    specs = (
        TensorSpec(name="x", dtype="float32", shape=("N",)),
        TensorSpec(name="k", dtype="int32", shape=()),
        TensorSpec(name="target", dtype="int64", shape=(2,)),
    )
    feeds = draw_feeds(specs, {"N": 3}, 0, {"k": (7,), "target": (3, -1)})
    assert (feeds["k"].shape, feeds["k"].dtype, int(feeds["k"])) == ((), np.dtype(np.int32), 7)
    assert feeds["target"].tolist() == [3, -1]
    np.testing.assert_array_equal(
        feeds["x"], draw_feeds(specs, {"N": 3}, 0)["x"]
    )  # the others are as they would be without
