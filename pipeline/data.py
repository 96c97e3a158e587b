"""Samples from .npz files, or generated: three types, so that calibration, selection and validation cannot be mixed up.

A set is opened once, in one streaming pass that checks every value and digests every sample; it is then small, picklable
and streams its batches with bounded memory. Batches never cross files, because each file may hold another shape.

    array.ndim == len(spec.shape)       axis 0 holds the samples and becomes the model's batch axis
    array.ndim == len(spec.shape) + 1   each row is a whole input of a model without batch axis; one sample per batch
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.config import DataPaths, GeneratedData
from pipeline.core import Profile, Tensors, TensorSpec, sizes_from_shapes
from pipeline.errors import DataError
from pipeline.npz import Header, Member, read_headers, row_reader

LABELS = "labels"
_BLOCK_BYTES = 4 << 20  # read per step of the checking pass: large enough for speed, small against any model
_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive samples of one file. `labels` is None where the set has none."""

    feeds: Tensors
    labels: NDArray[np.generic] | None
    first: int  # index of the first sample in the set
    samples: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """One .npz file of a set."""

    path: Path
    members: tuple[Member, ...]
    first: int  # index of its first sample in the set
    samples: int
    rows: tuple[int, int]  # fewest and most samples of a batch that some profile holds

    def batches(self, size: int) -> Iterator[Batch]:
        first = self.first
        with row_reader(self.path, self.members) as read:
            for count in _cut(self.samples, size, self.rows):
                arrays = read(count)
                labels = arrays.pop(LABELS, None)
                yield Batch(arrays, labels, first, count)
                first += count


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """Random samples of one shape; sample i depends on the seed and i only, not on the batch it comes in."""

    specs: tuple[TensorSpec, ...]  # of one sample
    seed: int
    first: int
    samples: int
    rows: tuple[int, int]
    whole: bool  # a sample is a whole input
    values: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of inputs whose values decide a shape, each the usual one of its profile

    def batches(self, size: int) -> Iterator[Batch]:
        first = self.first
        for count in _cut(self.samples, size, self.rows):
            rows = [_random_sample(self, index) for index in range(first, first + count)]
            feeds = rows[0] if self.whole else {spec.name: np.stack([row[spec.name] for row in rows]) for spec in self.specs}
            yield Batch(feeds, None, first, count)
            first += count


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Samples for the inputs `specs`, checked: names, dtypes and shapes fit, nothing is NaN or infinite."""

    role: ClassVar[str] = "samples"

    digest: str  # of all inputs and labels, in order
    samples: int
    specs: tuple[TensorSpec, ...]
    sample_digests: tuple[bytes, ...]  # of each sample's inputs; of a generated set one digest, that of its seed
    has_labels: bool
    parts: tuple[FilePart | GeneratedPart, ...]

    def batches(self, size: int) -> Iterator[Batch]:
        """All samples in order, at most `size` per batch, the last one short; more only where every profile asks for more."""
        for part in self.parts:
            yield from part.batches(size)

    def first(self, n: int) -> tuple[Tensors, ...]:
        """At most n feeds of the smallest batch, taken from the files in turn, so that each file's shape is among them."""
        turns = itertools.zip_longest(*(itertools.islice(part.batches(1), n) for part in self.parts))
        return tuple(itertools.islice((batch.feeds for turn in turns for batch in turn if batch is not None), n))


@dataclass(frozen=True, slots=True)
class CalibrationSet(SampleSet):
    """Chooses the ranges of int8 activations, and which nodes stay in fp32."""

    role: ClassVar[str] = "calibration"


@dataclass(frozen=True, slots=True)
class SelectionSet(SampleSet):
    """Chooses among the candidates."""

    role: ClassVar[str] = "selection"


@dataclass(frozen=True, slots=True)
class ValidationSet(SampleSet):
    """Read once: for the winner and the baseline."""

    role: ClassVar[str] = "validation"


S = TypeVar("S", bound=SampleSet)


