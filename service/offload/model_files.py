"""Decides whether an uploaded file has the form of a model, without reading a tensor.

The file is untrusted, so a helper does this.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path

from google.protobuf.message import DecodeError

from pipeline.errors import CrucibleError
from pipeline.llm.plan import LanguagePlan
from pipeline.llm.source import Source, describe, model_files
from pipeline.llm.texts import read_texts
from service.codecs.protobuf import LENGTH, VARINT, Field, fields
from service.errors import Unprocessable
from service.storage.drafts import Interface

# the fields of ModelProto and GraphProto in onnx.proto, with their wire types
MODEL = {1: VARINT, 5: VARINT, **dict.fromkeys((2, 3, 4, 6, 7, 8, 14, 20, 25, 26), LENGTH)}
GRAPH = dict.fromkeys((1, 2, 5, 10, 11, 12, 13, 14, 15, 16), LENGTH)
IR_VERSION_NUMBER, GRAPH_NUMBER = 1, 7  # of ModelProto
INITIALIZER, INPUT, OUTPUT, TENSOR_NAME = 5, 11, 12, 8  # of GraphProto, of TensorProto
MAX_GRAPH_FIELDS = 10**6  # nodes, weights and types of values
MAX_INTERFACE_BYTES = 16 * 2**20  # with the names of weights
MAX_TEXT_BYTES = 256 * 2**10  # of an Interface, which a page shows
HEAD_BYTES = 16  # of a file, to show to its sender
LENGTH_BYTES = 8  # before the JSON at the start of a safetensors file
NEXT = (
    "send ONNX, an archive of it named .zip, .tar, .tar.gz or .tgz, or .safetensors weights with"
    " `architecture`"
)


def check_model(body: bytes) -> tuple[int, tuple[()]]:
    """Check the file with the path `body`, by its suffix: .onnx, .pt2 or .safetensors.

    Unprocessable if its content is something else or is cut off.
    """
    path = Path(os.fsdecode(body))
    if not path.stat().st_size:
        raise Unprocessable("the model is an empty file", "send it again")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        if path.suffix == ".onnx":
            _check_onnx(data)
        elif path.suffix == ".safetensors":
            length = int.from_bytes(data[:LENGTH_BYTES], "little")
            if length > len(data) - LENGTH_BYTES or data[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
                raise _refusal(data, "safetensors file")
        elif not zipfile.is_zipfile(file):
            raise _refusal(data, ".pt2 file")
    return 0, ()


def check_language_model(body: bytes) -> tuple[int, tuple[()]]:
    """Check the files that a LanguagePlan names, which is `body` as JSON: the headers of the model,
    and the texts. Unprocessable says what is wrong.
    """
    plan = LanguagePlan.model_validate_json(body)
    try:
        place = Path(plan.language_model.path)
        kind, _ = model_files(place)
        describe(Source(kind=kind, path=place, digest=""), plan.context)
        read_texts(plan.texts)
    except CrucibleError as error:
        raise Unprocessable(error.message, error.next_step) from None
    return 0, ()


def read_interface(body: bytes) -> tuple[int, list[bytes]]:
    """Return, as JSON, the Interface of the .onnx file with the path `body`.

    Only the inputs, the outputs and the names of weights are parsed. Unprocessable if they are not
    those of a model that Crucible takes.
    """
    import onnx

    from pipeline.onnx_graph.inspect import specs_of

    path = Path(os.fsdecode(body))
    proto = onnx.ModelProto()
    outputs = []
    parsed_bytes = 0
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            for field in _graph_fields(data):
                if field.number not in (INITIALIZER, INPUT, OUTPUT):
                    continue
                begin, end = field.content, field.end
                if field.number == INITIALIZER:
                    begin, end = _name_of(data, field)
                parsed_bytes += end - begin
                if parsed_bytes > MAX_INTERFACE_BYTES:
                    raise ValueError(f"they have more than {MAX_INTERFACE_BYTES} bytes")
                content = data[begin:end]
                if field.number == INITIALIZER:
                    proto.graph.initializer.add(name=content.decode())
                elif field.number == INPUT:
                    proto.graph.input.append(onnx.ValueInfoProto.FromString(content))
                else:
                    outputs.append(onnx.ValueInfoProto.FromString(content).name)
        inputs, _ = specs_of(proto)
    except CrucibleError as error:
        raise Unprocessable(error.message, error.next_step) from None
    except (IndexError, ValueError, DecodeError) as error:
        message = f"the inputs and outputs of the model cannot be read: {error}"
        raise Unprocessable(message, "export the model again") from None
    text = Interface(inputs=inputs, outputs=tuple(outputs)).model_dump_json().encode()
    if len(text) > MAX_TEXT_BYTES:
        raise Unprocessable(
            f"the names and shapes of inputs and outputs have {len(text)} bytes, expected at most"
            f" {MAX_TEXT_BYTES}",
            "send it with its plan to POST /compile; or export fewer inputs and outputs",
        )
    return 0, [text]


def _graph_fields(data: mmap) -> Iterator[Field]:
    graphs = [field for field in fields(data, 0, len(data)) if field.number == GRAPH_NUMBER]
    for graph in graphs:
        yield from fields(data, graph.content, graph.end, MAX_GRAPH_FIELDS)


def _name_of(data: mmap, tensor: Field) -> tuple[int, int]:
    """Return where the name of a TensorProto lies; nowhere behind too many other fields."""
    with suppress(ValueError):
        for field in fields(data, tensor.content, tensor.end):
            if field.number == TENSOR_NAME:
                return field.content, field.end
    return tensor.end, tensor.end


def _check_onnx(data: mmap) -> None:
    graph = None
    numbers = set()
    try:
        for field in fields(data, 0, len(data)):
            numbers.add(field.number)
            if MODEL.get(field.number, field.wire_type) != field.wire_type:
                raise _refusal(data, "ONNX model")
            if field.number == GRAPH_NUMBER:
                graph = field
    except IndexError:
        if IR_VERSION_NUMBER in numbers and numbers <= MODEL.keys():
            raise Unprocessable(
                f"the model is cut off: its {len(data)} bytes end within a field",
                "send the whole file",
            ) from None
        raise _refusal(data, "ONNX model") from None
    except ValueError:
        raise _refusal(data, "ONNX model") from None
    if graph is None or not _is_graph(data, graph):
        raise _refusal(data, "ONNX model")


def _is_graph(data: mmap, graph: Field) -> bool:
    """Return True if the first field that belongs to a graph is complete."""
    try:
        return any(
            GRAPH.get(field.number) == field.wire_type and field.end <= graph.end
            for field in fields(data, graph.content, graph.end)
        )
    except (IndexError, ValueError):
        return False


def _refusal(data: mmap, expected: str) -> Unprocessable:
    head = repr(data[:HEAD_BYTES]).removeprefix("b")
    return Unprocessable(f"the model begins with {head} and is no {expected}", NEXT)
