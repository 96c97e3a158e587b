"""An unmodified tritonclient over HTTP, sync and asyncio, against a real server process."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from service.codecs.tensors import datatype_of
from service.storage.database import Database
from service.storage.keys import Keys
from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import DTYPES, MODELS, UNLOADED, serving_models, some_arrays
from tests.service.integration.test_server import Server, serving

# geventhttpclient leaves the socket of a timeout to the garbage collector, and tritonclient's
# asyncio answers that it does not read.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
PLAIN_DTYPES = [dtype for dtype in DTYPES if dtype != "bfloat16"]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "HTTP processes"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with serving_models(tmp_path_factory.mktemp("models"), http_processes=request.param) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address(server), concurrency=4) as client:
        yield client


def address(server: Server) -> str:
    return server.url.removeprefix("http://")


def tensor(
    name: str, array: np.ndarray[Any, Any], binary: bool = True, datatype: str = ""
) -> triton.InferInput:
    infer_input = triton.InferInput(
        name, list(array.shape), datatype or np_to_triton_dtype(array.dtype)
    )
    infer_input.set_data_from_numpy(array, binary_data=binary)
    return infer_input


def output_request(name: str, binary: bool = True, **more: Any) -> triton.InferRequestedOutput:
    return triton.InferRequestedOutput(name, binary_data=binary, **more)


X = np.arange(8, dtype=np.float32).reshape(2, 4)


# -- tensors -----------------------------------------------------------------


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_every_dtype_comes_back_bit_by_bit(
    client: triton.InferenceServerClient, dtype: str, binary_in: bool, binary_out: bool
) -> None:
    if dtype == "float16" and not binary_in:
        pytest.skip("tritonclient sends FP16 in binary only")
    for array in some_arrays(dtype):
        result = client.infer(
            f"same_{dtype}",
            [tensor("x", array, binary_in)],
            outputs=[output_request("y", binary_out)],
        )
        output_array = result.as_numpy("y")
        assert (output_array.dtype, output_array.tobytes()) == (array.dtype, array.tobytes())


def test_bfloat16_comes_back_as_the_floats_that_it_holds(
    client: triton.InferenceServerClient,
) -> None:
    array = np.array([[1.0, -2.5, 3.0e38, 2.0**-130]], np.float32)
    held = (array.view(np.uint32) & 0xFFFF0000).view(
        np.float32
    )  # tritonclient cuts the lower half off
    for binary in (True, False):
        result = client.infer(
            "same_bfloat16",
            [tensor("x", array, datatype="BF16")],
            outputs=[output_request("y", binary)],
        )
        assert result.get_output("y")["datatype"] == "BF16"
        np.testing.assert_array_equal(result.as_numpy("y"), held)


@pytest.mark.parametrize("binary", [True, False])
def test_a_tensor_without_axes(client: triton.InferenceServerClient, binary: bool) -> None:
    client.load_model("scalar")
    output_array = client.infer(
        "scalar",
        [tensor("x", np.array(2.5, np.float32), binary)],
        outputs=[output_request("y", binary)],
    ).as_numpy("y")
    assert (output_array.shape, float(output_array)) == ((), 2.5)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_an_empty_tensor(
    client: triton.InferenceServerClient, shape: tuple[int, int], binary: bool
) -> None:
    result = client.infer(
        "same_float32",
        [tensor("x", np.empty(shape, np.float32), binary)],
        outputs=[output_request("y", binary)],
    )
    assert result.get_output("y")["shape"] == list(shape)
    assert result.as_numpy("y").size == 0


def test_several_inputs_and_outputs_and_only_those_that_are_asked_for(
    client: triton.InferenceServerClient,
) -> None:
    inputs = [tensor("b", X), tensor("a", 2 * X, binary=False)]
    every = client.infer("add", inputs)
    np.testing.assert_array_equal(every.as_numpy("sum"), 3 * X)
    np.testing.assert_array_equal(every.as_numpy("difference"), X)
    some = client.infer("add", inputs, outputs=[output_request("difference", binary=False)])
    assert [output["name"] for output in some.get_response()["outputs"]] == ["difference"]
    mixed = client.infer(
        "add", inputs, outputs=[output_request("sum", binary=False), output_request("difference")]
    )
    np.testing.assert_array_equal(mixed.as_numpy("sum"), 3 * X)
    np.testing.assert_array_equal(mixed.as_numpy("difference"), X)


@pytest.mark.parametrize("binary", [True, False])
def test_a_large_tensor(client: triton.InferenceServerClient, binary: bool) -> None:
    """In JSON it is read and written outside the server's process."""
    array = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    for binary_out in (True, False):
        result = client.infer(
            "wide",
            [tensor("x", array, binary)],
            outputs=[output_request("y", binary_out)],
            request_id="17",
        )
        np.testing.assert_array_equal(result.as_numpy("y"), array)
        assert result.get_response()["id"] == "17"


