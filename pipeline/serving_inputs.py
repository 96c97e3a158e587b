"""Inputs of a served engine: the axes that join requests to batches, and the image preprocessing.

Both are proved or declared before an engine serves. Clients get them with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import TensorSpec, dtype_of
from pipeline.errors import PlanError
from pipeline.preprocess import Steps
from pipeline.text_inputs import TextConfig, check_text


class Padding(Frozen):
    """Padding of an input to a common length. The plan declares it; it is never inferred."""

    input: str = Field(description="Name of the input.")
    axis: int = Field(
        ge=1,
        description="The axis that is filled up, counted from 0. Axis 0 is not padded this way.",
    )
    value: float = Field(default=0.0, description="The value that fills it.")


class Packing(Frozen):
    """Several sequences in one row, kept apart by a block-diagonal mask. The plan declares it.

    Clients send neither the mask nor the positions: the server makes both.
    """

    axis: str = Field(
        description=(
            "The symbol of the tokens. A row holds as many as the largest max of the profiles."
        )
    )
    mask: str = Field(
        description=(
            "The input for the mask, `[batch, tokens, tokens]` or `[batch, 1, tokens, tokens]`, in"
            " int32, int64 or bool. 1 means that a token (row) sees another (column), 0 that it"
            " does not."
        )
    )
    positions: str = Field(
        description=(
            "The input for the positions, `[batch, tokens]`, in int32 or int64: 0, 1, ... within"
            " each sequence."
        )
    )

    @property
    def made(self) -> tuple[str, str]:
        """The inputs that clients do not send."""
        return self.mask, self.positions


class BatchSpec(Frozen):
    """Whether and how requests may be joined to a batch."""

    # of each input and output by name; None: not batched, the same for all rows of a batch
    axes: Mapping[str, int | None]
    maximum: int = Field(default=1, ge=1)  # rows of a batch, as the profiles allow
    padding: tuple[Padding, ...] = ()
    packing: Packing | None = None  # as declared: the server makes the mask and the positions
    packs: bool = False  # sequences in one row were seen to have the answers that each has alone
    proved: bool = False  # row i of a full batch, of a padded batch and alone were seen to agree
    reason: str = ""  # why it is not proved: then every request runs alone
    # seen in the proof, relative to the largest value of an output
    largest_error: float | None = None


class InputRecipe(Frozen):
    """Preprocessing of an encoded image.

    Decode, resize the shorter side to `resize`, crop to `size`, then (x * scale - mean) / std.
    """

    input: str = Field(description="Name of the input.")
    size: tuple[int, int] = Field(
        description="Height and width of the pixels that the model takes."
    )
    resize: int | None = Field(
        default=None,
        description=(
            "Length of the shorter side before the centre crop. Default: straight to `size`."
        ),
    )
    colour: Literal["RGB", "BGR"] = Field(default="RGB", description="Order of the channels.")
    layout: Literal["NCHW", "NHWC"] = Field(default="NCHW", description="Layout of the input.")
    scale: float = Field(default=1 / 255, description="The factor for each pixel. Default: 1/255.")
    mean: tuple[float, float, float] = Field(
        default=(0.0, 0.0, 0.0), description="Mean of each channel of the scaled values."
    )
    std: tuple[float, float, float] = Field(
        default=(1.0, 1.0, 1.0),
        description="Standard deviation of each channel of the scaled values.",
    )


class ServingConfig(Frozen):
    """Facts on a model that a server needs and the model does not contain."""

    padding: tuple[Padding, ...] = Field(
        default=(),
        description=(
            "Requests of unequal size along an axis may run in one batch, filled up with a value."
            " Another input, such as a mask, must mark the padding. Name every input that has this"
            " axis. The promotion proves on the engine that padding changes no answer."
        ),
    )
    packing: Packing | None = Field(
        default=None,
        description="Several sequences share a row of the engine. Not together with `padding`.",
    )
    image: InputRecipe | None = Field(
        default=None,
        description=(
            "How an encoded picture becomes an input. `layout`, `scale`, `mean` and `std` belong"
            " to `preprocess` instead if that names the input."
        ),
    )
    text: TextConfig | None = Field(
        default=None,
        description="How a text becomes inputs, and the output one vector: for `/v1/embeddings`.",
    )
    labels: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="Names of the classes, by output: `{logits: [cat, dog]}`."
    )


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
    if serving.packing:
        _check_packing(serving, serving.packing, inputs, outputs)
    if serving.text:
        check_text(serving.text, client_inputs(inputs, serving.packing), outputs)
    known = [spec.name for spec in outputs]
    if unknown := [name for name in serving.labels if name not in known]:
        raise PlanError(
            f"serving.labels names '{unknown[0]}', which is no output; the model has"
            f" {', '.join(known)}",
            "name one of these",
        )


WHOLE_NUMBERS = ("int32", "int64")


def _check_packing(
    serving: ServingConfig,
    packing: Packing,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
) -> None:
    """Raise PlanError if the model's inputs or outputs cannot be packed as declared."""
    if serving.padding:
        raise PlanError(
            "serving.packing and serving.padding are both given",
            "remove serving.padding: packing also joins sequences of unequal length",
        )
    by_name = {spec.name: spec for spec in inputs}
    for key, name in (("mask", packing.mask), ("positions", packing.positions)):
        if name not in by_name:
            raise PlanError(
                f"serving.packing.{key} names '{name}', which is no input; the model has"
                f" {', '.join(by_name)}",
                "packing needs a model with an input for the mask and one for the positions",
            )
    if len(by_name) == len(set(packing.made)):
        raise PlanError(
            "serving.packing: the model has no inputs beside the mask and the positions",
            "name the two inputs that the server makes; clients send the others",
        )
    symbols = dict.fromkeys(symbol for spec in inputs for symbol in spec.symbols)
    if packing.axis not in symbols:
        raise PlanError(
            f"serving.packing.axis is '{packing.axis}', which is no symbolic dimension of the"
            f" inputs; they have {', '.join(symbols) or 'none: every size is fixed'}",
            "give the axis of the tokens a symbol in model.inputs, and a range in profiles",
        )
    mask, positions = by_name[packing.mask], by_name[packing.positions]
    axis = packing.axis
    forms = [(*front, axis, axis) for front in ((), (1,))]
    _check_made("mask", mask, forms, (*WHOLE_NUMBERS, "bool"))
    _check_made("positions", positions, [(axis,)], WHOLE_NUMBERS)
    for kind, specs in (("input", client_inputs(inputs, packing)), ("output", outputs)):
        for spec in specs:
            if spec.shape[:1] != mask.shape[:1] or spec.shape.count(axis) != 1:
                raise PlanError(
                    f"serving.packing: {kind} '{spec.name}' is {list(spec.shape)}, expected"
                    f" '{mask.shape[0]}' in front and '{axis}' once: sequences in one row share"
                    " everything that is not per token",
                    f"leave packing out, or give every {kind} a value for each token",
                )


