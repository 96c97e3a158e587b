"""Split recorded calls into calibration, selection and validation sets without a common sample."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.errors import DataError
from pipeline.recording.outcome import Recording

WANTED = {"calibration": 500, "selection": 200, "validation": 200}
"""Samples that docs/howto/own-data.md recommends for each set."""

SEED = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of a recorded call, or the whole call."""

    path: Path
    row: int | None  # None: the whole call


@dataclass(frozen=True, slots=True)
class DataSets:
    """The files of each set, with the number of their samples."""

    files: dict[str, tuple[str, ...]]
    samples: dict[str, int]
    distinct: int  # samples to choose from
    repeated: int  # samples that were left out because an equal one was kept
    invalid: int  # samples that were left out because of a NaN or an infinity


def write_sets(recording: Recording, most: int, folder: Path) -> DataSets:
    """Write the .npz files of the three sets into `folder`; at most `most` samples in all.

    Equal samples count once. DataError if there are not enough for three sets.
    """
    samples, repeated, invalid = _distinct_samples(recording)
    random.Random(SEED).shuffle(samples)  # so that each set has early and late calls
    chosen, batch = samples[:most], _fixed_batch(recording)
    files: dict[str, tuple[str, ...]] = {}
    counts: dict[str, int] = {}
    start = 0
    for role, batches in _sizes(len(chosen) // batch).items():
        count = batches * batch
        files[role], counts[role] = _write_set(
            recording, role, chosen[start : start + count], folder
        )
        start += count
    if not all(counts.values()):
        raise _too_few(len(samples), repeated, batch)
    return DataSets(files, counts, len(samples), repeated, invalid)


def _sizes(count: int) -> dict[str, int]:
    """Divide `count` samples in the proportions of WANTED, with one for each set if possible."""
    whole = sum(WANTED.values())
    sizes = {role: max(1, count * wanted // whole) for role, wanted in WANTED.items()}
    sizes["calibration"] = max(0, count - sizes["selection"] - sizes["validation"])
    return sizes


def _fixed_batch(recording: Recording) -> int:
    """Return the rows that a batch must have; 1 if it may have any number."""
    first = recording.inputs[0].shape[0] if recording.has_rows else 1
    return first if isinstance(first, int) else 1


def _too_few(distinct: int, repeated: int, batch: int) -> DataError:
    equal = f" ({repeated} more are equal to one of them)" if repeated else ""
    return DataError(
        f"expected at least {len(WANTED) * batch} different samples, {batch} for each set, got"
        f" {distinct}{equal}",
        "let the script call the module on more inputs:"
        f" {' + '.join(map(str, WANTED.values()))} samples are best",
    )


def _distinct_samples(recording: Recording) -> tuple[list[Sample], int, int]:
    """Return the samples to choose from, and how many are repeated and invalid."""
    known: set[bytes] = set()
    samples: list[Sample] = []
    repeated = invalid = 0
    for sample, feeds in _all_samples(recording):
        if not all(np.isfinite(array).all() for array in feeds.values()):
            invalid += 1
            continue
        digest = hashlib.blake2b(digest_size=16)
        for array in feeds.values():
            digest.update(repr(array.shape).encode() + array.tobytes())
        if digest.digest() in known:
            repeated += 1
            continue
        known.add(digest.digest())
        samples.append(sample)
    return samples, repeated, invalid


def _all_samples(recording: Recording) -> Iterator[tuple[Sample, Tensors]]:
    for path in recording.files:
        feeds = _feeds(path, recording.inputs)
        if not recording.has_rows:
            yield Sample(path, None), feeds
            continue
        for row in range(len(next(iter(feeds.values())))):
            yield Sample(path, row), {name: array[row] for name, array in feeds.items()}


def _feeds(path: Path, inputs: Sequence[TensorSpec]) -> Tensors:
    with np.load(path) as arrays:
        return {spec.name: arrays[f"in_{number}"] for number, spec in enumerate(inputs)}


def _write_set(
    recording: Recording, role: str, samples: Sequence[Sample], folder: Path
) -> tuple[tuple[str, ...], int]:
    """Write one set. Return its files and the number of its samples."""
    if not recording.has_rows:
        arrays = {
            f"{number}/{name}": array
            for number, sample in enumerate(samples)
            for name, array in _feeds(sample.path, recording.inputs).items()
        }
        np.savez(folder / f"{role}.npz", **arrays)  # type: ignore[arg-type]  # numpy's keyword
        return (f"{role}.npz",), len(samples)
    batch = _fixed_batch(recording)
    files, count = [], 0
    groups = [rows for rows in _by_shape(recording, samples) if len(rows) >= batch]
    for number, rows in enumerate(groups):
        rows = rows[: len(rows) // batch * batch]
        name = f"{role}.npz" if len(groups) == 1 else f"{role}_{number}.npz"
        columns = {
            spec.name: np.stack([row[spec.name] for row in rows]) for spec in recording.inputs
        }
        np.savez(folder / name, **columns)  # type: ignore[arg-type]  # numpy's keyword
        files.append(name)
        count += len(rows)
    return tuple(files), count


def _by_shape(recording: Recording, samples: Sequence[Sample]) -> list[list[Tensors]]:
    """Return the rows of each shape: an array holds rows of one shape."""
    wanted: dict[Path, list[int]] = {}
    for sample in samples:
        assert sample.row is not None
        wanted.setdefault(sample.path, []).append(sample.row)
    groups: dict[tuple[tuple[int, ...], ...], list[Tensors]] = {}
    for path, rows in wanted.items():
        feeds: Mapping[str, np.ndarray] = _feeds(path, recording.inputs)
        shapes = tuple(array.shape[1:] for array in feeds.values())
        for row in rows:
            groups.setdefault(shapes, []).append(
                {name: array[row].copy() for name, array in feeds.items()}
            )
    return list(groups.values())
