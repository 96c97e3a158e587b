"""Samples from .npz files, or generated. Calibration, selection and validation are separate types.

`open_set` checks every value and digests every sample, in one streaming pass. The set is then small
and picklable, and it streams its batches with bounded memory. A batch never crosses files, because
each file may hold another shape.

    'x', array.ndim == len(spec.shape)       axis 0 holds the samples and becomes the model's batch
                                             axis
    'x', array.ndim == len(spec.shape) + 1   each row is a whole input of a model without batch
                                             axis; one sample per batch
    '0/x', '1/x', ...                        each array is a whole input, with the number of its
                                             sample; shapes may differ

In the last two forms a sample is a whole feed, and samples are not joined to batches.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.core import Profile, Tensors, TensorSpec, sizes_from_shapes
from pipeline.data.npz import Header, Member, feed_reader, read_headers, row_reader
from pipeline.errors import DataError
from pipeline.plan.schema import DataPaths, GeneratedData

LABELS = "labels"
# name of an array of one sample: "12/x"
NUMBERED = re.compile(r"(?P<number>\d{1,9})/(?P<array>.+)", re.ASCII | re.DOTALL)
BATCH_NAMES = ("batch", "batch_size")  # symbols that always count samples
NUMBER_THEM = (
    "number the samples and give each array as the model takes it: '0/{0}', '1/{0}', ..."
    " (docs/data.md)"
)
# bytes read per step of the check: large enough for speed, small compared with any model
_BLOCK_BYTES = 4 << 20
_UNBOUNDED = 2**31 - 1


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

    @property
    def distinct_samples(self) -> int:
        """Number of rows that are no copies."""
        return self.samples if self.distinct is None else len(self.distinct)


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
            for count in _cut(self.samples, size, self.rows):
                arrays = read(count)
                labels = arrays.pop(LABELS, None)
                yield Batch(arrays, labels, first, count, self.whole)
                first += count


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


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """Random samples of one shape. Sample i depends only on the seed and i, not on its batch."""

    specs: tuple[TensorSpec, ...]  # of one sample
    seed: int
    first: int
    samples: int
    rows: tuple[int, int]
    whole: bool  # a sample is a whole input
    # for inputs with values that decide a shape: the opt values of the profile
    values: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def sizes(self, inputs: tuple[TensorSpec, ...]) -> tuple[dict[str, int], ...]:
        """Return the size of each symbol of a sample, without the batch symbol."""
        cut = inputs if self.whole else _without_rows(inputs)
        sizes = sizes_from_shapes(cut, {spec.name: spec.resolve({}) for spec in self.specs})
        assert not isinstance(sizes, str), "the samples were drawn for these inputs"
        return (sizes,)

    def batches(self, size: int) -> Iterator[Batch]:
        first = self.first
        for count in _cut(self.samples, size, self.rows):
            rows = [_random_sample(self, index) for index in range(first, first + count)]
            feeds = (
                rows[0]
                if self.whole
                else {spec.name: np.stack([row[spec.name] for row in rows]) for spec in self.specs}
            )
            yield Batch(feeds, None, first, count, self.whole)
            first += count


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Checked samples for the inputs `specs`.

    Names, dtypes and shapes fit the inputs. No value is NaN or infinite.
    """

    role: ClassVar[str] = "samples"

    digest: str  # of all inputs and labels, in order
    samples: int
    specs: tuple[TensorSpec, ...]
    # of each sample's inputs; a generated set has one digest, that of its seed
    sample_digests: tuple[bytes, ...]
    has_labels: bool
    parts: tuple[FilePart | FeedsPart | GeneratedPart, ...]

    @property
    def whole(self) -> bool:
        """True if each sample is a whole feed, which cannot be joined with others to a batch."""
        return all(part.whole for part in self.parts)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all samples in order, at most `size` per batch. The last batch may be smaller.

        Batches are larger only if every profile requires it.
        """
        for part in self.parts:
            yield from part.batches(size)

    def filled(self, rows: int, parts: Sequence[int], most: int) -> Iterator[Batch]:
        """Yield the first samples of the files `parts` in batches of exactly `rows`.

        At most `most` rows in total, but at least one batch per file. A short last batch is filled
        with copies of its own samples. With `rows` 0, batches are as small as possible.
        """
        batches_per_part = max(1, most // max(1, rows) // len(parts))
        for index in parts:
            part = self.parts[index]
            if not rows or isinstance(part, FeedsPart):
                yield from itertools.islice(part.batches(1), batches_per_part)
                continue
            unlimited = replace(part, rows=(1, _UNBOUNDED))
            for batch in itertools.islice(unlimited.batches(rows), batches_per_part):
                yield batch.filled(rows)

    def first(self, n: int) -> tuple[Tensors, ...]:
        """Return at most n feeds in the smallest batches, taken from the files in turn.

        So the shapes of several files are among them.
        """
        turns = itertools.zip_longest(
            *(itertools.islice(part.batches(1), n) for part in self.parts)
        )
        batches = itertools.chain.from_iterable(turns)
        feeds = (batch.feeds for batch in batches if batch is not None)
        return tuple(itertools.islice(feeds, n))


@dataclass(frozen=True, slots=True)
class CalibrationSet(SampleSet):
    """Samples that choose the ranges of int8 activations, and the nodes that stay in fp32."""

    role: ClassVar[str] = "calibration"


@dataclass(frozen=True, slots=True)
class SelectionSet(SampleSet):
    """Samples that choose among the candidates."""

    role: ClassVar[str] = "selection"


@dataclass(frozen=True, slots=True)
class ValidationSet(SampleSet):
    """Samples that are read once, for the winner and the reference."""

    role: ClassVar[str] = "validation"


S = TypeVar("S", bound=SampleSet)


def open_set(
    kind: type[S],
    source: DataPaths,
    inputs: tuple[TensorSpec, ...],
    profiles: Sequence[Profile] = (),
) -> S:
    """Check and digest all samples, in one pass with bounded memory. Raises DataError."""
    if isinstance(source, GeneratedData):
        return _generated_set(kind, source, inputs, profiles)
    if not source:
        raise DataError(
            f"{kind.role}: expected at least one .npz file, got an empty list",
            "name the files, or leave the key out",
        )
    parts: list[FilePart | FeedsPart] = []
    for path in source:
        parts.append(_part(path, inputs, profiles, first=sum(part.samples for part in parts)))
    _check_alike(kind.role, parts)
    content = hashlib.blake2b(repr([spec.model_dump() for spec in inputs]).encode(), digest_size=32)
    digests = []
    for part in parts:
        content.update(_form_of(part).encode())
        for digest, label in (
            _checked_rows(part) if isinstance(part, FilePart) else _checked_feeds(part)
        ):
            digests.append(digest)
            content.update(digest + label)
    return kind(
        content.hexdigest(), len(digests), inputs, tuple(digests), parts[0].has_labels, tuple(parts)
    )


def _part(
    path: Path, inputs: tuple[TensorSpec, ...], profiles: Sequence[Profile], first: int
) -> FilePart | FeedsPart:
    """Open one file: rows of samples or numbered samples, by the names of its arrays."""
    headers = read_headers(path)
    # the name of an input may look like that of a numbered array
    names = {LABELS, *(spec.name for spec in inputs)}
    numbered = [name for name in headers if name not in names and NUMBERED.fullmatch(name)]
    if not numbered:
        part = _file_part(path, headers, inputs, profiles, first)
        _check_values(part, profiles)
        return part
    if plain := [name for name in headers if name not in numbered]:
        raise DataError(
            f"'{path}' holds '{plain[0]}' beside '{numbered[0]}': an array of all samples beside"
            " one of a single sample",
            f"give all arrays in one form: {NUMBER_THEM.format(inputs[0].name)}",
        )
    return _feeds_part(path, headers, inputs, profiles, first)


def _check_alike(role: str, parts: Sequence[FilePart | FeedsPart]) -> None:
    """Raise DataError if the files of a set differ in form, or if only some have labels."""
    for part in parts:
        if part.has_labels != parts[0].has_labels:
            bare = part if parts[0].has_labels else parts[0]
            raise DataError(
                f"{role}: '{bare.path}' has no '{LABELS}', other files of the set have",
                "give labels in every file or in none",
            )
        if part.whole != parts[0].whole:
            rows, whole = (part, parts[0]) if parts[0].whole else (parts[0], part)
            raise DataError(
                f"{role}: in '{rows.path}' a sample is a row of the batch, in '{whole.path}' it is"
                " a whole feed",
                "give all files of a set in one form",
            )


def _form_of(part: FilePart | FeedsPart) -> str:
    """Return the form of a file for the set's digest: number of samples, dtypes and shapes."""
    if isinstance(part, FilePart):
        return f"{part.samples} {part.members}"
    forms = [[(member.dtype, member.shape) for member in members] for members in part.feeds]
    return f"feeds {forms}"


