"""Files with an axis of samples in front of every array.

If an array has as many axes as the input, its axis 0 becomes the model's batch axis. With one axis
more, each row is a whole input of a model without batch axis, and a batch holds one sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.core.shapes import Profile, TensorSpec, sizes_from_shapes
from pipeline.data.batch import (
    UNBOUNDED,
    Batch,
    batch_range,
    batch_sizes,
    check_batch_sizes,
    without_rows,
)
from pipeline.data.input_checks import (
    LABELS,
    NUMBER_THEM,
    check_dtype,
    check_finite,
    name_faults,
    outside_error,
    spec_text,
    values_error,
)
from pipeline.data.npz import Header, Member, row_reader
from pipeline.errors import DataError

BATCH_NAMES = ("batch", "batch_size")  # symbols that always count samples
# bytes read per step of the check: large enough for speed, small compared with any model
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FilePart:
    """One .npz file of a set, with an axis of samples in front of every array."""

    path: Path
    members: tuple[Member, ...]
    first: int  # index of its first sample in the set
    samples: int
    rows: tuple[int, int]  # smallest and largest batch that a profile allows

    @property
    def whole(self) -> bool:
        """True if each sample is a whole feed."""
        return all(member.whole for member in self.members if member.name != LABELS)

    @property
    def has_labels(self) -> bool:
        return any(member.name == LABELS for member in self.members)

    def sizes(self, inputs: tuple[TensorSpec, ...]) -> tuple[dict[str, int], ...]:
        """Return the size of each symbol, without the batch symbol, per distinct sample shape."""
        return (_sample_sizes(self.path, self.members, inputs),)

    def batches(self, size: int) -> Iterator[Batch]:
        first = self.first
        with row_reader(self.path, self.members) as read:
            for count in batch_sizes(self.samples, size, self.rows):
                arrays = read(count)
                labels = arrays.pop(LABELS, None)
                yield Batch(arrays, labels, first, count, self.whole)
                first += count


def open_row_file(
    path: Path,
    headers: Mapping[str, Header],
    inputs: tuple[TensorSpec, ...],
    profiles: Sequence[Profile],
    first: int,
) -> FilePart:
    members = _members(path, headers, inputs)
    samples = members[0].shape[0]
    for member in members:
        if member.shape[0] != samples:
            raise DataError(
                f"'{path}': '{members[0].name}' holds {samples} samples, '{member.name}' holds"
                f" {member.shape[0]}",
                "give every array one row per sample; of a model without a batch axis in front,"
                f" {NUMBER_THEM.format(members[0].name)}",
            )
    if samples == 0:
        raise DataError(
            f"'{path}' holds no samples", "give at least one row, or leave the file out of the plan"
        )
    _check_batch_axis(path, members, inputs)
    rows = _rows_allowed(
        path, [member for member in members if member.name != LABELS], inputs, profiles
    )
    check_batch_sizes(f"'{path}'", samples, rows)
    part = FilePart(path, members, first, samples, rows)
    _check_values(part, profiles)
    return part


def _check_batch_axis(
    path: Path, members: Sequence[Member], inputs: tuple[TensorSpec, ...]
) -> None:
    """Raise DataError for rows of an input with its batch on an axis other than the first.

    The rows would be time steps or layers, not samples.
    """
    for member, spec in zip(members, inputs, strict=False):
        batch = next((axis for axis, dim in enumerate(spec.shape) if dim in BATCH_NAMES), 0)
        if batch and not member.whole:
            raise DataError(
                f"'{path}': axis 0 of '{spec.name}' would count samples, but {spec_text(spec)} has"
                f" '{spec.shape[batch]}' on axis {batch}",
                NUMBER_THEM.format(spec.name),
            )


def _members(
    path: Path, headers: Mapping[str, Header], inputs: tuple[TensorSpec, ...]
) -> tuple[Member, ...]:
    """Check names, dtypes and ranks of a file's arrays. Returns them by input, labels last."""
    names = [spec.name for spec in inputs]
    missing = [name for name in names if name not in headers]
    unknown = [name for name in headers if name not in (*names, LABELS)]
    if missing or unknown:
        raise DataError(
            name_faults(f"'{path}'", missing, unknown),
            f"name the arrays {', '.join(names)} and, if there are any, {LABELS}",
        )
    members = [_input_member(path, spec, headers[spec.name]) for spec in inputs]
    if LABELS in headers and LABELS not in names:
        labels = headers[LABELS]
        if labels.dtype.kind not in "biuf" or not labels.shape:
            raise DataError(
                f"'{path}': '{LABELS}' is {labels.dtype} {labels.shape}, expected one number per"
                " sample",
                "save class indices as int64 [samples]",
            )
        members.append(Member(LABELS, labels.dtype.str, labels.shape))
    return tuple(members)


