"""Codecs of tensors: every dtype and shape there and back, and what is malformed is refused in a
sentence, whatever it is.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from pipeline.core.shapes import TensorSpec
from service.codecs.content_encoding import accepted_encoding, packed, unpacked
from service.codecs.json_values import parsed_object
from service.codecs.native_json import encode_json, parse_json
from service.codecs.npy import array_from_npy, arrays_from_npz, npy_from_array, npz_from_arrays
from service.codecs.oip import OipRequest, binary_form, encode_answer, parse_request
from service.codecs.oip_metadata import model_config
from service.codecs.tensors import array_from, bytes_of, dtype_of
from service.errors import TooLarge, Unavailable, Unprocessable
from service.inference import InferAnswer, Timing
from tests.service.builders.serving import DTYPES, on_two_gpus, some_arrays

Array = np.ndarray[Any, Any]
SHAPES = ((), (1,), (0, 3), (2, 3), (1, 0, 2))
TIMING = Timing(0.001, 0.002, 0.003, 0.004, 2)


def equal(one: Array, other: Array) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def arrays() -> list[Array]:
    return [array for dtype in DTYPES for shape in SHAPES for array in some_arrays(dtype, shape)]


def answer(**outputs: Array) -> InferAnswer:
    return InferAnswer("m", 3, "cpu", outputs, TIMING, "id7")


# -- there and back ----------------------------------------------------------


def test_bytes() -> None:
    for array in arrays():
        assert equal(array_from("x", array.dtype.name, array.shape, bytes_of(array)), array)


def test_an_array_that_lies_otherwise_is_written_in_order() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert bytes_of(array.T).tobytes() == array.T.copy().tobytes()


def test_npy_and_npz() -> None:
    for array in arrays():
        back = array_from_npy(b"".join(npy_from_array(array)), "x")
        assert equal(back, array.astype(np.float32) if array.dtype.name == "bfloat16" else array)
    named = {
        f"t{number}": array
        for number, array in enumerate(arrays())
        if array.dtype.name != "bfloat16"
    } | {"file": np.ones(2)}
    arrays_back = arrays_from_npz(npz_from_arrays(named), 10**6)
    assert set(arrays_back) == set(named)
    assert all(equal(arrays_back[name], array) for name, array in named.items())


def test_npy_of_bfloat16_as_numpy_saves_it_by_columns_and_big_endian() -> None:
    bits, *_ = some_arrays("bfloat16", (2, 3))
    for array, meant in (
        (bits, bits),
        (np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype=np.int32)),
    ):
        stream = io.BytesIO()
        np.save(stream, array)
        assert equal(np.ascontiguousarray(array_from_npy(stream.getvalue(), "x")), meant)


@pytest.mark.parametrize("binary", [True, False])
def test_the_open_inference_protocol(binary: bool) -> None:
    for array in arrays():
        parts = encode_answer(answer(y=array), OipRequest({}, binary=binary))
        header = orjson.loads(parts[0])
        assert (
            header["model_name"],
            header["model_version"],
            header["id"],
            header["parameters"]["compute_ms"],
        ) == ("m", "3", "id7", 3.0)
        body = orjson.dumps({"inputs": header["outputs"]})
        request = parse_request(body + b"".join(parts[1:]), len(body) if binary else None)
        assert equal(request.inputs["y"], array)


def test_several_tensors_in_binary_and_what_else_a_request_says() -> None:
    tensors = {f"t{number}": array for number, array in enumerate(arrays())}
    rest = {
        "id": "7",
        "parameters": {"timeout": 1_500_000, "binary_data_output": True},
        "outputs": [{"name": "a", "parameters": {"binary_data": False}}],
    }
    length, parts = binary_form(tensors, rest)
    request = parse_request(b"".join(parts), length)
    assert all(equal(request.inputs[name], array) for name, array in tensors.items())
    assert (request.id, request.timeout_s, request.outputs) == ("7", 1.5, ("a",))
    assert (request.wants_binary("a"), request.wants_binary("b")) == (False, True)


def test_json_of_our_own() -> None:
    for array in arrays():
        if array.size:  # an empty list tells no other axes
            values = orjson.loads(encode_json(answer(y=array)))["outputs"]["y"]
            request = parse_json(orjson.dumps({"inputs": {"y": values}}), {"y": array.dtype.name})
            assert equal(request.inputs["y"], array)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compression(encoding: str) -> None:
    body = packed([b"abc", memoryview(b"d" * 1000)], encoding)
    pieces: list[int] = []
    assert unpacked(body, encoding, 1003, pieces.append) == b"abc" + b"d" * 1000
    assert pieces == [1003]
    with pytest.raises(TooLarge, match="more than 1002 bytes"):
        unpacked(body, encoding, 1002, pieces.append)
    for bad in (body[:-5], body + b"x", b"abc", b""):
        with pytest.raises(Unprocessable, match=encoding):
            unpacked(bad, encoding, 10**4, pieces.append)


def test_a_bomb_is_found_before_it_is_unpacked() -> None:
    bomb, pieces = zlib.compress(b"\0" * 10**8), list[int]()
    with pytest.raises(TooLarge):
        unpacked(bomb, "deflate", 1000, pieces.append)
    assert sum(pieces) == 1001

    def refuse(count: int) -> None:
        raise Unavailable("the server is full")

    with pytest.raises(Unavailable, match="full"):
        unpacked(bomb, "deflate", 10**9, refuse)


def test_a_long_body_is_unpacked_in_pieces() -> None:
    body, pieces = bytes(range(256)) * 10**5, list[int]()
    assert unpacked(zlib.compress(body), "deflate", len(body), pieces.append) == body
    assert sum(pieces) == len(body) > max(pieces)


def test_only_who_names_one_encoding_gets_it() -> None:
    assert [
        accepted_encoding(value)
        for value in ("gzip", "Deflate", "", "gzip, deflate", "gzip;q=0", "br", "*")
    ] == ["gzip", "deflate", *[None] * 5]


# -- refused -----------------------------------------------------------------


def item(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2], **fields}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in item().items() if key != name}


def binary(size: object, **fields: Any) -> dict[str, Any]:
    return {**without("data"), "parameters": {"binary_data_size": size}, **fields}


def shared(**parameters: object) -> dict[str, Any]:
    place = {"shared_memory_region": "a", "shared_memory_byte_size": 8}
    return {**without("data"), "parameters": {**place, **parameters}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[]", "a JSON object, got list"),
        ("{", "is not JSON"),
        (
            '{"inputs": [{"data": [1.0, NaN]}]}',
            "NaN at character 27, and JSON has numbers for finite values only",
        ),
        ('{"inputs": [{"data": [-Infinity]}]}', "Infinity at character 23"),
        ('{"inputs": [], "id": "a"}', "at least one tensor"),
        ({"inputs": "x"}, "`inputs` to be a list of objects"),
        ({"inputs": [7]}, "`inputs` to be a list of objects"),
        ({"inputs": [item(), item()]}, "a name comes twice"),
        ({"inputs": [item(name=7)]}, "`name of inputs` to be a text"),
        ({"inputs": [item()], "id": 7}, "`id` to be a text"),
        ({"inputs": [item(datatype="BYTES")]}, "engines take no strings"),
        ({"inputs": [item(datatype="FP8")]}, "expected `datatype` to be one of BOOL"),
        ({"inputs": [item(datatype=["FP32"])]}, "expected `datatype`"),
        ({"inputs": [without("datatype")]}, "expected `datatype`"),
        ({"inputs": [without("shape")]}, "expected `shape`"),
        ({"inputs": [without("data")]}, "neither `data` nor `binary_data_size`"),
        ({"inputs": [item(shape=[-2])]}, "expected `shape`"),
        ({"inputs": [item(shape=[2.0])]}, "expected `shape`"),
        ({"inputs": [item(shape=[True, 2])]}, "expected `shape`"),
        ({"inputs": [item(shape=[1] * 40)]}, "expected `shape`"),
        ({"inputs": [item(shape=[0, 2**62], data=[])]}, "no tensor has the shape"),
        ({"inputs": [binary(0, shape=[2**40, 0, 2**40])]}, "no tensor has the shape"),
        ({"inputs": [item(shape=[3])]}, r"values of shape \[3\], got \[2\]"),
        ({"inputs": [item(shape=[2**20, 2**20])]}, "values of shape"),
        ({"inputs": [item(data=[[1], [2]])]}, r"values of shape \[2\], got \[2, 1\]"),
        ({"inputs": [item(data=[1, [2]])]}, "lists of equal lengths"),
        ({"inputs": [item(data=[1, None])]}, "expected numbers, got object"),
        ({"inputs": [item(data=["a", "b"])]}, "expected numbers, got"),
        ({"inputs": [item(data={"a": 1})]}, "expected numbers, got object"),
        ({"inputs": [item(data=[True, False])]}, "expected numbers, got bool"),
        ({"inputs": [item(datatype="INT8", data=[1, 128])]}, "128 is out of its range"),
        ({"inputs": [item(datatype="INT8", data=[1.0, 2])]}, "expected whole numbers"),
        ({"inputs": [item(datatype="UINT64", data=[-1, 2])]}, "-1 is out of its range"),
        ({"inputs": [item(datatype="UINT64", data=[-1, 2**63])]}, "in its range"),
        ({"inputs": [item(datatype="BOOL", data=[1, 0])]}, "expected true and false"),
        ({"inputs": [item(datatype="FP16", data=[1, 1e5])]}, "too large"),
        ({"inputs": [item(datatype="BF16", data=[1, 3.4e38])]}, "too large"),
        ({"inputs": [item(parameters=7)]}, "expected `parameters` to be an object"),
        ({"inputs": [item(parameters={"shared_memory_region": "a"})]}, "has `data` or"),
        ({"inputs": [shared(shared_memory_region=7)]}, "`shared_memory_region` to be a text"),
        ({"inputs": [shared(shared_memory_byte_size=4)]}, "`shared_memory_byte_size` says 4"),
        ({"inputs": [shared(shared_memory_byte_size=True)]}, "number of bytes, got True"),
        ({"inputs": [shared(shared_memory_offset=-1)]}, "number of bytes, got -1"),
        ({"inputs": [shared(shared_memory_offset="0")]}, "number of bytes, got '0'"),
        ({"inputs": [{**shared(), "datatype": "BYTES"}]}, "engines take no strings"),
        ({"inputs": [binary(8)]}, "8 bytes, got 0"),
        ({"inputs": [binary(4)]}, "`binary_data_size` says 4"),
        ({"inputs": [binary("8")]}, "`binary_data_size` says 8"),
        ({"inputs": [binary(-8, shape=[2**40])]}, "`binary_data_size` says -8"),
        ({"inputs": [binary(2**50, shape=[2**48])]}, "1125899906842624 bytes, got 0"),
        (
            {"inputs": [item()], "parameters": {"timeout": "1"}},
            "`timeout` to be a number of microseconds",
        ),
        (
            {"inputs": [item()], "parameters": {"binary_data_output": 1}},
            "`binary_data_output` to be true or false",
        ),
        ({"inputs": [item()], "parameters": {"sequence_id": "a"}}, "no `sequence_id`"),
        (
            {"inputs": [item()], "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
            "no `classification`",
        ),
        ({"inputs": [item()], "outputs": [{}]}, "`name of outputs` to be a text"),
    ],
)
def test_a_request_of_the_protocol_that_is_not_right(document: object, message: str) -> None:
    body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
    with pytest.raises(Unprocessable, match=message):
        parse_request(body, None)


def test_lengths_that_do_not_fit_and_another_dtype() -> None:
    body = orjson.dumps({"inputs": [binary(8)]})
    spec = TensorSpec(name="x", dtype="float64", shape=(2,))
    for content, length, message in (
        (body + b"8 bytes.", len(body) + 9, "Inference-Header-Content-Length is"),
        (body + b"8 bytes.", None, "is not JSON"),
        (body + b"more than 8 bytes", len(body), "9 bytes are left behind"),
        (body + b"less", len(body), "8 bytes, got 4"),
    ):
        with pytest.raises(Unprocessable, match=message):
            parse_request(content, length)
    with pytest.raises(Unprocessable, match=r"expected float64 \(FP64\), got float32 \(FP32\)"):
        parse_request(body + b"8 bytes.", len(body), [spec])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "expected `inputs` to be an object"),
        ({"inputs": [[1]]}, "expected `inputs` to be an object"),
        ({"inputs": {"z": [1]}}, "no input 'z'"),
        ({"input": {"x": [1]}}, "no key 'input'"),
        ({"inputs": {"x": [1]}, "outputs": "y"}, "`outputs` to be a list of names"),
        ({"inputs": {"x": [1]}, "timeout_s": 0}, "`timeout_s` to be a number of seconds"),
        ({"inputs": {"x": [1]}, "timeout_s": True}, "`timeout_s` to be a number of seconds"),
    ],
)
def test_json_of_our_own_that_is_not_right(document: object, message: str) -> None:
    with pytest.raises(Unprocessable, match=message):
        parse_json(orjson.dumps(document), {"x": "float32"})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_what_is_not_finite_is_never_null(dtype: str, value: float) -> None:
    array = np.array([1.0, value], dtype_of("y", dtype))
    for encode in (encode_json, lambda outputs: encode_answer(outputs, OipRequest({}))):
        with pytest.raises(Unprocessable, match="'y' holds 1 of 2 values that are not finite"):
            encode(answer(y=array))
    body = encode_answer(answer(y=array), OipRequest({}, binary=True))[1]
    assert bytes(body) == array.tobytes()


def saved(array: Array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def headed(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not a .npy file"),
        (b"\x93NUMPY\x09\x00", "is not a .npy file"),
        (pickle.dumps([1]), "is not a .npy file"),
        (saved(np.array([{"a": 1}], np.object_)), "pickled Python objects, which are never loaded"),
        (saved(np.array(["a"])), "which no wire carries"),
        (saved(np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")])), "which no wire carries"),
        (saved(np.array([1 + 2j])), "which no wire carries"),
        (saved(np.arange(4.0))[:-1], "is 32 bytes, got 31"),
        (saved(np.arange(4.0)) + b"x", "is 32 bytes, got 33"),
        (
            headed("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}"),
            "4398046511104 bytes, got 0",
        ),
        (
            headed("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}", b"four"),
            "a negative size",
        ),
        (headed("{'descr': '<f4', 'fortran_order': False, 'shape': 7}"), "is not a .npy file"),
        (
            headed("{'descr': [], 'fortran_order': False, 'shape': ()}"),
            "which no wire carries|is not a .npy file",
        ),
        (headed("(" * 5000), "is not a .npy file"),
        (
            headed("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4611686018427387904)}"),
            "no tensor has the shape",
        ),
    ],
)
def test_npy_that_is_not_right(body: bytes, message: str) -> None:
    with pytest.raises(Unprocessable, match=message):
        array_from_npy(body, "x")


def test_json_is_not_parsed_where_a_worker_could_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = bytearray(b'{"a": 1}')

    def parsed_late(text: bytes | memoryview) -> object:
        body[:] = b" " * len(body)  # what a worker may do at any time
        return json.loads(bytes(text))

    monkeypatch.setattr(orjson, "loads", parsed_late)
    assert parsed_object(memoryview(body), "it") == {"a": 1}


def zipped(compress: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compress) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


def test_npz_that_is_not_right() -> None:
    good = zipped(x=saved(np.zeros(1000)))
    with pytest.raises(TooLarge, match="at most 1000 arrays and 8000 bytes"):
        arrays_from_npz(good, 8000)
    many = {f"x{number}": b"" for number in range(1001)}
    with pytest.raises(TooLarge, match="has 1001 arrays"):
        arrays_from_npz(zipped(zipfile.ZIP_DEFLATED, **many), 10**6)
    for bad, message in (
        (b"", "not a .npz"),
        (good[:-10], "not a .npz"),
        (good[:40] + b"xxxx" + good[44:], "not a .npz"),
        (zipped(x=b"abc"), "'x' is not a .npy"),
    ):
        with pytest.raises(Unprocessable, match=message):
            arrays_from_npz(bad, 10**6)
    smaller = bytearray(good)  # says that it unpacks to 1000 bytes
    where = good.index(b"PK\x01\x02") + 24
    smaller[where : where + 4] = (1000).to_bytes(4, "little")
    with pytest.raises(Unprocessable):
        arrays_from_npz(bytes(smaller), 5000)


# -- anything at all ---------------------------------------------------------

JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=3),
    lambda inner: some.lists(inner, max_size=4),
)
ITEMS = some.fixed_dictionaries(
    {"name": some.sampled_from(["x", "y"])},
    optional={
        "shape": some.lists(some.integers(-1, 4), max_size=3) | JSON,
        "datatype": some.sampled_from(["FP32", "INT8", "BOOL", "BF16", "UINT64", "BYTES"]) | JSON,
        "data": JSON,
        "parameters": (
            some.fixed_dictionaries({}, optional={"binary_data_size": some.integers(-1, 20)}) | JSON
        ),
    },
)
DECODERS: list[Callable[[bytes], object]] = [
    lambda body: parse_request(body, None),
    lambda body: parse_request(body, 10),
    lambda body: parse_json(body, {"x": "float16"}),
    lambda body: array_from_npy(body, "x"),
    lambda body: array_from_npy(b"\x93NUMPY\x01\x00" + body, "x"),
    lambda body: arrays_from_npz(body, 10**6),
]


def taken_or_refused(decode: Callable[[bytes], object], body: bytes) -> None:
    with suppress(Unprocessable, TooLarge):
        decode(body)


@settings(max_examples=300, deadline=None)
@given(some.sampled_from(DECODERS), some.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(decode: Callable[[bytes], object], body: bytes) -> None:
    taken_or_refused(decode, body)


@settings(max_examples=500, deadline=None)
@given(some.lists(ITEMS, max_size=2), JSON, some.binary(max_size=20))
def test_any_request_is_taken_or_refused(items: list[Any], outputs: object, data: bytes) -> None:
    header = json.dumps({"inputs": items, "outputs": outputs, "parameters": {}}).encode()
    taken_or_refused(lambda body: parse_request(body, len(header)), header + data)


@settings(max_examples=300, deadline=None)
@given(some.data())
def test_a_damaged_file_is_taken_or_refused(data: some.DataObject) -> None:
    original = data.draw(
        some.sampled_from(
            [
                saved(np.arange(6.0)),
                zipped(x=saved(np.arange(6.0))),
                zipped(zipfile.ZIP_STORED, x=saved(np.arange(3))),
            ]
        )
    )
    body = bytearray(original)
    for _ in range(data.draw(some.integers(1, 4))):
        body[data.draw(some.integers(0, len(body) - 1))] = data.draw(some.integers(0, 255))
    taken_or_refused(lambda content: array_from_npy(content, "x"), bytes(body))
    taken_or_refused(lambda content: arrays_from_npz(content, 10**6), bytes(body))


def test_the_instances_of_a_config_are_those_on_each_gpu() -> None:
    assert model_config(on_two_gpus())["instance_group"] == [
        {"name": "gpu:0, gpu:3", "kind": "KIND_GPU", "count": 2, "gpus": [0, 3]}
    ]
