"""Files with numbered samples.

In `'0/x', '1/x', ...` each array is a whole input, with the number of its sample. Shapes may differ
from sample to sample.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipeline.core.shapes import Profile, TensorSpec, sizes_from_shapes
from pipeline.data.batch import Batch
from pipeline.data.input_checks import (
    LABELS,
    check_dtype,
    check_finite,
    name_faults,
    outside_error,
    spec_text,
    values_error,
)
from pipeline.data.npz import Header, Member, feed_reader
from pipeline.errors import DataError

# name of an array of one sample: "12/x"
NUMBERED = re.compile(r"(?P<number>\d{1,9})/(?P<array>.+)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class FeedsPart:
    """One .npz file with numbered samples, each a whole feed with shapes of its own."""

    path: Path
    # per sample: its inputs in the model's order, labels last
    feeds: tuple[tuple[Member, ...], ...]
    inputs: tuple[str, ...]
    first: int
    has_labels: bool
    whole: ClassVar[bool] = True

    @property
    def samples(self) -> int:
        return len(self.feeds)

    def sizes(self, inputs: tuple[TensorSpec, ...]) -> tuple[dict[str, int], ...]:
        """Return the size of each symbol, per distinct sample shape."""
        distinct: list[dict[str, int]] = []
        for members in self.feeds:
            shapes = {
                name: member.shape[1:] for name, member in zip(self.inputs, members, strict=False)
            }
            sizes = sizes_from_shapes(inputs, shapes)
            assert not isinstance(sizes, str), "shapes were checked when the set was opened"
            if sizes not in distinct:
                distinct.append(sizes)
        return tuple(distinct)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield batches of one sample, whatever `size` is."""
        with feed_reader(self.path) as read:
            for index, members in enumerate(self.feeds):
                *arrays, last = read(members)
                feeds = dict(zip(self.inputs, (*arrays, last), strict=False))
                yield Batch(
                    feeds,
                    last[np.newaxis] if self.has_labels else None,
                    self.first + index,
                    1,
                    whole=True,
                )


def open_numbered_file(
    path: Path,
    headers: Mapping[str, Header],
    inputs: tuple[TensorSpec, ...],
    profiles: Sequence[Profile],
    first: int,
) -> FeedsPart:
    """Open a file of numbered samples and check names, dtypes and shapes of each."""
    samples = _by_number(path, headers)
    has_labels = LABELS in samples[0] and all(spec.name != LABELS for spec in inputs)
    names = tuple(spec.name for spec in inputs)
    expected = (*names, LABELS) if has_labels else names
    feeds = []
    for number, arrays in enumerate(samples):
        where = f"'{path}', sample {number}"
        missing = [name for name in expected if name not in arrays]
        unknown = [name for name in arrays if name not in expected]
        if LABELS in missing or LABELS in unknown:
            with_labels, without = (0, number) if has_labels else (number, 0)
            raise DataError(
                f"'{path}': sample {with_labels} has '{LABELS}', sample {without} has none",
                "give labels to every sample or to none",
            )
        if missing or unknown:
            raise DataError(
                name_faults(where, missing, unknown),
                f"give each sample the arrays {', '.join(names)}",
            )
        feeds.append(_feed(where, arrays, inputs, has_labels))
        _check_sizes(where, arrays, inputs, profiles)
    part = FeedsPart(path, tuple(feeds), names, first, has_labels)
    _check_feed_values(part, profiles)
    return part


def _by_number(path: Path, headers: Mapping[str, Header]) -> list[dict[str, tuple[str, Header]]]:
    """Return the samples of a file in order: name in the file and header of each array.

    DataError for a gap in the numbers, or for an array given twice.
    """
    samples: dict[int, dict[str, tuple[str, Header]]] = {}
    for name, header in headers.items():
        match = NUMBERED.fullmatch(name)
        assert match is not None
        arrays = samples.setdefault(int(match["number"]), {})
        if match["array"] in arrays:
            raise DataError(
                f"'{path}' holds '{arrays[match['array']][0]}' and '{name}', one array twice",
                "give each sample one number",
            )
        arrays[match["array"]] = (name, header)
    missing = next((number for number in range(len(samples)) if number not in samples), None)
    if missing is not None:
        raise DataError(
            f"'{path}' holds {len(samples)} samples, numbered up to {max(samples)}, and none with"
            f" number {missing}",
            "count the samples from 0, without a gap",
        )
    return [samples[number] for number in range(len(samples))]


def _feed(
    where: str,
    arrays: Mapping[str, tuple[str, Header]],
    inputs: tuple[TensorSpec, ...],
    has_labels: bool,
) -> tuple[Member, ...]:
    """Return the arrays of one sample in the order of the inputs, labels last.

    Each is a single row that holds a whole input.
    """
    for spec in inputs:
        check_dtype(where, spec, arrays[spec.name][1].dtype)
    names = [spec.name for spec in inputs]
    if has_labels:
        names.append(LABELS)
        label_dtype = arrays[LABELS][1].dtype
        if label_dtype.kind not in "biuf":
            raise DataError(
                f"{where}: '{LABELS}' is {label_dtype}, expected numbers",
                "save class indices as int64",
            )
    members = (arrays[name] for name in names)
    return tuple(
        Member(name, header.dtype.str, (1, *header.shape), whole=True) for name, header in members
    )


def _check_sizes(
    where: str,
    arrays: Mapping[str, tuple[str, Header]],
    inputs: tuple[TensorSpec, ...],
    profiles: Sequence[Profile],
) -> None:
    """Raise DataError for shapes that contradict the inputs or lie outside all profiles."""
    sizes = sizes_from_shapes(inputs, {spec.name: arrays[spec.name][1].shape for spec in inputs})
    if isinstance(sizes, str):
        expected = ", ".join(spec_text(spec) for spec in inputs)
        raise DataError(
            f"{where}: {sizes}",
            f"give each array as the model takes it, without an axis of samples: {expected}",
        )
    if profiles and not any(profile.holds(sizes) for profile in profiles):
        raise outside_error(where, sizes, profiles)


def _check_feed_values(part: FeedsPart, profiles: Sequence[Profile]) -> None:
    """Raise DataError for a sample with shape-deciding values outside all profiles."""
    valued = [
        index
        for index, name in enumerate(part.inputs)
        if any(name in profile.values for profile in profiles)
    ]
    if not valued:
        return
    with feed_reader(part.path) as read:
        for number, members in enumerate(part.feeds):
            arrays = read([members[index] for index in valued])
            values = {
                part.inputs[index]: array.ravel().tolist()
                for index, array in zip(valued, arrays, strict=True)
            }
            if not any(profile.holds({}, values) for profile in profiles):
                raise values_error(f"'{part.path}': sample {number}", values)


def checked_feeds(part: FeedsPart) -> Iterator[tuple[bytes, bytes]]:
    """Yield the digest of every sample's inputs and the bytes of its label.

    DataError at the first NaN or infinity.
    """
    for batch in part.batches(1):
        digest = hashlib.blake2b(digest_size=16)
        for name, array in batch.feeds.items():
            check_finite(part.path, name, array[np.newaxis], batch.first - part.first)
            digest.update(array.tobytes())
        labels = batch.labels
        if labels is not None:
            check_finite(part.path, LABELS, labels, batch.first - part.first)
        yield digest.digest(), b"" if labels is None else labels.tobytes()