@pytest.mark.parametrize("out", [None, "gzip", "deflate"])
@pytest.mark.parametrize("into", [None, "gzip", "deflate"])
def test_compression(
    client: triton.InferenceServerClient, into: str | None, out: str | None
) -> None:
    for shape in ((2, 4), (100, 300)):
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for binary in (True, False):
            result = client.infer(
                "same_float32",
                [tensor("x", array, binary)],
                outputs=[output_request("y", binary)],
                request_compression_algorithm=into,
                response_compression_algorithm=out,
            )
            np.testing.assert_array_equal(result.as_numpy("y"), array)


def test_where_the_time_went(client: triton.InferenceServerClient) -> None:
    response = client.infer("same_float32", [tensor("x", X)], request_id="a1").get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == (
        "same_float32",
        "1",
        "a1",
    )
    parameters = response["parameters"]
    assert set(parameters) == {
        "queue_ms",
        "copy_in_ms",
        "compute_ms",
        "copy_out_ms",
        "batch_size",
        "device",
    }
    assert (parameters["batch_size"], parameters["device"]) == (2, "cpu")


# -- what is refused ---------------------------------------------------------


def refused(call: Callable[[], object], status: int, message: str) -> None:
    with pytest.raises(InferenceServerException) as error:
        call()
    assert error.value.status() == str(status)
    assert message in error.value.message()


@pytest.mark.parametrize("binary", [True, False])
def test_strings_are_refused(client: triton.InferenceServerClient, binary: bool) -> None:
    words = np.array([["a", "b"]], np.object_)
    refused(
        lambda: client.infer("same_float32", [tensor("x", words, binary)]),
        422,
        "'x' is BYTES: engines take no strings",
    )


def test_requests_that_do_not_fit_are_refused(client: triton.InferenceServerClient) -> None:
    good = [tensor("x", X)]
    refused(lambda: client.infer("nothing", good), 404, "no model 'nothing'")
    refused(lambda: client.infer("add", good), 422, "expected the inputs a, b, got x")
    refused(lambda: client.infer("same_float32", good, model_version="7"), 404, "version 7")
    refused(
        lambda: client.infer("same_float32", good, model_version="new"),
        422,
        "a whole number, got 'new'",
    )
    refused(
        lambda: client.infer("same_float32", good, outputs=[output_request("z")]),
        422,
        "no output 'z'",
    )
    refused(
        lambda: client.infer("same_float32", [tensor("x", X.astype(np.float64))]),
        422,
        "expected float32 (FP32), got float64 (FP64)",
    )
    refused(lambda: client.infer("same_float32", [tensor("x", X[0])]), 422, "got float32 [4]")
    refused(
        lambda: client.infer("same_float32", good, outputs=[output_request("y", class_count=2)]),
        422,
        "this server has no `classification`",
    )
    refused(
        lambda: client.infer("same_float32", good, sequence_id=3, sequence_start=True),
        422,
        "this server has no `sequence_id`",
    )
    refused(
        lambda: client.infer("same_float32", good, priority=1), 422, "this server has no `priority`"
    )
    refused(
        lambda: client.infer("failed", [tensor("x", X)]), 503, "failed: the worker died three times"
    )


def test_what_is_not_finite_is_no_json(client: triton.InferenceServerClient) -> None:
    refused(
        lambda: client.infer(
            "broken", [tensor("x", X)], outputs=[output_request("y", binary=False)]
        ),
        422,
        "8 of 8 values that are not finite",
    )
    assert np.isnan(client.infer("broken", [tensor("x", X)]).as_numpy("y")).all()


