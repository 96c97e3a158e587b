"""Tensors in shared memory: an unmodified tritonclient over HTTP and gRPC, against a real server
process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import orjson
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, shared_memory

from service.auth import LOCAL
from service.errors import Forbidden
from service.grpc import grpc_service_pb2 as pb
from service.grpc.grpc_service_pb2 import SystemSharedMemoryStatusRequest as Status
from service.grpc.methods import METHODS, Call, address_of
from service.regions import FOLDER
from tests.service.builders.app import URL, Desk, at_desk
from tests.service.builders.regions import shared_file
from tests.service.builders.serving import serving_models
from tests.service.builders.tensors import WIRES, key_of, method_of
from tests.service.integration.test_server import Server

# geventhttpclient leaves sockets to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("models")
    with serving_models(home, keys_required=True, shared_memory=True) as server:
        yield server


class Client(NamedTuple):
    """A client of one protocol, the classes of its tensors, and the header with its key."""

    calls: Any
    kinds: Any
    headers: dict[str, str]

    def infer(self, model: str, inputs: list[Any], outputs: list[Any] | None = None) -> Any:
        return self.calls.infer(model, inputs, outputs=outputs, headers=dict(self.headers))

    def register(self, file: Path, name: str = "r", size: int = 128, offset: int = 0) -> None:
        self.calls.register_system_shared_memory(
            name, f"/{file.name}", size, offset, headers=self.headers
        )

    def input(self, name: str, region: str = "r", offset: int = 0, **more: Any) -> Any:
        tensor = self.kinds.InferInput(name, list(X.shape), more.get("datatype", "FP32"))
        return tensor.set_shared_memory(region, more.get("byte_size", X.nbytes), offset)

    def sent(self, name: str, array: np.ndarray[Any, Any]) -> Any:
        tensor = self.kinds.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return tensor

    def output(self, name: str, region: str = "r", size: int = X.nbytes, offset: int = 0) -> Any:
        output = self.kinds.InferRequestedOutput(name)
        output.set_shared_memory(region, size, offset)
        return output

    def status(self, name: str = "") -> list[str]:
        answer = self.calls.get_system_shared_memory_status(name, headers=self.headers)
        if self.kinds is triton_http:
            return [region["name"] for region in answer]
        return sorted(answer.regions)

    def unregister(self, name: str = "") -> None:
        self.calls.unregister_system_shared_memory(name, headers=self.headers)


def client_of(server: Server, wire: str) -> Client:
    """A client with a key of its own."""
    kinds = triton_http if wire == "http" else triton_grpc
    address = server.url.removeprefix("http://") if wire == "http" else server.rpc
    headers = {"authorization": f"Bearer {key_of(server.home, 'infer')}"}
    return Client(kinds.InferenceServerClient(address), kinds, headers)


@pytest.fixture(params=WIRES)
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = client_of(server, request.param)
    yield client
    client.calls.close()


@pytest.fixture
def file() -> Iterator[Path]:
    with shared_file(X.tobytes() + bytes(96)) as file:
        yield file


def refused(message: str, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(InferenceServerException) as error:
        call(*arguments)
    assert message in error.value.message()


def test_inputs_and_outputs_by_the_tools_of_the_client(client: Client) -> None:
    key = f"crucible-test-tools-{os.getpid()}"
    handle = shared_memory.create_shared_memory_region("r", f"/{key}", 64)
    try:
        shared_memory.set_shared_memory_region(handle, [X])
        client.register(FOLDER / key, size=64)
        client.infer("same_float32", [client.input("x")], [client.output("y", offset=32)])
        written = shared_memory.get_contents_as_numpy(handle, np.float32, X.shape, offset=32)
        np.testing.assert_array_equal(written, X)
        client.unregister("r")
        assert client.status() == []
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def test_beside_tensors_that_are_sent(client: Client, file: Path) -> None:
    client.register(file)
    client.register(file, "s", 64, offset=32)
    assert (client.status(), client.status("s")) == (["r", "s"], ["s"])
    inputs = [client.sent("a", 2 * X), client.input("b")]
    outputs = [client.output("sum", "s", 64), client.kinds.InferRequestedOutput("difference")]
    result = client.infer("add", inputs, outputs)
    np.testing.assert_array_equal(result.as_numpy("difference"), X)
    written = np.frombuffer(file.read_bytes()[32:64], np.float32).reshape(X.shape)
    np.testing.assert_array_equal(written, 3 * X)
    assert file.read_bytes()[64:] == bytes(64)
    client.unregister()
    refused("this key has no region 'r'", client.infer, "add", inputs, outputs)


def test_beside_long_json_that_helpers_read_and_write(server: Server) -> None:
    client = client_of(server, "http")
    rows = np.arange(40_000, dtype=np.float32).reshape(-1, 4)
    with shared_file(rows.tobytes()) as file:
        client.register(file, size=rows.nbytes)
        place = {"shared_memory_region": "r", "shared_memory_byte_size": rows.nbytes}
        a = {"name": "a", "datatype": "FP32", "shape": rows.shape, "parameters": place}
        b = {"name": "b", "datatype": "FP32", "shape": rows.shape, "data": rows.ravel().tolist()}
        outputs = [{"name": "sum", "parameters": place}, {"name": "difference"}]
        answer = httpx.post(
            f"{server.url}/v2/models/add/infer",
            content=orjson.dumps({"inputs": [a, b], "outputs": outputs}),
            headers=client.headers,
        )
        difference, total = answer.json()["outputs"]
        assert difference["data"] == [0.0] * rows.size
        assert total["parameters"] == {**place, "shared_memory_offset": 0}
        written = np.frombuffer(file.read_bytes(), np.float32)
        np.testing.assert_array_equal(written, 2 * rows.ravel())
    client.calls.close()


def test_beside_long_lists_that_a_helper_of_grpc_reads(server: Server) -> None:
    client = client_of(server, "grpc")
    rows = np.arange(40_000, dtype=np.float32).reshape(-1, 4)
    with shared_file(rows.tobytes()) as file:
        client.register(file, size=rows.nbytes)
        message = pb.ModelInferRequest(model_name="add")
        for name in "ab":
            message.inputs.add(name=name, datatype="FP32", shape=rows.shape)
        message.inputs[0].parameters["shared_memory_region"].string_param = "r"
        message.inputs[0].parameters["shared_memory_byte_size"].int64_param = rows.nbytes
        message.inputs[1].contents.fp32_contents[:] = rows.ravel().tolist()
        with grpc.insecure_channel(server.rpc) as channel:
            answer = pb.ModelInferResponse.FromString(
                method_of(channel, "ModelInfer")(message, metadata=tuple(client.headers.items()))
            )
    assert answer.raw_output_contents[0] == (2 * rows).tobytes()
    client.calls.close()


def test_what_does_not_fit_is_refused(client: Client, file: Path) -> None:
    client.register(file)
    for tensor, message in (
        (client.input("x", "s"), "this key has no region 's'"),
        (client.input("x", offset=97), "32 bytes at offset 97 of region 'r'"),
        (client.input("x", byte_size=31), "float32 [2, 4] is 32 bytes"),
        (client.input("x", datatype="BYTES"), "engines take no strings"),
        (client.input("x", datatype="INT32"), "float32"),
        (client.input("z"), "expected the inputs x, got z"),
    ):
        refused(message, client.infer, "same_float32", [tensor])
    for output, message in (
        (client.output("y", "s"), "this key has no region 's'"),
        (client.output("y", offset=97), "32 bytes at offset 97 of region 'r'"),
        (client.output("y", size=31), "32 bytes for a place of 31 bytes"),
    ):
        refused(message, client.infer, "same_float32", [client.input("x")], [output])
    refused("region 'r' is registered already", client.register, file)
    refused("is no key of shared memory", client.register, Path(".."), "s")
    refused("has 128 bytes, expected", client.register, file, "s", 129)
    for call in (client.unregister, client.status):
        refused("this key has no region 's'", call, "s")


def test_files_that_change_while_they_are_registered(client: Client, file: Path) -> None:
    client.register(file)
    inputs, outputs = [client.input("x")], [client.output("y")]
    os.truncate(file, 5)
    refused("has 5 bytes, expected at least 32", client.infer, "same_float32", inputs)
    sent = [client.sent("x", X)]
    refused("has 5 bytes, expected at least 32", client.infer, "same_float32", sent, outputs)
    file.unlink()
    refused("No such file", client.infer, "same_float32", inputs)
    result = client.infer("same_float32", sent)  # the server lives
    np.testing.assert_array_equal(result.as_numpy("y"), X)


def test_a_region_is_its_keys_own_over_both_protocols(server: Server, file: Path) -> None:
    mine = client_of(server, "http")
    same_key = Client(triton_grpc.InferenceServerClient(server.rpc), triton_grpc, mine.headers)
    others = [client_of(server, wire) for wire in WIRES]
    mine.register(file)
    assert same_key.status() == ["r"]
    for other in others:
        assert other.status() == []
        refused("this key has no region 'r'", other.unregister, "r")
        x = [other.input("x")]
        refused("this key has no region 'r'", other.infer, "same_float32", x)
        other.unregister()
    result = mine.infer("same_float32", [mine.input("x")])
    np.testing.assert_array_equal(result.as_numpy("y"), X)
    for client in (mine, same_key, *others):
        client.calls.close()


def test_a_request_that_a_proxy_forwards_is_refused(client: Client, file: Path) -> None:
    forwarded = client._replace(headers={**client.headers, "x-forwarded-for": "10.0.0.9"})
    message = "shared memory is only for clients on this host"
    refused(message, forwarded.register, file)
    refused(message, forwarded.infer, "same_float32", [client.input("x")])


def test_a_key_needs_the_scope_infer(server: Server, client: Client, file: Path) -> None:
    headers = {"authorization": f"Bearer {key_of(server.home, 'compile')}"}
    refused("no scope 'infer'", client._replace(headers=headers).register, file)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[]", "a JSON object, got list"),
        ({"byte_size": 8}, "expected `key` to be a text, got None"),
        ({"key": "/a", "byte_size": "8"}, "byte_size: expected a number of bytes, got '8'"),
        ({"key": "/a", "byte_size": 8, "offset": -1}, "offset: expected a number of bytes, got -1"),
        ({"key": "/a"}, "a region of 0 bytes"),
    ],
)
def test_bodies_that_register_nothing(server: Server, body: object, message: str) -> None:
    content = body if isinstance(body, str) else orjson.dumps(body)
    headers = {"authorization": f"Bearer {key_of(server.home, 'infer')}"}
    url = f"{server.url}/v2/systemsharedmemory/region/r/register"
    answer = httpx.post(url, content=content, headers=headers)
    assert (answer.status_code, message in answer.json()["error"]) == (422, True), answer.text


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.9"])
def test_only_for_this_host_and_only_if_it_is_switched_on(
    tmp_path: Path, enabled: bool, address: str
) -> None:
    """Both protocols, and the list of extensions."""

    async def story(desk: Desk) -> None:
        transport = httpx.ASGITransport(desk.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url=URL) as web:
            metadata = (await web.get("/v2")).json()
            answer = await web.get("/v2/systemsharedmemory/status")
        call = Call(desk.service, LOCAL, None, f"ipv4:{address}:1", ())
        of_grpc: Any = await METHODS["ServerMetadata"].does(call, pb.ServerMetadataRequest())
        assert list(of_grpc.extensions) == metadata["extensions"]
        assert ("system_shared_memory" in metadata["extensions"]) is enabled
        status = METHODS["SystemSharedMemoryStatus"].does(call, Status())
        if enabled and address == "127.0.0.1":
            assert (answer.json(), await status) == ([], pb.SystemSharedMemoryStatusResponse())
            return
        with pytest.raises(Forbidden) as error:
            await status
        assert (answer.status_code, answer.json()["error"]) == (403, error.value.message)

    at_desk(tmp_path, story, shared_memory=enabled)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:50051", "127.0.0.1"),
        ("ipv6:%5B::1%5D:50051", "::1"),
        ("ipv6:[::ffff:10.0.0.9]:50051", "::ffff:10.0.0.9"),
        ("unix:/run/socket", ""),
        ("unknown", ""),
    ],
)
def test_addresses_of_the_peers_of_grpc(peer: str, address: str) -> None:
    assert address_of(peer) == address