def open_set(kind: type[S], source: DataPaths, inputs: tuple[TensorSpec, ...], profiles: Sequence[Profile] = ()) -> S:
    """Check all of a set and digest it, in one pass of bounded memory. Raises DataError."""
    if isinstance(source, GeneratedData):
        return _generated_set(kind, source, inputs, profiles)
    if not source:
        raise DataError(f"{kind.role}: expected at least one .npz file, got an empty list", "name the files, or leave the key out")
    parts: list[FilePart] = []
    for path in source:
        parts.append(_file_part(path, inputs, profiles, first=sum(part.samples for part in parts)))
        _check_values(parts[-1], profiles)
    labelled = [any(member.name == LABELS for member in part.members) for part in parts]
    if len(set(labelled)) > 1:
        bare = parts[labelled.index(False)].path
        raise DataError(f"{kind.role}: '{bare}' has no '{LABELS}', other files of the set have", "give labels in every file or in none")
    content = hashlib.blake2b(repr([spec.model_dump() for spec in inputs]).encode(), digest_size=32)
    digests = []
    for part in parts:
        content.update(f"{part.samples} {part.members}".encode())
        for digest, label in _checked_rows(part):
            digests.append(digest)
            content.update(digest + label)
    return kind(content.hexdigest(), len(digests), inputs, tuple(digests), labelled[0], tuple(parts))


def check_disjoint(*sets: SampleSet) -> None:
    """Raise DataError if two sets share samples, whatever their files are called."""
    for left, right in itertools.combinations(sets, 2):
        known = {digest: index for index, digest in enumerate(left.sample_digests)}
        shared = [(known[digest], index) for index, digest in enumerate(right.sample_digests) if digest in known]
        if not shared:
            continue
        if isinstance(right.parts[0], GeneratedPart):
            raise DataError(
                f"{left.role} and {right.role} share {min(left.samples, right.samples)} samples: both are generated from seed {right.parts[0].seed}",
                "give each generated set a seed of its own",
            )
        pairs = ", ".join(f"{left.role} {i} = {right.role} {j}" for i, j in shared[:3])
        more = ", ..." if len(shared) > 3 else ""
        raise DataError(
            f"{left.role} and {right.role} share {len(shared)} samples: {pairs}{more}",
            "take the shared samples out of one of them; accuracy measured on calibration data proves nothing",
        )