def test_a_timeout_of_the_request_and_one_of_the_client(
    client: triton.InferenceServerClient, server: Server
) -> None:
    long = [tensor("x", np.array([[30.0]], np.float32))]
    refused(lambda: client.infer("slow", long, timeout=50_000), 504, "no answer within 0.05 s")
    with (
        triton.InferenceServerClient(address(server), network_timeout=0.2) as impatient,
        pytest.raises((TimeoutError, socket.timeout)),
    ):
        impatient.infer("slow", long)
    gc.collect()
    short = [tensor("x", np.array([[0.0]], np.float32))]
    assert (
        client.infer("slow", short, timeout=int(WITHIN_S * 1e6)).as_numpy("y") == 0
    )  # what the client gave up does not run


def test_a_full_queue_is_429(server: Server) -> None:
    with triton.InferenceServerClient(address(server), concurrency=3) as client:
        calls = [
            client.async_infer("narrow", [tensor("x", np.array([[2.0]], np.float32))])
            for _ in range(3)
        ]
        ended = []
        for call in calls:
            try:
                ended.append(call.get_result().as_numpy("y").item())
            except InferenceServerException as error:
                ended.append(error.status())
    assert sorted(map(str, ended)) == ["2.0", "2.0", "429"]


def test_keys_scopes_and_limits(tmp_path: Path) -> None:
    database = Database(tmp_path / "crucible.db")
    keys = Keys(database)
    reader, admin = (
        {"Authorization": f"Bearer {keys.create('k', [scope], 'local')[1]}"}
        for scope in ("compile", "admin")
    )
    infer = {"Authorization": f"Bearer {keys.create('k', ['infer'], 'local')[1]}"}
    database.close()
    with (
        serving_models(tmp_path, keys_required=True, max_infer_bytes=2000) as server,
        triton.InferenceServerClient(address(server)) as client,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        refused(lambda: client.get_server_metadata(), 401, "needs a key")
        refused(lambda: client.infer("same_float32", [tensor("x", X)]), 401, "needs a key")
        refused(
            lambda: client.infer("same_float32", [tensor("x", X)], headers=reader),
            403,
            "no scope 'infer'",
        )
        client.infer("same_float32", [tensor("x", X)], headers=infer)
        refused(lambda: client.load_model("scalar", headers=infer), 403, "no scope 'admin'")
        client.load_model("scalar", headers=admin)
        refused(
            lambda: client.infer("theirs", [tensor("x", X)], headers=infer),
            404,
            "no model 'theirs'",
        )
        client.infer("theirs", [tensor("x", X)], headers=admin)
        large = [tensor("x", np.zeros((1, 1000), np.float32))]
        refused(lambda: client.infer("same_float32", large, headers=infer), 413, "at most 2000")
        packed: dict[str, Any] = {"headers": infer, "request_compression_algorithm": "gzip"}
        refused(
            lambda: client.infer("same_float32", large, **packed),
            413,
            "unpacks to more than 2000 bytes",
        )
        assert "Traceback" not in server.log()


# -- what it tells -----------------------------------------------------------


def test_the_server(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    server = client.get_server_metadata()
    assert (server["name"], server["extensions"]) == (
        "crucible",
        ["binary_tensor_data", "model_configuration", "model_repository", "statistics"],
    )


def test_a_model(client: triton.InferenceServerClient) -> None:
    assert client.is_model_ready("add")
    assert client.is_model_ready("add", "1")
    assert not client.is_model_ready("add", "3")
    assert not client.is_model_ready("failed")
    assert not client.is_model_ready("nothing")
    model = client.get_model_metadata("add")
    assert (model["versions"], model["platform"]) == (["1", "2"], "onnxruntime")
    assert model["inputs"] == [
        {"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in "ab"
    ]
    assert client.get_model_metadata("add", "1")["name"] == "add"
    for dtype in DTYPES:
        assert client.get_model_metadata(f"same_{dtype}")["outputs"] == [
            {"name": "y", "datatype": datatype_of(dtype), "shape": [-1, -1]}
        ]


def test_a_models_configuration(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("add")
    assert (config["max_batch_size"], config["input"][0]) == (
        8,
        {"name": "a", "data_type": "TYPE_FP32", "dims": [4]},
    )
    assert config["instance_group"] == [{"name": "cpu", "kind": "KIND_CPU", "count": 1, "gpus": []}]
    client.load_model("scalar")
    alone = client.get_model_config("scalar", "1")
    assert (alone["max_batch_size"], alone["output"]) == (
        0,
        [{"name": "y", "data_type": "TYPE_FP32", "dims": []}],
    )


def test_statistics(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("same_uint8")["model_stats"][0]
    client.infer("same_uint8", [tensor("x", np.ones((3, 2), np.uint8))])
    (after,) = client.get_inference_statistics("same_uint8", "1")["model_stats"]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 1
    assert (
        after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"]
        == 1
    )
    assert [batch["batch_size"] for batch in after["batch_stats"]] == sorted(
        {3, *(batch["batch_size"] for batch in before["batch_stats"])}
    )
    assert {model["name"] for model in client.get_inference_statistics()["model_stats"]} >= {
        "add",
        "same_uint8",
    }


def test_the_repository(client: triton.InferenceServerClient) -> None:
    def state(name: str) -> list[tuple[str, str]]:
        return [
            (model["version"], model["state"])
            for model in client.get_model_repository_index()
            if model["name"] == name
        ]

    assert state("failed") == [("1", "UNAVAILABLE")]
    assert state("add") == [("1", "READY"), ("2", "READY")]
    client.unload_model("add")
    assert state("add") == []
    refused(lambda: client.infer("add", [tensor("a", X), tensor("b", X)]), 404, "no model 'add'")
    client.load_model("add")
    assert client.is_model_ready("add")
    refused(lambda: client.load_model("nothing"), 404, "no model 'nothing'")
    refused(lambda: client.unload_model("nothing"), 404, "no model 'nothing'")
    refused(
        lambda: client.load_model("add", config="{}"), 422, "a model is loaded as it was promoted"
    )


# -- asyncio -----------------------------------------------------------------


def with_aio(
    server: Server, story: Callable[[triton_aio.InferenceServerClient], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(address(server)) as client:
            await story(client)

    asyncio.run(run())
    gc.collect()


def test_asyncio_many_at_once_each_gets_its_own(server: Server) -> None:
    async def story(client: triton_aio.InferenceServerClient) -> None:
        async def one(number: int, binary: bool) -> None:
            array = np.full((2, 700 * (number % 3) + 1), number, np.int32)
            result = await client.infer(
                "same_int32",
                [tensor("x", array, binary)],
                outputs=[output_request("y", binary)],
                request_id=str(number),
            )
            assert result.get_response()["id"] == str(number)
            np.testing.assert_array_equal(result.as_numpy("y"), array)

        await asyncio.gather(*(one(number, number % 2 == 0) for number in range(64)))

    with_aio(server, story)


def test_asyncio_compression_errors_and_documents(server: Server) -> None:
    async def story(client: triton_aio.InferenceServerClient) -> None:
        for algorithm in ("gzip", "deflate"):
            packed = {
                "request_compression_algorithm": algorithm,
                "response_compression_algorithm": algorithm,
            }
            result = await client.infer("same_float32", [tensor("x", X)], **packed)
            np.testing.assert_array_equal(result.as_numpy("y"), X)
        with pytest.raises(InferenceServerException, match="'x' is BYTES"):
            await client.infer("same_float32", [tensor("x", np.array([["a"]], np.object_))])
        assert await client.is_server_ready()
        assert await client.is_model_ready("add")
        assert (await client.get_model_metadata("add"))["name"] == "add"
        assert (await client.get_model_config("add"))["name"] == "add"
        assert (await client.get_inference_statistics("add"))["model_stats"]
        assert len(await client.get_model_repository_index()) >= len(MODELS) - len(UNLOADED)
        await client.unload_model("same_uint16")
        assert not await client.is_model_ready("same_uint16")
        await client.load_model("same_uint16")

    with_aio(server, story)


def test_with_nothing_deployed(tmp_path: Path) -> None:
    with serving(tmp_path) as server, triton.InferenceServerClient(address(server)) as client:
        assert client.is_server_ready()
        assert client.get_model_repository_index() == []
        assert client.get_inference_statistics()["model_stats"] == []
        refused(lambda: client.infer("add", [tensor("x", X)]), 404, "no model 'add' is deployed")
        refused(lambda: client.load_model("add"), 404, "no model 'add'")
