"""Generated inputs for a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.core.artifacts import OnnxModel
from pipeline.core.shapes import Point, Profile, Tensors, TensorSpec, dtype_of

POINTS: tuple[Point, ...] = ("min", "opt", "max")


def draw_feeds(
    specs: tuple[TensorSpec, ...],
    sizes: Mapping[str, int],
    seed: int,
    values: Mapping[str, Sequence[int]] | None = None,
    seen: bool = False,
) -> Tensors:
    """Generate inputs.

    Floats are standard normal. bool has even odds, (u)int8 has its full range, and wider integers
    are 0 or 1: they are mostly ids and masks, and 0 and 1 are valid in every table, however small.
    Inputs named in `values` have those values: `profile.values_at(point)` for inputs that decide a
    shape. `seen`: every row of bool and wider integers begins with 1, so that no mask hides all of
    it.
    """
    random = np.random.default_rng(seed)
    drawn = {spec.name: _draw(random, dtype_of(spec.dtype), spec.resolve(sizes)) for spec in specs}
    for array in drawn.values() if seen else ():
        if array.ndim and array.dtype.kind in "iub" and array.dtype.name not in ("int8", "uint8"):
            array[..., :1] = 1
    fixed = {
        name: np.array(values[name], array.dtype).reshape(array.shape)
        for name, array in drawn.items()
        if values and name in values
    }
    return drawn | fixed


def _draw(
    random: np.random.Generator, dtype: np.dtype[np.generic], shape: tuple[int, ...]
) -> NDArray[np.generic]:
    if dtype.name in ("int8", "uint8"):
        limits = np.iinfo(dtype.name)
        return np.asarray(random.integers(limits.min, limits.max, shape, endpoint=True)).astype(
            dtype
        )
    if dtype.kind in "iub":
        return np.asarray(random.integers(0, 2, shape)).astype(dtype)
    return np.asarray(random.standard_normal(shape)).astype(dtype)


def feeds_of(
    model: OnnxModel, profiles: tuple[Profile, ...], samples: Iterable[Tensors], seen: bool = False
) -> Iterator[Tensors]:
    """Yield the feeds on which a changed graph is compared with the original.

    They are the samples, then generated inputs at four sizes of every profile. `seen` is that of
    `draw_feeds`.
    """
    yield from samples
    for profile in profiles or (Profile(),):
        points = [(profile.sizes(point), profile.values_at(point)) for point in POINTS]
        points.append((profile.odd_sizes(), profile.odd_values()))
        for seed, (sizes, values) in enumerate(points):
            yield draw_feeds(model.inputs, sizes, seed, values, seen)
