"""Tensors as bytes: dtypes by their names in the Open Inference Protocol, sizes checked before
anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pipeline.core import TensorSpec
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
"""The protocol's names of the dtypes that cross a wire: BYTES, which is strings, does not."""

_KINDS = {
    name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name in DATATYPES.values()
}
_DATATYPE_OF_KIND = {_KINDS[name]: datatype for datatype, name in DATATYPES.items()}
_DATATYPE_OF = {name: datatype for datatype, name in DATATYPES.items()}
_MAX_AXES = 32
_MAX_VALUES = 2**59  # of eight bytes: numpy counts bytes in 63 bits


def datatype_of(dtype: str) -> str:
    """The protocol's name of numpy's; those that it does not know keep their own, in capitals."""
    return _DATATYPE_OF.get(dtype, dtype.upper())


def datatype_of_array(array: Array) -> str:
    """The same of an array: numpy takes 5 us to name a dtype."""
    return _DATATYPE_OF_KIND.get(array.dtype) or datatype_of(array.dtype.name)


def dtype_of(name: str, dtype: str) -> np.dtype[np.generic]:
    """What an input of this dtype is to numpy. Unprocessable for one that no wire carries."""
    if dtype not in _KINDS:
        raise Unprocessable(
            f"'{name}' is {dtype}, which no wire carries",
            f"dtypes that are carried: {', '.join(_KINDS)}",
        )
    return _KINDS[dtype]


def dtype_of_datatype(name: str, datatype: object) -> str:
    """numpy's name of the protocol's; Unprocessable for strings and what is unknown."""
    if datatype == "BYTES":
        raise Unprocessable(
            f"'{name}' is BYTES: engines take no strings",
            f"send numbers: one of {', '.join(DATATYPES)}",
        )
    found = DATATYPES.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        raise Unprocessable(
            f"'{name}': expected `datatype` to be one of {', '.join(DATATYPES)}, got"
            f" {_short(datatype)}",
            "see GET /v2/models/NAME",
        )
    return found


def check_dtype(specs: Iterable[TensorSpec], name: str, dtype: str) -> None:
    """Unprocessable if an input is sent in another dtype than the model's. Unknown names are left
    to whoever checks all of them.
    """
    for spec in specs:
        if spec.name == name and spec.dtype != dtype:
            message = (
                f"input '{name}': expected {spec.dtype} ({datatype_of(spec.dtype)}), got {dtype}"
                f" ({datatype_of(dtype)})"
            )
            raise Unprocessable(
                message, "convert it before it is sent: the server changes no values"
            )


def shape_from(name: str, given: object) -> tuple[int, ...]:
    """A shape as JSON or a file's header has it."""
    sizes: Sequence[Any] = given if isinstance(given, list | tuple) else [None]
    if len(sizes) > _MAX_AXES or not all(type(size) is int and size >= 0 for size in sizes):
        raise Unprocessable(
            f"'{name}': expected `shape` to be a list of sizes, at most {_MAX_AXES}, got"
            f" {_short(given)}",
            "see GET /v2/models/NAME",
        )
    check_sizes(name, sizes)
    return tuple(sizes)


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Unprocessable for a shape that numpy cannot count, which it refuses also where one size
    is 0.
    """
    if abs(math.prod(filter(None, sizes))) >= _MAX_VALUES:
        raise Unprocessable(
            f"'{name}': no tensor has the shape {_short(list(sizes))}", "see GET /v2/models/NAME"
        )


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes; computed without overflow."""
    return _KINDS[dtype].itemsize * math.prod(shape)


def array_from(name: str, dtype: str, shape: Sequence[int], buffer: Buffer) -> Array:
    """A view of bytes that came, little-endian and in row-major order; not to be written to, and
    not always aligned.
    """
    expected = size_of(dtype, shape)
    if len(buffer) != expected:
        raise Unprocessable(
            f"'{name}': {dtype} {list(shape)} is {expected} bytes, got {len(buffer)}",
            "send exactly the tensor's bytes",
        )
    return (
        np.frombuffer(buffer, _KINDS[dtype]).reshape(shape)
        if expected
        else np.empty(shape, _KINDS[dtype])
    )


def bytes_of(array: Array) -> memoryview:
    """An array's bytes, not copied if they lie in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