def check_disjoint(*sets: SampleSet) -> None:
    """Raise DataError if two sets share samples, whatever their files are called."""
    for left, right in itertools.combinations(sets, 2):
        known = {digest: index for index, digest in enumerate(left.sample_digests)}
        shared = [
            (known[digest], index)
            for index, digest in enumerate(right.sample_digests)
            if digest in known
        ]
        if not shared:
            continue
        if isinstance(right.parts[0], GeneratedPart):
            raise DataError(
                f"{left.role} and {right.role} share {min(left.samples, right.samples)} samples:"
                f" both are generated from seed {right.parts[0].seed}",
                "give each generated set a seed of its own",
            )
        pairs = ", ".join(f"{left.role} {i} = {right.role} {j}" for i, j in shared[:3])
        more = ", ..." if len(shared) > 3 else ""
        raise DataError(
            f"{left.role} and {right.role} share {len(shared)} samples: {pairs}{more}",
            "remove the shared samples from one of them; accuracy measured on calibration data"
            " proves nothing",
        )


def _cut(samples: int, size: int, rows: tuple[int, int]) -> Iterator[int]:
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


def _check_cut(where: str, samples: int, rows: tuple[int, int]) -> None:
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


def _file_part(
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
    _check_cut(f"'{path}'", samples, rows)
    return FilePart(path, members, first, samples, rows)


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
                f"'{path}': axis 0 of '{spec.name}' would count samples, but {_spec_text(spec)} has"
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
            _name_faults(f"'{path}'", missing, unknown),
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


def _name_faults(where: str, missing: list[str], unknown: list[str]) -> str:
    faults = [f"input '{name}' is missing" for name in missing]
    for name in unknown:
        near = difflib.get_close_matches(name, missing or [LABELS], n=1, cutoff=0.5)
        faults.append(
            f"array '{name}' is none of the model's inputs"
            + (f" (did you mean '{near[0]}'?)" if near else "")
        )
    return f"{where}: {'; '.join(faults)}"


def _check_dtype(where: str, spec: TensorSpec, dtype: np.dtype[np.generic]) -> None:
    if dtype.str != _dtype_str(spec):
        raise DataError(
            f"{where}: '{spec.name}' is {dtype.name if dtype.isnative else dtype.str}, the model's"
            f" input is {spec.dtype}",
            f"nothing is cast silently: save {spec.name}.astype('{spec.dtype}')",
        )


def _input_member(path: Path, spec: TensorSpec, header: Header) -> Member:
    dtype, shape = header.dtype, header.shape
    _check_dtype(f"'{path}'", spec, dtype)
    if not shape or len(shape) not in (len(spec.shape), len(spec.shape) + 1):
        raise DataError(
            f"'{path}': '{spec.name}' has shape {shape}, the model's input is {_spec_text(spec)}",
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
        raise _outside_error(f"'{path}'", sizes, profiles)
    fewest, most = 1, _UNBOUNDED
    for member, spec in zip(members, inputs, strict=True):
        low, high = (1, 1) if member.whole else _range_of(spec.shape[0], sizes, profile)
        fewest, most = max(fewest, low), min(most, high)
    if fewest > most:
        raise DataError(
            f"'{path}': no batch fits all inputs ({', '.join(map(_spec_text, inputs))})",
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
    cut = tuple(spec if member.whole else _without_rows((spec,))[0] for member, spec in pairs)
    sizes = sizes_from_shapes(cut, {member.name: member.shape[1:] for member in members})
    if isinstance(sizes, str):
        expected = ", ".join(_spec_text(spec) for spec in inputs)
        raise DataError(
            f"'{path}': in each sample, {sizes}",
            f"bring every sample to the shape of the model's inputs: {expected}",
        )
    return sizes


def _without_rows(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(spec.model_copy(update={"shape": spec.shape[1:]}) for spec in inputs)


def _outside_error(where: str, sizes: Mapping[str, int], profiles: Sequence[Profile]) -> DataError:
    got = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    by_profile = [
        ", ".join(f"{name} {dim.min} to {dim.max}" for name, dim in profile.dims.items())
        for profile in profiles
    ]
    ranges = "; ".join(by_profile)
    return DataError(
        f"{where}: {got} lies outside all profiles ({ranges})",
        "widen a profile in the plan, or cut or pad the samples",
    )


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
            raise _values_error(f"'{part.path}': sample {row}", values)


def _values_error(where: str, values: Mapping[str, object]) -> DataError:
    got = ", ".join(f"{name} = {value}" for name, value in values.items())
    return DataError(
        f"{where} has {got}, outside all profiles",
        "widen `values` in a profile, or leave such samples out",
    )


def _range_of(dim: int | str, sizes: Mapping[str, int], profile: Profile | None) -> tuple[int, int]:
    """Return the smallest and largest size of an input's first axis."""
    if isinstance(dim, int):
        return dim, dim
    if dim in sizes:  # also the name of another axis, whose size the data fixes
        return sizes[dim], sizes[dim]
    if profile is None or dim not in profile.dims:
        return 1, _UNBOUNDED
    return max(profile.dims[dim].min, 1), profile.dims[dim].max


def _dtype_str(spec: TensorSpec) -> str:
    """Return the spec's dtype in numpy's byte-exact form. DataError for bfloat16."""
    # numpy knows bfloat16 after an import of ml_dtypes, but .npz files cannot hold it
    if spec.dtype == "bfloat16":
        raise DataError(
            f"input '{spec.name}' is {spec.dtype}, which .npz files and generated data cannot hold",
            "give the model a float32 input and cast inside it",
        )
    return np.dtype(spec.dtype).str


def _spec_text(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} [{', '.join(str(dim) for dim in spec.shape)}]"


def _checked_rows(part: FilePart) -> Iterator[tuple[bytes, bytes]]:
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
                _check_finite(part.path, name, array, start)
            rows = {name: _bytes_by_row(array) for name, array in arrays.items()}
            labels = rows.pop(LABELS, None)
            for row in range(count):
                digest = hashlib.blake2b(digest_size=16)
                for data in rows.values():
                    digest.update(data[row])
                yield digest.digest(), b"" if labels is None else labels[row].tobytes()


def _bytes_by_row(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8).reshape(len(array), array.nbytes // len(array))


def _check_finite(path: Path, name: str, array: NDArray[np.generic], start: int) -> None:
    if array.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        # much faster than a check of each value; if the sum overflows, each value is checked
        if np.isfinite(array.sum()):
            return
    bad = ~np.isfinite(array.reshape(len(array), -1))
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        value = "NaN" if np.isnan(array[row]).any() else "an infinity"
        raise DataError(
            f"'{path}': '{name}' has {value} in sample {start + row}",
            "repair or leave out such samples; no accuracy can be measured on them",
        )


# -- numbered samples --------------------------------------------------------


def _feeds_part(
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
                _name_faults(where, missing, unknown),
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
        _check_dtype(where, spec, arrays[spec.name][1].dtype)
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
        expected = ", ".join(_spec_text(spec) for spec in inputs)
        raise DataError(
            f"{where}: {sizes}",
            f"give each array as the model takes it, without an axis of samples: {expected}",
        )
    if profiles and not any(profile.holds(sizes) for profile in profiles):
        raise _outside_error(where, sizes, profiles)


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
                raise _values_error(f"'{part.path}': sample {number}", values)


def _checked_feeds(part: FeedsPart) -> Iterator[tuple[bytes, bytes]]:
    """Yield the digest of every sample's inputs and the bytes of its label.

    DataError at the first NaN or infinity.
    """
    for batch in part.batches(1):
        digest = hashlib.blake2b(digest_size=16)
        for name, array in batch.feeds.items():
            _check_finite(part.path, name, array[np.newaxis], batch.first - part.first)
            digest.update(array.tobytes())
        labels = batch.labels
        if labels is not None:
            _check_finite(part.path, LABELS, labels, batch.first - part.first)
        yield digest.digest(), b"" if labels is None else labels.tobytes()


# -- generated ---------------------------------------------------------------


def _generated_set(
    kind: type[S],
    source: GeneratedData,
    inputs: tuple[TensorSpec, ...],
    profiles: Sequence[Profile],
) -> S:
    """Return samples at the opt size of every profile, nearly the same number for each."""
    for spec in inputs:
        _dtype_str(spec)
    shared = {spec.shape[0] if spec.shape else None for spec in inputs}
    symbol = next(iter(shared)) if len(shared) == 1 else None
    batched = isinstance(symbol, str) and not any(symbol in spec.shape[1:] for spec in inputs)
    specs = _without_rows(inputs) if batched else inputs
    choices = list(profiles or (Profile(),))[: source.samples]
    parts, first = list[GeneratedPart](), 0
    for index, profile in enumerate(choices):
        count = (source.samples - first) // (len(choices) - index)
        rows = _range_of(symbol, {}, profile) if batched and symbol is not None else (1, 1)
        _check_cut(kind.role, count, rows)
        parts.append(
            GeneratedPart(
                _resolved(specs, profile),
                source.seed,
                first,
                count,
                rows,
                not batched,
                tuple(profile.values_at("opt").items()),
            )
        )
        first += count
    seed = hashlib.blake2b(f"random 2, seed {source.seed}".encode(), digest_size=16).digest()
    content = hashlib.blake2b(
        seed
        + repr([(part.specs, part.samples, part.whole, *part.values) for part in parts]).encode(),
        digest_size=32,
    )
    return kind(
        content.hexdigest(), source.samples, inputs, (seed,), has_labels=False, parts=tuple(parts)
    )


def _resolved(specs: tuple[TensorSpec, ...], profile: Profile) -> tuple[TensorSpec, ...]:
    try:
        return tuple(
            spec.model_copy(update={"shape": spec.resolve(profile.sizes("opt"))}) for spec in specs
        )
    except KeyError as error:
        raise DataError(
            f"cannot generate samples: no profile gives the size of {error}",
            "add the symbol to `profiles:`",
        ) from None


def _random_sample(part: GeneratedPart, index: int) -> dict[str, NDArray[np.generic]]:
    """Draw one sample.

    Floats are standard normal, and uint8 values are pixels. Other integers are 0 or 1, which every
    embedding table or mask accepts, and rows begin with 1, like the mask of a text.
    """
    random = np.random.default_rng([part.seed, index])
    sample: dict[str, NDArray[np.generic]] = {}
    for spec in part.specs:
        dtype, shape = np.dtype(spec.dtype), spec.resolve({})
        drawn = (
            random.standard_normal(shape)
            if dtype.kind == "f"
            else random.integers(0, 256 if dtype == np.uint8 else 2, shape)
        )
        if dtype.kind != "f" and dtype != np.uint8 and shape and shape[-1] > 1:
            drawn[..., 0] = 1
        sample[spec.name] = (
            np.asarray(dict(part.values).get(spec.name, drawn)).astype(dtype).reshape(shape)
        )
    return sample
