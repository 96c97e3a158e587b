"""The whole way on a real server process with real engines: from a report to answers over every
wire, changes under load, and a worker's death.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from numpy.typing import NDArray
from onnx import TensorProto, helper

from pipeline.core.artifacts import Engine
from service.jobs.store import JobStore
from service.storage.database import Database
from service.storage.layout import Folders
from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.tensors import WIRES, Request, ask, key_of
from tests.service.cli.test_models import reports
from tests.service.integration.test_server import Server, serving, until
from tests.service.serving.engines import WIDTH, direct, engine_of, linear, marked, processes_of
from tests.service.serving.models import ended_job

Array = NDArray[Any]
X = marked(1, rows=2)
NAME = f"story-{os.getpid()}"


def expected(folder: Path, layers: int, x: Array) -> Array:
    """What a session of our own answers."""
    y: Array = direct(linear(folder / "own", layers=layers), {"x": x})["y"]
    return y


def json_of(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    if status >= 400:
        assert isinstance(answer.json()["error"], str)
    return answer.json() if answer.content else None


def promoted(web: httpx.Client, report: str) -> Any:
    return json_of(web.post(f"/models/{NAME}/promote", json={"report": report}))


def test_from_a_report_to_answers_in_every_form(tmp_path: Path) -> None:
    (report,) = reports(tmp_path, 1)
    want = expected(tmp_path, 1, X)
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=WITHIN_S) as web:
        json_of(web.post("/infer", content=X.tobytes()), 404)
        promoted(web, report)
        json_of(web.post(f"/models/{NAME}/infer", content=X.tobytes()), 404)
        view = json_of(web.put(f"/models/{NAME}/deployment", json={}))
        assert (view["deployment"]["state"], view["current"]["batch"]["proved"]) == ("ready", True)
        json_of(web.get("/readyz"))

        for path in ("/infer", f"/models/{NAME}/infer", f"/models/{NAME}/infer?version=1"):
            raw = web.post(path, content=X.tobytes())
            assert np.allclose(np.frombuffer(raw.content, np.float32).reshape(X.shape), want)
            assert (raw.headers["Crucible-Version"], raw.headers["Crucible-Batch-Size"]) == (
                "1",
                "2",
            )
            assert all(
                f"{stage};dur=" in raw.headers["Server-Timing"]
                for stage in ("queue", "copy_in", "compute", "copy_out")
            )
        file = io.BytesIO()
        np.save(file, X)
        got = web.post(
            "/infer", content=file.getvalue(), headers={"Content-Type": "application/x-npy"}
        ).content
        assert np.allclose(np.load(io.BytesIO(got)), want)
        document = json_of(web.post("/infer", json={"inputs": {"x": X.tolist()}}))
        assert np.allclose(document["outputs"]["y"], want)
        assert (document["version"], document["timing"]["batch_size"]) == (1, 2)
        for client in (triton_http, triton_grpc):
            assert np.allclose(over_triton(client, server), want)

        figures = web.get("/metrics").text
        labels = f'model="{NAME}",version="1"'
        assert (
            f'crucible_inference_requests_total{{model="{NAME}",state="executed",version="1"}} 7.0'
            in figures
        )
        assert f"crucible_inference_queue{{{labels}}} 0.0" in figures
        rows = "crucible_inference_batch_rows"
        assert f'{rows}_sum{{device="cpu",{labels}}} 14.0' in figures
        assert f'{rows}_bucket{{device="cpu",le="1.0",{labels}}} 0.0' in figures
        assert f'{rows}_bucket{{device="cpu",le="2.0",{labels}}} 7.0' in figures
        for stage in ("queue", "copy_in", "compute", "copy_out"):
            assert figure(web, "crucible_inference_stage_seconds_count", stage=stage) == 7
            assert 0 <= figure(web, "crucible_inference_stage_seconds_sum", stage=stage) < WITHIN_S
        assert figure(web, "crucible_inference_stage_seconds_sum", stage="compute") > 0
        assert json_of(web.get(f"/models/{NAME}/shapes"))["shapes"] == [
            {"sizes": {"batch": 2}, "requests": 7}
        ]
        json_of(web.delete(f"/models/{NAME}/deployment"), 204)
        json_of(web.post("/infer", content=X.tobytes()), 404)
        assert server.end() == 0


def over_triton(module: Any, server: Server) -> Array:
    """What tritonclient gets, after it has asked whether there is anything."""
    address = server.url.removeprefix("http://") if module is triton_http else server.rpc
    with closing(module.InferenceServerClient(address)) as client:
        assert client.is_server_ready()
        assert client.is_model_ready(NAME)
        tensor = module.InferInput("x", list(X.shape), "FP32")
        tensor.set_data_from_numpy(X)
        output: Array = client.infer(NAME, [tensor]).as_numpy("y")
        return output


def figure(web: httpx.Client, name: str, **labels: str) -> float:
    """A value in /metrics of the model's first version."""
    label_text = ",".join(
        f'{label}="{value}"'
        for label, value in sorted({"model": NAME, "version": "1", **labels}.items())
    )
    (line,) = [
        line
        for line in web.get("/metrics").text.splitlines()
        if line.startswith(f"{name}{{{label_text}}} ")
    ]
    return float(line.split()[-1])


