"""Valid messages of each kind, made by the libraries that clients use. Equal in every run."""

from __future__ import annotations

import gzip
import io
import struct
import zlib

import numpy as np
from google.protobuf.message import Message
from onnx import TensorProto, helper
from PIL import Image

from service.grpc import grpc_service_pb2 as pb
from service.grpc.health_pb2 import HealthCheckRequest
from service.grpc.methods import METHODS

ROW = np.arange(4, dtype=np.float32)[np.newaxis]
ARRAYS = (
    ROW,
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">i4"),
    np.zeros((0, 3), np.uint8),
    np.ones((), np.bool_),
    np.arange(4, dtype=np.float16),
    np.array([("a", 1)], [("name", "U1"), ("n", "<i4")]),
    np.array(["text"]),
)


def npy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], version: int = 1) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, (version, 0))
    return stream.getvalue()


NPY = (*map(npy, ARRAYS), npy(ROW, 2))


def npz(**arrays: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **arrays)
    return stream.getvalue()


NPZ = (npz(x=ROW), npz(a=ROW, b=ROW), npz(**{"0/x": ROW, "1/x": ROW}))


def images() -> tuple[bytes, ...]:
    """Small images in every form of the service, and with a palette."""
    pixels = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
    image = Image.fromarray(pixels)
    coded = []
    for form, mode in (("JPEG", "RGB"), ("PNG", "P"), ("PNG", "RGBA"), ("WEBP", "RGB")):
        stream = io.BytesIO()
        image.convert(mode).save(stream, form)
        coded.append(stream.getvalue())
    return tuple(coded)


# -- JSON ----------------------------------------------------------------------

OIP = (
    {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [[1, 2.5, 3, 4]]}]},
    {
        "id": "7",
        "parameters": {"timeout": 1000, "binary_data_output": True, "priority": 0},
        "inputs": [
            {"name": "a", "shape": [2], "datatype": "UINT64", "data": [2**63, 1]},
            {"name": "b", "shape": [2, 0], "datatype": "BOOL", "data": []},
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
    },
    {
        "inputs": [
            {
                "name": "x",
                "shape": [1, 4],
                "datatype": "FP32",
                "parameters": {
                    "shared_memory_region": "r",
                    "shared_memory_byte_size": 16,
                    "shared_memory_offset": 0,
                },
            }
        ],
        "outputs": [
            {"name": "y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 9}}
        ],
    },
)
OIP_BINARY = {
    "inputs": [
        {
            "name": "x",
            "shape": [1, 4],
            "datatype": "FP32",
            "parameters": {"binary_data_size": 16},
        }
    ]
}
NATIVE = (
    {"inputs": {"x": [[1.0, 2, 3, 4]]}, "outputs": ["y"], "timeout_s": 1.5},
    {"inputs": {"x": 1, "k": [True, False], "n": [[2**63]]}},
)
DTYPES = {"x": "float32", "k": "bool", "n": "uint64", "h": "bfloat16"}
WORKER = (
    {"kind": "ready", "memory_bytes": 5},
    {
        "kind": "done",
        "number": 3,
        "outputs": [{"shape": [2, 1000], "offset": 64}, {"shape": [], "offset": 0}],
        "copy_in_s": 0.1,
        "compute_s": 0.2,
        "copy_out_s": 0.3,
    },
    {"kind": "short", "number": 3, "output_bytes": 70},
    {"kind": "refused", "number": 3, "message": "bad ids", "next_step": "send others"},
    {"kind": "failed", "code": "host.store", "message": "no", "next_step": "go"},
)
JOB = (
    {"kind": "wants"},
    {"kind": "returns"},
    {"kind": "finished"},
    {
        "kind": "stage",
        "event": {"stage": "build", "subject": "int8", "state": "progress", "fraction": 0.5},
    },
    *WORKER[-1:],
)
HELPER = ({"kind": "result", "header_length": 2}, *WORKER[-1:])


# -- protobuf --------------------------------------------------------------------


def infer_requests() -> tuple[bytes, ...]:
    """Requests with raw bytes, with lists of every type, and in shared memory."""
    tensor = pb.ModelInferRequest.InferInputTensor
    raw = pb.ModelInferRequest(
        model_name="same_float32",
        inputs=[tensor(name="x", datatype="FP32", shape=[1, 4])],
        raw_input_contents=[ROW.tobytes()],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="y")],
    )
    raw.parameters["timeout"].int64_param = 1000
    listed = pb.ModelInferRequest(model_version="1", id="7")
    for datatype, name in (
        *(("FP32", "fp32_contents"), ("FP64", "fp64_contents"), ("INT8", "int_contents")),
        *(("INT64", "int64_contents"), ("UINT64", "uint64_contents"), ("BOOL", "bool_contents")),
    ):
        each = listed.inputs.add(name=name, datatype=datatype, shape=[2])
        getattr(each.contents, name).extend([0, 1])
    shared = pb.ModelInferRequest(model_name="same_float32")
    parameters = shared.inputs.add(name="x", datatype="FP32", shape=[1, 4]).parameters
    parameters["shared_memory_region"].string_param = "r"
    parameters["shared_memory_byte_size"].int64_param = 16
    return tuple(_serialized(message) for message in (raw, listed, shared))


