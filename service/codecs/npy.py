"""Arrays as numpy's files: .npy and .npz. Never pickles; sizes are read from the headers and
checked before memory is taken.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable

import numpy as np
from numpy.lib import format as npy

from pipeline.core import Tensors, TensorSpec
from pipeline.data.npz import ZIP_ERRORS, header_from_npy
from service.codecs.tensors import DATATYPES, Array, check_dtype, check_sizes, dtype_of
from service.errors import TooLarge, Unprocessable

MAX_ARRAYS = 1000
HEAD_BYTES = 16384  # of a .npy file: numpy refuses headers of more than 10,000 characters
_BITS_OF_BFLOAT16 = np.dtype("V2")  # what numpy writes for it


def array_from_npy(body: bytes | memoryview, name: str, specs: Iterable[TensorSpec] = ()) -> Array:
    """A view of the array in a .npy file."""
    stream = io.BytesIO(body[:HEAD_BYTES])
    try:
        header = header_from_npy(stream)
    except (ValueError, EOFError) as error:
        raise Unprocessable(
            f"'{name}' is not a .npy file: {str(error)[:200]}", "write it with numpy.save"
        ) from None
    shape, dtype = header.shape, header.dtype
    kind = _checked(name, dtype)
    check_dtype(specs, name, kind)
    check_sizes(name, shape)
    begin, count = stream.tell(), math.prod(shape)
    if any(size < 0 for size in shape) or len(body) - begin != count * dtype.itemsize:
        message = (
            f"'{name}': {kind} {list(shape)} is {count * dtype.itemsize} bytes, got"
            f" {len(body) - begin}"
        )
        raise Unprocessable(message, "write it with numpy.save")
    flat = np.frombuffer(body, dtype, count, begin) if count else np.empty(0, dtype)
    array = flat.reshape(shape, order="F" if header.by_columns else "C")
    return (
        array.view(dtype_of(name, kind))
        if kind == "bfloat16"
        else array.astype(dtype.newbyteorder("="), copy=False)
    )


def arrays_from_npz(body: bytes, limit: int) -> dict[str, Array]:
    """The arrays in a .npz file; TooLarge if they are more than `limit` bytes together."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            members = archive.infolist()
            if len(members) > MAX_ARRAYS or sum(member.file_size for member in members) > limit:
                message = (
                    f"a .npz file of {len(members)} arrays that unpacks to more than {limit} bytes,"
                    f" or to more than {MAX_ARRAYS} arrays"
                )
                raise TooLarge(
                    message, "send less, or have the service's limit `max_infer_bytes` raised"
                )
            return {
                name: array_from_npy(_read(archive, member), name)
                for member in members
                for name in [member.filename.removesuffix(".npy")]
            }
    except (*ZIP_ERRORS, ValueError) as error:
        raise Unprocessable(
            f"the body is not a .npz file: {error}", "write it with numpy.savez"
        ) from None


def npy_from_array(array: Array) -> list[bytes | memoryview]:
    """A .npy file in two parts. bfloat16, which it cannot name, becomes float32."""
    named = np.ascontiguousarray(_nameable(array)).reshape(array.shape)
    stream = io.BytesIO()
    npy.write_array_header_1_0(stream, npy.header_data_from_array_1_0(named))
    return [stream.getvalue(), named.reshape(-1).view(np.uint8).data]


def npz_from_arrays(arrays: Tensors) -> bytes:
    """A .npz file, not compressed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(
        stream, "w"
    ) as archive:  # numpy.savez takes names as arguments, so that none may be `file`
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", b"".join(npy_from_array(array)))
    return stream.getvalue()


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with archive.open(member) as stream:
        body = stream.read(member.file_size + 1)
    if len(body) > member.file_size:
        raise Unprocessable(
            f"'{member.filename}' is longer than it says", "write the file with numpy.savez"
        )
    return body


def _checked(name: str, dtype: np.dtype[np.generic]) -> str:
    """numpy's name of the dtype; Unprocessable for objects, texts and records."""
    if dtype == _BITS_OF_BFLOAT16:
        return "bfloat16"
    if dtype.hasobject:
        raise Unprocessable(
            f"'{name}' holds pickled Python objects, which are never loaded",
            "save plain numeric arrays",
        )
    if dtype.name not in DATATYPES.values():
        raise Unprocessable(
            f"'{name}' is {dtype}, which no wire carries",
            f"dtypes that are carried: {', '.join(DATATYPES.values())}",
        )
    return dtype.name


def _nameable(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
