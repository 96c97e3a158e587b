"""Servers with homes of their own, on one PostgreSQL and one S3, behind HAProxy: clients see one
service, also while a server is killed, and while one is added.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
import pytest

from service.grpc import grpc_service_pb2 as pb
from service.grpc.descriptors import SERVICE
from service.storage.database import Database
from service.storage.keys import KNOWN_FOR_S, Keys
from tests.service.builders.app import parts
from tests.service.builders.jobs import WITHIN_S, write_out
from tests.service.integration.test_server import Server, serving
from tests.service.routing.test_haproxy import free_pair, lacking
from tests.service.serving.engines import linear, marked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("s3"),
    pytest.mark.skipif(bool(lacking()), reason=f"proxy test: {lacking()}"),
]
Start = Callable[[str], AbstractContextManager[Server]]


@pytest.fixture
def start(tmp_path: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a server of this name."""
    monkeypatch.setenv("CRUCIBLE_SERVICE_DATABASE_URL", postgresql)
    monkeypatch.setenv("CRUCIBLE_SERVICE_FILES_URL", "s3://bucket/files")
    engine = linear(tmp_path / "made")

    def start(name: str) -> AbstractContextManager[Server]:
        home = tmp_path / name
        write_out(home / "template", home / "template-store", real=engine)
        return serving(home, port=free_pair(), keys_required="yes", max_streams=2)

    return start


@contextmanager
def proxy() -> Iterator[tuple[str, str]]:
    """The addresses for HTTP and gRPC of a proxy for the servers of the database."""
    port = free_pair()
    command = (sys.executable, "-m", "pipeline.cli", "proxy", "start", "--from-database")
    with (
        TemporaryDirectory(dir="/tmp") as home,
        subprocess.Popen((*command, "--port", str(port), "--home", home)) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
        finally:
            process.terminate()


@dataclass(frozen=True, slots=True)
class Service:
    """What answers at an address: the proxy, or one server."""

    client: httpx.Client

    def ask(self, method: str, path: str, **body: Any) -> Any:
        answer = self.client.request(method, path, **body)
        assert answer.is_success, (method, path, answer.text)
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text

    def status(self, path: str) -> int:
        try:
            return self.client.get(path).status_code
        except httpx.TransportError:
            return 0

    def has_logged(self, job_id: str, text: str) -> bool:
        return text in self.ask("GET", f"/jobs/{job_id}/log")

    def infer(self) -> int:
        """The version that answers."""
        body = {"inputs": {"x": marked(1.0).tolist()}}
        return int(self.ask("POST", "/models/m/infer", json=body)["version"])

    def end_of(self, job_id: str) -> str:
        ended = {"succeeded", "failed", "cancelled"}
        until(lambda: self.ask("GET", f"/jobs/{job_id}")["state"] in ended)
        return str(self.ask("GET", f"/jobs/{job_id}")["state"])


@contextmanager
def client_of(url: str, key: str) -> Iterator[Service]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=WITHIN_S) as client:
        yield Service(client)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_several_servers_behind_a_proxy_are_one_service(start: Start, postgresql: str) -> None:
    with ExitStack() as stack:
        one, two = (stack.enter_context(start(name)) for name in "ab")
        database = stack.enter_context(closing(Database(postgresql)))
        key, text = Keys(database).create("ci", ["admin", "compile", "infer"])
        servers = [stack.enter_context(client_of(server.url, text)) for server in (one, two)]
        url, rpc = stack.enter_context(proxy())
        service = stack.enter_context(client_of(url, text))
        until(lambda: service.status("/readyz") == 200)

        hanging = service.ask("POST", "/compile", files=parts("hang"))["id"]
        job = service.ask("POST", "/compile", files=parts("succeed"))["id"]
        assert service.end_of(job) == "succeeded"
        for server in servers:
            assert server.ask("GET", f"/reports/{job}") == service.ask("GET", f"/reports/{job}")
            until(partial(server.has_logged, hanging, "I am hang"))
            assert "event: succeeded" in server.ask("GET", f"/jobs/{job}/events")
        service.ask("DELETE", f"/jobs/{hanging}")
        assert service.end_of(hanging) == "cancelled"

        service.ask("POST", "/models/m/promote", json={"report": job})
        service.ask("PUT", "/models/m/deployment", json={})
        assert {server.infer() for server in (*servers, *[service] * 10)} == {1}
        assert asyncio.run(ready_over_grpc(rpc, text, 10)) == {True}

        two.process.kill()
        until(lambda: service.status("/readyz") == 200)
        until(lambda: all(service.status("/models/m") == 200 for _ in range(20)))
        assert {service.infer() for _ in range(20)} == {1}

        three = stack.enter_context(start("c"))
        last = stack.enter_context(client_of(three.url, text))
        assert last.infer() == 1, "it loads what the others have"
        one.end()
        until(lambda: all(service.status("/models/m") == 200 for _ in range(20)))
        assert service.infer() == 1

        Keys(database).revoke(key.prefix)
        time.sleep(KNOWN_FOR_S)
        assert service.status("/jobs") == last.status("/jobs") == 401


async def ready_over_grpc(address: str, key: str, count: int) -> set[bool]:
    """Whether the model is ready, by so many calls."""
    metadata = (("authorization", f"Bearer {key}"),)
    request = pb.ModelReadyRequest(name="m").SerializeToString()
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE.full_name}/ModelReady")
        answers = [await call(request, metadata=metadata) for _ in range(count)]
    return {pb.ModelReadyResponse.FromString(answer).ready for answer in answers}
