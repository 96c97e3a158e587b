"""Arrays as .npy and .npz files. Pickles are never loaded.

Sizes are read from the headers and checked before memory is allocated.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable

import numpy as np
from numpy.lib import format as npy

from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.data.npz import ZIP_ERRORS, header_from_npy
from service.codecs.tensors import DATATYPES, Array, check_dtype, check_sizes, dtype_of
from service.errors import TooLarge, Unprocessable

MAX_ARRAYS = 1000
HEAD_BYTES = 16384  # of a .npy file: numpy refuses headers of more than 10,000 characters
_BITS_OF_BFLOAT16 = np.dtype("V2")  # the dtype that numpy writes for bfloat16


def array_from_npy(body: bytes | memoryview, name: str, specs: Iterable[TensorSpec] = ()) -> Array:
    """Read the array of a .npy file, as a view of `body`."""
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
    if len(body) - begin != count * dtype.itemsize:
        message = (
            f"'{name}': {kind} {list(shape)} is {count * dtype.itemsize} bytes, got"
            f" {len(body) - begin}"
        )
        raise Unprocessable(message, "write it with numpy.save")
    flat = np.frombuffer(body, dtype, count, begin) if count else np.empty(0, dtype)
    array = flat.reshape(shape, order="F" if header.by_columns else "C")
    if kind == "bfloat16":
        return array.view(dtype_of(name, kind))
    return array.astype(dtype.newbyteorder("="), copy=False)


def arrays_from_npz(body: bytes, limit: int) -> dict[str, Array]:
    """Read the arrays of a .npz file; TooLarge if they have more than `limit` bytes together."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            members = archive.infolist()
            file_bytes = sum(member.file_size for member in members)
            if len(members) > MAX_ARRAYS or file_bytes > limit:
                message = (
                    f"the .npz file has {len(members)} arrays of {file_bytes} bytes, expected at"
                    f" most {MAX_ARRAYS} arrays and {limit} bytes"
                )
                raise TooLarge(
                    message, "send less, or ask for a higher `max_infer_bytes` of the service"
                )
            arrays: dict[str, Array] = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                arrays[name] = array_from_npy(_read(archive, member), name)
            return arrays
    except (*ZIP_ERRORS, ValueError) as error:
        raise Unprocessable(
            f"the body is not a .npz file: {error}", "write it with numpy.savez"
        ) from None


def npy_from_array(array: Array) -> list[bytes | memoryview]:
    """Encode a .npy file in two parts. bfloat16 becomes float32: .npy has no name for it."""
    plain = np.ascontiguousarray(_nameable(array)).reshape(array.shape)
    stream = io.BytesIO()
    npy.write_array_header_1_0(stream, npy.header_data_from_array_1_0(plain))
    return [stream.getvalue(), plain.reshape(-1).view(np.uint8).data]


def npz_from_arrays(arrays: Tensors) -> bytes:
    """Encode a .npz file without compression."""
    stream = io.BytesIO()
    # numpy.savez takes the names as arguments: an array could not have the name `file`.
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", b"".join(npy_from_array(array)))
    return stream.getvalue()


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with archive.open(member) as stream:
        body = stream.read(member.file_size + 1)
    if len(body) > member.file_size:
        raise Unprocessable(
            f"'{member.filename}' is longer than its header says", "write the file with numpy.savez"
        )
    return body


def _checked(name: str, dtype: np.dtype[np.generic]) -> str:
    """Return the name of the dtype; Unprocessable for objects, texts and records."""
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
            f"the dtypes of the protocol are {', '.join(DATATYPES.values())}",
        )
    return dtype.name


def _nameable(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
