"""Samples from .npz files, or generated. Calibration, selection and validation are separate types.

`open_set` checks every value and digests every sample, in one streaming pass. The set is then small
and picklable, and it streams its batches with bounded memory. A batch never crosses files, because
each file may hold another shape.

Each row of a file is a sample (row_files.py), or the samples are numbered (numbered_files.py). A
sample that is a whole feed is not joined with others to a batch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from pipeline.core.shapes import Profile, Tensors, TensorSpec
from pipeline.data.batch import UNBOUNDED, Batch
from pipeline.data.generated import GeneratedPart, generated_parts
from pipeline.data.input_checks import LABELS, NUMBER_THEM
from pipeline.data.label_file import LabelFile, LabelKind, read_label_file
from pipeline.data.npz import read_headers
from pipeline.data.numbered_files import NUMBERED, FeedsPart, checked_feeds, open_numbered_file
from pipeline.data.row_files import FilePart, checked_rows, open_row_file
from pipeline.errors import DataError
from pipeline.plan.schema import DataPaths, GeneratedData


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
    label_file: LabelFile | None = None  # None: the labels, if any, are in the parts

    @property
    def label_kind(self) -> LabelKind | None:
        """What the labels are; None where there are none."""
        if self.label_file is not None:
            return self.label_file.kind
        return "numbers" if self.has_labels else None

    @property
    def whole(self) -> bool:
        """True if each sample is a whole feed, which cannot be joined with others to a batch."""
        return all(part.whole for part in self.parts)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all samples in order, at most `size` per batch. The last batch may be smaller.

        Batches are larger only if every profile requires it.
        """
        for part in self.parts:
            yield from self._labelled(part.batches(size))

    def _labelled(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches with the labels of the file, if there is one."""
        for batch in batches:
            if self.label_file is not None:
                labels = self.label_file.entries[batch.first : batch.first + batch.samples]
                batch = replace(batch, labels=labels)
            yield batch

    def filled(self, rows: int, parts: Sequence[int], most: int) -> Iterator[Batch]:
        """Yield the first samples of the files `parts` in batches of exactly `rows`.

        At most `most` rows in total, but at least one batch per file. A short last batch is filled
        with copies of its own samples. With `rows` 0, batches are as small as possible.
        """
        batches_per_part = max(1, most // max(1, rows) // len(parts))
        for index in parts:
            part = self.parts[index]
            if not rows or isinstance(part, FeedsPart):
                batches = itertools.islice(part.batches(1), batches_per_part)
                yield from self._labelled(batches)
                continue
            unlimited = replace(part, rows=(1, UNBOUNDED))
            batches = itertools.islice(unlimited.batches(rows), batches_per_part)
            for batch in self._labelled(batches):
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
    labels: Path | None = None,
) -> S:
    """Check and digest all samples, in one pass with bounded memory. Raises DataError.

    `labels`: a file with one label per sample, of a set without labels in its own files.
    """
    if isinstance(source, GeneratedData):
        return _generated_set(kind, source, inputs, profiles)
    if not source:
        raise DataError(
            f"{kind.role}: expected at least one .npz file, got an empty list",
            "name the files, or leave the key out",
        )
    parts: list[FilePart | FeedsPart] = []
    for path in source:
        parts.append(_open_file(path, inputs, profiles, first=sum(part.samples for part in parts)))
    _check_alike(kind.role, parts)
    content = hashlib.blake2b(repr([spec.model_dump() for spec in inputs]).encode(), digest_size=32)
    digests = []
    for part in parts:
        content.update(_form_of(part).encode())
        for digest, label in (
            checked_rows(part) if isinstance(part, FilePart) else checked_feeds(part)
        ):
            digests.append(digest)
            content.update(digest + label)
    label_file = None
    if labels is not None:
        if parts[0].has_labels:
            raise DataError(
                f"data.labels.{kind.role} names '{labels}', and '{parts[0].path}' has an array"
                f" '{LABELS}' too",
                "give the labels once",
            )
        label_file = read_label_file(labels, len(digests), kind.role)
        content.update(label_file.digest.encode())
    return kind(
        content.hexdigest(),
        len(digests),
        inputs,
        tuple(digests),
        parts[0].has_labels or label_file is not None,
        tuple(parts),
        label_file,
    )


def _open_file(
    path: Path, inputs: tuple[TensorSpec, ...], profiles: Sequence[Profile], first: int
) -> FilePart | FeedsPart:
    """Open one file: rows of samples or numbered samples, by the names of its arrays."""
    headers = read_headers(path)
    # the name of an input may look like that of a numbered array
    names = {LABELS, *(spec.name for spec in inputs)}
    numbered = [name for name in headers if name not in names and NUMBERED.fullmatch(name)]
    if not numbered:
        return open_row_file(path, headers, inputs, profiles, first)
    if plain := [name for name in headers if name not in numbered]:
        raise DataError(
            f"'{path}' holds '{plain[0]}' beside '{numbered[0]}': an array of all samples beside"
            " one of a single sample",
            f"give all arrays in one form: {NUMBER_THEM.format(inputs[0].name)}",
        )
    return open_numbered_file(path, headers, inputs, profiles, first)


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


def _generated_set(
    kind: type[S],
    source: GeneratedData,
    inputs: tuple[TensorSpec, ...],
    profiles: Sequence[Profile],
) -> S:
    """Return a set of random samples, with the digest of its seed in the place of the samples'."""
    parts = generated_parts(kind.role, source, inputs, profiles)
    seed = hashlib.blake2b(f"random 2, seed {source.seed}".encode(), digest_size=16).digest()
    forms = [(part.specs, part.samples, part.whole, *part.values) for part in parts]
    content = hashlib.blake2b(seed + repr(forms).encode(), digest_size=32)
    return kind(content.hexdigest(), source.samples, inputs, (seed,), has_labels=False, parts=parts)
