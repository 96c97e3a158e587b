"""Recorded shapes become symbols and ranges."""

from __future__ import annotations

from pipeline.core.shapes import DimRange
from pipeline.recording.shapes import Shapes, inputs_and_profile, share_rows


def test_sizes_that_vary_become_symbols_and_others_stay_fixed() -> None:
    shapes: dict[Shapes, int] = {
        ((2, 16), (2, 16), (2, 7)): 5,
        ((4, 16), (4, 16), (4, 7)): 3,
        ((4, 9), (4, 9), (4, 7)): 3,
    }
    names, dtypes = ("ids", "mask", "features"), ("int64", "float32", "float32")
    inputs, profile = inputs_and_profile(names, dtypes, shapes, has_rows=True)
    assert [spec.shape for spec in inputs] == [
        ("batch", "sequence"),
        ("batch", "sequence"),
        ("batch", 7),
    ]
    assert profile.dims == {
        "batch": DimRange(min=1, opt=4, max=4),  # 6 of 11 calls; rows may come alone
        "sequence": DimRange(min=9, opt=16, max=16),
    }


def test_without_rows_no_axis_is_the_batch() -> None:
    shapes: dict[Shapes, int] = {((3, 1, 6), (2, 1, 8)): 1, ((5, 1, 6), (2, 1, 8)): 2}
    inputs, profile = inputs_and_profile(("x", "h"), ("float32", "float32"), shapes, False)
    assert [spec.shape for spec in inputs] == [("x_0", 1, 6), (2, 1, 8)]
    assert profile.dims == {"x_0": DimRange(min=3, opt=5, max=5)}


def test_height_and_width_are_told_apart_from_a_batch_of_equal_size() -> None:
    shapes: dict[Shapes, int] = {((8, 3, 8, 10),): 1, ((9, 3, 9, 12),): 1}
    (image,), profile = inputs_and_profile(("image",), ("float32",), shapes, has_rows=True)
    assert image.shape == ("batch", 3, "height", "width")
    assert profile.sizes("opt") == {"batch": 9, "height": 9, "width": 12}


def test_rows_need_one_size_of_axis_0_in_each_call() -> None:
    assert share_rows({((2, 3), (2,)): 1, ((4, 3), (4,)): 1})
    assert not share_rows({((2, 3), (4,)): 1})
    assert not share_rows({((2, 3), ()): 1})
