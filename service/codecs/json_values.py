"""Tensors as JSON values. A conversion that would lose information is refused, both ways."""

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
    """Parse a JSON object; `what` names it in messages."""
    try:
        # a copy: a worker could change shared memory of a body after orjson has checked it
        value = orjson.loads(bytes(text))
    except orjson.JSONDecodeError as error:
        not_finite = NOT_FINITE.match(error.doc, error.pos)
        if not_finite:
            message = (
                f"{what} is not JSON: {not_finite[0]} at character {error.pos}, and JSON has"
                " numbers for finite values only"
            )
            raise Unprocessable(
                message, "send this tensor as raw bytes: `binary_data_size`, or .npy, .npz"
            ) from None
        raise Unprocessable(
            f"{what} is not JSON: {error}", "check the body and its Content-Type"
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
    """Convert nested lists of numbers to an array.

    With a `shape` the values may also be one flat list in row-major order.
    """
    kind = dtype_of(name, dtype)
    try:
        raw = np.array(values)
        # numpy chooses floats for integers on both sides of 2**63.
        if kind == np.uint64 and raw.dtype.kind == "f":
            objects = np.array(values, np.object_)
            numbers: list[object] = objects.ravel().tolist()
            if all(type(number) is int for number in numbers):
                raw = objects.astype(np.uint64)
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
    """Encode an array as JSON; Unprocessable if a value is not finite."""
    plain = (
        array.astype(np.float32)
        if array.dtype.kind == "V" or array.dtype.name == "bfloat16"
        else array
    )
    if plain.dtype.kind == "f":
        _check_finite(plain, name)
    if plain.ndim == 0 and not flat:
        return orjson.Fragment(orjson.dumps(plain.item()))
    rows = np.ascontiguousarray(plain.reshape(-1) if flat else plain)
    return orjson.Fragment(
        orjson.dumps(rows if rows.size else rows.tolist(), option=orjson.OPT_SERIALIZE_NUMPY)
    )


def _check_finite(array: Array, name: str) -> None:
    """Unprocessable if a value is not finite."""
    finite = np.isfinite(array)
    if not finite.all():
        count = array.size - int(np.count_nonzero(finite))
        message = (
            f"output '{name}' holds {count} of {array.size} values that are not finite, for which"
            " JSON has no number"
        )
        raise Unprocessable(
            message,
            "ask for the binary form: `Accept: application/x-npz`, or `binary_data` in the Open"
            " Inference Protocol",
        )


def _check_kind(name: str, raw: Array, kind: np.dtype[np.generic], dtype: str) -> None:
    if not raw.size:
        return
    accepted = {"b": "b", "i": "iu", "u": "iu"}.get(kind.kind, "iuf")
    if raw.dtype.kind not in accepted:
        expected = {"b": "true and false", "iu": "whole numbers, of 64 bits at most"}.get(
            accepted, "numbers"
        )
        raise Unprocessable(
            f"'{name}' is {dtype}: expected {expected}, got {raw.dtype.name} values",
            "send one number per element; null is not a number",
        )


def _converted(name: str, raw: Array, kind: np.dtype[np.generic], dtype: str) -> Array:
    if kind.kind in "iu" and raw.size:
        low, high = int(raw.min()), int(raw.max())
        if low < np.iinfo(kind.name).min or high > np.iinfo(kind.name).max:
            raise Unprocessable(
                f"'{name}' is {dtype}: {low if low < 0 else high} is out of its range",
                "send values within the range of the dtype",
            )
    with np.errstate(over="ignore"):
        array = raw.astype(kind)
    if kind.kind not in "biu" and not np.isfinite(array.astype(np.float64)).all():
        raise Unprocessable(
            f"'{name}' is {dtype}: a value is too large for it",
            "send values within the range of the dtype",
        )
    return array