def calls() -> tuple[bytes, ...]:
    """A message of each method, behind the number of the method."""
    filled: tuple[Message, ...] = (
        pb.ModelReadyRequest(name="add", version="1"),
        pb.SystemSharedMemoryRegisterRequest(name="r", key="/k", offset=0, byte_size=16),
        HealthCheckRequest(service="inference.GRPCInferenceService"),
    )
    contents = [_serialized(message) for message in filled]
    numbers = range(len(METHODS))
    infer = [bytes([number]) + each for number in numbers for each in infer_requests()[:1]]
    return (*infer, *(bytes([number]) + each for number in numbers for each in contents))


def onnx_model() -> bytes:
    """A model of one node, with a weight."""
    sizes = ["n", 4]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes)],
        [helper.make_tensor("w", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0])],
    )
    return _serialized(helper.make_model(graph))


def _serialized(message: Message) -> bytes:
    data: bytes = message.SerializeToString(deterministic=True)
    return data


MODELS = (
    b"\0" + onnx_model(),
    b"\1" + struct.pack("<Q", 2) + b"{}",
    b"\2" + NPZ[0],
)
"""Files behind the number of their suffix in SUFFIXES."""
SUFFIXES = (".onnx", ".safetensors", ".pt2")

ENCODED = tuple(
    form
    for size in (500, 2000)
    for form in (
        b"\0" + gzip.compress(b"x" * size, mtime=0),
        b"\1" + zlib.compress(b"x" * size),
    )
)


# -- uploads and HTTP --------------------------------------------------------------

BOUNDARY = b"XX"
UPLOAD = b"multipart/form-data; boundary=" + BOUNDARY


def part(name: str, content: bytes, filename: str) -> bytes:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n'
    return head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"


END = b"--XX--\r\n"
MULTIPART = (
    part("model", onnx_model(), "model.onnx") + part("plan", b"name: n", "plan.yaml") + END,
    part("model", b"a", "a.zip") + part("calibration", NPZ[0], "c.npz") + END,
    b"preamble\r\n" + part("model", b"--XX\r\n--X", "m.onnx") + b"--XX--",
)
HTTP = (
    b"GET /a?b=%20c HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: 7\r\n\r\n",
    b"POST /infer HTTP/1.1\r\nContent-Length: 4\r\n\r\nbodyGET / HTTP/1.1\r\n\r\n",
    b"POST /infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    b"POST /infer HTTP/1.1\r\nContent-Length: 70000\r\n\r\n" + b"b" * 300,
    b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\nExpect: 100-continue\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
