"""Texts as inputs of an encoder: their tokens as arrays, and one vector for each from its output.

The plan's `serving.text` says how. The tokenizer is delivered beside the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import Profile, Tensors, TensorSpec, dtype_of
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, PlanError

TOKENIZER_FILE = "tokenizer.json"
WHOLE_NUMBERS = ("int32", "int64")
KEY = "serving.text"
TINY = 1e-12  # a vector of zeros stays one


class TextRecipe(Frozen):
    """How the tokens of a text become inputs, and an output becomes its vector."""

    input: str = Field(default="input_ids", description="Name of the input for the tokens.")
    mask: str = Field(
        default="attention_mask",
        description="Name of the input that is 1 for tokens and 0 for padding, if there is one.",
    )
    types: str = Field(
        default="token_type_ids",
        description="Name of an input that is 0 for every token, if there is one.",
    )
    output: str = Field(
        default="", description="Name of the output that becomes the vector. Default: the only one."
    )
    pooling: Literal["mean", "cls"] | None = Field(
        default=None,
        description=(
            "How an output `[batch, tokens, size]` becomes one vector: `mean` over the tokens, or"
            " `cls`, that of the first token. Default: the output is `[batch, size]` already."
        ),
    )
    normalize: bool = Field(default=True, description="Scale each vector to length 1.")


class TextConfig(TextRecipe):
    """The section `serving.text`."""

    tokenizer: Path | None = Field(
        default=None,
        description=(
            "The tokenizer.json of Hugging Face, or the folder with it. It is delivered beside the"
            " engine. An upload sends it as the part `tokenizer`."
        ),
    )

    @property
    def recipe(self) -> TextRecipe:
        """The section without the path of the tokenizer."""
        return TextRecipe.model_validate(self.model_dump(exclude={"tokenizer"}))

    @property
    def file(self) -> Path:
        """The tokenizer.json. PlanError if the plan names none."""
        if self.tokenizer is None:
            raise PlanError(
                f"{KEY} has no tokenizer",
                f"give {KEY}.tokenizer, or send the file as the part `tokenizer` of the upload",
            )
        return self.tokenizer / TOKENIZER_FILE if self.tokenizer.is_dir() else self.tokenizer


def check_tokenizer(file: Path) -> None:
    """Raise PlanError unless `file` is a tokenizer, BackendUnavailable if none can be read here."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BackendUnavailable(
            f"{KEY} needs the library tokenizers", install_command("embeddings")
        ) from error
    if not file.is_file():
        raise PlanError(
            f"{KEY}.tokenizer: no file at '{file}'",
            f"give a {TOKENIZER_FILE} of Hugging Face, or the folder with it; transformers writes"
            " one with `AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`",
        )
    try:
        Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises no other class
        raise PlanError(
            f"{KEY}.tokenizer: '{file}' is no tokenizer: {str(error)[:200]}",
            f"give a {TOKENIZER_FILE} of Hugging Face",
        ) from error


def check_text(
    recipe: TextRecipe, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> None:
    """Raise PlanError if texts cannot become these inputs, or these outputs no vector.

    `inputs` are those that clients send.
    """
    by_name = {spec.name: spec for spec in inputs}
    if recipe.input not in by_name:
        raise PlanError(
            f"{KEY}.input names '{recipe.input}', which is no input; the model has"
            f" {', '.join(by_name)}",
            "name one of these",
        )
    tokens = by_name[recipe.input]
    for spec in inputs:
        if spec.name not in (recipe.input, recipe.mask, recipe.types):
            raise PlanError(
                f"{KEY}: the model also has the input '{spec.name}', which no text gives",
                f"name it as {KEY}.mask or {KEY}.types if it is one of these, or let the module"
                " make it",
            )
        if spec.dtype not in WHOLE_NUMBERS or len(spec.shape) != 2 or spec.shape != tokens.shape:
            raise PlanError(
                f"{KEY}: input '{spec.name}' is {_form(spec)}, expected int32 or int64 [batch,"
                " tokens], equal for all inputs",
                "change the model's inputs, or leave the section out",
            )
    output = vector_output(recipe, outputs)
    rank = len(output.shape)
    if rank == 2 and recipe.pooling is None:
        return
    if rank != 3 or recipe.pooling is None or output.shape[1] != tokens.shape[1]:
        raise PlanError(
            f"{KEY}: output '{output.name}' is {_form(output)} and pooling is"
            f" {recipe.pooling or 'not given'}; expected [batch, size] without pooling, or [batch,"
            f" {tokens.shape[1]}, size] with it",
            f"give {KEY}.pooling for hidden states only",
        )


def vector_output(recipe: TextRecipe, outputs: Sequence[TensorSpec]) -> TensorSpec:
    """Return the output that becomes the vector. PlanError if it is not clear which one."""
    chosen = [spec for spec in outputs if recipe.output in ("", spec.name)]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(spec.name for spec in outputs)
    what = f"names '{recipe.output}', which is no output" if recipe.output else "is not given"
    raise PlanError(f"{KEY}.output {what}; the model has {names}", "name one of these")


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"


# -- one text ------------------------------------------------------------------


def lengths_of(spec: TensorSpec, profiles: Sequence[Profile]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of lengths that an engine takes; empty if it takes all."""
    dim = spec.shape[1]
    if isinstance(dim, int):
        return ((dim, dim),)
    ranges = (profile.dims[dim] for profile in profiles if dim in profile.dims)
    return tuple((each.min, each.max) for each in ranges)


def length_for(tokens: int, lengths: Sequence[tuple[int, int]]) -> int | None:
    """Return the shortest length that holds so many tokens; None if there is none."""
    if not lengths:
        return tokens
    return min((max(tokens, low) for low, high in lengths if tokens <= high), default=None)


def inputs_from_tokens(
    tokens: NDArray[np.int32],
    inputs: Sequence[TensorSpec],
    recipe: TextRecipe,
    length: int,
    padding: int = 0,
) -> Tensors:
    """Return the inputs for the tokens of one text, filled up to `length`: [1, length] each."""
    count = len(tokens)
    values = {recipe.input: tokens, recipe.mask: 1, recipe.types: 0}
    fill = {recipe.input: padding}
    made = {}
    for spec in inputs:
        array = np.full((1, length), fill.get(spec.name, 0), dtype_of(spec.dtype))
        array[0, :count] = values[spec.name]
        made[spec.name] = array
    return made


def vector_from_output(
    output: NDArray[np.generic], count: int, recipe: TextRecipe
) -> NDArray[np.float32]:
    """Return the vector of a text with `count` tokens: [size].

    `output`: [1, size], or [1, length, size] with pooling.
    """
    values: NDArray[np.float32] = output[0].astype(np.float32)
    if recipe.pooling == "cls":
        values = values[0]
    elif recipe.pooling == "mean":
        values = values[:count].mean(axis=0)
    if recipe.normalize:
        values /= max(float(np.linalg.norm(values)), TINY)
    return values
