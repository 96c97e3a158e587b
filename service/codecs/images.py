"""Decode an image to a model's input, by its InputRecipe."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from pipeline.serving_inputs import InputRecipe
from service.codecs.tensors import Array, dtype_of
from service.errors import TooLarge, Unprocessable

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP"}
MAX_PIXELS = 64 * 2**20


def array_from_image(body: bytes, recipe: InputRecipe, dtype: str) -> Array:
    """Decode an image to [1, 3, height, width] or [1, height, width, 3].

    It is resized bilinearly. The EXIF rotation is ignored, as in torchvision.
    """
    pixels = np.asarray(_resized(_opened(body), recipe), np.float32)  # [height, width, RGB]
    if recipe.colour == "BGR":
        pixels = pixels[:, :, ::-1]
    values = (pixels * np.float32(recipe.scale) - np.array(recipe.mean, np.float32)) / np.array(
        recipe.std, np.float32
    )
    kind = dtype_of(recipe.input, dtype)
    if kind.kind in "iu":
        values = np.clip(np.rint(values), np.iinfo(kind.name).min, np.iinfo(kind.name).max)
    ordered = values.transpose(2, 0, 1) if recipe.layout == "NCHW" else values
    return np.ascontiguousarray(ordered[np.newaxis].astype(kind))


def _opened(body: bytes) -> Image:
    """Decode the image to RGB. Its size is checked before."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(body), formats=tuple(FORMATS.values())) as image:
            _check_size(image.width, image.height)
            return image.convert("RGB")
    except (
        UnidentifiedImageError,
        Image.DecompressionBombError,
        OSError,
        SyntaxError,
        ValueError,
    ) as error:
        # The text of UnidentifiedImageError contains the address of the stream.
        message = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise Unprocessable(
            f"the body is no readable image{message}", f"send one of {', '.join(FORMATS)}"
        ) from None


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise TooLarge(
            f"an image of {width} x {height}, expected at most {MAX_PIXELS} pixels",
            "send a smaller image; a very narrow one becomes larger by resizing",
        )


def _resized(image: Image, recipe: InputRecipe) -> Image:
    """Scale the shorter side to `resize` and crop the middle; or scale directly to `size`."""
    from PIL.Image import Resampling

    height, width = recipe.size
    if recipe.resize is None:
        return image.resize((width, height), Resampling.BILINEAR)
    shorter = min(image.size)
    scaled = [max(1, int(recipe.resize * side / shorter)) for side in image.size]
    _check_size(*scaled)  # a narrow strip grows to many pixels
    left, top = (
        round((size - side) / 2) for size, side in zip(scaled, (width, height), strict=True)
    )
    return image.resize((scaled[0], scaled[1]), Resampling.BILINEAR).crop(
        (left, top, left + width, top + height)
    )
