"""From the shapes of the recorded calls to the inputs and the profile of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.core.shapes import DimRange, Profile, TensorSpec

Shapes = tuple[tuple[int, ...], ...]
"""The shape of every input of a call."""

BATCH = "batch"
IMAGE_AXES = {2: "height", 3: "width"}  # of [N, C, H, W]


def share_rows(shapes: Mapping[Shapes, int]) -> bool:
    """Return True if axis 0 of all inputs has one size in every call."""
    return all(all(call) and len({shape[0] for shape in call}) == 1 for call in shapes)


def inputs_and_profile(
    names: Sequence[str], dtypes: Sequence[str], shapes: Mapping[Shapes, int], has_rows: bool
) -> tuple[tuple[TensorSpec, ...], Profile]:
    """Return the inputs, with a symbol for each size that varies, and the ranges of the symbols.

    `shapes` holds the number of calls for each. Axes that have equal sizes in every call share a
    symbol. `opt` is the size of most calls. With `has_rows`, a varying axis 0 is the batch, which
    starts at 1.
    """
    symbols: dict[tuple[object, ...], str] = {}
    ranges: dict[str, DimRange] = {}
    inputs = []
    for number, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        rank = len(next(iter(shapes))[number])
        dims: list[int | str] = []
        for axis, sizes in enumerate(zip(*(call[number] for call in shapes), strict=True)):
            if len(set(sizes)) == 1:
                dims.append(sizes[0])
                continue
            is_batch = has_rows and axis == 0
            if (is_batch, sizes) not in symbols:
                symbol = BATCH if is_batch else _symbol(name, dtype, rank, axis)
                symbol = symbol if symbol not in ranges else f"{name}_{axis}"
                symbols[is_batch, sizes] = symbol
                ranges[symbol] = _range(sizes, tuple(shapes.values()), is_batch)
            dims.append(symbols[is_batch, sizes])
        inputs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(dims)))
    return tuple(inputs), Profile(dims=ranges)


def _symbol(name: str, dtype: str, rank: int, axis: int) -> str:
    """Return the usual name of an axis of token ids or images, or one after the input."""
    if np.dtype(dtype).kind in "iu" and (rank, axis) == (2, 1):
        return "sequence"
    return IMAGE_AXES.get(axis, f"{name}_{axis}") if rank == 4 else f"{name}_{axis}"


def _range(sizes: Sequence[int], calls: Sequence[int], is_batch: bool) -> DimRange:
    """Return the range of a symbol from its size in each shape and the calls of each shape."""
    count: Counter[int] = Counter()
    for size, number in zip(sizes, calls, strict=True):
        count[size] += number
    usual = max(count, key=lambda size: (count[size], size))
    return DimRange(min=1 if is_batch else min(sizes), opt=max(1, usual), max=max(sizes))