REFUSED: list[tuple[str, str, dict[str, Any], int]] = [
    ("POST", "/infer", {"content": b"123"}, 422),
    ("POST", "/infer?shape=0,4611686018427387904", {"content": b""}, 422),
    ("POST", "/infer?shape=137438953472,8", {"content": X.tobytes()}, 422),  # 4 TB
    ("POST", f"/models/{NAME}/infer", {"content": X.astype(np.float64).tobytes() + b"1"}, 422),
    (
        "POST",
        f"/models/{NAME}/infer",
        {"content": marked(1, rows=17).tobytes()},
        422,
    ),  # the profile ends at 16
    ("POST", f"/models/{NAME}/infer?version=2", {"content": b""}, 404),
    ("POST", f"/models/{NAME}/infer?timeout_s=nan", {"content": X.tobytes()}, 422),
    ("POST", f"/models/{NAME}/infer", {"json": {"inputs": {"z": [[1]]}}}, 422),
    (
        "POST",
        f"/models/{NAME}/infer",
        {"json": {"inputs": {"x": [[1] * 8]}, "outputs": ["z"]}},
        422,
    ),
    ("POST", "/models/..%2F..%2Fetc/infer", {"content": b""}, 404),
    ("POST", "/v2/models/other/infer", {"json": {"inputs": []}}, 404),
    ("POST", f"/v2/models/{NAME}/versions/..%2F1/infer", {"content": b"{}"}, 404),
    ("POST", f"/v2/models/{NAME}/versions/-1/infer", {"content": b"{}"}, 422),
    (
        "POST",
        f"/v2/models/{NAME}/infer",
        {"content": b"{}", "headers": {"Inference-Header-Content-Length": "-1"}},
        422,
    ),
    (
        "POST",
        f"/v2/models/{NAME}/infer",
        {"content": b"{}", "headers": {"Inference-Header-Content-Length": "99"}},
        422,
    ),
    (
        "POST",
        f"/v2/models/{NAME}/infer",
        {"content": b"{}", "headers": {"Content-Encoding": "br"}},
        422,
    ),
    ("GET", f"/v2/models/{NAME}/infer", {}, 405),
    ("POST", "/v2/repository/models/..%2F1/load", {}, 404),
    ("POST", "/v2/repository/models/other/unload", {}, 404),
    ("PUT", "/models/.hidden/deployment", {"json": {}}, 422),
    (
        "PUT",
        f"/models/{NAME}/deployment",
        {"content": b"y\xffj", "headers": {"Content-Type": "application/json"}},
        422,
    ),
    (
        "POST",
        f"/models/{NAME}/promote",
        {"content": b"\xff", "headers": {"Content-Type": "application/json"}},
        422,
    ),
    ("PUT", f"/models/{NAME}/deployment", {"json": {"device": "gpu:0"}}, 422),
    ("PUT", f"/models/{NAME}/deployment", {"json": {"version": 7}}, 404),
    ("PUT", f"/models/{NAME}/deployment", {"json": {"max_batch": 17}}, 422),
]


