"""Tensors as JSON values. What a number would lose by becoming a tensor's element, or an element by
becoming a number, is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import orjson

from service.codecs.tensors import Array, dtype_of
from service.errors import Unprocessable

NOT_FINITE = re.compile(r"(?:NaN|Infinity)\b")


def parsed_object(text: bytes | memoryview, what: str) -> dict[str, object]:
    """A JSON object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if found := NOT_FINITE.match(error.doc, error.pos):
            message = (
                f"{what} is not JSON: {found[0]} at character {error.pos}, and JSON has numbers for"
                " finite values only"
            )
            raise Unprocessable(
                message, "send this tensor as raw bytes: `binary_data_size`, or .npy, .npz"
            ) from None
        raise Unprocessable(
            f"{what} is not JSON: {error}", "check what was sent, and its Content-Type"
        ) from None
    if not isinstance(value, dict):
        raise Unprocessable(
            f"expected {what} to be a JSON object, got {type(value).__name__}",
            "GET /docs shows what this path takes",
        )
    return value


def array_from_values(
    name: str, dtype: str, values: object, shape: Sequence[int] | None = None
) -> Array:
    """Nested lists of numbers as an array. With a `shape` they may also be one flat list in
    row-major order.
    """
    kind = dtype_of(name, dtype)
    try:
        raw = np.array(values)
        if (
            kind == np.uint64 and raw.dtype.kind == "f"
        ):  # numpy's choice for what holds numbers on both sides of 2**63
            whole = np.array(values, np.object_)
            each: list[object] = whole.ravel().tolist()
            raw = whole.astype(np.uint64) if all(type(value) is int for value in each) else raw
    except (ValueError, OverflowError) as error:
        raise Unprocessable(
            f"'{name}' is {dtype}: expected lists of equal lengths with numbers in its range:"
            f" {error}",
            "check `data`",
        ) from None
    _check_kind(name, raw, kind, dtype)
    array = _converted(name, raw, kind, dtype)
    if shape is None:
        return array
    if raw.size != math.prod(shape) or (raw.ndim > 1 and raw.shape != tuple(shape)):
        raise Unprocessable(
            f"'{name}': expected values of shape {list(shape)}, got {list(raw.shape)}",
            "send the shape that `data` has",
        )
    return array.reshape(shape)


def json_of(array: Array, name: str, flat: bool) -> orjson.Fragment:
    """An array as JSON; Unprocessable if it holds what JSON has no numbers for."""
    plain = (
        array.astype(np.float32)
        if array.dtype.kind == "V" or array.dtype.name == "bfloat16"
        else array
    )
    if plain.dtype.kind == "f" and not (finite := np.isfinite(plain)).all():
        count = plain.size - int(np.count_nonzero(finite))
        message = (
            f"output '{name}' holds {count} of {plain.size} values that are not finite, for which"
            " JSON has no number"
        )
        raise Unprocessable(
            message,
            "ask for the binary form: `Accept: application/x-npz`, or `binary_data` in the Open"
            " Inference Protocol",
        )
    if plain.ndim == 0 and not flat:
        return orjson.Fragment(orjson.dumps(plain.item()))
    rows = np.ascontiguousarray(plain.reshape(-1) if flat else plain)
    return orjson.Fragment(
        orjson.dumps(rows if rows.size else rows.tolist(), option=orjson.OPT_SERIALIZE_NUMPY)
    )


def _check_kind(name: str, raw: Array, kind: np.dtype[np.generic], dtype: str) -> None:
    if not raw.size:
        return
    taken = {"b": "b", "i": "iu", "u": "iu"}.get(kind.kind, "iuf")
    if raw.dtype.kind not in taken:
        expected = {"b": "true and false", "iu": "whole numbers, of 64 bits at most"}.get(
            taken, "numbers"
        )
        raise Unprocessable(
            f"'{name}' is {dtype}: expected {expected}, got {raw.dtype.name} values",
            "send one number per element; null is none",
        )


def _converted(name: str, raw: Array, kind: np.dtype[np.generic], dtype: str) -> Array:
    if kind.kind in "iu" and raw.size:
        low, high = int(raw.min()), int(raw.max())
        if low < np.iinfo(kind.name).min or high > np.iinfo(kind.name).max:
            raise Unprocessable(
                f"'{name}' is {dtype}: {low if low < 0 else high} is out of its range",
                "send values that fit",
            )
    with np.errstate(over="ignore"):
        array = raw.astype(kind)
    if kind.kind not in "biu" and not np.isfinite(array.astype(np.float64)).all():
        raise Unprocessable(
            f"'{name}' is {dtype}: a value is too large for it", "send values that fit"
        )
    return array
