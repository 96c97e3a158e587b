"""The parsers of the service, each called directly with mutated messages."""

from __future__ import annotations

import asyncio
import io
import shutil
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import yaml
from pydantic import TypeAdapter

from pipeline.core.shapes import TensorSpec
from pipeline.data.npz import Member, read_headers, row_reader
from pipeline.errors import DataError, HostError
from service.auth import LOCAL
from service.codecs.content_encoding import ENCODINGS, unpacked
from service.codecs.npy import array_from_npy, arrays_from_npz
from service.codecs.oip import parse_request
from service.errors import ServiceError, Unprocessable
from service.grpc import grpc_service_pb2 as pb
from service.grpc.codec import inputs_from, parsed, places_from, request_from, shared_inputs_from
from service.grpc.offload_worker import raw_form
from service.grpc.wire_scan import typed_bytes, without_tensors
from service.jobs.messages import FROM_CHILD
from service.offload.model_files import check_model, read_interface
from service.offload.worker import FROM_HELPER, decode_image, decode_json, decode_oip
from service.sandbox.framing import BadMessage, decode, receive_frame
from service.serving.worker_messages import FROM_WORKER
from service.settings import Settings
from service.submission.plan import parse, plan_from, warnings_of
from service.submission.tar import untar
from service.submission.uploads import Limits, Part, receive, unpack
from tests.fuzz import messages
from tests.fuzz.mutation import (
    Make,
    bytes_from,
    changed,
    json_from,
    mutated,
    one_of,
    tar_from,
    zip_from,
)
from tests.fuzz.running import Read, Target, reader
from tests.service.builders.serving import IMAGE
from tests.service.submission.test_plan import COMPLETE

LIMIT_BYTES = 2**17
LIMITS = Limits(upload_bytes=LIMIT_BYTES, plan_bytes=2**16, unpacked_bytes=LIMIT_BYTES)
SPECS = (TensorSpec(name="x", dtype="float32", shape=("n", 4)),)
NONE = 255  # in the place of a header's length: there is none


# -- tensors -------------------------------------------------------------------------


def read_npz(case: bytes) -> None:
    arrays = arrays_from_npz(case, LIMIT_BYTES)
    assert sum(array.nbytes for array in arrays.values()) <= LIMIT_BYTES


def make_oip(random: Random) -> bytes:
    """Two bytes with the header's length, then the header and bytes of tensors."""
    if random.random() < 0.5:
        return b"\xff\xff" + json_from(*messages.OIP)(random)
    header = json_from(messages.OIP_BINARY, *messages.OIP)(random)
    length = max(0, len(header) + random.choice((0, 0, 0, 0, 1, -1, 100)))
    tensors = messages.ROW.tobytes() * random.choice((0, 1, 1, 1, 2))
    return length.to_bytes(2, "little") + header + tensors


def read_oip(case: bytes) -> None:
    """As a helper and the server do: the helper's form of a request must be readable."""
    length = int.from_bytes(case[:2], "little")
    header_length = None if length == 0xFFFF else length
    parse_request(case[2:], header_length, SPECS)
    binary_length, parts = decode_oip(case[2:], header_length)
    parse_request(b"".join(parts), binary_length)


def read_json(case: bytes) -> None:
    length, parts = decode_json(case, messages.DTYPES)
    parse_request(b"".join(parts), length)


def read_image(case: bytes) -> None:
    length, parts = decode_image(case, IMAGE.model_dump(mode="json"), "float32")
    parse_request(b"".join(parts), length)


def read_encoded(case: bytes) -> None:
    pieces: list[int] = []
    encoding = ENCODINGS[case[0] % 2] if case else "x"
    assert len(unpacked(case[1:], encoding, 1000, pieces.append)) == sum(pieces) <= 1000


NPZ = one_of(bytes_from(*messages.NPZ), zip_from({"x.npy": bytes_from(*messages.NPY)}))