def test_all_that_is_refused_says_so_in_one_form_and_harms_nobody(tmp_path: Path) -> None:
    (report,) = reports(tmp_path, 1)
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=WITHIN_S) as web:
        promoted(web, report)
        json_of(web.put(f"/models/{NAME}/deployment", json={}))
        workers = processes_of(f"serve-{NAME}-")
        for method, path, request, status in REFUSED:
            assert json_of(web.request(method, path, **request), status)["error"], path
        for wire in WIRES:
            assert (
                ask(server, wire, Request(NAME, X, shape=(2**37, 8))).code
                == "service.unprocessable"
            )
        assert np.allclose(
            np.frombuffer(web.post("/infer", content=X.tobytes()).content, np.float32),
            expected(tmp_path, 1, X).ravel(),
        )
        assert processes_of(f"serve-{NAME}-") == workers  # none of them has cost a worker


def test_a_client_that_sends_slowly_keeps_nobody_waiting(tmp_path: Path) -> None:
    (report,) = reports(tmp_path, 1)
    body = X.tobytes()
    head = (
        f"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection:"
        " close\r\n\r\n".encode()
    )
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=WITHIN_S) as web:
        promoted(web, report)
        json_of(web.put(f"/models/{NAME}/deployment", json={}))
        slow = [socket.create_connection(server.address, WITHIN_S) for _ in range(20)]
        for client in slow:
            client.sendall(head + body[:-1])
        assert web.post("/infer", content=body).status_code == 200
        assert (
            figure(web, "crucible_inference_requests_total", state="executed") == 1
        )  # theirs have not come
        for client in slow:
            client.sendall(body[-1:])
            with client.makefile("rb") as answer:
                assert np.allclose(
                    np.frombuffer(answer.read()[-X.nbytes :], np.float32),
                    expected(tmp_path, 1, X).ravel(),
                )
            client.close()


class Load:
    """Requests that go on beside the test, each with its own marker; what came of them, by the code
    of the refusal.
    """

    def __init__(self, server: Server, answers: dict[float, tuple[Array, Array]]) -> None:
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._server, self._answers, self._ended = server, answers, threading.Event()

    @contextmanager
    def going(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._ask, args=(wire, number))
            for number, wire in enumerate(WIRES * 2)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def _ask(self, wire: str, number: int) -> None:
        while not self._ended.is_set():
            answer = ask(self._server, wire, Request(NAME, marked(number)))
            self.codes[answer.code] += 1
            if answer.y is not None and not any(
                np.allclose(answer.y, each) for each in self._answers[number]
            ):
                self.wrong.append(f"{wire}: {answer.y}")


