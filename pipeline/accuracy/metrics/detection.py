"""Mean average precision of boxes: over IoU 0.50 to 0.95 and all classes, as COCO defines it.

pycocotools matches the boxes once. The precision of hundreds of resamples is computed here, from
how often each image was drawn.

At most 100 boxes of a class count per image, those with the highest scores, as in COCO.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.accuracy.metrics.arithmetic import Array, Floats, mean_of_known
from pipeline.accuracy.metrics.decoders import BOX
from pipeline.accuracy.metrics.metric import Batches, Decode, Metric, Picks
from pipeline.data.label_file import Boxes
from pipeline.errors import DataError

MAX_DETECTIONS = 100
MAX_SHUFFLED = 128  # images: each shuffle matches all their boxes again
ANY_AREA = [0.0, 1e20]
RECALLS = np.linspace(0, 1, 101)


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
    matches = _matches(found, images, classes)
    return _Detections(len(images), _counts(images), matches)


def _counts(images: Sequence[Boxes]) -> dict[int, int]:
    """Return the number of images with each class, in order. Crowds do not count."""
    counts: Counter[int] = Counter()
    for image in images:
        pairs = zip(image.classes, image.crowds, strict=True)
        counts.update({number for number, crowd in pairs if not crowd})
    return dict(sorted(counts.items()))


@dataclass(frozen=True, slots=True)
class _ClassMatches:
    """The boxes found of one class, from the highest score to the lowest."""

    owners: NDArray[np.intp]  # [boxes], the image of each
    right: NDArray[np.bool_]  # [thresholds, boxes]; boxes in a crowd are neither right nor wrong
    wrong: NDArray[np.bool_]
    truths: NDArray[np.intp]  # [images], the true boxes of each

    def precision(self, drawn: NDArray[np.intp]) -> float:
        """Return the average precision where each image was drawn so often; NaN without truths.

        The mean over thresholds of IoU and 101 recalls of the best precision at that recall or
        more, as pycocotools accumulates it.
        """
        truths = int(drawn @ self.truths)
        if not truths:
            return float("nan")
        if not self.owners.size:
            return 0.0
        weights = drawn[self.owners]
        right = np.cumsum(self.right * weights, axis=1)
        wrong = np.cumsum(self.wrong * weights, axis=1)
        precision = right / (right + wrong + np.spacing(1))
        best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        best = np.hstack([best, np.zeros((len(best), 1))])  # of a recall that is never reached
        firsts = [np.searchsorted(recall, RECALLS) for recall in right / truths]
        return float(np.take_along_axis(best, np.array(firsts), axis=1).mean())


@dataclass(frozen=True, slots=True)
class _Detections:
    """The matches of all images by class, and their precision over drawn images."""

    units: int
    classes: Mapping[int, int]
    matches: Mapping[int, _ClassMatches]

    def score(self, picks: Picks) -> float:
        """Return the mean over the classes that have true boxes on these images."""
        return mean_of_known(self.class_scores(sorted(self.classes), picks))

    def class_scores(self, numbers: Sequence[int], picks: Picks) -> Floats:
        drawn = np.bincount(picks, minlength=self.units)
        return np.array([self.matches[number].precision(drawn) for number in numbers])


def _by_class(matches: Any, images: int) -> dict[int, _ClassMatches]:
    """Return what pycocotools matched, by class. `matches`: its evalImgs are [classes, images]."""
    return {
        number: _class_matches(matches.evalImgs[index * images : (index + 1) * images])
        for index, number in enumerate(matches.params.catIds)
    }


def _class_matches(of_images: Sequence[Mapping[str, Any] | None]) -> _ClassMatches:
    """Join the matches of one class; None: an image has and shows no box of it."""
    shown = [(image, match) for image, match in enumerate(of_images) if match is not None]
    truths = np.zeros(len(of_images), np.intp)
    for image, match in shown:
        truths[image] = np.count_nonzero(np.asarray(match["gtIgnore"]) == 0)
    if not shown:
        nothing = np.zeros((1, 0), np.bool_)
        return _ClassMatches(np.zeros(0, np.intp), nothing, nothing, truths)
    scores = np.concatenate([match["dtScores"] for _, match in shown])
    order = np.argsort(-scores, kind="stable")
    owners = np.concatenate([np.full(len(match["dtScores"]), image) for image, match in shown])
    is_match = np.hstack([match["dtMatches"] for _, match in shown])[:, order] > 0
    ignored = np.hstack([match["dtIgnore"] for _, match in shown])[:, order] > 0
    return _ClassMatches(
        owners[order].astype(np.intp), is_match & ~ignored, ~is_match & ~ignored, truths
    )


def _matches(
    found: Sequence[Array], images: Sequence[Boxes], classes: int
) -> dict[int, _ClassMatches]:
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
    return _by_class(matches, len(images))


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