def _cut(samples: int, size: int, rows: tuple[int, int]) -> Iterator[int]:
    """Batch sizes that add up to `samples`: `size` each and a short last one, unless rows = (fewest, most) asks otherwise."""
    fewest, most = rows
    size = min(max(size, fewest), most)
    batches = min(math.ceil(samples / size), samples // fewest)
    size = max(size, math.ceil(samples / batches))  # above what was asked only where the last batch would be too short
    for after in reversed(range(batches)):
        count = min(size, samples - after * fewest)
        samples -= count
        yield count


def _check_cut(where: str, samples: int, rows: tuple[int, int]) -> None:
    fewest, most = rows
    if math.ceil(samples / most) <= samples // fewest:
        return
    if fewest == most:
        raise DataError(f"{where} holds {samples} samples, which is no multiple of the batch of {fewest}", f"give a multiple of {fewest} samples")
    raise DataError(
        f"{where} holds {samples} samples, which cannot be cut into batches of {fewest} to {most}",
        "give more samples, or lower the smallest batch of the profile",
    )


def _file_part(path: Path, inputs: tuple[TensorSpec, ...], profiles: Sequence[Profile], first: int) -> FilePart:
    members = _members(path, inputs)
    samples = members[0].shape[0]
    for member in members:
        if member.shape[0] != samples:
            raise DataError(
                f"'{path}': '{members[0].name}' holds {samples} samples, '{member.name}' holds {member.shape[0]}",
                "give every array one row per sample",
            )
    if samples == 0:
        raise DataError(f"'{path}' holds no samples", "give at least one row, or leave the file out of the plan")
    rows = _rows_allowed(path, [member for member in members if member.name != LABELS], inputs, profiles)
    _check_cut(f"'{path}'", samples, rows)
    return FilePart(path, members, first, samples, rows)


def _members(path: Path, inputs: tuple[TensorSpec, ...]) -> tuple[Member, ...]:
    """The arrays of a file in the order of the inputs, labels last; names, dtypes and ranks are checked."""
    headers = read_headers(path)
    names = [spec.name for spec in inputs]
    missing = [name for name in names if name not in headers]
    unknown = [name for name in headers if name not in (*names, LABELS)]
    if missing or unknown:
        raise DataError(_name_faults(path, missing, unknown), f"name the arrays {', '.join(names)} and, if there are any, {LABELS}")
    members = [_input_member(path, spec, headers[spec.name]) for spec in inputs]
    if LABELS in headers and LABELS not in names:
        labels = headers[LABELS]
        if labels.dtype.kind not in "biuf" or not labels.shape:
            raise DataError(
                f"'{path}': '{LABELS}' is {labels.dtype} {labels.shape}, expected one number per sample", "save class indices as int64 [samples]"
            )
        members.append(Member(LABELS, labels.dtype.str, labels.shape))
    return tuple(members)


def _name_faults(path: Path, missing: list[str], unknown: list[str]) -> str:
    faults = [f"input '{name}' is missing" for name in missing]
    for name in unknown:
        near = difflib.get_close_matches(name, missing or [LABELS], n=1, cutoff=0.5)
        faults.append(f"array '{name}' is none of the model's inputs" + (f" (did you mean '{near[0]}'?)" if near else ""))
    return f"'{path}': {'; '.join(faults)}"


def _input_member(path: Path, spec: TensorSpec, header: Header) -> Member:
    dtype, shape = header.dtype, header.shape
    if dtype.str != _dtype_str(spec):
        raise DataError(
            f"'{path}': '{spec.name}' is {dtype.name if dtype.isnative else dtype.str}, the model's input is {spec.dtype}",
            f"nothing is cast silently: save {spec.name}.astype('{spec.dtype}')",
        )
    if not shape or len(shape) not in (len(spec.shape), len(spec.shape) + 1):
        raise DataError(
            f"'{path}': '{spec.name}' has shape {shape}, the model's input is {_shown(spec)}",
            "axis 0 holds the samples: give as many axes as the input has, or one more where the model has no batch axis",
        )
    return Member(spec.name, dtype.str, shape, whole=len(shape) == len(spec.shape) + 1)


def _rows_allowed(path: Path, members: list[Member], inputs: tuple[TensorSpec, ...], profiles: Sequence[Profile]) -> tuple[int, int]:
    """Fewest and most samples of a batch, by the first profile that holds the shapes of this file."""
    cut = [spec if member.whole else spec.model_copy(update={"shape": spec.shape[1:]}) for member, spec in zip(members, inputs, strict=True)]
    sizes = sizes_from_shapes(tuple(cut), {member.name: member.shape[1:] for member in members})
    if isinstance(sizes, str):
        wanted = ", ".join(_shown(spec) for spec in inputs)
        raise DataError(f"'{path}': in each sample, {sizes}", f"bring every sample to the shape of the model's inputs: {wanted}")
    profile = next((profile for profile in profiles if profile.holds(sizes)), None)
    if profiles and profile is None:
        got = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        ranges = "; ".join(", ".join(f"{name} {dim.min} to {dim.max}" for name, dim in profile.dims.items()) for profile in profiles)
        raise DataError(f"'{path}': {got} lies outside all profiles ({ranges})", "widen a profile in the plan, or cut or pad the samples")
    fewest, most = 1, _UNBOUNDED
    for member, spec in zip(members, inputs, strict=True):
        low, high = (1, 1) if member.whole else _range_of(spec.shape[0], sizes, profile)
        fewest, most = max(fewest, low), min(most, high)
    if fewest > most:
        raise DataError(
            f"'{path}': no batch fits all inputs ({', '.join(_shown(spec) for spec in inputs)})",
            "add an axis in front of every array: each row is then a whole input",
        )
    return fewest, most


def _check_values(part: FilePart, profiles: Sequence[Profile]) -> None:
    """DataError for a sample whose values, of inputs that decide a shape, lie outside all profiles."""
    named = [replace(member, whole=False) for member in part.members if any(member.name in profile.values for profile in profiles)]
    if not named:
        return
    with row_reader(part.path, named) as read:
        arrays = read(part.samples)  # a few numbers per sample
    for row in range(part.samples):
        values = {name: array[row].ravel().tolist() for name, array in arrays.items()}
        if not any(profile.holds({}, values) for profile in profiles):
            got = ", ".join(f"{name} = {each}" for name, each in values.items())
            raise DataError(f"'{part.path}': sample {row} has {got}, outside all profiles", "widen `values` in a profile, or leave such samples out")


def _range_of(dim: int | str, sizes: Mapping[str, int], profile: Profile | None) -> tuple[int, int]:
    """What the first axis of an input may be."""
    if isinstance(dim, int):
        return dim, dim
    if dim in sizes:  # also the name of another axis, whose size the data fixes
        return sizes[dim], sizes[dim]
    if profile is None or dim not in profile.dims:
        return 1, _UNBOUNDED
    return max(profile.dims[dim].min, 1), profile.dims[dim].max


def _dtype_str(spec: TensorSpec) -> str:
    """The spec's dtype in numpy's byte-exact form."""
    if spec.dtype == "bfloat16":  # numpy knows it once anything has imported ml_dtypes, but .npz files do not
        raise DataError(
            f"input '{spec.name}' is {spec.dtype}, which .npz files and generated data cannot hold",
            "give the model a float32 input and cast inside it",
        )
    return np.dtype(spec.dtype).str


def _shown(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} [{', '.join(str(dim) for dim in spec.shape)}]"


def _checked_rows(part: FilePart) -> Iterator[tuple[bytes, bytes]]:
    """Digest of every sample's inputs, and its label's bytes; DataError at the first NaN or infinity."""
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
        if np.isfinite(array.sum()):  # far quicker than looking at each value; a sum that overflows only costs the look
            return
    bad = ~np.isfinite(array.reshape(len(array), -1))
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        value = "NaN" if np.isnan(array[row]).any() else "an infinity"
        raise DataError(
            f"'{path}': '{name}' has {value} in sample {start + row}", "repair or leave out such samples; no accuracy can be measured on them"
        )


# -- generated --------------------------------------------------------------------------------------------------------


def _generated_set(kind: type[S], source: GeneratedData, inputs: tuple[TensorSpec, ...], profiles: Sequence[Profile]) -> S:
    """Samples at the usual size of every profile in turn, nearly equally many of each."""
    for spec in inputs:
        _dtype_str(spec)
    shared = {spec.shape[0] if spec.shape else None for spec in inputs}
    symbol = next(iter(shared)) if len(shared) == 1 else None
    batched = isinstance(symbol, str) and not any(symbol in spec.shape[1:] for spec in inputs)
    specs = tuple(spec.model_copy(update={"shape": spec.shape[1:]}) if batched else spec for spec in inputs)
    choices = list(profiles or (Profile(),))[: source.samples]
    parts, first = list[GeneratedPart](), 0
    for index, profile in enumerate(choices):
        count = (source.samples - first) // (len(choices) - index)
        rows = _range_of(symbol, {}, profile) if batched and symbol is not None else (1, 1)
        _check_cut(kind.role, count, rows)
        parts.append(GeneratedPart(_resolved(specs, profile), source.seed, first, count, rows, not batched, tuple(profile.values_at("opt").items())))
        first += count
    seed = hashlib.blake2b(f"random 2, seed {source.seed}".encode(), digest_size=16).digest()
    content = hashlib.blake2b(seed + repr([(part.specs, part.samples, part.whole, *part.values) for part in parts]).encode(), digest_size=32)
    return kind(content.hexdigest(), source.samples, inputs, (seed,), has_labels=False, parts=tuple(parts))


def _resolved(specs: tuple[TensorSpec, ...], profile: Profile) -> tuple[TensorSpec, ...]:
    try:
        return tuple(spec.model_copy(update={"shape": spec.resolve(profile.sizes("opt"))}) for spec in specs)
    except KeyError as error:
        raise DataError(f"cannot generate samples: no profile gives the size of {error}", "add the symbol to `profiles:`") from None


def _random_sample(part: GeneratedPart, index: int) -> dict[str, NDArray[np.generic]]:
    """Floats are standard normal, uint8 are pixels, other integers 0 or 1, which any table or mask can take; rows begin with 1, as seen texts do."""
    random, sample = np.random.default_rng([part.seed, index]), dict[str, NDArray[np.generic]]()
    for spec in part.specs:
        dtype, shape = np.dtype(spec.dtype), spec.resolve({})
        drawn = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 256 if dtype == np.uint8 else 2, shape)
        if dtype.kind != "f" and dtype != np.uint8 and shape and shape[-1] > 1:
            drawn[..., 0] = 1
        sample[spec.name] = np.asarray(dict(part.values).get(spec.name, drawn)).astype(dtype).reshape(shape)
    return sample