def descriptors(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_answers_match_requests_through_changes_under_load_and_a_dead_worker(
    tmp_path: Path,
) -> None:
    first, second = reports(tmp_path, 1, 2)
    answers: dict[float, tuple[Array, Array]] = {
        n: (expected(tmp_path, 1, marked(n)), expected(tmp_path, 2, marked(n)))
        for n in range(2 * len(WIRES))
    }
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=WITHIN_S) as web:
        promoted(web, first)
        json_of(web.put(f"/models/{NAME}/deployment", json={}))
        switching = Load(server, answers)
        with switching.going():
            promoted(web, second)
            json_of(web.post(f"/models/{NAME}/rollback"))
            json_of(web.put(f"/models/{NAME}/deployment", json={"instances": 2}))
            json_of(web.post(f"/v2/repository/models/{NAME}/load"))
            until(lambda: switching.codes[""] > 100)
        assert (set(switching.codes), switching.wrong) == ({""}, [])  # none was lost

        dying = Load(server, answers)
        with dying.going():
            until(lambda: dying.codes[""] > 20)
            os.kill(processes_of(f"serve-{NAME}-")[-1], signal.SIGKILL)
            promoted(web, second)  # while one of two workers is gone
            before = dying.codes[""]
            until(lambda: dying.codes[""] > before + 20)
            json_of(web.delete(f"/models/{NAME}/deployment"), 204)
            until(lambda: dying.codes["service.not_found"] > 0)
        assert dying.codes.keys() <= {"", "service.unavailable", "service.not_found"}
        assert dying.codes["service.unavailable"] <= len(
            answers
        )  # those that the worker had, and that drained
        assert dying.wrong == []
        assert processes_of(f"serve-{NAME}-") == []

        settled = descriptors(server)
        for _ in range(3):
            json_of(web.put(f"/models/{NAME}/deployment", json={"instances": 2}))
            assert ask(server, "http", Request(NAME, marked(0))).code == ""
            json_of(web.delete(f"/models/{NAME}/deployment"), 204)
        until(lambda: descriptors(server) <= settled)
        assert "Traceback" not in server.log()


@contextmanager
def held(processes: list[int]) -> Iterator[None]:
    """Processes that stand still meanwhile."""
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def sluggish(folder: Path) -> Engine:
    """y = x for positive x, after some 50 ms of small steps."""
    row = (TensorProto.FLOAT, ["batch", WIDTH])
    steps = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Abs", ["v"], ["w"])]
    given = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        helper.make_tensor_value_info("v", *row),
    ]
    returned = [
        helper.make_tensor_value_info("on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("w", *row),
    ]
    body = helper.make_graph(steps, "steps", given, returned)
    return engine_of(
        folder,
        [helper.make_node("Loop", ["turns", "", "x"], ["y"], body=body)],
        {"x": row},
        {"y": row},
        {"turns": np.array(20_000)},
    )


def test_clients_that_go_are_dropped_and_those_that_wait_at_the_end_are_answered(
    tmp_path: Path,
) -> None:
    with closing(Database(tmp_path / "crucible.db")) as database:
        report = ended_job(
            Folders(tmp_path), JobStore(database), engine=sluggish(tmp_path / "engines")
        )
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=WITHIN_S) as web:
        promoted(web, report)
        json_of(web.put(f"/models/{NAME}/deployment", json={"max_batch": 4}))
        body = marked(1).tobytes()
        length = f"Content-Length: {len(body)}"
        head = f"POST /infer HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()
        sockets = [socket.create_connection(server.address) for _ in range(200)]
        for connection in sockets:
            connection.sendall(head + body)

        def count(state: str) -> float:
            return figure(web, "crucible_inference_requests_total", state=state)

        def batches() -> int:
            (statistics,) = json_of(web.get(f"/v2/models/{NAME}/stats"))["model_stats"]
            return int(statistics["execution_count"])

        until(
            lambda: figure(web, "crucible_inference_queue") + count("executed") >= 200 - 2 * 4
        )  # two batches may be with the worker
        for connection in sockets:
            connection.close()
        until(
            lambda: figure(web, "crucible_inference_queue") == 0
        )  # on a busy host a batch of theirs may go out before the last one is missed
        before = batches()
        assert web.post("/infer", content=marked(7).tobytes()).content == marked(7).tobytes()
        assert batches() - before <= 3  # the two that the worker may have had, and its own
        until(lambda: count("executed") + count("dropped") == 201)
        assert count("dropped") > 50

        asking = [(wire, Request(NAME, marked(number))) for number, wire in enumerate(WIRES * 8)]
        with ThreadPoolExecutor(len(asking)) as pool:
            with held(
                processes_of(f"serve-{NAME}-")
            ):  # else all may be answered before any is seen to wait
                answers = [pool.submit(ask, server, wire, request) for wire, request in asking]
                until(lambda: figure(web, "crucible_inference_queue") >= len(asking) - 2 * 4)
                server.process.send_signal(signal.SIGTERM)
            for (_, request), answer in zip(asking, answers, strict=True):
                assert answer.result().code == ""
                assert np.array_equal(answer.result().y, request.array)  # type: ignore[arg-type]
        assert server.process.wait(WITHIN_S) == 0


