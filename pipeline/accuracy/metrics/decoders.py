"""The built-in decoders: from an output to the classes, texts, boxes or vectors that it means.

Outputs are [samples, ...]. An output for a whole feed may have more axes of 1, which are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.accuracy.metrics.arithmetic import Array, Floats
from pipeline.accuracy.metrics.metric import Decode
from pipeline.accuracy.metrics.user import object_array
from pipeline.errors import DataError
from pipeline.postprocess import IndexOutput

BOX = 6  # x1, y1, x2, y2, score, class


def argmax(index: IndexOutput | None) -> Decode:
    """Return the decoder of scores [samples, ..., classes] to classes [samples, ...]."""

    def decode(outputs: Array, mask: Array | None) -> Array:
        if index is not None:
            return index.with_last(outputs)[..., 0]
        if outputs.ndim < 2:
            raise DataError(
                f"argmax needs an output of shape [samples, ..., classes], got {outputs.shape}",
                "choose another `accuracy.output`",
            )
        return np.asarray(outputs.argmax(axis=-1))

    return decode


def ctc_greedy(tokens: Sequence[str], index: IndexOutput | None) -> Decode:
    """Return the decoder of scores [samples, time, classes] to one text per sample.

    The best class of each time step; runs of one class become one; classes without a text vanish.
    """
    best = argmax(index)
    texts = np.array(tokens, dtype=object)

    def decode(outputs: Array, mask: Array | None) -> Array:
        if index is None and outputs.shape[-1] != len(tokens):
            raise DataError(
                f"the output has {outputs.shape[-1]} classes, and accuracy.tokens has"
                f" {len(tokens)} texts",
                "give a text for each class, empty for the blank",
            )
        classes = one_axis(best(outputs, mask), "ctc_greedy", "[samples, time, classes]", 2)
        if classes.size and not 0 <= classes.min() <= classes.max() < len(tokens):
            raise DataError(
                f"the output has classes from {classes.min()} to {classes.max()}, and"
                f" accuracy.tokens has {len(tokens)} texts",
                "give a text for each class, empty for the blank",
            )
        return object_array([_text(row, texts) for row in classes])

    return decode


def _text(classes: Array, texts: Array) -> str:
    starts = np.diff(classes.astype(np.int64), prepend=-1) != 0
    return "".join(texts[classes[starts].astype(np.intp)].tolist())


def boxes_xyxy(outputs: Array, mask: Array | None) -> Array:
    """Decode [samples, boxes, 6] to an array [found, 6] per sample.

    A row is x1, y1, x2, y2, score, class. Rows with a score of 0 or less, or a class below 0, are
    filling.
    """
    expected = "[samples, boxes, 6], with x1, y1, x2, y2, score and class"
    if outputs.ndim < 2 or outputs.shape[-1] != BOX:
        raise _wrong_shape("boxes_xyxy", expected, outputs)
    boxes = one_axis(outputs, "boxes_xyxy", expected, 3).astype(np.float64)
    return object_array([sample[(sample[:, 4] > 0) & (sample[:, 5] >= 0)] for sample in boxes])


def mean_pool(outputs: Array, mask: Array | None) -> Array:
    """Decode [samples, positions, values] to the mean of the positions, [samples, values].

    `mask`: [samples, positions], 1 where a position counts. A sample without any has the mean 0.
    """
    if outputs.ndim < 3:
        raise _wrong_shape("mean_pool", "[samples, positions, values]", outputs)
    table = one_axis(outputs, "mean_pool", "[samples, positions, values]", 3).astype(np.float64)
    weights: Floats = np.ones(table.shape[:2])
    if mask is not None:
        if mask.size != weights.size or len(mask) != len(weights):
            raise DataError(
                f"accuracy.mask has the shape {mask.shape}, and the output {outputs.shape}",
                "name the input with one value per position of `accuracy.output`",
            )
        weights = (mask.reshape(weights.shape) != 0).astype(np.float64)
    # not a product: a position that does not count may be NaN
    total = np.sum(table, axis=1, where=weights[..., None] > 0)
    return np.asarray(total / np.maximum(weights.sum(axis=1), 1)[:, None])


def one_axis(array: Array, decoder: str, expected: str, rank: int) -> Array:
    """Return the array with `rank` axes, without axes of 1 behind the samples.

    DataError if more than one axis is left between the samples and the last axes that stay.
    """
    kept = rank - 2  # axes behind the one that counts positions
    middle = array.shape[1 : array.ndim - kept]
    if array.ndim < 2 or sum(size != 1 for size in middle) > 1:
        raise _wrong_shape(decoder, expected, array)
    return array.reshape(len(array), int(np.prod(middle)), *array.shape[array.ndim - kept :])


def _wrong_shape(decoder: str, expected: str, array: Array) -> DataError:
    return DataError(
        f"{decoder} needs an output of shape {expected}; got {array.shape}",
        "choose another `accuracy.output`, or decode it with `accuracy.decode: module:function`",
    )
