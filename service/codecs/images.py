"""An encoded image becomes a model's input, as its InputRecipe says."""

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
    """[1, 3, height, width] or [1, height, width, 3]. Resized bilinearly; as in torchvision, a
    rotation that EXIF notes is not applied.
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
    """The decoded image in RGB; its size is checked before it is decoded."""
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
        message = (
            "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        )  # which names the stream's address
        raise Unprocessable(
            f"the body is no readable image{message}", f"send one of {', '.join(FORMATS)}"
        ) from None


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise TooLarge(
            f"an image of {width} x {height}, expected at most {MAX_PIXELS} pixels",
            "make it smaller, or less narrow",
        )


def _resized(image: Image, recipe: InputRecipe) -> Image:
    """The shorter side made `resize` long, and the middle cut out; or straight to `size`."""
    from PIL.Image import Resampling

    height, width = recipe.size
    if recipe.resize is None:
        return image.resize((width, height), Resampling.BILINEAR)
    shorter = min(image.size)
    whole = [max(1, int(recipe.resize * side / shorter)) for side in image.size]
    _check_size(*whole)  # a strip of few pixels grows to many
    left, top = (
        round((size - side) / 2) for size, side in zip(whole, (width, height), strict=True)
    )
    return image.resize((whole[0], whole[1]), Resampling.BILINEAR).crop(
        (left, top, left + width, top + height)
    )
