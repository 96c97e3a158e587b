"""Requests and answers of the Open Inference Protocol v2, as JSON or with binary tensor data.

The binary tensor data extension puts the bytes behind a JSON header:

JSON header | bytes of tensor | bytes of tensor | ...        Inference-Header-Content-Length: bytes
                                                             of the header
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from pipeline.core.shapes import Tensors, TensorSpec
from service.codecs.json_values import array_from_values, json_of, parsed_object
from service.codecs.oip_shared_memory import parameters_of, place_from, shared_input
from service.codecs.tensors import (
    Array,
    array_from,
    bytes_of,
    check_dtype,
    datatype_of,
    datatype_of_array,
    dtype_of_datatype,
    shape_from,
    size_of,
)
from service.errors import Unprocessable
from service.inference import InferAnswer
from service.regions import Place, SharedInput

HEADER_LENGTH = "Inference-Header-Content-Length"
REFUSED = (
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "classification",
)
"""Parameters that would change the result, and that this server does not implement.

Parameters that only describe a request are ignored.
"""

Document = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OipRequest:
    """The contents of a request body."""

    inputs: Tensors
    id: str = ""
    outputs: tuple[str, ...] = ()  # empty: all
    timeout_s: float | None = None
    binary: bool = False  # for outputs that are not in `binary_of`
    binary_of: Mapping[str, bool] = field(default_factory=dict)
    shared_inputs: Mapping[str, SharedInput] = field(default_factory=dict)
    shared_outputs: Mapping[str, Place] = field(default_factory=dict)

    def wants_binary(self, output: str) -> bool:
        return self.binary_of.get(output, self.binary)


def parse_request(
    body: bytes | memoryview, header_length: int | None, specs: Iterable[TensorSpec] = ()
) -> OipRequest:
    """Parse a request; Unprocessable if it is invalid.

    Tensors that came as bytes are views of the body.
    """
    view, document = split(body, header_length)
    parameters = _parameters(document, "the request")
    outputs = _items(document, "outputs")
    inputs = _items(document, "inputs")
    if not inputs:
        raise Unprocessable(
            "expected `inputs`, a list of at least one tensor", "see GET /v2/models/NAME"
        )
    binary_of: dict[str, bool] = {}
    shared_outputs: dict[str, Place] = {}
    for name, item in outputs.items():
        output_parameters = _parameters(item, name)
        place = place_from(name, output_parameters)
        if place is not None:
            shared_outputs[name] = place
        is_binary = _flag(output_parameters, "binary_data")
        if is_binary is not None:
            binary_of[name] = is_binary
    tensors, shared_inputs = _tensors(inputs, view, tuple(specs))
    return OipRequest(
        tensors,
        _text(document.get("id", ""), "id"),
        tuple(outputs),
        _timeout_s(parameters),
        _flag(parameters, "binary_data_output") or False,
        binary_of,
        shared_inputs,
        shared_outputs,
    )


def split(body: bytes | memoryview, header_length: int | None) -> tuple[memoryview, Document]:
    """Split a body into the bytes behind the header, and the header."""
    length = len(body) if header_length is None else header_length
    if not 0 <= length <= len(body):
        raise Unprocessable(
            f"{HEADER_LENGTH} is {length}, the body has {len(body)} bytes",
            "count the JSON header's bytes before compression",
        )
    view = memoryview(body)
    what = "the request" if header_length is None else "the header before the tensors"
    return view[length:], parsed_object(view[:length], what)


def encode_answer(
    answer: InferAnswer, request: OipRequest, written: Sequence[Document] = ()
) -> list[bytes | memoryview]:
    """Encode the header and the tensors behind it: one part if no output is binary.

    `written` describes further outputs, which are in shared memory.
    """
    binary = {name: request.wants_binary(name) for name in answer.outputs}
    outputs: list[Document] = []
    for name, array in answer.outputs.items():
        output: dict[str, object] = {
            "name": name,
            "datatype": datatype_of_array(array),
            "shape": array.shape,
        }
        if binary[name]:
            output["parameters"] = {"binary_data_size": array.nbytes}
        else:
            output["data"] = json_of(array, name, flat=True)
        outputs.append(output)
    header: dict[str, object] = {
        "model_name": answer.model,
        "model_version": str(answer.version),
    }
    if answer.id:
        header["id"] = answer.id
    header["parameters"] = timing_parameters(answer)
    header["outputs"] = [*outputs, *written]
    parts = [bytes_of(array) for name, array in answer.outputs.items() if binary[name]]
    return [orjson.dumps(header), *parts]


def timing_parameters(answer: InferAnswer) -> dict[str, float | int | str]:
    """The times of a request, as parameters of the protocol."""
    times = answer.timing
    times_s = {
        "queue_ms": times.queue_s,
        "copy_in_ms": times.copy_in_s,
        "compute_ms": times.compute_s,
        "copy_out_ms": times.copy_out_s,
    }
    return {
        **{name: round(seconds * 1e3, 4) for name, seconds in times_s.items()},
        "batch_size": times.batch_size,
        "device": answer.device,
    }


def binary_form(
    tensors: Tensors, rest: Document, shared_inputs: Mapping[str, SharedInput] | None = None
) -> tuple[int, list[bytes | memoryview]]:
    """Encode a request with binary tensors: the length of the header, and the parts."""
    inputs: list[Document] = [
        {
            "name": name,
            "datatype": datatype_of_array(array),
            "shape": array.shape,
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in tensors.items()
    ]
    for name, shared in (shared_inputs or {}).items():
        datatype = datatype_of(shared.dtype.name)
        parameters = parameters_of(shared.place)
        inputs.append(
            {"name": name, "datatype": datatype, "shape": shared.shape, "parameters": parameters}
        )
    header = orjson.dumps({**rest, "inputs": inputs})
    return len(header), [header, *map(bytes_of, tensors.values())]


def _tensors(
    items: Mapping[str, Document], view: memoryview, specs: tuple[TensorSpec, ...]
) -> tuple[dict[str, Array], dict[str, SharedInput]]:
    tensors: dict[str, Array] = {}
    shared: dict[str, SharedInput] = {}
    begin = 0
    for name, item in items.items():
        dtype = dtype_of_datatype(name, item.get("datatype"))
        shape = shape_from(name, item.get("shape"))
        check_dtype(specs, name, dtype)
        parameters = _parameters(item, name)
        length = parameters.get("binary_data_size")
        place = place_from(name, parameters)
        if place is not None:
            if length is not None or "data" in item:
                raise Unprocessable(
                    f"'{name}' is in shared memory, and has `data` or `binary_data_size` too",
                    "send it in one of them",
                )
            shared[name] = shared_input(name, dtype, shape, place)
            continue
        if length is None:
            if "data" not in item:
                raise Unprocessable(
                    f"'{name}' has neither `data` nor `binary_data_size`",
                    "send the values of the tensor, or its bytes behind the header",
                )
            tensors[name] = array_from_values(name, dtype, item["data"], shape)
            continue
        expected = size_of(dtype, shape)
        if type(length) is not int or length != expected:
            message = (
                f"'{name}': {dtype} {list(shape)} is {expected} bytes, `binary_data_size` says"
                f" {str(length)[:40]}"
            )
            raise Unprocessable(message, "send exactly the bytes of the tensor")
        tensors[name] = array_from(name, dtype, shape, view[begin : begin + length])
        begin += length
    if begin != len(view):
        raise Unprocessable(
            f"{len(view) - begin} bytes are left behind the last tensor",
            f"check `binary_data_size` and {HEADER_LENGTH}",
        )
    return tensors, shared


def _items(document: Document, key: str) -> dict[str, Document]:
    """The tensors that `inputs` or `outputs` lists, by name."""
    items = document.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Unprocessable(f"expected `{key}` to be a list of objects", "see GET /v2/models/NAME")
    by_name = {_text(item.get("name"), f"name of {key}"): item for item in items}
    if len(by_name) < len(items):
        raise Unprocessable(f"a name comes twice in `{key}`", "send each tensor once")
    return by_name


def _parameters(document: Document, where: str) -> Document:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Unprocessable(
            f"{where}: expected `parameters` to be an object", "leave it out if there are none"
        )
    refused = [name for name in REFUSED if parameters.get(name)]
    if refused:
        raise Unprocessable(
            f"{where}: this server has no `{refused[0]}`",
            "GET /v2 lists the extensions of this server",
        )
    return parameters


def _flag(parameters: Document, name: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise Unprocessable(
            f"expected `{name}` to be true or false, got {value!r:.40}", "leave it out for JSON"
        )
    return value


def _timeout_s(parameters: Document) -> float | None:
    """Convert `timeout` from microseconds; 0 means no time-out."""
    value = parameters.get("timeout")
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise Unprocessable(
            f"expected `timeout` to be a number of microseconds, got {value!r:.40}",
            "leave it out for the time-out of the model",
        )
    return value / 1e6 or None


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Unprocessable(
            f"expected `{what}` to be a text, got {value!r:.40}", "see GET /v2/models/NAME"
        )
    return value
