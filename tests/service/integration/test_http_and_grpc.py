"""What HTTP and gRPC must do alike: keys, limits, refusals, time-outs, clients that go, and the end
of the server.
"""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from service.grpc import grpc_service_pb2 as pb
from service.storage.database import Database
from service.storage.keys import Keys
from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.builders.tensors import (
    UNLIMITED,
    WIRES,
    Outcome,
    Request,
    ask,
    key_of,
    message_of,
    metadata_of,
    method_of,
)
from tests.service.integration.test_server import MB, Server, until

ROW = [[1.0, 2.0, 3.0, 4.0]]
both = pytest.mark.parametrize("wire", WIRES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_models(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Needs keys, and takes 2 MB."""
    with serving_models(
        tmp_path_factory.mktemp("locked"), keys_required=True, max_infer_bytes=2 * MB
    ) as server:
        yield server


def executions(server: Server, model: str) -> int:
    return int(
        httpx.get(f"{server.url}/v2/models/{model}/stats").json()["model_stats"][0][
            "execution_count"
        ]
    )


def reached(server: Server, model: str, event: str) -> int:
    """How many requests of an observed model wait or waited, or compute or computed."""
    return server.log().count(json.dumps({"event": event, "model": model}))


class Asking(threading.Thread):
    """A request that is under way."""

    def __init__(self, server: Server, wire: str, request: Request) -> None:
        super().__init__(daemon=True)
        self.outcome = Outcome("not answered")
        self._given = (server, wire, request)
        self.start()

    def run(self) -> None:
        self.outcome = ask(*self._given)

    def ended(self) -> Outcome:
        self.join(WITHIN_S)
        assert not self.is_alive()
        return self.outcome


@both
def test_keys_scopes_and_owners(locked: Server, wire: str) -> None:
    home = locked.home
    keys = {scope: key_of(home, scope) for scope in ("infer", "compile", "admin")}
    expected = {
        "": "service.unauthorized",
        f"cru_0123456789_{'A' * 43}": "service.unauthorized",
        keys["compile"]: "service.forbidden",
    }
    for key in (*expected, keys["infer"], keys["admin"]):
        assert ask(locked, wire, Request("same_float32", ROW, key)).code == expected.get(key, "")
    got = {
        owner: ask(locked, wire, Request("theirs", ROW, key_of(home, "infer", owner=owner))).code
        for owner in ("local", "somebody")
    }
    assert got == {"local": "service.not_found", "somebody": ""}
    assert ask(locked, wire, Request("theirs", ROW, keys["admin"])).code == ""


@both
def test_a_wrong_key_is_refused_before_the_tensors_are_read(locked: Server, wire: str) -> None:
    before = locked.received()
    try:
        refused = ask(
            locked, wire, Request("same_float32", np.zeros((1, 10 * MB), np.float32), key="no key")
        )
        assert refused.code == "service.unauthorized"
    except httpx.WriteError:  # answered, and then the connection was closed
        assert wire == "http"
    assert locked.received() - before < 6 * MB  # of 40: what lay in the sockets' buffers


@both
@pytest.mark.parametrize("gzip", [False, True])
def test_the_limit_is_that_of_the_unpacked_request(locked: Server, wire: str, gzip: bool) -> None:
    key = key_of(locked.home, "infer")
    fits, over = (np.zeros((1, size // 4), np.float32) for size in (2 * MB - 1000, 2 * MB + 1000))
    assert ask(locked, wire, Request("same_float32", fits, key, gzip=gzip)).code == ""
    assert (
        ask(locked, wire, Request("same_float32", over, key, gzip=gzip)).code
        == {"http": "service.too_large", "grpc": "RESOURCE_EXHAUSTED"}[wire]
    )


@both
def test_64_mb_go_in_and_out(server: Server, wire: str) -> None:
    values = np.arange(16 * MB, dtype=np.float32).reshape(4, -1)
    answer = ask(server, wire, Request("same_float32", values))
    assert answer.y is not None
    assert np.array_equal(answer.y, values)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request("nowhere", ROW), "service.not_found"),
        (Request("add", ROW, version="7"), "service.not_found"),
        (Request("add", ROW, version="latest"), "service.unprocessable"),
        (Request("failed", ROW), "service.unavailable"),
        (Request("add", ROW), "service.unprocessable"),
        (Request("same_int8", ROW), "service.unprocessable"),
        (Request("slow", ROW), "service.unprocessable"),
        (Request("same_float32", ROW, shape=(2, 4)), "service.unprocessable"),
        (Request("same_float32", ROW, shape=(2**20, 2**18)), "service.unprocessable"),
        (Request("same_float32", ROW, shape=(2**62, 2**62, 2**62)), "service.unprocessable"),
        (Request("same_float32", ROW, shape=(-1, 4)), "service.unprocessable"),
        (Request("same_float32", ROW, datatype="BYTES"), "service.unprocessable"),
        (Request("same_float32", ROW, datatype="FP8"), "service.unprocessable"),
        (Request("same_float32", ROW, timeout_us=-1), "service.unprocessable"),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else f"{value.model}-{value.version or value.shape or value.datatype}"
    ),
)
def test_refusals_have_the_same_code(server: Server, request_: Request, code: str) -> None:
    over_http, over_grpc = (ask(server, wire, request_) for wire in WIRES)
    assert (over_http.code, over_grpc.code) == (code, code)
    assert over_http.retry_after == over_grpc.retry_after


@both
def test_a_full_queue_says_when_to_try_again(server: Server, wire: str) -> None:
    before = reached(server, "narrow", "computes")
    running = [Asking(server, wire, Request("narrow", [[4.0]]))]
    until(lambda: reached(server, "narrow", "computes") > before)
    running += [Asking(server, wire, Request("narrow", [[0.0]])) for _ in range(2)]
    ended = [call.ended() for call in running]
    assert sorted(outcome.code for outcome in ended) == ["", "", "service.too_many"]
    assert {outcome.retry_after for outcome in ended if outcome.code} == {"1"}


@both
def test_the_requests_own_time_out(server: Server, wire: str) -> None:
    assert (
        ask(server, wire, Request("slow", [[30.0]], timeout_us=100_000)).code == "service.timed_out"
    )


@both
def test_a_client_that_goes_is_dropped_from_the_queue(server: Server, wire: str) -> None:
    before = executions(server, "slow")
    computing, waiting = (reached(server, "slow", event) for event in ("computes", "waits"))
    running = Asking(server, wire, Request("slow", [[4.0]]))
    until(lambda: reached(server, "slow", "computes") > computing)
    if wire == "grpc":
        with grpc.insecure_channel(server.rpc) as channel:
            call = method_of(channel, "ModelInfer").future(message_of(Request("slow", [[2.0]])))
            until(lambda: reached(server, "slow", "waits") > waiting + 1)
            assert call.cancel()
    else:
        impatience = httpx.Timeout(WITHIN_S, read=0.5)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/models/slow/infer",
                json={"inputs": {"x": [[2.0]]}},
                timeout=impatience,
            )
    assert running.ended().code == ""
    assert ask(server, wire, Request("slow", [[0.0]])).code == ""
    assert executions(server, "slow") - before == 2


def test_a_deadline_drops_the_request_and_is_told(server: Server) -> None:
    before = executions(server, "slow")
    with grpc.insecure_channel(server.rpc) as channel, pytest.raises(grpc.RpcError) as error:
        method_of(channel, "ModelInfer")(message_of(Request("slow", [[30.0]])), timeout=0.3)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: '"DEADLINE_EXCEEDED"' in server.log())
    assert ask(server, "grpc", Request("slow", [[0.0]])).code == ""
    assert executions(server, "slow") - before == 1


@both
def test_the_request_id_is_given_back_and_logged(server: Server, wire: str) -> None:
    assert (
        ask(server, wire, Request("same_float32", ROW, request_id=f"mine-{wire}")).request_id
        == f"mine-{wire}"
    )
    refused = ask(server, wire, Request("nowhere", ROW, request_id="not a good id"))
    assert refused.request_id not in (None, "not a good id")
    until(lambda: f'"{refused.request_id}"' in server.log())  # written when the answer is out
    lines = {
        line["request"]: line
        for line in map(json.loads, server.log().splitlines())
        if line["event"] == "request"
    }
    done, failed = lines[f"mine-{wire}"], lines[str(refused.request_id)]
    assert (done["status"], failed["status"]) == {"http": (200, 404), "grpc": ("OK", "NOT_FOUND")}[
        wire
    ]
    assert done["bytes"] > 16
    assert done["path"].endswith({"http": "/infer", "grpc": "/ModelInfer"}[wire])


@both
def test_what_is_under_way_at_the_end_is_answered(tmp_path: Path, wire: str) -> None:
    with serving_models(tmp_path) as server:
        running = Asking(server, wire, Request("slow", [[3.5]]))
        until(lambda: reached(server, "slow", "computes") > 0)
        server.process.send_signal(signal.SIGTERM)
        assert running.ended().code == ""
        assert server.process.wait(WITHIN_S) == 0
        assert "Traceback" not in server.log()
        with pytest.raises((httpx.ConnectError, AssertionError)):
            assert ask(server, wire, Request("same_float32", ROW)).code != "UNAVAILABLE"


def test_an_open_stream_ends_with_the_server_and_is_told_why(tmp_path: Path) -> None:
    with serving_models(tmp_path) as server, grpc.insecure_channel(server.rpc) as channel:
        sent, ended = threading.Event(), threading.Event()

        def requests() -> Iterator[pb.ModelInferRequest]:
            yield message_of(Request("slow", [[3.5]]))
            sent.set()
            ended.wait(WITHIN_S)

        infer: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            lambda message: message.SerializeToString(),
        )
        answers = infer(requests())
        assert sent.wait(WITHIN_S)
        until(lambda: reached(server, "slow", "computes") > 0)
        server.process.send_signal(signal.SIGTERM)
        first = pb.ModelStreamInferResponse.FromString(next(answers))
        assert first.error_message == ""
        with pytest.raises(grpc.RpcError) as error:
            next(answers)
        ended.set()
        assert (error.value.code(), str(error.value.details()).split(" (")[0]) == (
            grpc.StatusCode.UNAVAILABLE,
            "the server is stopping",
        )
        assert server.process.wait(WITHIN_S) == 0
        assert "Traceback" not in server.log()


def test_readiness_goes_first(tmp_path: Path) -> None:
    with serving_models(tmp_path) as server, grpc.insecure_channel(server.rpc) as channel:

        def ready() -> bool:
            return bool(
                pb.ServerReadyResponse.FromString(
                    method_of(channel, "ServerReady")(pb.ServerReadyRequest(), WITHIN_S)
                ).ready
            )

        assert ready()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not ready())
        assert server.process.wait(WITHIN_S) == 0


def test_a_revoked_key_ends_on_an_open_stream_too(locked: Server) -> None:
    key = key_of(locked.home, "infer")
    with grpc.insecure_channel(locked.rpc, options=UNLIMITED) as channel:
        infer: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            lambda message: message.SerializeToString(),
        )
        going = threading.Event()

        def requests() -> Iterator[pb.ModelInferRequest]:
            yield message_of(Request("same_float32", ROW))
            going.wait(WITHIN_S)
            yield message_of(Request("same_float32", ROW))

        answers = infer(requests(), metadata=metadata_of(key))
        assert pb.ModelStreamInferResponse.FromString(next(answers)).error_message == ""
        with closing(Database(locked.home / "crucible.db")) as database:
            Keys(database).revoke(key.split("_")[1])
        going.set()
        assert "revoked" in pb.ModelStreamInferResponse.FromString(next(answers)).error_message
