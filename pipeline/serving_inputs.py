"""How an engine may be fed when it serves: along which axis requests are joined, and how an image
becomes its input.

Both are proved or declared before an engine serves, and are told to clients with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from pipeline.core import Frozen, TensorSpec
from pipeline.errors import PlanError


class Padding(Frozen):
    """What fills an input up to a common length; declared by the plan, never inferred."""

    input: str
    axis: int = Field(ge=1)
    value: float = 0.0


class BatchSpec(Frozen):
    """Whether and how requests may be answered together."""

    # of each input and output by name; None: not batched, the same for all rows of a batch
    axes: Mapping[str, int | None]
    maximum: int = Field(default=1, ge=1)  # rows of a batch, as the profiles allow
    padding: tuple[Padding, ...] = ()
    proved: bool = False  # row i of a full batch, of a padded batch and alone were seen to agree
    reason: str = ""  # why it is not proved: then every request runs alone
    # seen in the proof, relative to the largest value of an output
    largest_error: float | None = None


class InputRecipe(Frozen):
    """How an encoded image becomes the input: decoded, resized so that the shorter side is
    `resize`, cropped to `size`, (x * scale - mean) / std.
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
    """What a server must be told of a model, because it cannot be seen in it."""

    padding: tuple[Padding, ...] = ()
    image: InputRecipe | None = None
    labels: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # of outputs, by class index


def check_serving(
    serving: ServingConfig, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    """PlanError for an input, an axis or an output that the model lacks."""
    rank = {spec.name: len(spec.shape) for spec in inputs}
    asked = [("padding", each.input) for each in serving.padding] + (
        [("image", serving.image.input)] if serving.image else []
    )
    for key, name in asked:
        if name not in rank:
            raise PlanError(
                f"serving.{key} names '{name}', which is no input; the model has {', '.join(rank)}",
                "name one of these",
            )
    for each in serving.padding:
        if each.axis >= rank[each.input]:
            message = (
                f"serving.padding: '{each.input}' has {rank[each.input]} axes, there is no axis"
                f" {each.axis}"
            )
            raise PlanError(message, "axes are counted from 0")
    known = [spec.name for spec in outputs]
    if unknown := [name for name in serving.labels if name not in known]:
        raise PlanError(
            f"serving.labels names '{unknown[0]}', which is no output; the model has"
            f" {', '.join(known)}",
            "name one of these",
        )
