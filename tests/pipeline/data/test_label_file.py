"""Labels in a file beside a set: one per sample, of the kind that the metric needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.shapes import TensorSpec
from pipeline.data import label_file
from pipeline.data.label_file import Boxes, read_label_file
from pipeline.data.samples import SelectionSet, open_set
from pipeline.errors import DataError

X = (TensorSpec(name="x", dtype="float32", shape=("batch", 2)),)
BOX = {"image_id": 7, "category_id": 3, "bbox": [1, 2, 3.5, 4]}
COCO: dict[str, Any] = {
    "images": [{"id": 7}, {"id": 5}],
    "categories": [{"id": 3, "name": "cat"}, {"id": 1}],
    "annotations": [BOX, {**BOX, "category_id": 1, "iscrowd": 1}],
}


def lines(*entries: object) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def written(folder: Path, text: str, name: str = "labels.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_texts_and_numbers_are_read_in_order_and_by_number(tmp_path: Path) -> None:
    texts = read_label_file(
        written(tmp_path, lines({"text": "a b"}, {"text": "ü"})), 2, "selection"
    )
    assert (texts.kind, texts.entries.tolist()) == ("texts", ["a b", "ü"])
    numbered = lines({"sample": 1, "label": 4}, {"sample": 0, "label": 3}) + "\n"
    numbers = read_label_file(written(tmp_path, numbered), 2, "selection")
    assert (numbers.kind, numbers.entries.dtype.name) == ("numbers", "int64")
    assert numbers.entries.tolist() == [3, 4]
    floats = read_label_file(written(tmp_path, lines({"label": 1}, {"label": 0.5})), 2, "selection")
    assert floats.entries.tolist() == [1.0, 0.5]
    table = read_label_file(written(tmp_path, lines({"label": [1, -100]})), 1, "selection")
    assert table.entries.tolist() == [[1, -100]]


def test_boxes_belong_to_the_images_in_their_order(tmp_path: Path) -> None:
    boxes = read_label_file(written(tmp_path, json.dumps(COCO), "boxes.json"), 2, "validation")
    assert (boxes.kind, boxes.classes) == ("boxes", ("cat", "1"))
    box = (1.0, 2.0, 3.5, 4.0)
    assert boxes.entries.tolist() == [
        Boxes((box, box), (0, 1), (False, True)),
        Boxes((), (), ()),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines({"text": "a"}), "has 1 lines with labels, and the set has 2 samples"),
        (lines(*[{"text": "a"}] * 3), "has 3 lines with labels, and the set has 2 samples"),
        (lines({"text": "a"}, {"text": " "}), "line 2: the text is empty"),
        (lines({"text": "a"}, {"label": 1}), "line 2: 'label', and other lines have 'text'"),
        (lines({"text": "a"}, {"text": 1}), "line 2: no label in '{\"text\": 1}'"),
        (lines({"text": "a"}, {}), "line 2: no label in '{}'"),
        (lines({"text": "a"}, {"text": "b", "score": 1}), "line 2: no label in"),
        (lines({"text": "a"}, ["b"]), "line 2: expected an object, got '[\"b\"]'"),
        (lines({"label": 1}, {"label": True}), "line 2: no label in"),
        (lines({"label": 1}, {"label": 2**63}), "line 2: no label in"),
        (lines({"label": 1}, {"label": []}), "line 2: no label in"),
        (lines({"label": 1}, {"label": [0.5]}), "line 2: no label in"),
        (lines({"label": [1, 2]}, {"label": [1]}), "has a list of 2, and sample 1 has a list of 1"),
        (lines({"label": [1, 2]}, {"label": 1}), "a list of 2, and sample 1 has a single label"),
        ('{"label": 1}\n{"label": NaN}\n', "line 2 is not valid JSON"),
        ('{"label": 1}\n{"label": 1\n', "line 2 is not valid JSON"),
        ("[" * 5000 + "\n[\n", "line 1 is not valid JSON"),
        (
            lines({"sample": 0, "label": 1}, {"sample": 2, "label": 1}),
            "line 2: no sample '2' in the set, whose samples are 0 to 1",
        ),
        (
            lines({"sample": 0, "label": 1}, {"sample": "dog.jpg", "label": 1}),
            "line 2: no sample '\"dog.jpg\"' in the set",
        ),
        (
            lines({"sample": 0, "label": 1}, {"sample": 0, "label": 1}),
            "line 2: sample 0 has a label already, in line 1",
        ),
        (
            lines({"sample": 0, "label": 1}, {"label": 1}),
            "line 2 lacks the key 'sample', unlike the lines before",
        ),
    ],
)
def test_lines_that_are_no_labels_of_the_set(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError) as raised:
        read_label_file(path, 2, "selection")
    assert message in raised.value.message
    assert raised.value.message.startswith(f"data.labels.selection: '{path}'")
    assert raised.value.next_step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [{"id": 7}]}, "has 1 images, and the set has 2 samples"),
        ({"images": [{"id": 7}, {"id": 7}]}, "images[0] and images[1] have the id 7"),
        ({"images": [{"id": 7}, {"id": "x"}]}, "images[1] has no integer `id`"),
        ({"categories": [{"id": 3}, {"id": 3}]}, "categories[0] and categories[1] have the id 3"),
        ({"categories": None}, "has no list of objects `categories`"),
        ({"annotations": [1]}, "has no list of objects `annotations`"),
        ({"annotations": []}, "has no annotations"),
        ({"annotations": [{**BOX, "image_id": 8}]}, "image_id '8' is not among `images`"),
        ({"annotations": [{**BOX, "category_id": 2}]}, "category_id '2' is not among `categories`"),
        ({"annotations": [{"image_id": 7}]}, "category_id 'null' is not among `categories`"),
        ({"annotations": [{**BOX, "bbox": [1, 2, 3]}]}, "annotation 0: bbox '[1,2,3]'"),
        ({"annotations": [BOX, {**BOX, "bbox": [1, 2, -3, 4]}]}, "annotation 1: bbox"),
        ({"annotations": [{**BOX, "bbox": [1, 2, 1e300, 4]}]}, "annotation 0: bbox"),
        ({"annotations": [{**BOX, "bbox": "1 2 3 4"}]}, "annotation 0: bbox"),
    ],
)
def test_boxes_that_are_no_labels_of_the_set(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, json.dumps({**COCO, **change}), "boxes.json")
    with pytest.raises(DataError) as raised:
        read_label_file(path, 2, "selection")
    assert message in raised.value.message
    assert raised.value.next_step


def test_files_that_cannot_be_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in (
        (tmp_path / "none.jsonl", "cannot be read: No such file"),
        (written(tmp_path, "1", "labels.csv"), "expected a file that ends in .json or .jsonl"),
        (written(tmp_path, "[]", "list.json"), "has no list of objects `images`"),
        (written(tmp_path, "", "empty.json"), "is not valid JSON"),
    ):
        with pytest.raises(DataError) as raised:
            read_label_file(path, 2, "selection")
        assert message in raised.value.message
    monkeypatch.setattr(label_file, "MAX_BYTES", 3)
    with pytest.raises(DataError, match="has 4 bytes, expected at most 3"):
        read_label_file(written(tmp_path, "1234"), 2, "selection")


# -- in a set ----------------------------------------------------------------


def test_a_set_yields_the_labels_of_its_file_and_changes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(10, dtype=np.float32).reshape(5, 2))
    texts = written(tmp_path, lines(*({"text": word} for word in "abcde")))
    samples = open_set(SelectionSet, (path,), X, labels=texts)
    assert (samples.has_labels, samples.label_kind) == (True, "texts")
    assert [batch.labels.tolist() for batch in samples.batches(2) if batch.labels is not None] == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]
    filled = next(samples.filled(3, [0], 3))
    assert filled.labels is not None
    assert filled.labels.tolist() == ["a", "b", "c"]
    bare = open_set(SelectionSet, (path,), X)
    assert (bare.has_labels, bare.label_kind) == (False, None)
    texts.write_text(texts.read_text().replace('"e"', '"f"'))
    changed = open_set(SelectionSet, (path,), X, labels=texts)
    assert len({samples.digest, bare.digest, changed.digest}) == 3


def test_numbered_samples_take_their_labels_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    arrays: dict[str, Any] = {f"{n}/x": np.full((1, 2), n, np.float32) for n in range(3)}
    np.savez(path, **arrays)
    labels = written(tmp_path, lines({"label": [1, 2]}, {"label": [3, 4]}, {"label": [5, 6]}))
    samples = open_set(SelectionSet, (path,), X, labels=labels)
    assert samples.whole
    assert [batch.labels.tolist() for batch in samples.batches(8) if batch.labels is not None] == [
        [[1, 2]],
        [[3, 4]],
        [[5, 6]],
    ]
    assert [len(batch.feeds["x"]) for batch in samples.filled(2, [0], 2)] == [1]


def test_labels_are_given_once(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros((1, 2), np.float32), labels=np.zeros(1, np.int64))
    with pytest.raises(DataError, match="has an array 'labels' too"):
        open_set(SelectionSet, (path,), X, labels=written(tmp_path, lines({"label": 1})))
