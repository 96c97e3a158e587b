"""Inference over HTTP without a client library: forms, sizes, errors, who may, and a client that
goes away.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.app import create_app
from service.jobs.traces import tracing_to
from service.settings import MIB, Settings
from tests.service.builders.app import URL, Desk, known_host
from tests.service.builders.jobs import WITHIN_S, WORKER
from tests.service.builders.serving import MODELS, DoubleServing, serving_models, statistics_of
from tests.service.integration.test_server import until

NPY, NPZ, RAW = "application/x-npy", "application/x-npz", "application/octet-stream"
X = np.arange(8, dtype=np.float32).reshape(2, 4)

Story = Callable[[Desk, DoubleServing], Awaitable[None]]


def at_models(
    home: Path,
    story: Story,
    models: tuple[str, ...] = tuple(MODELS),
    traces: TracerProvider | None = None,
    **settings: Any,
) -> None:
    async def run() -> None:
        serving = DoubleServing({name: MODELS[name] for name in models})
        app = create_app(Settings(home=home, **settings), WORKER, known_host, serving, traces)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url=URL, timeout=WITHIN_S) as client,
        ):
            desk = Desk(app, client)
            await desk.service.started
            await story(desk, serving)

    asyncio.run(run())


def npy(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def loaded(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return np.load(io.BytesIO(answer.content))


def png(width: int, height: int, colour: tuple[int, int, int], form: str = "PNG") -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(stream, form)
    return stream.getvalue()


async def send(
    desk: Desk, model: str, body: bytes, kind: str | None = RAW, query: str = "", **headers: str
) -> httpx.Response:
    request_headers = {
        **({"Content-Type": kind} if kind else {}),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return await desk.client.post(
        f"/models/{model}/infer{query}", content=body, headers=request_headers
    )


def test_json_with_its_timing(tmp_path: Path) -> None:
    async def story(desk: Desk, _: DoubleServing) -> None:
        body = {"inputs": {"a": X.tolist(), "b": [[1, 1, 1, 1], [0, 0, 0, 0]]}, "outputs": ["sum"]}
        answer = await desk.client.post("/models/add/infer", json=body)
        document = answer.json()
        assert document.pop("timing") == {
            "queue_ms": 1.0,
            "copy_in_ms": 2.0,
            "compute_ms": 3.0,
            "copy_out_ms": 4.0,
            "batch_size": 2,
        }
        assert document == {
            "model": "add",
            "version": 2,
            "device": "cpu",
            "outputs": {"sum": [[1, 2, 3, 4], [4, 5, 6, 7]]},
        }
        named = {
            name: answer.headers[f"Crucible-{name}"]
            for name in ("Model", "Version", "Device", "Batch-Size")
        }
        assert named == {"Model": "add", "Version": "2", "Device": "cpu", "Batch-Size": "2"}
        assert (
            answer.headers["Server-Timing"]
            == "queue;dur=1.000, copy_in;dur=2.000, compute;dur=3.000, copy_out;dur=4.000"
        )
        old = await desk.client.post(
            "/models/add/infer?version=1&outputs=difference",
            json={"inputs": {"a": X.tolist(), "b": X.tolist()}},
        )
        assert (old.json()["version"], list(old.json()["outputs"])) == (1, ["difference"])

    at_models(tmp_path, story)


def test_one_model_needs_no_name_and_several_are_listed(tmp_path: Path) -> None:
    async def one(desk: Desk, _: DoubleServing) -> None:
        answer = await desk.client.post("/infer", content=npy(X), headers={"Content-Type": NPY})
        np.testing.assert_array_equal(loaded(answer), X)

    async def several(desk: Desk, _: DoubleServing) -> None:
        answer = await desk.client.post("/infer", content=X.tobytes())
        assert (answer.status_code, answer.json()["error"]) == (
            422,
            "several models are deployed: add, same_float32",
        )

    at_models(tmp_path, one, ("same_float32",), max_infer_bytes=1000)
    at_models(tmp_path, several, ("same_float32", "add"))


def test_raw_bytes_and_their_shape(tmp_path: Path) -> None:
    async def story(desk: Desk, _: DoubleServing) -> None:
        wide = np.random.default_rng(0).standard_normal((2, 3, 224, 224), np.float32)
        for kind in (RAW, None):
            answer = await send(desk, "wide", wide.tobytes(), kind)
            assert answer.content == wide.tobytes()
            assert (answer.headers["Crucible-Dtype"], answer.headers["Crucible-Shape"]) == (
                "float32",
                "2,3,224,224",
            )
        free = await send(desk, "same_float32", X.tobytes())
        assert "does not follow from 32 bytes" in free.json()["error"]
        named = await send(desk, "same_float32", X.tobytes(), query="?shape=2,4")
        assert (named.content, named.headers["Crucible-Shape"]) == (X.tobytes(), "2,4")
        for query, message in (
            ("?shape=2,5", "is 40 bytes, got 32"),
            ("?shape=2,-4", "a list of sizes"),
            ("?shape=1099511627776", "bytes, got 32"),
        ):
            assert (
                message
                in (await send(desk, "same_float32", X.tobytes(), query=query)).json()["error"]
            )
        assert "a multiple of 602112 bytes" in (await send(desk, "wide", b"123")).json()["error"]
        assert (
            "raw bytes can be one input, model 'add' has 2: a, b"
            in (await send(desk, "add", b"123")).json()["error"]
        )
        assert (await send(desk, "scalar", np.float32(3).tobytes())).headers["Crucible-Shape"] == ""

    at_models(tmp_path, story, ("wide", "same_float32", "add", "scalar"))


def test_numpys_files_and_the_form_that_is_accepted(tmp_path: Path) -> None:
    async def story(desk: Desk, _: DoubleServing) -> None:
        np.testing.assert_array_equal(loaded(await send(desk, "same_float32", npy(X), NPY)), X)
        both = await send(desk, "add", npz(a=X, b=X), NPZ)
        assert both.headers["Content-Type"] == NPZ
        np.testing.assert_array_equal(loaded(both)["sum"], 2 * X)
        one = await send(desk, "add", npz(a=X, b=X), NPZ, "?outputs=sum", Accept=NPY)
        np.testing.assert_array_equal(loaded(one), 2 * X)
        two = await send(desk, "add", npz(a=X, b=X), NPZ, Accept=RAW)
        assert (
            two.status_code,
            "can be one output, this answer has 2: sum, difference" in two.json()["error"],
        ) == (422, True)
        text = await send(
            desk, "same_float32", npy(X), NPY, Accept="text/html, application/json;q=0.5"
        )
        assert text.json()["outputs"]["y"] == X.tolist()
        wrong = await send(desk, "same_float32", npy(X.astype(np.float64)), NPY)
        assert "expected float32 (FP32), got float64 (FP64)" in wrong.json()["error"]
        assert (
            "pickled"
            in (await send(desk, "same_float32", npy(np.array([{}], np.object_)), NPY)).json()[
                "error"
            ]
        )
        assert (
            "Content-Type 'text/plain'"
            in (await send(desk, "same_float32", b"1", "text/plain")).json()["error"]
        )

    at_models(tmp_path, story, ("same_float32", "add"))


def test_images(tmp_path: Path) -> None:
    async def story(desk: Desk, _: DoubleServing) -> None:
        for form, kind in (("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")):
            answer = await send(desk, "photos", png(31, 17, (255, 0, 128), form), kind)
            (scores,) = answer.json()["outputs"]["scores"]
            np.testing.assert_allclose(scores, [2, -2, 0], atol=0.05)  # (x / 255 - 0.5) / 0.25
        assert (
            "no readable image"
            in (await send(desk, "photos", b"no image", "image/png")).json()["error"]
        )
        assert (
            "no readable image"
            in (await send(desk, "photos", png(9, 9, (1, 2, 3))[:-30], "image/png")).json()["error"]
        )
        for size in (
            (9000, 9000),
            (1, 3_000_000),
        ):  # a strip would grow to 300 million pixels where its shorter side is made 10 long
            assert (
                await send(desk, "photos", png(*size, (1, 2, 3)), "image/png")
            ).status_code == 413
        assert (
            "does not say how an image"
            in (await send(desk, "add", png(9, 9, (1, 2, 3)), "image/png")).json()["error"]
        )

    at_models(tmp_path, story, ("photos", "add"))


def test_what_is_too_large_before_and_after_it_is_unpacked(tmp_path: Path) -> None:
    import gzip

    async def story(desk: Desk, _: DoubleServing) -> None:
        zeros = np.zeros((1, 3, 224, 224), np.float32)
        for body, kind, encoding in (
            (zeros.tobytes(), RAW, "identity"),
            (gzip.compress(zeros.tobytes()), RAW, "gzip"),
            (npz(x=zeros), NPZ, "identity"),
        ):
            answer = await send(desk, "wide", body, kind, Content_Encoding=encoding)
            assert (answer.status_code, "error" in answer.json()) == (413, True), answer.text
        assert (await send(desk, "wide", b"", RAW, Content_Encoding="br")).status_code == 422

    at_models(tmp_path, story, ("wide",), max_infer_bytes=100_000)


def test_a_body_counts_packed_and_unpacked_until_its_answer(tmp_path: Path) -> None:
    import gzip

    async def story(desk: Desk, _: DoubleServing) -> None:
        zeros = np.zeros((1, 3, 224, 224), np.float32).tobytes()
        budget = desk.service.bytes_in_flight
        with budget.share() as others:
            others.grow(MIB - len(zeros))
            answer = await send(desk, "wide", gzip.compress(zeros), RAW, Content_Encoding="gzip")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        answer = await send(desk, "wide", gzip.compress(zeros), RAW, Content_Encoding="gzip")
        assert (answer.status_code, budget.held) == (200, 0)
        metrics = (await desk.client.get("/metrics")).text
        assert "\ncrucible_bytes_in_flight 0.0\n" in metrics
        assert "\ncrucible_bytes_in_flight_refused_total 1.0\n" in metrics

    at_models(tmp_path, story, ("wide",), max_infer_bytes=MIB, max_bytes_in_flight=MIB)


def test_large_json_is_read_and_written_elsewhere(tmp_path: Path) -> None:
    async def story(desk: Desk, _: DoubleServing) -> None:
        array = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
        body = orjson.dumps(
            {"inputs": {"x": array}, "timeout_s": 20.0}, option=orjson.OPT_SERIALIZE_NUMPY
        )
        answers = await asyncio.gather(
            *(send(desk, "wide", body, "application/json") for _ in range(4))
        )
        for answer in answers:
            np.testing.assert_array_equal(
                np.array(answer.json()["outputs"]["y"], np.float32), array
            )
        assert (
            "is not JSON"
            in (await send(desk, "wide", body[:-1], "application/json")).json()["error"]
        )
        assert (await send(desk, "wide", body.replace(b'"x"', b'"z"'), "application/json")).json()[
            "error"
        ] == "no input 'z'"
        nan = await send(
            desk, "broken", np.zeros((5000, 4), np.float32).tobytes(), Accept="application/json"
        )
        assert "20000 of 20000 values that are not finite" in nan.json()["error"]
        assert "application/x-npz" in nan.json()["next"]

    at_models(tmp_path, story, ("wide", "broken"))


def test_a_helper_that_dies_is_replaced(tmp_path: Path) -> None:
    import psutil

    async def story(desk: Desk, _: DoubleServing) -> None:
        assert (await send(desk, "same_float32", npz(x=X), NPZ)).status_code == 200
        (helper,) = [
            child
            for child in psutil.Process().children()
            if "service.offload.worker" in child.cmdline()
        ]
        helper.suspend()
        waiting = asyncio.create_task(send(desk, "same_float32", npz(x=X), NPZ))
        while desk.service.helpers._idle:  # until the request has taken it
            await asyncio.sleep(0)
        helper.kill()
        answer = await waiting
        assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)
        assert (await send(desk, "same_float32", npz(x=X), NPZ)).status_code == 200

    at_models(tmp_path, story, ("same_float32",))


def test_who_may(tmp_path: Path) -> None:
    async def story(desk: Desk, _: DoubleServing) -> None:
        assert (await send(desk, "theirs", X.tobytes())).status_code == 401
        desk.client.headers.update(desk.key("compile"))
        assert "no scope 'infer'" in (await send(desk, "theirs", X.tobytes())).json()["error"]
        desk.client.headers.update(desk.key("infer"))
        assert (await send(desk, "theirs", X.tobytes())).status_code == 404
        assert (await desk.client.post("/v2/repository/models/theirs/load")).status_code == 403
        desk.client.headers.update(desk.key("admin"))
        assert (await send(desk, "theirs", X.tobytes())).content == X.tobytes()
        assert (await desk.client.post("/v2/repository/models/theirs/unload")).status_code == 200

    at_models(tmp_path, story, ("theirs",), keys_required=True)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/nothing", 404),
        ("GET", "/v2/models/add/versions/x", 422),
        ("GET", "/v2/models/add/infer", 405),
        ("GET", "/infer", 405),
        ("POST", "/v2", 405),
        ("POST", "/models//infer", 404),
        ("POST", "/models/a/b/infer", 404),
        ("POST", "/models/add/infer?version=0", 422),
        ("POST", "/models/add/infer?timeout_s=nan", 422),
        ("POST", "/v2/models/add/infer", 422),
        ("POST", "/v2/models/failed/infer", 422),
        ("GET", "/v2/models/failed/ready", 503),
    ],
)
def test_every_error_has_one_form(tmp_path: Path, method: str, path: str, status: int) -> None:
    async def story(desk: Desk, _: DoubleServing) -> None:
        answer = await desk.client.request(method, path)
        assert (answer.status_code, bool(answer.json()["error"])) == (status, True), answer.text

    at_models(tmp_path, story)


def test_a_request_is_counted_under_its_route_whichever_way_it_takes(tmp_path: Path) -> None:
    async def story(desk: Desk, _: DoubleServing) -> None:
        for path in (
            "/models/same_float32/infer",
            "/models/same_float32/infer?shape=2,4",
            "/models/nothing/infer",
            "/infer",
        ):
            await desk.client.post(path, content=npy(X), headers={"Content-Type": NPY})
        text = (await desk.client.get("/metrics")).text
        assert (
            'crucible_http_requests_total{method="POST",route="/models/{name}/infer",'
            'status="404"} 1.0'
        ) in text
        assert (
            'crucible_http_requests_total{method="POST",route="/models/{name}/infer",'
            'status="200"} 2.0'
        ) in text
        assert 'crucible_http_requests_total{method="POST",route="/infer",status="200"} 1.0' in text

    at_models(tmp_path, story, ("same_float32",))


def test_the_way_through_the_router_answers_alike(tmp_path: Path) -> None:
    """With traces FastAPI's router runs the routes, since it makes the spans."""
    answers: list[list[tuple[int, str]]] = []

    async def story(desk: Desk, _: DoubleServing) -> None:
        rows = []
        for path in (
            "/models/same_float32/infer?shape=2,4",
            "/models/same_float32/infer?shape=2,5",
            "/models/same_float32/infer?version=x&timeout_s=y",
            "/models/add/infer?version=1",
            "/models/nothing/infer",
            "/v2/models/same_float32/infer",
            "/v2/models/same_float32/infer?version=9",
            "/v2/models/same_float32/versions/x/infer",
        ):
            answer = await desk.client.post(path, content=X.tobytes())
            rows.append((answer.status_code, answer.text))
        answers.append(rows)

    at_models(tmp_path, story)
    exporter = InMemorySpanExporter()
    at_models(tmp_path, story, traces=tracing_to(SimpleSpanProcessor(exporter)))
    assert answers[0] == answers[1]
    assert [status for status, _ in answers[0]] == [200, 422, 422, 422, 404, 422, 404, 422]
    refusal = orjson.loads(answers[0][2][1])["error"]
    assert ("query version: " in refusal, "query timeout_s: " in refusal) == (True, True)
    names = {span.name for span in exporter.get_finished_spans()}
    assert {"POST /models/{name}/infer", "POST /v2/models/{name}/versions/{version}/infer"} <= names


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/infer", ["outputs", "shape", "version", "timeout_s"]),
        ("/models/{name}/infer", ["name", "outputs", "shape", "version", "timeout_s"]),
        ("/v2/models/{name}/infer", ["name", "version"]),
        ("/v2/models/{name}/versions/{version}/infer", ["name", "version"]),
    ],
)
def test_routes_that_bypass_fastapi_are_documented(
    tmp_path: Path, path: str, parameters: list[str]
) -> None:
    operation = create_app(Settings(home=tmp_path)).openapi()["paths"][path]["post"]
    assert [parameter["name"] for parameter in operation["parameters"]] == parameters
    assert "application/octet-stream" in operation["requestBody"]["content"]
    assert {"200", "4XX", "5XX"} == set(operation["responses"])


