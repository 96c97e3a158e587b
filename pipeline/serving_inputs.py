"""Inputs of a served engine: the axes that join requests to batches, and the image preprocessing.

Both are proved or declared before an engine serves. Clients get them with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from pipeline.core import Frozen, TensorSpec
from pipeline.errors import PlanError
from pipeline.preprocess import Steps


class Padding(Frozen):
    """Padding of an input to a common length. The plan declares it; it is never inferred."""

    input: str
    axis: int = Field(ge=1)
    value: float = 0.0


class BatchSpec(Frozen):
    """Whether and how requests may be joined to a batch."""

    # of each input and output by name; None: not batched, the same for all rows of a batch
    axes: Mapping[str, int | None]
    maximum: int = Field(default=1, ge=1)  # rows of a batch, as the profiles allow
    padding: tuple[Padding, ...] = ()
    proved: bool = False  # row i of a full batch, of a padded batch and alone were seen to agree
    reason: str = ""  # why it is not proved: then every request runs alone
    # seen in the proof, relative to the largest value of an output
    largest_error: float | None = None


class InputRecipe(Frozen):
    """Preprocessing of an encoded image.

    Decode, resize the shorter side to `resize`, crop to `size`, then (x * scale - mean) / std.
    """

    input: str
    size: tuple[int, int]  # height, width
    resize: int | None = None  # None: straight to `size`
    colour: Literal["RGB", "BGR"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


class ServingConfig(Frozen):
    """Facts on a model that a server needs and the model does not contain."""

    padding: tuple[Padding, ...] = ()
    image: InputRecipe | None = None
    labels: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # of outputs, by class index


RAW_PIXELS: Mapping[str, object] = {
    "layout": "NHWC",
    "scale": 1.0,
    "mean": (0.0, 0.0, 0.0),
    "std": (1.0, 1.0, 1.0),
}
"""Fields of an InputRecipe that decodes an image to its pixels, as the engine takes them."""


def with_raw_image(
    serving: ServingConfig, inputs: tuple[TensorSpec, ...], steps: Steps
) -> ServingConfig:
    """Return the image recipe of an input that the engine preprocesses: it only decodes to pixels.

    PlanError if the recipe repeats a step, or if its size is not that of the engine's input.
    """
    image = serving.image
    if image is None or image.input not in steps:
        return serving
    for key, value in RAW_PIXELS.items():
        # a stored plan holds all keys, so a default is as good as none
        if getattr(image, key) not in (value, InputRecipe.model_fields[key].default):
            raise PlanError(
                f"serving.image.{key} and preprocess.{image.input} are both given, so the image"
                " would be preprocessed twice",
                f"remove serving.image.{key}: the engine does the steps of `preprocess`",
            )
    _, *size, channels = next(spec.shape for spec in inputs if spec.name == image.input)
    for given, expected in zip((*image.size, 3), (*size, channels), strict=True):
        if isinstance(expected, int) and given != expected:
            raise PlanError(
                f"serving.image gives pixels of {[*image.size, 3]}, the engine takes"
                f" {[*size, channels]} as '{image.input}'",
                "give serving.image.size as the engine takes it; images have 3 channels",
            )
    return serving.model_copy(update={"image": image.model_copy(update=RAW_PIXELS)})


def check_serving(
    serving: ServingConfig, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    """Raise PlanError for an input, an axis or an output that the model lacks."""
    rank = {spec.name: len(spec.shape) for spec in inputs}
    named_inputs = [("padding", padding.input) for padding in serving.padding]
    if serving.image:
        named_inputs.append(("image", serving.image.input))
    for key, name in named_inputs:
        if name not in rank:
            raise PlanError(
                f"serving.{key} names '{name}', which is no input; the model has {', '.join(rank)}",
                "name one of these",
            )
    for padding in serving.padding:
        axes = rank[padding.input]
        if padding.axis >= axes:
            raise PlanError(
                f"serving.padding: '{padding.input}' has {axes} axes, there is no axis"
                f" {padding.axis}",
                "axes are counted from 0",
            )
    known = [spec.name for spec in outputs]
    if unknown := [name for name in serving.labels if name not in known]:
        raise PlanError(
            f"serving.labels names '{unknown[0]}', which is no output; the model has"
            f" {', '.join(known)}",
            "name one of these",
        )
