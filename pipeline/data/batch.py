"""A batch of samples, and the batch sizes into which samples are cut."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.core.shapes import Profile, Tensors, TensorSpec
from pipeline.errors import DataError

UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive samples of one file. `labels` is None where the set has none."""

    feeds: Tensors
    labels: NDArray[np.generic] | None
    first: int  # index of the first sample in the set
    samples: int
    whole: bool = False  # one sample that is a whole feed; `labels` has an axis of 1 in front
    distinct: tuple[int, ...] | None = None  # rows that are no copies; None: all

    def filled(self, rows: int) -> Batch:
        """Return the batch with `rows` rows, made of adjacent copies of its samples.

        So every part of the batch holds different samples.
        """
        if self.whole or self.samples == rows:
            return self
        picks = np.arange(rows) * self.samples // rows
        feeds = {name: array[picks] for name, array in self.feeds.items()}
        labels = None if self.labels is None else self.labels[picks]
        distinct = tuple(np.flatnonzero(np.diff(picks, prepend=-1)).tolist())
        return Batch(feeds, labels, self.first, rows, distinct=distinct)

    def with_inputs(self, names: Collection[str]) -> Batch:
        """Return the batch with these inputs alone. The others need no memory any more."""
        return replace(self, feeds={name: self.feeds[name] for name in names})

    @property
    def distinct_samples(self) -> int:
        """Number of rows that are no copies."""
        return self.samples if self.distinct is None else len(self.distinct)


def batch_sizes(samples: int, size: int, rows: tuple[int, int]) -> Iterator[int]:
    """Yield batch sizes that add up to `samples`: `size` each, and a smaller last one.

    Each is within `rows`, the smallest and largest batch allowed.
    """
    fewest, most = rows
    size = min(max(size, fewest), most)
    batches = min(math.ceil(samples / size), samples // fewest)
    # larger than `size` only if the last batch would be too small
    size = max(size, math.ceil(samples / batches))
    for after in reversed(range(batches)):
        count = min(size, samples - after * fewest)
        samples -= count
        yield count


def check_batch_sizes(where: str, samples: int, rows: tuple[int, int]) -> None:
    fewest, most = rows
    if math.ceil(samples / most) <= samples // fewest:
        return
    if fewest == most:
        raise DataError(
            f"{where} holds {samples} samples, which is no multiple of the batch of {fewest}",
            f"give a multiple of {fewest} samples",
        )
    raise DataError(
        f"{where} holds {samples} samples, which cannot be cut into batches of {fewest} to {most}",
        "give more samples, or lower the smallest batch of the profile",
    )


def batch_range(
    dim: int | str, sizes: Mapping[str, int], profile: Profile | None
) -> tuple[int, int]:
    """Return the smallest and largest size of an input's first axis."""
    if isinstance(dim, int):
        return dim, dim
    if dim in sizes:  # also the name of another axis, whose size the data fixes
        return sizes[dim], sizes[dim]
    if profile is None or dim not in profile.dims:
        return 1, UNBOUNDED
    return max(profile.dims[dim].min, 1), profile.dims[dim].max


def without_rows(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(spec.model_copy(update={"shape": spec.shape[1:]}) for spec in inputs)
