"""Images for an engine that preprocesses them itself."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from pipeline.core.processing import Preprocess
from pipeline.core.shapes import TensorSpec
from pipeline.serving_inputs import InputRecipe, ServingConfig, with_raw_image
from service.codecs.images import array_from_image


@pytest.mark.parametrize(("colour", "order"), [("RGB", [0, 1, 2]), ("BGR", [2, 1, 0])])
def test_an_engine_that_preprocesses_gets_the_pixels_as_they_are(
    colour: str, order: list[int]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3)).astype(np.uint8)
    recipe = InputRecipe.model_validate({"input": "x", "size": (8, 6), "colour": colour})
    raw = TensorSpec(name="x", dtype="uint8", shape=("n", 8, 6, 3))
    image = with_raw_image(ServingConfig(image=recipe), (raw,), {"x": Preprocess()}).image
    assert image is not None
    body = io.BytesIO()
    Image.fromarray(pixels).save(body, "PNG")
    array = array_from_image(body.getvalue(), image, raw.dtype)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, pixels[np.newaxis][..., order])
