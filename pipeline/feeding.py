"""How an engine may be fed when it serves: along which axis requests are joined, and how an image becomes its input.

Both are proved or declared before an engine serves, and are told to clients with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from pipeline.core import Frozen


class Padding(Frozen):
    """What fills an input up to a common length; declared by the plan, never inferred."""

    input: str
    axis: int = Field(ge=1)
    value: float = 0.0


class BatchSpec(Frozen):
    """Whether and how requests may be answered together."""

    axes: Mapping[str, int | None]  # of each input and output by name; None: not batched, the same for all rows of a batch
    maximum: int = Field(default=1, ge=1)  # rows of a batch, as the profiles allow
    padding: tuple[Padding, ...] = ()
    proved: bool = False  # row i of a full batch, of a padded batch and alone were seen to agree
    reason: str = ""  # why it is not proved: then every request runs alone
    largest_error: float | None = None  # seen in the proof, relative to the largest value of an output


class InputRecipe(Frozen):
    """How an encoded image becomes the input: decoded, resized so that the shorter side is `resize`, cropped to `size`, (x * scale - mean) / std."""

    input: str
    size: tuple[int, int]  # height, width
    resize: int | None = None  # None: straight to `size`
    colour: Literal["RGB", "BGR"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