def test_a_request_whose_client_has_gone_is_dropped(tmp_path: Path) -> None:
    """Two wait behind one that computes; the sockets of both are closed."""
    import socket

    with serving_models(tmp_path) as server:
        body = np.array([[1.0]], np.float32).tobytes()
        head = (
            "POST /models/slow/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length:"
            f" {len(body)}\r\n\r\n".encode()
        )
        sockets = [socket.create_connection(server.address) for _ in range(3)]
        for connection in sockets:
            connection.sendall(head + body)
        for connection in sockets[1:]:
            connection.close()
        until(lambda: server.log().count('"client gone"') == 2)
        assert sockets[0].recv(100).startswith(b"HTTP/1.1 200")
        sockets[0].close()
        statistics = httpx.get(f"{server.url}/v2/models/slow/stats").json()["model_stats"][0]
        assert statistics["execution_count"] == 1
        assert (
            httpx.post(
                f"{server.url}/models/slow/infer", content=np.zeros((1, 1), np.float32).tobytes()
            ).status_code
            == 200
        )


def test_the_double_counts_what_it_drops() -> None:
    from service.auth import LOCAL
    from service.inference import InferRequest

    async def run() -> None:
        double = DoubleServing()
        request = InferRequest(LOCAL, "slow", {"x": np.full((1, 1), 0.05, np.float32)})
        first, second = (asyncio.create_task(double.infer(request)) for _ in range(2))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([first, second])
        statistics = statistics_of(double, LOCAL, "slow")
        assert (statistics.succeeded.count, statistics.dropped) == (1, 1)

    asyncio.run(run())