@contextmanager
def data_file(folder: Path) -> Iterator[Read]:
    """As a job's child reads the data of a plan."""
    file = folder / "data.npz"

    def read(case: bytes) -> None:
        file.write_bytes(case)
        members = [
            Member(name, header.dtype.str, header.shape)
            for name, header in read_headers(file).items()
            if header.shape and header.shape[0] > 0 and header.dtype.itemsize
        ]
        small = [each for each in members if each.row_bytes < LIMIT_BYTES]
        with row_reader(file, small) as rows:
            rows(1)

    yield read


# -- gRPC -----------------------------------------------------------------------------


def read_infer(case: bytes) -> None:
    """As the dispatcher does; the helper's form must give the same inputs."""
    typed_bytes(case)
    without_tensors(case)
    message = parsed(pb.ModelInferRequest, case)
    request_from(message, LOCAL, None)
    shared_inputs_from(message)
    places_from(message)
    inputs = inputs_from(message)
    _, (raw,) = raw_form(case)
    again = inputs_from(parsed(pb.ModelInferRequest, bytes(raw)))
    assert {name: array.tobytes() for name, array in again.items()} == {
        name: array.tobytes() for name, array in inputs.items()
    }


# -- uploads ----------------------------------------------------------------------------


MODEL = bytes_from(messages.onnx_model())


@contextmanager
def multipart(folder: Path) -> Iterator[Read]:
    target = folder / "upload"

    async def take(case: bytes) -> None:
        async def stream() -> AsyncIterator[bytes]:
            half = len(case) // 2
            yield case[:half]
            yield case[half:]

        await receive(stream(), messages.UPLOAD.decode(), target, LIMITS)

    with asyncio.Runner() as runner:

        def read(case: bytes) -> None:
            try:
                runner.run(take(case))
            except Unprocessable:
                assert not target.exists()
                raise
            finally:
                shutil.rmtree(target, ignore_errors=True)

        yield read


def whole(content: Make, name: str) -> dict[str, Make]:
    """A model, and a file of this name with as many zeros as a case wants."""
    sizes = (0, 100, 2000, LIMIT_BYTES)
    return {"model.onnx": content, name: lambda random: bytes(random.choice(sizes))}


def make_archive(random: Random) -> bytes:
    members = whole(MODEL, random.choice(("weights.bin", "model.onnx", "d/w")))
    packed = one_of(zip_from(members), tar_from(members, True), tar_from(members, False))(random)
    return packed if random.random() < 0.5 else mutated(random, [packed])


def make_engine(random: Random) -> bytes:
    packed = tar_from(whole(MODEL, random.choice(("engine/w", "model.onnx/w"))), False)(random)
    return packed if random.random() < 0.5 else mutated(random, [packed])


@contextmanager
def archive(folder: Path) -> Iterator[Read]:
    file, inside = folder / "archive", folder / "outer" / "inner" / "unpacked"

    def read(case: bytes) -> None:
        file.write_bytes(case)
        try:
            unpack(Part("model", file, "", len(case), "model.zip"), inside, LIMITS)
        finally:
            outside = set(folder.rglob("*")) - {file, *inside.parents, inside, *inside.rglob("*")}
            size = sum(each.stat().st_size for each in inside.rglob("*") if each.is_file())
            shutil.rmtree(folder / "outer")
            assert not outside
            assert size <= LIMIT_BYTES

    yield read


@contextmanager
def engine(folder: Path) -> Iterator[Read]:
    """As the client unpacks an engine."""
    inside = folder / "outer" / "inner"

    def read(case: bytes) -> None:
        inside.mkdir(parents=True)
        try:
            untar(io.BytesIO(case), inside)
        finally:
            outside = set(folder.rglob("*")) - {*inside.parents, inside, *inside.rglob("*")}
            shutil.rmtree(folder / "outer")
            assert not outside

    yield read


@contextmanager
def model_file(folder: Path) -> Iterator[Read]:
    def read(case: bytes) -> None:
        file = folder / f"model{messages.SUFFIXES[case[0] % 3] if case else '.onnx'}"
        file.write_bytes(case[1:])
        check_model(bytes(file))
        if file.suffix == ".onnx":
            read_interface(bytes(file))

    yield read


