"""One request over HTTP or gRPC, and how it was refused in words that both wires have.

answer = ask(server, "grpc", Request("slow", [[0.5]], key=key))

`answer.code` is "" or such as "service.not_found".
"""

from __future__ import annotations

import gzip
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from service.codecs.tensors import DATATYPES
from service.grpc import grpc_service_pb2 as pb
from service.grpc.descriptors import SERVICE
from service.storage.database import Database
from service.storage.keys import Keys
from tests.service.builders.jobs import WITHIN_S
from tests.service.integration.test_server import Server

WIRES = ("http", "grpc")
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer, or a refusal."""

    code: str = ""  # of the error; empty: there is none
    message: str = ""
    retry_after: str | None = None
    request_id: str | None = None
    y: NDArray[np.generic] | None = None  # the first output


@dataclass(frozen=True, slots=True)
class Request:
    """For a model with the input `x`."""

    model: str
    x: ArrayLike
    key: str = ""
    timeout_us: int = 0  # the protocol's parameter
    version: str = ""
    datatype: str = "FP32"
    shape: tuple[int, ...] | None = None  # None: that of x
    gzip: bool = False
    request_id: str = ""

    @property
    def array(self) -> NDArray[np.generic]:
        return np.asarray(self.x, DATATYPES.get(self.datatype, "float32"))


def ask(server: Server, wire: str, request: Request) -> Outcome:
    """Send the request over one of WIRES."""
    return (_over_http if wire == "http" else _over_grpc)(server, request)


def key_of(home: Path, *scopes: str, owner: str = "") -> str:
    """A new key of a running server, whose models belong to `local`."""
    with closing(Database(home / "crucible.db")) as database:
        return Keys(database).create("test", scopes, owner or "local")[1]


def metadata_of(key: str = "", request_id: str = "") -> tuple[tuple[str, str], ...]:
    """Metadata of a call of gRPC."""
    return (
        *([("authorization", f"Bearer {key}")] if key else []),
        *([("x-request-id", request_id)] if request_id else []),
    )


def message_of(request: Request) -> pb.ModelInferRequest:
    """Message of gRPC for the request."""
    array = request.array
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="x",
        datatype=request.datatype,
        shape=array.shape if request.shape is None else request.shape,
    )
    message = pb.ModelInferRequest(
        model_name=request.model,
        model_version=request.version,
        inputs=[tensor],
        raw_input_contents=[array.tobytes()],
    )
    if request.timeout_us:
        message.parameters["timeout"].int64_param = request.timeout_us
    return message


def method_of(channel: grpc.Channel, name: str) -> grpc.UnaryUnaryMultiCallable[object, bytes]:
    """Method of the inference service that returns undecoded bytes."""
    return channel.unary_unary(
        f"/{SERVICE.full_name}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
    )


def _over_grpc(server: Server, request: Request) -> Outcome:
    compression = grpc.Compression.Gzip if request.gzip else None
    with grpc.insecure_channel(server.rpc, options=UNLIMITED) as channel:
        try:
            raw, call = method_of(channel, "ModelInfer").with_call(
                message_of(request),
                WITHIN_S,
                metadata_of(request.key, request.request_id),
                compression=compression,
            )
        except grpc.RpcError as error:
            metadata: dict[str, Any] = {each.key: each.value for each in error.trailing_metadata()}
            return Outcome(
                metadata.get("crucible-code", error.code().name),
                error.details() or "",
                metadata.get("retry-after"),
                metadata.get("x-request-id"),
            )
    answer = pb.ModelInferResponse.FromString(raw)
    output, metadata = answer.outputs[0], dict(call.trailing_metadata())
    y = np.frombuffer(answer.raw_output_contents[0], DATATYPES[output.datatype]).reshape(
        output.shape
    )
    return Outcome(request_id=metadata["x-request-id"], y=y)


def _over_http(server: Server, request: Request) -> Outcome:
    array = request.array
    shape = list(array.shape if request.shape is None else request.shape)
    tensor = {
        "name": "x",
        "datatype": request.datatype,
        "shape": shape,
        "parameters": {"binary_data_size": array.nbytes},
    }
    parameters = {
        "binary_data_output": True,
        **({"timeout": request.timeout_us} if request.timeout_us else {}),
    }
    head = orjson.dumps({"inputs": [tensor], "parameters": parameters})
    body = head + array.tobytes()
    headers = {
        "Inference-Header-Content-Length": str(len(head)),
        **{name.title(): value for name, value in metadata_of(request.key, request.request_id)},
    }
    if request.gzip:
        body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
    version = f"/versions/{request.version}" if request.version else ""
    path = f"/v2/models/{request.model}{version}/infer"
    answer = httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=WITHIN_S)
    known = answer.headers.get("X-Request-Id")
    if answer.status_code != 200:
        refusal = answer.json()
        return Outcome(refusal["code"], refusal["error"], answer.headers.get("Retry-After"), known)
    length = int(answer.headers["Inference-Header-Content-Length"])
    (output,) = orjson.loads(answer.content[:length])["outputs"]
    return Outcome(
        request_id=known,
        y=np.frombuffer(answer.content[length:], DATATYPES[output["datatype"]]).reshape(
            output["shape"]
        ),
    )