def _check_made(
    key: str, spec: TensorSpec, forms: list[tuple[int | str, ...]], dtypes: tuple[str, ...]
) -> None:
    """Raise PlanError for an input that the server cannot make."""
    rows, shape = spec.shape[:1], spec.shape[1:]
    if shape not in forms or isinstance(rows[0], int) or rows[0] in shape:
        expected = " or ".join(f"[batch, {', '.join(map(str, form))}]" for form in forms)
        raise PlanError(
            f"serving.packing.{key}: '{spec.name}' is {list(spec.shape)}, expected {expected}"
            " with a symbol for the batch",
            "change the model's inputs, or leave packing out",
        )
    if spec.dtype not in dtypes:
        raise PlanError(
            f"serving.packing.{key}: '{spec.name}' is {spec.dtype}, expected one of"
            f" {', '.join(dtypes)}",
            "let the module convert it: the server makes whole numbers only, and a mask that is"
            " added to the scores has no standard value",
        )


def client_inputs(
    inputs: tuple[TensorSpec, ...], packing: Packing | None
) -> tuple[TensorSpec, ...]:
    """Return the inputs that clients send."""
    made = packing.made if packing else ()
    return tuple(spec for spec in inputs if spec.name not in made)


def with_made_inputs(
    feeds: Mapping[str, Any], inputs: tuple[TensorSpec, ...], packing: Packing | None
) -> Mapping[str, Any]:
    """Add the mask and the positions of rows that each are one sequence. Of the feeds, only the
    shapes count.
    """
    if packing is None:
        return feeds
    spec = client_inputs(inputs, packing)[0]
    shape = feeds[spec.name].shape
    rows, length = shape[0], shape[spec.shape.index(packing.axis)]
    specs = {each.name: each for each in inputs}
    mask, positions = (specs[name] for name in packing.made)
    front = (rows, *(1,) * (len(mask.shape) - 3))
    return {
        **feeds,
        mask.name: np.ones((*front, length, length), dtype_of(mask.dtype)),
        positions.name: np.tile(np.arange(length, dtype=dtype_of(positions.dtype)), (rows, 1)),
    }
