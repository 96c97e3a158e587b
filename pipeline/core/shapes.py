"""Tensors, the shapes of inputs and outputs, and the ranges of shapes that an engine accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from pipeline.core.frozen import Frozen

Tensors = Mapping[str, NDArray[Any]]
"""Tensors by name, as host arrays."""


Dim = Annotated[int, Field(ge=0)] | str
"""One dimension: a size, or the name of a symbol."""


class TensorSpec(Frozen):
    """Name, dtype and shape of one input or output."""

    name: str = Field(description="Name of the input or output.")
    dtype: str = Field(
        description="The name in NumPy, such as `float32`, `int64` or `bool`; or `bfloat16`."
    )
    shape: tuple[Dim, ...] = Field(
        description=(
            "One entry for each axis. A number is fixed. A string is a symbolic dimension. `[]` is"
            " a scalar."
        )
    )
    location: Literal["device", "host"] = Field(
        default="device", description="`host`: a shape tensor, which the builder reads on the CPU."
    )
    kind: Literal["static", "dynamic", "data-dependent"] = Field(
        default="static",
        description="`data-dependent`: the size is known only after a run, as of NonZero.",
    )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbolic dimensions, in order, each once."""
        return tuple(dict.fromkeys(dim for dim in self.shape if isinstance(dim, str)))

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the concrete shape. KeyError names a symbol without a size."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


class _Range(Frozen):
    """Fields min, opt and max. Written as {min, opt, max}, as [min, opt, max], or as one number for
    all three.
    """

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: object) -> object:
        triple = [value] * 3 if isinstance(value, int) else value
        if isinstance(triple, list | tuple) and len(triple) != 3:
            raise ValueError(f"expected [min, opt, max], got {list(triple)}")
        return (
            dict(zip(("min", "opt", "max"), triple, strict=True))
            if isinstance(triple, list | tuple)
            else triple
        )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, usual, high = (np.atleast_1d(value) for _, value in self)
        if not (
            low.shape == usual.shape == high.shape
            and (low <= usual).all()
            and (usual <= high).all()
        ):
            raise ValueError(
                "expected min <= opt <= max, got"
                f" {', '.join(f'{point} {value}' for point, value in self)}"
            )
        return self


class DimRange(_Range):
    """Smallest, most usual and largest size of one symbolic dimension."""

    min: int = Field(ge=0)
    opt: int = Field(ge=1)
    max: int


def dtype_of(name: str) -> np.dtype[np.generic]:
    """The numpy dtype of a spec's dtype name; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


Point = Literal["min", "opt", "max"]
Values = Annotated[
    tuple[int, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, int) else value,
        json_schema_input_type=int | tuple[int, ...],
    ),
]


class ValueRange(_Range):
    """Smallest, most usual and largest values of an input with values that decide a shape.

    Examples are the target of a Reshape and the k of a TopK.
    """

    min: Values
    opt: Values
    max: Values

    def holds(self, values: Sequence[int]) -> bool:
        """Return whether the number of values fits and each lies within its range."""
        return len(values) == len(self.min) and all(
            low <= value <= high
            for low, value, high in zip(self.min, values, self.max, strict=True)
        )


class Profile(Frozen):
    """A range of shapes that an engine accepts: one DimRange per symbol.

    Inputs that share a symbol always have the same size there.
    """

    dims: dict[str, DimRange] = Field(default_factory=dict)
    # by input name, for inputs with values that decide a shape
    values: dict[str, ValueRange] = Field(default_factory=dict)

    def sizes(self, point: Point) -> dict[str, int]:
        """Return the size of every symbol at min, opt or max."""
        return {name: int(getattr(dim, point)) for name, dim in self.dims.items()}

    def values_at(self, point: Point) -> dict[str, tuple[int, ...]]:
        """Return the values at min, opt or max, for every input with values that decide a shape."""
        return {name: tuple(getattr(values, point)) for name, values in self.values.items()}

    def odd_sizes(self) -> dict[str, int]:
        """Return sizes inside the ranges, odd and none of min, opt and max if possible."""
        return {name: _odd_size(dim.min, dim.opt, dim.max) for name, dim in self.dims.items()}

    def odd_values(self) -> dict[str, tuple[int, ...]]:
        """Return values by the rule of `odd_sizes`.

        A value with the same range as a symbol equals the odd size of that symbol.
        """
        return {
            name: tuple(map(_odd_size, values.min, values.opt, values.max))
            for name, values in self.values.items()
        }

    def holds(
        self, sizes: Mapping[str, int], values: Mapping[str, Sequence[int]] | None = None
    ) -> bool:
        """Return whether all sizes, and the values if there are any, lie within their ranges.

        A symbol or an input that is missing does not count.
        """
        for name, values_range in self.values.items():
            if values is not None and name in values and not values_range.holds(values[name]):
                return False
        return all(
            dim.min <= sizes.get(name, dim.opt) <= dim.max for name, dim in self.dims.items()
        )

    def distance(self, sizes: Mapping[str, int]) -> float:
        """Return how far these sizes are from opt, in doublings: opt is what kernels are tuned for.

        It is the sum over symbols of |log2(size / opt)|: half of opt is as far as twice opt. Sizes
        below 1 count as 1.
        """
        return sum(
            abs(math.log2(max(sizes.get(name, dim.opt), 1) / max(dim.opt, 1)))
            for name, dim in self.dims.items()
        )

    def in_words(self) -> str:
        """Return every range as text for messages."""
        texts = [f"{symbol} from {dim.min} to {dim.max}" for symbol, dim in self.dims.items()]
        for name, values in self.values.items():
            texts.append(f"{name} from {list(values.min)} to {list(values.max)}")
        return ", ".join(texts)


def nearest_profile(
    profiles: Sequence[Profile],
    sizes: Mapping[str, int],
    values: Mapping[str, Sequence[int]] | None = None,
) -> int | None:
    """Return the index of the profile that is tuned nearest to the sizes; None if none holds them.

    Among equally near ones it is the first.
    """
    holding = [number for number, each in enumerate(profiles) if each.holds(sizes, values)]
    return min(holding, key=lambda number: profiles[number].distance(sizes), default=None)


def _odd_size(low: int, usual: int, high: int) -> int:
    inside = [n for n in range(low + 1, min(high, low + 64)) if n != usual]
    candidates = [n for n in inside if n % 2 == 1] or inside or [high]
    return candidates[len(candidates) // 2]


def sizes_from_shapes(
    specs: tuple[TensorSpec, ...], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int] | str:
    """Return the size of every symbol from concrete shapes, or a message if they do not fit."""
    sizes: dict[str, int] = {}
    for spec in specs:
        shape = shapes[spec.name]
        if len(shape) != len(spec.shape):
            return (
                f"input '{spec.name}' has rank {len(shape)} {shape}, expected rank"
                f" {len(spec.shape)} {spec.shape}"
            )
        for dim, size in zip(spec.shape, shape, strict=True):
            if isinstance(dim, int) and dim != size:
                return f"input '{spec.name}' has shape {shape}, expected {spec.shape}"
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                return (
                    f"input '{spec.name}' gives '{dim}' = {size}, another input gives {sizes[dim]}"
                )
    return sizes