def _input_member(path: Path, spec: TensorSpec, header: Header) -> Member:
    dtype, shape = header.dtype, header.shape
    check_dtype(f"'{path}'", spec, dtype)
    if not shape or len(shape) not in (len(spec.shape), len(spec.shape) + 1):
        raise DataError(
            f"'{path}': '{spec.name}' has shape {shape}, the model's input is {spec_text(spec)}",
            "axis 0 holds the samples: give as many axes as the input has, or one more where the"
            f" model has no batch axis; or {NUMBER_THEM.format(spec.name)}",
        )
    return Member(spec.name, dtype.str, shape, whole=len(shape) == len(spec.shape) + 1)


def _rows_allowed(
    path: Path, members: list[Member], inputs: tuple[TensorSpec, ...], profiles: Sequence[Profile]
) -> tuple[int, int]:
    """Return the smallest and largest batch, by the first profile that holds this file's shapes."""
    sizes = _sample_sizes(path, members, inputs)
    profile = next((profile for profile in profiles if profile.holds(sizes)), None)
    if profiles and profile is None:
        raise outside_error(f"'{path}'", sizes, profiles)
    fewest, most = 1, UNBOUNDED
    for member, spec in zip(members, inputs, strict=True):
        low, high = (1, 1) if member.whole else batch_range(spec.shape[0], sizes, profile)
        fewest, most = max(fewest, low), min(most, high)
    if fewest > most:
        raise DataError(
            f"'{path}': no batch fits all inputs ({', '.join(map(spec_text, inputs))})",
            "add an axis in front of every array: each row is then a whole input; or"
            f" {NUMBER_THEM.format(members[0].name)}",
        )
    return fewest, most


def _sample_sizes(
    path: Path, members: Sequence[Member], inputs: tuple[TensorSpec, ...]
) -> dict[str, int]:
    """Return the size of each symbol of this file's samples, without the batch symbol.

    DataError if they contradict the inputs.
    """
    pairs = zip(members, inputs, strict=False)  # labels come last
    cut = tuple(spec if member.whole else without_rows((spec,))[0] for member, spec in pairs)
    sizes = sizes_from_shapes(cut, {member.name: member.shape[1:] for member in members})
    if isinstance(sizes, str):
        expected = ", ".join(spec_text(spec) for spec in inputs)
        raise DataError(
            f"'{path}': in each sample, {sizes}",
            f"bring every sample to the shape of the model's inputs: {expected}",
        )
    return sizes


def _check_values(part: FilePart, profiles: Sequence[Profile]) -> None:
    """Raise DataError for a sample with shape-deciding values outside all profiles."""
    named = [
        replace(member, whole=False)
        for member in part.members
        if any(member.name in profile.values for profile in profiles)
    ]
    if not named:
        return
    with row_reader(part.path, named) as read:
        arrays = read(part.samples)  # a few numbers per sample
    for row in range(part.samples):
        values = {name: array[row].ravel().tolist() for name, array in arrays.items()}
        if not any(profile.holds({}, values) for profile in profiles):
            raise values_error(f"'{part.path}': sample {row}", values)


def checked_rows(part: FilePart) -> Iterator[tuple[bytes, bytes]]:
    """Yield the digest of every sample's inputs and the bytes of its label.

    DataError at the first NaN or infinity.
    """
    block = max(1, _BLOCK_BYTES // max(1, sum(member.row_bytes for member in part.members)))
    stacked = [replace(member, whole=False) for member in part.members]
    with row_reader(part.path, stacked) as read:
        for start in range(0, part.samples, block):
            count = min(block, part.samples - start)
            arrays = read(count)
            for name, array in arrays.items():
                check_finite(part.path, name, array, start)
            rows = {name: _bytes_by_row(array) for name, array in arrays.items()}
            labels = rows.pop(LABELS, None)
            for row in range(count):
                digest = hashlib.blake2b(digest_size=16)
                for data in rows.values():
                    digest.update(data[row])
                yield digest.digest(), b"" if labels is None else labels[row].tobytes()


def _bytes_by_row(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8).reshape(len(array), array.nbytes // len(array))
