"""Mean average precision of boxes, by pycocotools: over IoU 0.50 to 0.95 and all classes.

At most 100 boxes of a class count per image, those with the highest scores, as in COCO.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pipeline.accuracy.metrics.arithmetic import Array, Floats
from pipeline.accuracy.metrics.decoders import BOX
from pipeline.accuracy.metrics.metric import Batches, Decode, Metric, Picks
from pipeline.data.label_file import Boxes
from pipeline.errors import DataError

MAX_DETECTIONS = 100
MAX_SHUFFLED = 128  # images: each shuffle matches all their boxes again
ANY_AREA = [0.0, 1e20]


def mean_average_precision(decode: Decode, class_names: Sequence[str]) -> Metric:
    """Return mAP of decoded boxes, an array [found, 6] per image: corners, score and class."""
    return Metric(
        "map",
        partial(_evaluate, len(class_names)),
        _boxes,
        decode,
        hides_nan=True,
        most_shuffled=MAX_SHUFFLED,
        class_names=tuple(class_names),
    )


def _boxes(decoded: Array, labels: Array | None, reference: Array) -> Array:
    """Check the boxes of each image: [found, 6] numbers."""
    for boxes in decoded:
        array = np.asarray(boxes)
        if array.ndim != 2 or array.shape[-1] != BOX or array.dtype.kind not in "iuf":
            raise DataError(
                f"map needs boxes of shape [found, {BOX}] per image, and the decoder gives"
                f" {array.dtype} of shape {array.shape}",
                "return x1, y1, x2, y2, score and class of each box",
            )
    return decoded


def _evaluate(
    classes: int, records: Batches, labels: Batches | None, reference: Batches
) -> _Detections:
    images = [entry for batch in labels or () for entry in batch]
    expected = [boxes for batch in reference for boxes in batch]
    largest = max((int(boxes[:, 5].max()) for boxes in expected if len(boxes)), default=-1)
    if largest >= classes:
        raise DataError(
            f"the reference finds boxes of class {largest}, and the labels have {classes}"
            " categories",
            "list the categories in the order of the model's classes, which count from 0",
        )
    found = [boxes for batch in records for boxes in batch]
    return _Detections(_matches(found, images, classes), len(images), _counts(images))


def _counts(images: Sequence[Boxes]) -> dict[int, int]:
    """Return the number of images with each class, in order. Crowds do not count."""
    counts: Counter[int] = Counter()
    for image in images:
        pairs = zip(image.classes, image.crowds, strict=True)
        counts.update({number for number, crowd in pairs if not crowd})
    return dict(sorted(counts.items()))


@dataclass(frozen=True, slots=True)
class _Detections:
    """The matches of all images, and their accumulation over drawn images."""

    matches: Any  # a COCOeval whose evalImgs holds [classes, images]
    units: int
    classes: Mapping[int, int]

    def score(self, picks: Picks) -> float:
        precisions = self._precisions(picks, sorted(self.classes))
        return float(np.nanmean(precisions)) if np.isfinite(precisions).any() else float("nan")

    def class_score(self, number: int, picks: Picks) -> float:
        return float(self._precisions(picks, [number])[0])

    def _precisions(self, picks: Picks, classes: Sequence[int]) -> Floats:
        """Return the average precision of each class on these images; NaN without a true box."""
        drawn = copy.copy(self.matches)
        drawn.params = copy.copy(self.matches.params)
        drawn.params.catIds = list(classes)
        drawn.params.imgIds = list(range(len(picks)))
        drawn._paramsEval = drawn.params
        drawn.evalImgs = [
            self.matches.evalImgs[number * self.units + image]
            for number in classes
            for image in picks.tolist()
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            drawn.accumulate()
        # [thresholds, recalls, classes]; -1 where a class has no true box
        precision = drawn.eval["precision"][..., 0, 0]
        means = precision.mean(axis=(0, 1))
        return np.where(means < 0, np.nan, means)


def _matches(found: Sequence[Array], images: Sequence[Boxes], classes: int) -> Any:
    """Match the boxes of each image with the true ones, class by class."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    records = {
        "images": [{"id": image} for image in range(len(images))],
        "categories": [{"id": number} for number in range(classes)],
    }
    # ids begin with 1: 0 means "no match"
    truth = [
        {**record, "id": number, "iscrowd": int(crowd)}
        for number, (record, crowd) in enumerate(_true_boxes(images), 1)
    ]
    results = [{**record, "id": number} for number, record in enumerate(_found_boxes(found), 1)]
    with contextlib.redirect_stdout(io.StringIO()):
        sides = []
        for annotations in (truth, results):
            side = COCO()
            side.dataset = {**records, "annotations": annotations}
            side.createIndex()
            sides.append(side)
        matches = COCOeval(*sides, iouType="bbox")
        matches.params.maxDets = [MAX_DETECTIONS]
        matches.params.areaRng, matches.params.areaRngLbl = [ANY_AREA], ["all"]
        matches.evaluate()
    return matches


def _true_boxes(images: Sequence[Boxes]) -> Iterator[tuple[dict[str, Any], bool]]:
    for image, boxes in enumerate(images):
        for box, number, crowd in zip(boxes.boxes, boxes.classes, boxes.crowds, strict=True):
            yield _annotation(image, number, list(box)), crowd


def _found_boxes(found: Sequence[Array]) -> Iterator[dict[str, Any]]:
    for image, boxes in enumerate(found):
        for left, top, right, bottom, score, number in np.asarray(boxes, np.float64).tolist():
            box = [left, top, right - left, bottom - top]
            yield {**_annotation(image, int(number), box), "score": score}


def _annotation(image: int, number: int, box: list[float]) -> dict[str, Any]:
    return {"image_id": image, "category_id": number, "bbox": box, "area": box[2] * box[3]}
