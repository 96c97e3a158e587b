"""Sizes and inputs of the accuracy gate. Pure.

An engine may be accurate at one batch size and wrong at another: a builder chooses other kernels
for each profile, and kernels have other paths for small batches. So the gate runs the whole
selection set at one batch size, and in every profile also:

    samples     batches of 1, min, opt and max rows, cut from the selection set or filled up from it
    generated   min, opt and max of the profile if no sample has its other sizes (a sequence)

Generated inputs are samples with their axes cut or repeated, so that ids and masks stay valid for
the model. Without samples they are random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import Point, Profile, Tensors, TensorSpec
from pipeline.data.batch import Batch
from pipeline.data.generated import GeneratedPart
from pipeline.data.samples import SampleSet
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.results.accuracy import InputSource

ROWS_PER_SIZE = 256  # rows of the selection set per size, which bounds the cost of each size
POINTS: tuple[Point, ...] = ("min", "opt", "max")

Sizes = dict[str, int]
Values = dict[str, tuple[int, ...]]


class GatePoint(Frozen):
    """One size that the gate checks, in one profile."""

    profile: int  # index of the profile
    sizes: Sizes  # of all symbols; samples: only of the batch symbol, the samples have the others
    values: Values = Field(default_factory=dict)  # generated: for inputs that decide a shape
    inputs: InputSource
    rows: int = 0  # samples: in each batch; 0: as the set itself cuts them
    parts: tuple[int, ...] = ()  # samples: the files of the set that this profile holds


def gate_points(
    samples: SampleSet, profiles: Sequence[Profile], batch: int
) -> tuple[GatePoint, ...]:
    """Return every size to check besides the run over all samples.

    That run has batches of `batch` rows, in the profile that is tuned nearest to them.
    """
    points: list[GatePoint] = []
    for index, profile in enumerate(profiles):
        points += _sample_points(samples, profiles, index, batch)
        points += _generated_points(samples, profile, index)
    return tuple(points)


def feeds_at(point: GatePoint, samples: SampleSet) -> Iterator[Batch]:
    """Yield the batches of one point. They are the same in every call."""
    if point.inputs == "samples":
        yield from samples.filled(point.rows, point.parts, ROWS_PER_SIZE)
        return
    feeds = _generated(point, samples)
    rows = 1 if samples.whole else len(next(iter(feeds.values())))
    yield Batch(feeds, None, 0, rows, whole=samples.whole)


# -- samples -----------------------------------------------------------------


def _sample_points(
    samples: SampleSet, profiles: Sequence[Profile], index: int, batch: int
) -> Iterator[GatePoint]:
    """Yield points of 1, min, opt and max rows, with the files that this profile holds."""
    profile, symbol = profiles[index], _row_symbol(samples)
    holders = [_holders(part.sizes(samples.specs), profiles) for part in samples.parts]
    parts = [number for number, indices in enumerate(holders) if index in indices]
    # whether the run over all samples covers this profile
    covered = all(holders[number][0] == index for number in parts)
    if not parts:
        return
    if symbol is None:
        if not covered:
            yield GatePoint(profile=index, sizes={}, inputs="samples", parts=tuple(parts))
        return
    for rows in _row_counts(profile, symbol):
        if not (covered and rows == batch):
            most = max(1, ROWS_PER_SIZE // rows)
            chosen = parts[:: math.ceil(len(parts) / most)]
            yield GatePoint(
                profile=index,
                sizes={symbol: rows},
                inputs="samples",
                rows=rows,
                parts=tuple(chosen),
            )


def _holders(shapes: Sequence[Sizes], profiles: Sequence[Profile]) -> list[int]:
    """Return the indices of the profiles that hold all shapes of a file."""
    return [
        index
        for index, profile in enumerate(profiles)
        if all(profile.holds(sizes) for sizes in shapes)
    ]


def _row_symbol(samples: SampleSet) -> str | None:
    """Return the batch symbol, or None if a sample is a whole feed or the batch is fixed."""
    first = {spec.shape[0] if spec.shape else None for spec in samples.specs}
    symbol = next(iter(first)) if len(first) == 1 else None
    if samples.whole or not isinstance(symbol, str):
        return None
    return None if any(symbol in spec.shape[1:] for spec in samples.specs) else symbol


def _row_counts(profile: Profile, symbol: str) -> tuple[int, ...]:
    """Return those of 1, min, opt and max that the profile holds, ascending."""
    if symbol not in profile.dims:
        return ()
    dim = profile.dims[symbol]
    counts = {max(1, rows) for rows in (1, dim.min, dim.opt, dim.max)}
    return tuple(sorted(rows for rows in counts if dim.min <= rows <= dim.max))


# -- generated ---------------------------------------------------------------


def _generated_points(samples: SampleSet, profile: Profile, index: int) -> Iterator[GatePoint]:
    """Yield points at min, opt and max, and at opt with a batch of 1, if no sample covers them."""
    symbol = _row_symbol(samples)
    known = [sizes for part in samples.parts for sizes in part.sizes(samples.specs)]
    candidates = [(profile.sizes(name), profile.values_at(name)) for name in POINTS]
    if symbol in profile.dims and profile.dims[symbol].min <= 1:
        candidates.append((profile.sizes("opt") | {symbol: 1}, profile.values_at("opt")))
    listed: list[tuple[Sizes, Values]] = []
    for sizes, values in candidates:
        other_sizes = {name: size for name, size in sizes.items() if name != symbol}
        is_known = not values and any(_agrees(other_sizes, known_sizes) for known_sizes in known)
        if min(sizes.values(), default=1) >= 1 and not is_known and (sizes, values) not in listed:
            listed.append((sizes, values))
            yield GatePoint(profile=index, sizes=sizes, values=values, inputs="generated")


def _agrees(sizes: Sizes, known: Sizes) -> bool:
    """Return whether a sample has these sizes. Symbols that no input has are ignored."""
    return all(known[symbol] == size for symbol, size in sizes.items() if symbol in known)


def _generated(point: GatePoint, samples: SampleSet) -> Tensors:
    """Make inputs of these sizes: samples with axes cut or repeated, else random values."""
    if all(isinstance(part, GeneratedPart) for part in samples.parts):
        return draw_feeds(samples.specs, point.sizes, 0, point.values, seen=True)
    batch = next(samples.batches(max(point.sizes.values(), default=1)))
    return {spec.name: _fitted(batch.feeds[spec.name], spec, point) for spec in samples.specs}


def _fitted(array: NDArray[np.generic], spec: TensorSpec, point: GatePoint) -> NDArray[np.generic]:
    shape = spec.resolve(point.sizes)
    if spec.name in point.values or array.size == 0:
        return draw_feeds((spec,), point.sizes, 0, point.values)[spec.name]
    for axis, size in enumerate(shape):
        array = np.take(array, np.arange(size) % array.shape[axis], axis)
    return np.ascontiguousarray(array)
