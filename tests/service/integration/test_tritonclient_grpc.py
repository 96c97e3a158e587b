"""An unmodified `tritonclient.grpc` against the service: sync, asyncio and streaming."""

import asyncio
import json
import queue
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from service.codecs.tensors import DATATYPES, datatype_of
from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import DTYPES, serving_models, some_arrays
from tests.service.builders.tensors import key_of
from tests.service.integration.test_server import Server

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_models(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.rpc) as client:
        yield client


def input_of(name: str, array: NDArray[Any]) -> triton.InferInput:
    """In the dtype that this client has for the protocol's: BF16 is float32 to it, until 2.70."""
    datatype = datatype_of(array.dtype.name)
    return triton.InferInput(name, array.shape, datatype).set_data_from_numpy(
        array.astype(triton_to_np_dtype(datatype))
    )


def inputs() -> list[triton.InferInput]:
    return [input_of("a", A), input_of("b", B)]


def test_health_and_documents(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add")
    assert client.is_model_ready("add", "1")
    assert not client.is_model_ready("failed")
    assert not client.is_model_ready("nowhere")
    server_metadata = client.get_server_metadata(as_json=True)
    assert (server_metadata["name"], "statistics" in server_metadata["extensions"]) == (
        "crucible",
        True,
    )
    model = client.get_model_metadata("add", as_json=True)
    assert (model["name"], model["versions"]) == ("add", ["1", "2"])
    assert model["inputs"][0] == {"name": "a", "datatype": "FP32", "shape": ["-1", "4"]}
    assert [output["name"] for output in model["outputs"]] == ["sum", "difference"]


def test_the_configuration_is_tritons(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("add", as_json=True)["config"]
    assert (config["name"], config["max_batch_size"], config["dynamic_batching"]) == ("add", 8, {})
    assert config["input"][0] == {"name": "a", "data_type": "TYPE_FP32", "dims": ["4"]}
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    assert client.get_model_config("same_bfloat16").config.input[0].data_type == 14  # TYPE_BF16


def test_several_inputs_and_outputs(client: triton.InferenceServerClient) -> None:
    answer = client.infer("add", inputs(), request_id="r17")
    assert np.array_equal(answer.as_numpy("sum"), A + B)
    assert np.array_equal(answer.as_numpy("difference"), A - B)
    response = answer.get_response()
    assert (response.id, response.model_name, response.model_version) == ("r17", "add", "2")
    old = client.infer(
        "add", inputs(), model_version="1", outputs=[triton.InferRequestedOutput("difference")]
    )
    assert (
        old.get_response().model_version,
        [output.name for output in old.get_response().outputs],
    ) == ("1", ["difference"])


def test_every_answer_tells_where_its_time_went(client: triton.InferenceServerClient) -> None:
    parameters = client.infer("add", inputs()).get_response().parameters
    times = {
        name: parameters[name].double_param
        for name in ("queue_ms", "copy_in_ms", "compute_ms", "copy_out_ms")
    }
    assert times == {"queue_ms": 1.0, "copy_in_ms": 2.0, "compute_ms": 3.0, "copy_out_ms": 4.0}
    assert (parameters["batch_size"].int64_param, parameters["device"].string_param) == (2, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_go_and_come_unchanged(client: triton.InferenceServerClient, dtype: str) -> None:
    empty = next(some_arrays(dtype, (0, 5)))
    for array in (*some_arrays(dtype), empty):
        got = client.infer(f"same_{dtype}", [input_of("x", array)]).as_numpy("y")
        assert got.shape == array.shape
        assert got.dtype == triton_to_np_dtype(datatype_of(dtype))
        assert np.array_equal(got, array.astype(got.dtype))


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed(client: triton.InferenceServerClient, algorithm: str) -> None:
    values = np.tile(A, (1000, 1))
    answer = client.infer("same_float32", [input_of("x", values)], compression_algorithm=algorithm)
    assert np.array_equal(answer.as_numpy("y"), values)


def test_models_load_and_unload(client: triton.InferenceServerClient) -> None:
    scalar = [input_of("x", np.array(2.5, np.float32))]
    assert "scalar" not in {
        model["name"] for model in client.get_model_repository_index(as_json=True)["models"]
    }
    client.load_model("scalar")
    answer = client.infer("scalar", scalar).as_numpy("y")
    assert (answer.shape, float(answer)) == ((), 2.5)
    client.unload_model("scalar")
    with pytest.raises(InferenceServerException) as error:
        client.infer("scalar", scalar)
    assert error.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="without `config`"):
        client.load_model("scalar", config=json.dumps({"max_batch_size": 4}))


def test_statistics(client: triton.InferenceServerClient) -> None:
    for _ in range(3):
        client.infer("photos", [input_of("image", np.zeros((2, 3, 8, 8), np.float32))])
    (statistics,) = client.get_inference_statistics("photos", as_json=True)["model_stats"]
    assert (statistics["inference_count"], statistics["execution_count"]) == ("6", "3")
    assert statistics["inference_stats"]["queue"] == {"count": "3", "ns": "3000000"}
    assert statistics["batch_stats"][0]["batch_size"] == "2"
    assert {
        model["name"] for model in client.get_inference_statistics(as_json=True)["model_stats"]
    } > {"photos", "add"}
    with pytest.raises(InferenceServerException, match="nowhere"):
        client.get_inference_statistics("nowhere")


def test_what_is_not_supported_says_so(client: triton.InferenceServerClient) -> None:
    calls = (
        client.get_trace_settings,
        client.get_log_settings,
        client.get_cuda_shared_memory_status,
        client.unregister_cuda_shared_memory,
    )
    for call in calls:
        with pytest.raises(InferenceServerException, match="this server has no") as error:
            call()
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"


def text() -> triton.InferInput:
    return triton.InferInput("x", [1], "BYTES").set_data_from_numpy(np.array([b"text"], np.object_))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": [text()]}, "BYTES: engines take no strings"),
        ({"sequence_id": 7, "sequence_start": True}, "no `sequence_id`"),
        ({"priority": 3}, "no `priority`"),
        ({"outputs": [triton.InferRequestedOutput("y", class_count=3)]}, "no `classification`"),
        ({"outputs": [triton.InferRequestedOutput("z")]}, "no output 'z'"),
        ({"inputs": [input_of("x", A), input_of("x", A)]}, "comes twice"),
        ({"inputs": []}, "expected the inputs x, got none"),
        ({"model_version": "newest"}, "expected a version to be a whole number"),
    ],
)
def test_bad_requests_are_refused_clearly(
    client: triton.InferenceServerClient, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as error:
        client.infer("same_float32", **{"inputs": [input_of("x", A)], **options})
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_time_outs_of_the_client_and_of_the_server(client: triton.InferenceServerClient) -> None:
    slow = [input_of("x", np.array([[30.0]], np.float32))]
    for options in ({"client_timeout": 0.3}, {"timeout": 300_000}):
        with pytest.raises(InferenceServerException) as error:
            client.infer("slow", slow, **options)
        assert error.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_keys_go_as_headers(tmp_path: Any) -> None:
    with (
        serving_models(tmp_path, keys_required=True) as server,
        triton.InferenceServerClient(server.rpc) as client,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException) as error:
            client.get_server_metadata()
        assert error.value.status() == "StatusCode.UNAUTHENTICATED"
        key = {"authorization": f"Bearer {key_of(tmp_path, 'infer')}"}
        assert np.array_equal(client.infer("add", inputs(), headers=key).as_numpy("sum"), A + B)
        with pytest.raises(InferenceServerException) as error:
            client.unload_model("add", headers=key)
        assert error.value.status() == "StatusCode.PERMISSION_DENIED"


def test_asynchronously_by_callback(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for _ in range(8):
        client.async_infer("add", inputs(), lambda result, error: answers.put((result, error)))
    for _ in range(8):
        result, error = answers.get(timeout=WITHIN_S)
        assert error is None
        assert np.array_equal(result.as_numpy("sum"), A + B)
    call = client.async_infer(
        "slow",
        [input_of("x", np.array([[20.0]], np.float32))],
        lambda result, error: answers.put((result, error)),
    )
    call.cancel()
    assert answers.get(timeout=WITHIN_S)[1].status() == "StatusCode.CANCELLED"


def test_a_stream_answers_in_order_and_outlives_errors(
    client: triton.InferenceServerClient,
) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(100):
        model = "nowhere" if number == 50 else "same_float32"
        client.async_stream_infer(
            model, [input_of("x", np.full((1, 1000), number, np.float32))], request_id=str(number)
        )
    for number in range(100):
        result, error = answers.get(timeout=WITHIN_S)
        if number == 50:
            assert "nowhere" in str(error)
            continue
        assert error is None
        assert (result.get_response().id, float(result.as_numpy("y")[0, 0])) == (
            str(number),
            number,
        )
        assert result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def test_the_asyncio_client(server: Server) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(server.rpc) as client:
            assert await client.is_server_ready()
            assert await client.is_model_ready("add")
            assert (await client.get_model_config("add", as_json=True))["config"][
                "max_batch_size"
            ] == 8
            answers = await asyncio.gather(
                *(client.infer("add", inputs(), request_id=str(number)) for number in range(16))
            )
            assert [answer.get_response().id for answer in answers] == [
                str(number) for number in range(16)
            ]
            assert all(np.array_equal(answer.as_numpy("sum"), A + B) for answer in answers)
            with pytest.raises(InferenceServerException, match="nowhere"):
                await client.infer("nowhere", inputs())

            async def requests() -> Any:
                for number in range(20):
                    yield {"model_name": "add", "inputs": inputs(), "request_id": str(number)}

            numbers = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                numbers.append(int(result.get_response().id))
            assert numbers == list(range(20))

    asyncio.run(run())


@pytest.mark.parametrize("first", ["tritonclient.grpc", "service.grpc.server"])
def test_the_client_and_the_server_live_in_one_process(first: str) -> None:
    """Both have messages of the same names. In a process of its own, so that the order of the
    imports is this.
    """
    program = f"""
    import {first}
    import asyncio, tempfile
    from pathlib import Path
    import numpy as np
    import tritonclient.grpc, tritonclient.grpc.aio
    from service.grpc.server import rpc_server
    from tests.service.builders.app import opened_desk
    from tests.service.builders.serving import DoubleServing

    async def run():
        home = Path(tempfile.mkdtemp())
        async with opened_desk(home, port=0) as desk, rpc_server(desk.service, None) as rpc:
            desk.service.serving = DoubleServing()
            async with tritonclient.grpc.aio.InferenceServerClient(rpc.address) as client:
                x = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
                x.set_data_from_numpy(np.ones((1, 2), np.float32))
                print((await client.infer("same_float32", [x])).as_numpy("y"))

    asyncio.run(run())
    """
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "[[1. 1.]]" in result.stdout.splitlines()  # the app's own lines of the log are beside it


def test_the_double_has_all_dtypes() -> None:
    assert set(DATATYPES.values()) == set(DTYPES)