def test_models_answer_until_a_load_balancer_knows_that_the_server_goes(tmp_path: Path) -> None:
    (report,) = reports(tmp_path, 1)
    statuses: list[tuple[int, int]] = []

    def look(web: httpx.Client) -> None:
        while True:
            statuses.append(
                (
                    web.get("/readyz").status_code,
                    web.post("/infer", content=X.tobytes()).status_code,
                )
            )

    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=WITHIN_S) as web:
        promoted(web, report)
        json_of(web.put(f"/models/{NAME}/deployment", json={}))
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):  # until nobody listens
            look(web)
        assert server.process.wait(WITHIN_S) == 0
    assert (503, 200) in statuses
    assert {status for _, status in statuses} <= {200, 503}
    assert processes_of(f"serve-{NAME}-") == []


PATHS = [
    f"/v2/models/{NAME}{rest}"
    for rest in ("", "/ready", "/config", "/stats", "/versions/1", "/versions/1/stats")
]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that needs keys, with a model of the owner `local` that is loaded."""
    home = tmp_path_factory.mktemp("locked")
    (report,) = reports(home, 1)
    with serving(home, keys_required=True) as server:
        with httpx.Client(
            base_url=server.url, headers=bearer(server, "admin"), timeout=WITHIN_S
        ) as web:
            promoted(web, report)
            json_of(web.put(f"/models/{NAME}/deployment", json={}))
        yield server


def bearer(server: Server, scope: str, owner: str = "") -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(server.home, scope, owner=owner)}"}


def test_nothing_is_told_of_another_owners_model_and_nothing_without_a_key(locked: Server) -> None:
    with httpx.Client(base_url=locked.url, timeout=WITHIN_S) as web:
        mine, theirs = bearer(locked, "infer"), bearer(locked, "infer", owner="somebody")
        for path in (*PATHS, f"/models/{NAME}", f"/models/{NAME}/shapes"):
            json_of(web.get(path), 401)
            json_of(web.get(path, headers=theirs), 404)
            json_of(web.get(path, headers=mine))
        assert json_of(web.post("/v2/repository/index", headers=theirs)) == []
        assert json_of(web.get("/v2/models/stats", headers=theirs)) == {"model_stats": []}
        assert json_of(web.get("/models", headers=theirs)) == {"models": []}
        json_of(web.post("/infer", content=X.tobytes(), headers=theirs), 404)
        assert len(json_of(web.post("/v2/repository/index", headers=mine))) == 1


def test_only_admins_load_and_unload_over_either_wire(locked: Server) -> None:
    key = bearer(locked, "infer")
    with httpx.Client(base_url=locked.url, headers=key, timeout=WITHIN_S) as web:
        for action in ("load", "unload"):
            json_of(web.post(f"/v2/repository/models/{NAME}/{action}"), 403)
    headers = {name.lower(): value for name, value in key.items()}
    with closing(triton_grpc.InferenceServerClient(locked.rpc)) as client:
        for act in (client.load_model, client.unload_model):
            with pytest.raises(triton_grpc.InferenceServerException, match="PERMISSION_DENIED"):
                act(NAME, headers=headers)
    assert ask(locked, "grpc", Request(NAME, marked(1), key_of(locked.home, "infer"))).code == ""
