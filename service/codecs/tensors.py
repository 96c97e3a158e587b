"""Tensors as bytes, with the dtype names of the Open Inference Protocol.

Sizes are checked before memory is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pipeline.core.shapes import TensorSpec
from service.errors import Unprocessable

Array = NDArray[np.generic]
Buffer = bytes | memoryview

DATATYPES = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
}
"""The supported dtypes by their names in the protocol. BYTES, for strings, is not supported."""

_KINDS = {
    name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name in DATATYPES.values()
}
_DATATYPE_OF_KIND = {_KINDS[name]: datatype for datatype, name in DATATYPES.items()}
_DATATYPE_OF = {name: datatype for datatype, name in DATATYPES.items()}
_MAX_AXES = 32
_MAX_VALUES = 2**59  # of at most eight bytes: numpy counts bytes in 63 bits


def datatype_of(dtype: str) -> str:
    """The protocol's name of a numpy dtype; unknown ones keep their own name in capitals."""
    return _DATATYPE_OF.get(dtype, dtype.upper())


def datatype_of_array(array: Array) -> str:
    """The protocol's name of an array's dtype. Fast: numpy needs 5 us to name a dtype."""
    return _DATATYPE_OF_KIND.get(array.dtype) or datatype_of(array.dtype.name)


def dtype_of(name: str, dtype: str) -> np.dtype[np.generic]:
    """The numpy dtype of this name; Unprocessable if no protocol supports it."""
    if dtype not in _KINDS:
        raise Unprocessable(
            f"'{name}' is {dtype}, which no wire carries",
            f"the dtypes of the protocol are {', '.join(_KINDS)}",
        )
    return _KINDS[dtype]


def dtype_of_datatype(name: str, datatype: object) -> str:
    """The numpy name of a datatype; Unprocessable for strings and unknown names."""
    if datatype == "BYTES":
        raise Unprocessable(
            f"'{name}' is BYTES: engines take no strings",
            f"send numbers: one of {', '.join(DATATYPES)}",
        )
    dtype = DATATYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise Unprocessable(
            f"'{name}': expected `datatype` to be one of {', '.join(DATATYPES)}, got"
            f" {_short(datatype)}",
            "see GET /v2/models/NAME",
        )
    return dtype


def check_dtype(specs: Iterable[TensorSpec], name: str, dtype: str) -> None:
    """Unprocessable if an input has another dtype than the model expects.

    Unknown names pass: another check covers all names.
    """
    for spec in specs:
        if spec.name == name and spec.dtype != dtype:
            message = (
                f"input '{name}': expected {spec.dtype} ({datatype_of(spec.dtype)}), got {dtype}"
                f" ({datatype_of(dtype)})"
            )
            raise Unprocessable(
                message, "convert it before you send it: the server does not change values"
            )


def shape_from(name: str, shape: object) -> tuple[int, ...]:
    """Check a shape from JSON or from the header of a file."""
    sizes: Sequence[Any] = shape if isinstance(shape, list | tuple) else [None]
    if len(sizes) > _MAX_AXES or not all(type(size) is int and size >= 0 for size in sizes):
        raise Unprocessable(
            f"'{name}': expected `shape` to be a list of sizes, at most {_MAX_AXES}, got"
            f" {_short(shape)}",
            "see GET /v2/models/NAME",
        )
    check_sizes(name, sizes)
    return tuple(sizes)


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Unprocessable for a shape with too many values for numpy, not counting sizes of 0."""
    if abs(math.prod(filter(None, sizes))) >= _MAX_VALUES:
        raise Unprocessable(
            f"'{name}': no tensor has the shape {_short(list(sizes))}", "see GET /v2/models/NAME"
        )


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """The size in bytes, computed without overflow."""
    return _KINDS[dtype].itemsize * math.prod(shape)


def array_from(name: str, dtype: str, shape: Sequence[int], buffer: Buffer) -> Array:
    """View received bytes as an array, little-endian and in row-major order.

    The array is read-only and not always aligned.
    """
    expected = size_of(dtype, shape)
    if len(buffer) != expected:
        raise Unprocessable(
            f"'{name}': {dtype} {list(shape)} is {expected} bytes, got {len(buffer)}",
            "send exactly the bytes of the tensor",
        )
    return (
        np.frombuffer(buffer, _KINDS[dtype]).reshape(shape)
        if expected
        else np.empty(shape, _KINDS[dtype])
    )


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
