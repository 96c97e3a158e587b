"""Labels in a file beside a set: boxes in the format of COCO, or a line of JSON for each sample.

boxes.json   {"images": [{"id"}, ...], "categories": [{"id", "name"}, ...],
              "annotations": [{"image_id", "category_id", "bbox": [x, y, width, height]}, ...]}
             The images are the samples, in order. Class i of the model is the i-th category.
texts.jsonl  {"text": "..."} or {"label": 3} or {"label": [3, 0, 7]} or {"label": 0.5}
             Lines are in the order of the samples, or each also has its number as "sample".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from pipeline.errors import DataError

MAX_BYTES = 512 * 2**20  # COCO's 118,000 training images have 448 MB of boxes and masks
SHOWN = 80  # characters of a faulty line in a message
MAX_INTEGER = 2**63 - 1

LabelKind = Literal["numbers", "texts", "boxes"]
Array = NDArray[np.generic]
LINE = (
    'write {"text": "..."}, or {"label": ...} with a number or a list of integers, one line per'
    " sample"
)
COCO = (
    "write the format of COCO: `images`, `categories` and `annotations`, each annotation with"
    " `image_id`, `category_id` and `bbox`: [x, y, width, height]"
)


@dataclass(frozen=True, slots=True)
class Boxes:
    """The true boxes of one image, in pixels of the model's input."""

    boxes: tuple[tuple[float, float, float, float], ...]  # x, y, width, height
    classes: tuple[int, ...]  # index into the file's categories
    crowds: tuple[bool, ...]  # a box of many objects, which counts neither for nor against


@dataclass(frozen=True, slots=True)
class LabelFile:
    """The labels of a set, checked."""

    digest: str  # of the file's bytes
    kind: LabelKind
    entries: Array  # [samples, ...] numbers, or [samples] of str or Boxes
    classes: tuple[str, ...] = ()  # boxes: the names of the categories, in order


def read_label_file(path: Path, samples: int, role: str) -> LabelFile:
    """Read and check the labels of a set of `samples` samples.

    DataError for a file of another form, for a sample without a label or with two, for a label
    without a sample, for lists of different lengths, and for boxes of unknown classes or images.
    """
    where = f"data.labels.{role}: '{path}'"
    content = _content(path, where)
    digest = hashlib.sha256(content).hexdigest()
    if path.suffix == ".json":
        return _boxes(_parsed(content, where, COCO), where, samples, digest)
    if path.suffix == ".jsonl":
        return _entries(content, where, samples, digest)
    raise DataError(
        f"{where}: expected a file that ends in .json or .jsonl",
        "give boxes as .json, in the format of COCO, and other labels as .jsonl",
    )


def _content(path: Path, where: str) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(
                f"{where} has {size} bytes, expected at most {MAX_BYTES}",
                "give the labels of this set alone",
            )
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{where} cannot be read: {error.strerror}",
            "paths in a plan are relative to the plan's own folder",
        ) from error


def _parsed(content: bytes, where: str, next_step: str) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where} is not valid JSON: {error}", next_step) from error


def _check_count(where: str, entries: int, samples: int, noun: str) -> None:
    if entries != samples:
        raise DataError(
            f"{where} has {entries} {noun}, and the set has {samples} samples",
            "give one entry per sample, in the order of the samples",
        )


# -- lines -------------------------------------------------------------------


def _entries(content: bytes, where: str, samples: int, digest: str) -> LabelFile:
    lines = [
        (f"{where}, line {number}", line)
        for number, line in enumerate(content.split(b"\n"), 1)
        if line.strip()
    ]
    _check_count(where, len(lines), samples, "lines with labels")
    values: list[object] = [None] * samples
    key = ""
    for index, value_key, value in _numbered(lines, samples):
        key = key or value_key
        if value_key != key:
            raise DataError(f"{lines[index][0]}: '{value_key}', and other lines have '{key}'", LINE)
        values[index] = value
    if key == "text":
        texts = np.empty(samples, dtype=object)
        texts[:] = values
        return LabelFile(digest, "texts", texts)
    return LabelFile(digest, "numbers", _numbers(values, where))


def _numbered(
    lines: Sequence[tuple[str, bytes]], samples: int
) -> Iterator[tuple[int, str, object]]:
    """Yield the sample, the key and the value of each line."""
    has_numbers: bool | None = None
    lines_of: dict[int, str] = {}
    for position, (where, line) in enumerate(lines):
        document = _parsed(line, where, LINE)
        if not isinstance(document, dict):
            raise DataError(f"{where}: expected an object, got {_shown(line)}", LINE)
        numbered = "sample" in document
        if has_numbers not in (None, numbered):
            raise DataError(
                f"{where} {'has' if numbered else 'lacks'} the key 'sample', unlike the lines"
                " before",
                "number every line or none",
            )
        has_numbers = numbered
        index = document.pop("sample", position)
        if type(index) is not int or not 0 <= index < samples:
            raise DataError(
                f"{where}: no sample {_shown(orjson.dumps(index))} in the set, whose samples are 0"
                f" to {samples - 1}",
                "correct the number, or leave `sample` out of every line",
            )
        if index in lines_of:
            raise DataError(
                f"{where}: sample {index} has a label already, in {lines_of[index]}",
                "give each sample one label",
            )
        lines_of[index] = where.rpartition(", ")[2]
        yield index, *_entry(document, where, line)