PLAN = yaml.safe_load(COMPLETE)
SHORT = (
    b'name: "\\ud83d\\ude00"\ninputs: [{name: 2001-02-28, dtype: !!str float32, shape: [1]}]',
    b"{name: n, profiles: [{batch: [1, 8, 64]}], measure_profile_width: !!bool yes}",
    b"data: {calibration: {generate: random, samples: 0x10, seed: 1_0}}\nobjective: latency\n",
)


def make_plan(random: Random) -> bytes:
    if random.random() < 0.4:
        return mutated(random, SHORT)
    if random.random() < 0.1:
        return mutated(random, [COMPLETE])
    kept = {key: value for key, value in PLAN.items() if random.random() < 0.2}
    return yaml.safe_dump(changed(random, kept), allow_unicode=True).encode("utf-8", "replace")


@contextmanager
def plan(folder: Path) -> Iterator[Read]:
    settings = Settings(home=folder)

    def read(case: bytes) -> None:
        submitted = parse(case)
        warnings_of(case)
        model = Part("model", folder / "model", "", 1, "model.onnx")
        name = "weights.safetensors" if submitted.architecture else "model.onnx"
        data = Part("selection", folder / "selection", "", 1, "d.npz")
        parts = {"model": Part("model", model.path, "", 1, name), "selection": data}
        plan_from(submitted, parts, settings).model_dump_json().encode()

    yield read


# -- child processes ------------------------------------------------------------------------


def message(kinds: TypeAdapter[Any]) -> Callable[[Path], Any]:
    return reader(lambda case: decode(kinds, case))


def make_frame(random: Random) -> bytes:
    head, body = json_from(*messages.HELPER)(random), bytes(random.choice((0, 2, 2000)))
    whole = struct.pack("<QQ", len(head), len(body)) + head + body
    return whole if random.random() < 0.5 else mutated(random, [whole])


@contextmanager
def frames(folder: Path) -> Iterator[Read]:
    """As the server receives the answers of a helper."""

    async def take(case: bytes) -> None:
        stream = asyncio.StreamReader(limit=16)
        stream.feed_data(case)
        stream.feed_eof()
        head, _ = await receive_frame(stream, 1000)
        decode(FROM_HELPER, head)

    with asyncio.Runner() as runner:
        yield lambda case: runner.run(take(case))


REFUSED = (ServiceError,)
CHILD = (BadMessage, EOFError)  # EOFError: it has ended, as asyncio's IncompleteReadError says, too

PARSERS = (
    Target(
        "npy",
        bytes_from(*messages.NPY),
        reader(lambda case: array_from_npy(case, "x")),
        REFUSED,
        weight=8,
    ),
    Target("npz", NPZ, reader(read_npz), REFUSED, weight=8),
    Target("data_npz", NPZ, data_file, (DataError,)),
    Target("oip", make_oip, reader(read_oip), REFUSED, weight=8),
    Target("json", json_from(*messages.NATIVE), reader(read_json), REFUSED, weight=8),
    Target("image", bytes_from(*messages.images()), reader(read_image), REFUSED, weight=4),
    Target(
        "content_encoding", bytes_from(*messages.ENCODED), reader(read_encoded), REFUSED, weight=4
    ),
    Target(
        "grpc_infer", bytes_from(*messages.infer_requests()), reader(read_infer), REFUSED, weight=8
    ),
    Target("multipart", bytes_from(*messages.MULTIPART), multipart, REFUSED, weight=2),
    Target("archive", make_archive, archive, REFUSED),
    Target("engine_tar", make_engine, engine, (HostError,)),
    Target("model_file", bytes_from(*messages.MODELS), model_file, REFUSED, weight=2),
    Target("plan", make_plan, plan, REFUSED),
    Target("worker_message", json_from(*messages.WORKER), message(FROM_WORKER), CHILD, weight=8),
    Target("job_message", json_from(*messages.JOB), message(FROM_CHILD), CHILD, weight=8),
    Target("helper_frame", make_frame, frames, CHILD, weight=8),
)
