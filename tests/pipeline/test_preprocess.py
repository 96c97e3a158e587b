"""Preprocessing in numpy, against other libraries; what a model's inputs do not allow."""

import numpy as np
import pytest
from PIL import Image

from pipeline.core.processing import ImageResize, Preprocess
from pipeline.core.shapes import TensorSpec
from pipeline.errors import PlanError
from pipeline.preprocess import inverse_in_numpy, preprocessed, raw_specs

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NCHW = TensorSpec(name="image", dtype="float32", shape=("batch", 3, 6, 4))


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def resize(source: tuple[int, int], target: tuple[int, int]) -> ImageResize:
    return ImageResize(source=source, target=target, filter="linear")


def test_raw_inputs_are_bytes_with_channels_last_and_other_inputs_stay() -> None:
    size = TensorSpec(name="size", dtype="int64", shape=("batch", 2))
    raw, same = raw_specs((NCHW, size), {"image": Preprocess(resize=resize((12, 9), (6, 4)))})
    assert (raw.dtype, raw.shape) == ("uint8", ("batch", 12, 9, 3))
    assert same == size


def test_values_are_scaled_centred_and_transposed() -> None:
    raw = pixels(2, 6, 4, 3)
    ids = np.arange(2)
    feeds = preprocessed(
        {"image": raw, "ids": ids}, {"image": Preprocess(mean=MEAN, std=STD, layout="NCHW")}
    )
    value = (raw[1, 5, 2, 0] / 255 - MEAN[0]) / STD[0]
    assert feeds["image"].shape == (2, 3, 6, 4)
    assert feeds["image"].dtype == np.float32
    assert feeds["image"][1, 0, 5, 2] == pytest.approx(value, rel=1e-6)
    assert feeds["ids"] is ids


def test_upsampling_agrees_with_pillow_which_has_no_antialiasing_there() -> None:
    raw = pixels(1, 5, 7, 1)
    expected = Image.fromarray(raw[0, :, :, 0].astype(np.float32)).resize(
        (16, 11), Image.Resampling.BILINEAR
    )
    step = Preprocess(scale=1, layout="NHWC", resize=resize((5, 7), (11, 16)))
    values = preprocessed({"image": raw}, {"image": step})["image"]
    np.testing.assert_allclose(values[0, :, :, 0], np.asarray(expected), atol=1e-3)


def test_downsampling_by_two_is_the_mean_of_four_pixels() -> None:
    raw = pixels(1, 8, 6, 2)
    step = Preprocess(scale=1, layout="NHWC", resize=resize((8, 6), (4, 3)))
    values = preprocessed({"image": raw}, {"image": step})["image"]
    np.testing.assert_allclose(values, raw.reshape(1, 4, 2, 3, 2, 2).mean(axis=(2, 4)), atol=1e-4)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_expression_of_the_message_restores_every_byte(layout: str) -> None:
    raw = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    step = Preprocess.model_validate({"mean": MEAN, "std": STD, "layout": layout})
    image = preprocessed({"image": raw}, {"image": step})["image"]
    restored = eval(inverse_in_numpy("image", step), {"numpy": np, "image": image})
    np.testing.assert_array_equal(restored, raw)


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        ({}, {"photo": Preprocess()}, "preprocess names 'photo', which is no input"),
        ({"dtype": "float16"}, {"image": Preprocess()}, "is float16 .*, expected float32"),
        ({"shape": ("batch", 72)}, {"image": Preprocess()}, "expected float32 with 4 axes"),
        ({}, {"image": Preprocess(mean=(0.5, 0.5))}, "mean has 2 numbers.*3 channels"),
        ({}, {"image": Preprocess(std=(1, 2, 3, 4))}, "std has 4 numbers.*3 channels"),
        ({}, {"image": Preprocess(layout="NHWC", mean=MEAN)}, "mean has 3 numbers.*4 channels"),
        (
            {"shape": ("batch", 3, 224, 224)},
            {"image": Preprocess(layout="NHWC")},
            "in NHWC, axis 3 holds the channels, and that is 224",
        ),
        (
            {"shape": ("batch", "c", 6, 4)},
            {"image": Preprocess()},
            "in NCHW, axis 1 holds the channels, and that is c",
        ),
        ({}, {"image": Preprocess(resize=resize((9, 9), (4, 6)))}, r"target is \[4, 6\].*\[6, 4\]"),
        (
            {"shape": ("batch", 3, "h", "w")},
            {"image": Preprocess(resize=resize((9, 9), (4, 6)))},
            r"an image of \[h, w\]",
        ),
    ],
)
def test_steps_that_do_not_fit_the_input_are_errors_of_the_plan(
    changes: dict[str, object], steps: dict[str, Preprocess], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        raw_specs((NCHW.model_copy(update=changes),), steps)
