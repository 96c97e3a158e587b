"""Preprocessing and postprocessing inside the engine, as a plan asks for them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from pipeline.core.frozen import Frozen


class ImageResize(Frozen):
    """Resizing of an image inside the engine, from one fixed size to another.

    `linear` interpolates between the two nearest pixels of each axis, without antialiasing. The
    centres of pixels count, as in OpenCV's INTER_LINEAR.
    """

    source: tuple[PositiveInt, PositiveInt] = Field(
        description="Height and width of the image that comes in."
    )
    target: tuple[PositiveInt, PositiveInt] = Field(
        description="Height and width of the model's input."
    )
    filter: Literal["linear"] = Field(
        description="The only filter that all backends compute alike."
    )

    @field_validator("filter", mode="before")
    @classmethod
    def _known_filter(cls, value: object) -> object:
        if value != "linear":
            raise ValueError(
                "expected filter linear, which all backends compute alike; TensorRT has none with"
                " antialiasing. For another filter leave `resize` out and resize the images before"
                " the engine, as `serving.image` does with JPEG and PNG"
            )
        return value


PerChannel = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    Field(min_length=1),
    BeforeValidator(
        lambda value: (value,) if isinstance(value, int | float) else value,
        json_schema_input_type=float | tuple[float, ...],
    ),
]
"""One number for each channel, or one for all."""


class Preprocess(Frozen):
    """Preprocessing of an image input inside the engine: uint8 [N, H, W, C] comes in.

    It is cast to float32, resized, (x * scale - mean) / std, then transposed to `layout`.
    """

    scale: float = Field(
        default=1 / 255,
        gt=0,
        allow_inf_nan=False,
        description="The factor for each pixel. Default: 1/255.",
    )
    mean: PerChannel = Field(
        default=(0.0,),
        description="Mean of the scaled values: one number for each channel, or one for all.",
    )
    std: PerChannel = Field(
        default=(1.0,),
        description=(
            "Standard deviation of the scaled values, above 0: one number for each channel, or one"
            " for all."
        ),
    )
    layout: Literal["NCHW", "NHWC"] = Field(
        default="NCHW", description="Layout of the model's input."
    )
    resize: ImageResize | None = Field(
        default=None, description="Resizing before the other steps. Default: none."
    )

    @field_validator("std")
    @classmethod
    def _divisible(cls, std: tuple[float, ...]) -> tuple[float, ...]:
        if min(std) <= 0:
            raise ValueError("expected numbers above 0: the image is divided by them")
        return std


class Postprocess(Frozen):
    """Reduction of an output inside the engine: exactly one of `top_k` and `argmax`."""

    top_k: PositiveInt | None = Field(
        default=None,
        description=(
            "The k highest scores, the highest first, and their indices. Give exactly one of"
            " `top_k` and `argmax`."
        ),
    )
    argmax: bool = Field(default=False, description="The index of the highest score only.")
    axis: int = Field(
        default=-1, description="The axis of the classes. Negative numbers count from the last."
    )
    softmax: bool = Field(
        default=False,
        description="`top_k` only. The values are probabilities, from a softmax over all classes.",
    )

    @model_validator(mode="after")
    def _one_reduction(self) -> Self:
        if (self.top_k is not None) == self.argmax:
            raise ValueError("expected exactly one of `top_k: k` and `argmax: true`")
        if self.softmax and self.argmax:
            raise ValueError(
                "expected `softmax` with `top_k` only: it does not change which score is highest"
            )
        return self
