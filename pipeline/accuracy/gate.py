"""At which sizes the accuracy gate looks at an engine, and with which inputs. Pure.

An engine may be right at one batch size and wrong at another: a builder chooses other kernels for
each profile, and kernels have other paths for small batches. So besides the whole selection set at
one batch size, the gate runs in every profile:

    samples     batches of 1, min, opt and max rows, cut from the selection set or filled up from it
    generated   min, opt and max of the profile where no sample has its other sizes (a sequence)

Generated inputs are samples with their axes cut or repeated, so that ids and masks stay such as the
model knows; where there is no sample they are random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipeline.core import Frozen, Point, Profile, Tensors, TensorSpec
from pipeline.data.samples import Batch, GeneratedPart, SampleSet
from pipeline.onnx_graph.feeds import draw_feeds

ROWS_PER_SIZE = 256  # of the selection set, which keeps the cost of each other size in bounds
POINTS: tuple[Point, ...] = ("min", "opt", "max")

Sizes = dict[str, int]
Values = dict[str, tuple[int, ...]]


class GatePoint(Frozen):
    """One size at which the gate looks, in one profile."""

    profile: int  # its index
    sizes: Sizes  # of all symbols; samples: only of the one that counts rows, they bring the others
    values: Values = Field(default_factory=dict)  # generated: of inputs whose values decide a shape
    inputs: Literal["samples", "generated"]
    rows: int = 0  # samples: in each batch; 0: as the set itself cuts them
    parts: tuple[int, ...] = ()  # samples: the files of the set that this profile holds


def gate_points(
    samples: SampleSet, profiles: Sequence[Profile], batch: int
) -> tuple[GatePoint, ...]:
    """Every size to look at besides the run over all samples.

    That one takes `batch` rows in the first profile that holds them.
    """
    points: list[GatePoint] = []
    for index, profile in enumerate(profiles):
        points += _sample_points(samples, profiles, index, batch)
        points += _generated_points(samples, profile, index)
    return tuple(points)


def feeds_at(point: GatePoint, samples: SampleSet) -> Iterator[Batch]:
    """The batches of one point, always the same."""
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
    """Batches of 1, min, opt and max rows of what this profile holds."""
    profile, symbol = profiles[index], _row_symbol(samples)
    holders = [_holders(part.sizes(samples.specs), profiles) for part in samples.parts]
    parts = [number for number, held_by in enumerate(holders) if index in held_by]
    covered = all(holders[number][0] == index for number in parts)  # by the run over all samples
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
    """The profiles that hold all shapes of a file."""
    return [
        index
        for index, profile in enumerate(profiles)
        if all(profile.holds(sizes) for sizes in shapes)
    ]


def _row_symbol(samples: SampleSet) -> str | None:
    """The symbol that counts samples in a batch.

    None where a sample is a whole feed, or the batch is fixed.
    """
    first = {spec.shape[0] if spec.shape else None for spec in samples.specs}
    symbol = next(iter(first)) if len(first) == 1 else None
    if samples.whole or not isinstance(symbol, str):
        return None
    return None if any(symbol in spec.shape[1:] for spec in samples.specs) else symbol


def _row_counts(profile: Profile, symbol: str) -> tuple[int, ...]:
    """1, min, opt and max, as far as the profile holds them, ascending."""
    if symbol not in profile.dims:
        return ()
    dim = profile.dims[symbol]
    counts = {max(1, rows) for rows in (1, dim.min, dim.opt, dim.max)}
    return tuple(sorted(rows for rows in counts if dim.min <= rows <= dim.max))


# -- generated ---------------------------------------------------------------


def _generated_points(samples: SampleSet, profile: Profile, index: int) -> Iterator[GatePoint]:
    """Min, opt and max of a profile, and opt in a batch of 1, as far as no sample has their
    sizes.
    """
    symbol = _row_symbol(samples)
    known = [sizes for part in samples.parts for sizes in part.sizes(samples.specs)]
    places = [(profile.sizes(name), profile.values_at(name)) for name in POINTS]
    if symbol in profile.dims and profile.dims[symbol].min <= 1:
        places.append((profile.sizes("opt") | {symbol: 1}, profile.values_at("opt")))
    listed: list[tuple[Sizes, Values]] = []
    for sizes, values in places:
        others = {each: size for each, size in sizes.items() if each != symbol}
        is_known = not values and any(_agrees(others, each) for each in known)
        if min(sizes.values(), default=1) >= 1 and not is_known and (sizes, values) not in listed:
            listed.append((sizes, values))
            yield GatePoint(profile=index, sizes=sizes, values=values, inputs="generated")


def _agrees(sizes: Sizes, known: Sizes) -> bool:
    """Whether a sample has these sizes, as far as inputs have them."""
    return all(known[symbol] == size for symbol, size in sizes.items() if symbol in known)


def _generated(point: GatePoint, samples: SampleSet) -> Tensors:
    """Inputs of these sizes: samples with axes cut or repeated, or random ones without samples."""
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
