"""Encoded images become what the engine takes: preprocessed here or there, never twice."""

import re

import pytest

from pipeline.core import Preprocess, TensorSpec
from pipeline.errors import PlanError
from pipeline.serving_inputs import ServingConfig, with_raw_image

RAW = (TensorSpec(name="x", dtype="uint8", shape=("n", 8, 6, 3)),)


def test_an_image_is_decoded_to_pixels_where_the_engine_preprocesses() -> None:
    image = {"input": "x", "size": [8, 6], "resize": 10, "colour": "BGR"}
    serving = ServingConfig.model_validate({"image": image})
    decoded = with_raw_image(serving, RAW, {"x": Preprocess(mean=(0.5,))})
    assert decoded.image is not None
    assert decoded.image.model_dump() == {
        **image,
        "size": (8, 6),
        "layout": "NHWC",
        "scale": 1.0,
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
    }
    stored = ServingConfig.model_validate(decoded.model_dump())
    assert with_raw_image(stored, RAW, {"x": Preprocess(mean=(0.5,))}) == decoded
    assert with_raw_image(serving, RAW, {}) == serving


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": [0.5, 0.5, 0.5]}, "serving.image.mean and preprocess.x are both given"),
        ({"scale": 0.5}, "serving.image.scale and preprocess.x are both given"),
        ({"size": [6, 8]}, "gives pixels of [6, 8, 3], the engine takes [8, 6, 3] as 'x'"),
    ],
)
def test_an_image_is_never_preprocessed_twice_nor_of_another_size(
    changes: dict[str, object], message: str
) -> None:
    image = {"input": "x", "size": [8, 6], **changes}
    serving = ServingConfig.model_validate({"image": image})
    with pytest.raises(PlanError, match=re.escape(message)):
        with_raw_image(serving, RAW, {"x": Preprocess()})
