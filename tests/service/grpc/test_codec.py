"""Messages and arrays: raw bytes and typed contents, and what is refused in words."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from service.auth import LOCAL
from service.codecs.protobuf import MAX_FIELDS
from service.codecs.tensors import DATATYPES
from service.errors import Unprocessable
from service.grpc import grpc_service_pb2 as pb
from service.grpc.codec import (
    CONTENTS,
    inputs_from,
    message_from,
    places_from,
    request_from,
    shared_inputs_from,
    version_from,
)
from service.grpc.offload_worker import raw_form
from service.grpc.wire_scan import typed_bytes, without_tensors
from service.inference import InferAnswer, Timing
from service.regions import Place, SharedInput
from tests.service.builders.serving import some_arrays

Input = pb.ModelInferRequest.InferInputTensor


def request(*inputs: Input, raw: tuple[bytes, ...] = (), **more: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=raw, **more)


def typed(datatype: str, values: list[float], shape: tuple[int, ...], field: str = "") -> Input:
    named: dict[str, Any] = {field or CONTENTS[datatype][0]: values}
    contents = pb.InferTensorContents(**named)
    return Input(name="x", datatype=datatype, shape=shape, contents=contents)


@pytest.mark.parametrize("datatype", CONTENTS)
def test_typed_contents_of_every_datatype_that_has_a_field(datatype: str) -> None:
    for array in some_arrays(DATATYPES[datatype]):
        x = inputs_from(request(typed(datatype, array.ravel().tolist(), array.shape)))["x"]
        assert x.dtype == array.dtype
        assert np.array_equal(x, array)


@pytest.mark.parametrize("datatype", CONTENTS)
def test_a_helper_makes_raw_bytes_of_typed_contents_and_leaves_the_rest(datatype: str) -> None:
    array = next(some_arrays(DATATYPES[datatype], (3, 5)))
    inputs = (
        typed(datatype, array.ravel().tolist(), array.shape),
        Input(name="empty", datatype="FP32", shape=(0, 2)),
    )
    message = request(*inputs, id="seven", model_version="3")
    message.parameters["timeout"].int64_param = 9
    _, (body,) = raw_form(message.SerializeToString())
    raw = pb.ModelInferRequest.FromString(bytes(body))
    assert (inputs_from(raw)["x"].tobytes(), len(raw.raw_input_contents)) == (
        array.tobytes(),
        2,
    )
    assert (raw.id, raw.model_version, raw.parameters["timeout"].int64_param) == ("seven", "3", 9)
    assert typed_bytes(bytes(body)) < 100


def test_what_is_typed_is_told_from_what_is_raw_without_parsing() -> None:
    zeros = np.zeros((100, 100), np.float32)
    long = request(typed("FP32", [0.0] * 10_000, (100, 100)), id="seven")
    raw = request(
        Input(name="x", datatype="FP32", shape=(100, 100)), raw=(zeros.tobytes(),), id="seven"
    )
    assert (
        typed_bytes(long.SerializeToString())
        > 40_000
        > 100
        > typed_bytes(raw.SerializeToString())
        > 0
    )
    for each in (long, raw):
        rest = without_tensors(each.SerializeToString())
        assert (rest.id, rest.model_name, len(rest.inputs), len(rest.raw_input_contents)) == (
            "seven",
            "m",
            0,
            0,
        )
    assert (
        without_tensors(
            request(typed("FP32", [0.0], (1,)), id="i").SerializeToString() + b"\xff"
        ).id
        == ""
    )


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 9, b"\x0b", b"\x2a\x05abc", b"\x2a", b"\x09abc", b"\x08\x01" * (MAX_FIELDS + 1)],
)
def test_what_no_client_sends_is_left_to_a_helper(data: bytes) -> None:
    """So that it cannot be a long list in disguise."""
    assert (typed_bytes(data), without_tensors(data)) == (len(data), pb.ModelInferRequest())


@pytest.mark.parametrize("datatype", DATATYPES)
def test_raw_bytes_of_every_datatype_also_0d_and_empty(datatype: str) -> None:
    for shape in ((3, 5), (), (0, 4)):
        array = next(some_arrays(DATATYPES[datatype], shape))
        x = inputs_from(
            request(Input(name="x", datatype=datatype, shape=shape), raw=(array.tobytes(),))
        )["x"]
        assert (x.dtype, x.shape) == (array.dtype, shape)
        assert x.tobytes() == array.tobytes()


def test_an_empty_tensor_needs_no_contents() -> None:
    result = request_from(request(Input(name="x", datatype="INT16", shape=(0, 4))), LOCAL, None)
    assert (result.inputs["x"].dtype, result.inputs["x"].shape) == (np.dtype(np.int16), (0, 4))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (request(typed("FP32", [1.0], (2,))), r"shape \[2\] has 2 values, got 1"),
        (
            request(typed("FP32", [1.0], (1,), "fp64_contents")),
            "expected its values in fp32_contents, got some in fp64_contents",
        ),
        (request(typed("INT8", [200], (1,))), "INT8: a value is out of its range"),
        (request(typed("UINT16", [70000], (1,))), "UINT16: a value is out of its range"),
        (request(typed("FP16", [1.0], (1,), "fp32_contents")), "`contents` has no field for FP16"),
        (request(typed("BF16", [1.0], (1,), "fp32_contents")), "`contents` has no field for BF16"),
        (request(typed("FP32", [1.0], (-1,))), "expected `shape` to be a list of sizes"),
        (
            request(typed("FP32", [1.0], (2**62, 2**62))),
            r"no tensor has the shape \[4611686018427387904, 4611686018427387904\]",
        ),
        (
            request(Input(name="x", datatype="FP32", shape=(1,)), raw=(b"1234", b"1234")),
            "of all 1 inputs, got 2",
        ),
        (
            request(typed("FP32", [1.0], (1,)), raw=(b"1234",)),
            "in `contents` and in raw_input_contents",
        ),
        (request(Input(name="x", datatype="FP32", shape=(1,)), raw=(b"123",)), "is 4 bytes, got 3"),
        (
            request(Input(name="x", datatype="FP32", shape=(2**20, 2**18)), raw=(b"1234",)),
            "is 1099511627776 bytes, got 4",
        ),
        (
            request(Input(name="x", datatype="BYTES", shape=(1,)), raw=(b"1234",)),
            "engines take no strings",
        ),
        (
            request(Input(name="x", datatype="", shape=(1,)), raw=(b"1234",)),
            "expected `datatype` to be one of",
        ),
    ],
)
def test_what_does_not_fit_is_named(message: pb.ModelInferRequest, text: str) -> None:
    with pytest.raises(Unprocessable, match=text):
        request_from(message, LOCAL, None)


def at_place(tensor: Any, **parameters: str | int) -> Any:
    """The tensor, in a region of shared memory."""
    for name, value in {"byte_size": 8, "region": "r", **parameters}.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(tensor.parameters[f"shared_memory_{name}"], kind, value)
    return tensor


def test_tensors_in_shared_memory_stand_beside_others() -> None:
    inputs = (
        at_place(Input(name="a", datatype="FP32", shape=(2,)), offset=16),
        Input(name="b", datatype="INT8", shape=(2,)),
    )
    output = at_place(pb.ModelInferRequest.InferRequestedOutputTensor(name="y"))
    message = request(*inputs, raw=(b"12",), outputs=[output])
    assert shared_inputs_from(message) == {
        "a": SharedInput(Place("r", 8, 16), np.dtype(np.float32), (2,))
    }
    assert (list(inputs_from(message)), places_from(message)) == (["b"], {"y": Place("r", 8)})
    outputs = {"x": np.zeros(1, bool), "y": np.ones(1, np.int16), "z": np.zeros(1, np.int8)}
    timing = Timing(0.5, 0.001, 0.002, 0.003, 7)
    answer = message_from(InferAnswer("m", 3, "cpu", outputs, timing), places_from(message))
    assert list(answer.raw_output_contents) == [b"\0", b"", b"\0"]
    assert [len(each.parameters) for each in answer.outputs] == [0, 3, 0]
    assert answer.outputs[1].parameters["shared_memory_byte_size"].int64_param == 2


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (request(at_place(Input(name="x", datatype="BYTES", shape=(1,)))), "take no strings"),
        (request(at_place(Input(name="x", datatype="FP32", shape=(1,)))), "is 4 bytes, .* says 8"),
        (request(at_place(typed("FP64", [1.0], (1,)))), "in `contents` and in shared memory"),
        (request(at_place(typed("FP64", [], (1,)), region=7)), "to be a text, got 7"),
        (request(at_place(typed("FP64", [], (1,)), offset=-1)), "number of bytes, got -1"),
        (
            request(at_place(typed("FP64", [], (1,))), typed("FP64", [1.0], (1,))),
            "input 'x' comes twice",
        ),
        (
            request(at_place(typed("FP64", [], (1,))), at_place(typed("FP64", [], (1,)))),
            "input 'x' comes twice",
        ),
    ],
)
def test_shared_inputs_that_do_not_fit(message: pb.ModelInferRequest, text: str) -> None:
    with pytest.raises(Unprocessable, match=text):
        shared_inputs_from(message)


def test_nan_and_infinity_pass_as_typed_contents() -> None:
    values = inputs_from(request(typed("FP32", [float("nan"), float("-inf")], (2,))))["x"]
    assert np.isnan(values[0])
    assert values[1] == -np.inf


@pytest.mark.parametrize(
    ("deadline_s", "timeout_us", "expected"),
    [
        (None, None, None),
        (2.0, None, 2.0),
        (None, 500_000, 0.5),
        (2.0, 500_000, 0.5),
        (0.1, 500_000, 0.1),
        (None, 0, None),
    ],
)
def test_the_sooner_of_deadline_and_timeout_counts(
    deadline_s: float | None, timeout_us: int | None, expected: float | None
) -> None:
    message = request(typed("FP32", [1.0], (1,)))
    if timeout_us is not None:
        message.parameters["timeout"].int64_param = timeout_us
    assert request_from(message, LOCAL, deadline_s).timeout_s == expected


def test_a_timeout_that_is_no_number_is_refused() -> None:
    message = request(typed("FP32", [1.0], (1,)))
    message.parameters["timeout"].string_param = "soon"
    with pytest.raises(Unprocessable, match="number of microseconds, got 'soon'"):
        request_from(message, LOCAL, None)


@pytest.mark.parametrize(("text", "version"), [("", None), ("1", 1), ("0017", 17)])
def test_versions(text: str, version: int | None) -> None:
    assert version_from(text) == version


@pytest.mark.parametrize("text", ["0", "-1", "1.0", "v1", "²", "9" * 5000])
def test_versions_that_are_none(text: str) -> None:
    with pytest.raises(Unprocessable, match="whole number from 1"):
        version_from(text)


def test_answers_hold_the_bytes_in_order_and_the_times() -> None:
    outputs = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "b": np.array(1.5, ml_dtypes.bfloat16),
        "c": np.zeros((0, 2), bool),
    }
    message = message_from(
        InferAnswer("m", 3, "gpu:0", outputs, Timing(0.5, 0.001, 0.002, 0.003, 7), "id"), {}
    )
    assert [(output.name, output.datatype, list(output.shape)) for output in message.outputs] == [
        ("a", "FP32", [3, 2]),
        ("b", "BF16", []),
        ("c", "BOOL", [0, 2]),
    ]
    assert list(message.raw_output_contents) == [array.tobytes() for array in outputs.values()]
    assert (message.model_name, message.model_version, message.id) == ("m", "3", "id")
    assert (
        message.parameters["queue_ms"].double_param,
        message.parameters["batch_size"].int64_param,
    ) == (500.0, 7)
    assert message.parameters["device"].string_param == "gpu:0"