def _entry(document: Mapping[str, object], where: str, line: bytes) -> tuple[str, object]:
    """Return the key of a line's value, and the value. DataError if it is none."""
    (key, value), *others = document.items() or (("", None),)
    if key == "text" and not others and isinstance(value, str):
        if not value.strip():
            raise DataError(
                f"{where}: the text is empty, and an error rate counts the words of the labels",
                "leave such samples out",
            )
        return key, value
    if key == "label" and not others:
        values = value if isinstance(value, list) else [value]
        integers = all(type(each) is int and abs(each) <= MAX_INTEGER for each in values)
        number = type(value) is float and math.isfinite(value)
        if values and (integers or number):
            return key, value
    raise DataError(f"{where}: no label in {_shown(line)}", LINE)


def _numbers(values: Sequence[object], where: str) -> Array:
    """Return the numbers as one array. DataError if some are lists and others not, or ragged."""
    lengths = [len(value) if isinstance(value, list) else None for value in values]
    for index, length in enumerate(lengths):
        if length != lengths[0]:
            raise DataError(
                f"{where}: sample 0 has {_length(lengths[0])}, and sample {index} has"
                f" {_length(length)}",
                "give every sample as many labels, filled up with -100, which f1 and perplexity"
                " leave out",
            )
    array = np.array(values)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


def _length(length: int | None) -> str:
    return "a single label" if length is None else f"a list of {length}"


def _shown(text: bytes) -> str:
    return ascii(text.decode("utf-8", "replace")[:SHOWN])


# -- boxes -------------------------------------------------------------------


def _boxes(document: object, where: str, samples: int, digest: str) -> LabelFile:
    images = _records(document, "images", where)
    _check_count(where, len(images), samples, "images")
    categories = _records(document, "categories", where)
    image_of = _indices(images, "images", where)
    class_of = _indices(categories, "categories", where)
    found: list[list[tuple[tuple[float, float, float, float], int, bool]]] = [
        [] for _ in range(samples)
    ]
    for number, annotation in enumerate(_records(document, "annotations", where)):
        here = f"{where}: annotation {number}"
        image = _index(annotation, "image_id", image_of, here, "images")
        class_ = _index(annotation, "category_id", class_of, here, "categories")
        found[image].append((_box(annotation, here), class_, bool(annotation.get("iscrowd"))))
    if not any(found):
        raise DataError(f"{where} has no annotations, so no box can be found or missed", COCO)
    entries = np.empty(samples, dtype=object)
    for index, boxes in enumerate(found):
        entries[index] = Boxes(*(zip(*boxes, strict=True) if boxes else ((), (), ())))
    names = tuple(str(category.get("name", category["id"])) for category in categories)
    return LabelFile(digest, "boxes", entries, names)


def _records(document: object, key: str, where: str) -> list[dict[str, Any]]:
    records = document.get(key) if isinstance(document, dict) else None
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise DataError(f"{where} has no list of objects `{key}`", COCO)
    return cast(list[dict[str, Any]], records)


def _indices(records: Sequence[Mapping[str, Any]], key: str, where: str) -> dict[int, int]:
    """Return the index of each record by its id."""
    indices: dict[int, int] = {}
    for index, record in enumerate(records):
        if type(record.get("id")) is not int:
            raise DataError(f"{where}: {key}[{index}] has no integer `id`", COCO)
        if record["id"] in indices:
            first = indices[record["id"]]
            raise DataError(
                f"{where}: {key}[{first}] and {key}[{index}] have the id {record['id']}",
                "give each an id of its own",
            )
        indices[record["id"]] = index
    return indices


def _index(
    annotation: Mapping[str, Any], key: str, known: Mapping[int, int], where: str, among: str
) -> int:
    value = annotation.get(key)
    if type(value) is not int or value not in known:
        raise DataError(
            f"{where}: {key} {_shown(orjson.dumps(value))} is not among `{among}`",
            f"add it to `{among}`, or remove the annotation",
        )
    return known[value]


def _box(annotation: Mapping[str, Any], where: str) -> tuple[float, float, float, float]:
    box = annotation.get("bbox")
    is_box = (
        isinstance(box, list)
        and len(box) == 4
        and all(type(each) in (int, float) and abs(each) < 1e9 for each in box)
        and min(box[2:]) >= 0
    )
    if not is_box:
        raise DataError(
            f"{where}: bbox {_shown(orjson.dumps(box))}",
            "give [x, y, width, height] in pixels of the model's input",
        )
    x, y, width, height = map(float, cast(list[float], box))
    return x, y, width, height
