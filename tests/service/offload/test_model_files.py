"""What a file has to look like to be taken as a model, and the sentence for one that does not."""

import io
import json
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from onnx import TensorProto, helper

from service.codecs.protobuf import LENGTH, MAX_FIELDS, VARINT
from service.errors import Unprocessable
from service.offload.model_files import (
    GRAPH,
    MAX_INTERFACE_BYTES,
    MAX_TEXT_BYTES,
    MODEL,
    check_model,
    read_interface,
)
from service.storage.drafts import Interface
from tests.service.jobs.test_worker import tiny_model

ONNX = helper.make_model(
    helper.make_graph([], "g", [], []), doc_string="d" * 20
).SerializeToString()
VERSION = b"\x08\x0a"  # ir_version: 10


def zipped() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return data.getvalue()


SAFETENSORS = (2).to_bytes(8, "little") + b"{}"


def check(folder: Path, content: bytes, suffix: str = ".onnx") -> None:
    path = folder / f"model{suffix}"
    path.write_bytes(content)
    check_model(bytes(path))


def test_the_fields_are_those_of_onnx() -> None:
    for numbers, message in ((MODEL, onnx.ModelProto), (GRAPH, onnx.GraphProto)):
        wire_types = {
            field.number: VARINT if field.type == field.TYPE_INT64 else LENGTH
            for field in message.DESCRIPTOR.fields
        }
        assert numbers == numbers | wire_types


def test_models_of_every_form_are_taken(tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny.onnx")
    check(tmp_path, (tmp_path / "tiny.onnx").read_bytes())
    check(tmp_path, ONNX + b"\xfa\x07\x02of")  # a field that a later version of ONNX may add
    check(tmp_path, zipped(), ".pt2")
    check(tmp_path, SAFETENSORS, ".safetensors")


@pytest.mark.parametrize(
    ("content", "suffix", "message"),
    [
        (b"", ".onnx", "an empty file"),
        (b"# Crucible\n\ntext", ".onnx", r"begins with '# Crucible\\n\\ntext' and is no ONNX"),
        (b"\x89PNG\r\n\x1a\n" + bytes(500), ".onnx", "'.x89PNG.* and is no ONNX"),
        (json.dumps({"a": 1}).encode(), ".onnx", "no ONNX"),
        (pickle.dumps([1] * 100), ".onnx", "no ONNX"),
        (zipped(), ".onnx", "'PK.* and is no ONNX"),
        (SAFETENSORS, ".onnx", "no ONNX"),
        (VERSION, ".onnx", "no ONNX"),  # no graph
        (VERSION + b"\x3a\x00", ".onnx", "no ONNX"),  # an empty one
        (VERSION + b"\x3a\x02xx", ".onnx", "no ONNX"),
        (VERSION * (MAX_FIELDS + 1), ".onnx", "no ONNX"),
        (VERSION + b"\x80" * 100, ".onnx", "no ONNX"),
        (ONNX[:-1], ".onnx", f"cut off: its {len(ONNX) - 1} bytes end within a field"),
        (VERSION + b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", ".onnx", "cut off"),
        (ONNX, ".pt2", "is no .pt2 file"),
        (ONNX, ".safetensors", "is no safetensors file"),
        (SAFETENSORS[:5], ".safetensors", "is no safetensors file"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_model_is_refused_with_its_beginning(
    tmp_path: Path, content: bytes, suffix: str, message: str
) -> None:
    with pytest.raises(Unprocessable, match=message) as caught:
        check(tmp_path, content, suffix)
    assert caught.value.next_step


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    """100 GB, of which nothing is on the disk: they do not fit into memory."""
    path = tmp_path / "model.onnx"
    for begin in (b"", VERSION + b"\x3a\x80\x80\x80\x80\x20\x0a\x00"):
        with path.open("wb") as file:
            file.write(begin)
            file.truncate(10**11)
        with pytest.raises(Unprocessable, match="no ONNX"):
            check_model(bytes(path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    some.one_of(
        some.binary(),
        some.tuples(
            some.integers(0, len(ONNX)), some.binary(max_size=12), some.integers(0, len(ONNX))
        ).map(lambda cut: ONNX[: cut[0]] + cut[1] + ONNX[cut[2] :]),
    )
)
def test_no_bytes_break_the_check(tmp_path: Path, content: bytes) -> None:
    with suppress(Unprocessable):
        check(tmp_path, content)
    with suppress(Unprocessable):
        read(tmp_path, content)


def read(folder: Path, content: bytes) -> Interface:
    path = folder / "model.onnx"
    path.write_bytes(content)
    _, (text,) = read_interface(bytes(path))
    return Interface.model_validate_json(text)


def interface_model(dtype: int, weights: int = 1) -> bytes:
    """A model with the inputs `x` and `w0`, of which `w0` is a weight."""
    x = helper.make_tensor_value_info("x", dtype, ["batch", None, 3])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("w0", "y")]
    initializers = [
        helper.make_tensor(f"w{number}", TensorProto.FLOAT, [1], [1.0]) for number in range(weights)
    ]
    graph = helper.make_graph([], "g", [x, values[0]], values[1:], initializers)
    content: bytes = helper.make_model(graph).SerializeToString()
    return content


def test_the_interface_of_a_model_is_read_without_its_weights(tmp_path: Path) -> None:
    found = read(tmp_path, interface_model(TensorProto.BFLOAT16, 2 * MAX_FIELDS))
    (spec,) = found.inputs
    assert (spec.name, spec.dtype, spec.shape) == ("x", "bfloat16", ("batch", "x_1", 3))
    assert (found.symbols, found.outputs) == (("batch", "x_1"), ("y",))


def test_an_interface_that_no_backend_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unprocessable, match="input 'x' holds string"):
        read(tmp_path, interface_model(TensorProto.STRING))
    for size, message in (
        (MAX_INTERFACE_BYTES, f"more than {MAX_INTERFACE_BYTES} bytes"),
        (MAX_TEXT_BYTES, f"expected at most {MAX_TEXT_BYTES}"),
    ):
        long = helper.make_tensor_value_info("t" * size, TensorProto.FLOAT, [1])
        large = helper.make_model(helper.make_graph([], "g", [long], []))
        with pytest.raises(Unprocessable, match=message):
            read(tmp_path, large.SerializeToString())
    with pytest.raises(Unprocessable, match="cannot be read"):
        read(tmp_path, ONNX.replace(b"\x12\x01g", b"\x5a\x01g"))
