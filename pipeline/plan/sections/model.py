"""The section `model`, and the profiles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import DimRange, Profile, TensorSpec, ValueRange, Values

ONNX_SUFFIXES = (".onnx",)


def _profiles_by_symbol(value: object) -> object:
    """Convert profiles written as `[{batch: [1, 8, 64]}]` to the stored form `{dims: ...}`."""
    if isinstance(value, list | tuple):
        return [
            _profile_by_symbol(item) if isinstance(item, Mapping) and "dims" not in item else item
            for item in value
        ]
    return value


def _profile_by_symbol(item: Mapping[str, object]) -> dict[str, object]:
    """Convert one profile. `values: {k: ...}` holds ranges of values by input.

    All other keys are symbols, and so is `values` itself if it holds min, opt and max.
    """
    values = item.get("values")
    if not isinstance(values, Mapping) or set(values) == set(DimRange.model_fields):
        return {"dims": dict(item)}
    return {
        "dims": {name: sizes for name, sizes in item.items() if name != "values"},
        "values": values,
    }


_WrittenRange = int | tuple[int, int, int] | DimRange
_WrittenValues = int | tuple[Values, Values, Values] | ValueRange
_WrittenProfile = dict[str, _WrittenRange | dict[str, _WrittenValues]]
Profiles = Annotated[
    tuple[Profile, ...],
    BeforeValidator(_profiles_by_symbol, json_schema_input_type=tuple[_WrittenProfile, ...]),
]


class ModelConfig(Frozen):
    """The source: `path:`, or `entrypoint:` with `weights:`."""

    path: Path | None = Field(
        default=None,
        description=(
            "A .onnx file, with external data only inside its own folder, or a .pt2 file from"
            " torch.export.save."
        ),
    )
    entrypoint: str | None = Field(
        default=None,
        description=(
            "`module:function` that returns an nn.Module. Give exactly one of `path` and"
            " `entrypoint`."
        ),
    )
    python_path: Path = Field(
        default=Path(),
        description=(
            "Folder from which the module is imported. Its source text is part of the cache key."
            " Default: the plan's folder."
        ),
    )
    weights: Path | None = Field(
        default=None, description="A .safetensors file with the module's state dict."
    )
    weights_from: str = Field(
        default="",
        description=(
            "The source of the weights in words, if there is no file. The report repeats it."
        ),
    )
    inputs: tuple[TensorSpec, ...] = Field(
        default=(),
        description="The inputs in the order of the call. For .onnx they are read from the graph.",
    )
    outputs: tuple[str, ...] = Field(
        default=(), description="Names of the outputs. Default: the exporter's."
    )
    seed: int = Field(default=0, description="Seed of random weights and of generated inputs.")

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.entrypoint is None):
            raise ValueError("expected exactly one of `path` and `entrypoint`")
        if self.entrypoint is not None and self.entrypoint.count(":") != 1:
            raise ValueError(f"expected entrypoint `module:function`, got '{self.entrypoint}'")
        if self.entrypoint is not None and self.weights is None and not self.weights_from:
            raise ValueError(
                "entrypoint without `weights`: give a .safetensors file, or say in `weights_from:`"
                " where the weights come from"
            )
        if self.path is not None and self.path.suffix not in (*ONNX_SUFFIXES, ".pt2"):
            raise ValueError(f"expected a .onnx or .pt2 file, got '{self.path}'")
        if (
            self.entrypoint is not None or (self.path is not None and self.path.suffix == ".pt2")
        ) and not self.inputs:
            raise ValueError(
                "`inputs` is needed: name, dtype and shape of each input, in the order of the call"
            )
        return self
