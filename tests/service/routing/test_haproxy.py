"""A real HAProxy before two real servers, each with HTTP and gRPC."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
import pytest

from pipeline.errors import HostError, PlanError
from service.jobs.nodes import Nodes
from service.routing import grpc_refusals
from service.routing.addresses import Address
from service.routing.configuration import BUFFER_BYTES, ProxyOptions
from service.routing.follow import Pool, wait_until_idle
from service.routing.haproxy import program, running, socket_of
from service.routing.runtime import Runtime, ServerState
from service.storage.database import Database
from tests.builders.cli import crucible
from tests.service.builders.postgresql import refusing_connections
from tests.service.builders.routed_server import METHOD

WITHIN_S = 60.0


def lacking() -> str:
    try:
        program()
    except HostError as error:
        return error.message
    return ""


pytestmark = pytest.mark.skipif(bool(lacking()), reason=f"proxy test: {lacking()}")


def free_pair() -> int:
    """A free port whose next one is free too. Below those that the kernel gives to connections,
    so that no connection takes it before it is used.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


class Server:
    """A process of `routed_server`."""

    def __init__(self, port: int) -> None:
        self.address = Address("127.0.0.1", port)
        self.start()

    def start(self) -> None:
        module = "tests.service.builders.routed_server"
        self.process = subprocess.Popen([sys.executable, "-m", module, str(self.address.port)])
        until(self._answers)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}/readyz").text == self.pid
        except httpx.TransportError:
            return False

    @property
    def pid(self) -> str:
        return str(self.process.pid)

    def release(self) -> None:
        """Let requests to `hold` be answered."""
        httpx.get(f"http://{self.address}/release")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    both = (Server(free_pair()), Server(free_pair()))
    yield both
    for server in both:
        server.kill()


@dataclass(frozen=True, slots=True)
class Proxy:
    home: Path
    url: str
    rpc: str
    runtime: Runtime
    pool: Pool

    def states(self, server: Server) -> set[ServerState]:
        return {each.state for each in self.runtime.status(server.address)}

    def until(self, server: Server, state: ServerState) -> None:
        until(lambda: self.states(server) == {state})

    def get(self, path: str = "/") -> str:
        answer = httpx.get(self.url + path, timeout=WITHIN_S)
        assert answer.status_code == 200, answer.text
        return answer.text

    def command(self, *words: str) -> str:
        result = crucible("proxy", *words, "--home", str(self.home))
        assert result.code == 0, result.err
        return result.out


@pytest.fixture
def proxy(servers: tuple[Server, Server]) -> Iterator[Proxy]:
    # not in tmp_path, which may be too long for the path of a socket
    with (
        TemporaryDirectory(dir="/tmp") as folder,
        started(Path(folder, "a home"), *servers) as proxy,
    ):
        yield proxy


@contextmanager
def started(home: Path, *servers: Server) -> Iterator[Proxy]:
    """A proxy that sends requests to all of these servers."""
    port = free_pair()
    options = ProxyOptions("127.0.0.1", port, socket_of(home))
    with running(options) as (_, runtime):
        pool = Pool(runtime)
        pool.update([server.address for server in servers])
        proxy = Proxy(home, f"http://127.0.0.1:{port}", f"127.0.0.1:{port + 1}", runtime, pool)
        for server in servers:
            proxy.until(server, ServerState.UP)
        yield proxy


@contextmanager
def method(proxy: Proxy, name: str) -> Iterator[Callable[[], str]]:
    """Calls over one connection."""
    with grpc.insecure_channel(proxy.rpc) as channel:
        call: Callable[..., bytes] = channel.unary_unary(METHOD + name)
        yield lambda: call(b"", timeout=WITHIN_S).decode()


def test_requests_go_to_the_server_with_the_fewest(
    proxy: Proxy, servers: tuple[Server, Server]
) -> None:
    with ThreadPoolExecutor(4) as pool, method(proxy, "hold") as hold, method(proxy, "do") as do:
        held = pool.submit(proxy.get, "/hold")
        until(lambda: sum(map(proxy.runtime.active, addresses(servers))) == 1)
        (busy,) = [each for each in servers if proxy.runtime.active(each.address)]
        (idle,) = [each for each in servers if each is not busy]
        assert {proxy.get() for _ in range(20)} == {idle.pid}

        call = pool.submit(hold)
        until(lambda: sum(map(proxy.runtime.active, addresses(servers))) == 2)
        assert len({do() for _ in range(20)}) == 1
        for server in servers:
            server.release()
        assert held.result() == busy.pid
        assert call.result() in {busy.pid, idle.pid}


def addresses(servers: tuple[Server, ...]) -> list[Address]:
    return [server.address for server in servers]


def test_a_killed_server_gets_no_more_requests(
    proxy: Proxy, servers: tuple[Server, Server]
) -> None:
    killed, other = servers
    killed.kill()
    proxy.until(killed, ServerState.DOWN)
    with method(proxy, "do") as do:
        assert {proxy.get() for _ in range(10)} == {do() for _ in range(10)} == {other.pid}
    other.kill()
    proxy.until(other, ServerState.DOWN)
    answer = httpx.get(proxy.url)
    assert (answer.status_code, answer.json()["code"]) == (503, "service.unavailable")
    assert answer.headers["Retry-After"] == "5"
    for size in (0, 10, 200_000, 20_000_000):
        assert_refused(proxy, size)
    with grpc.insecure_channel(proxy.rpc) as channel:
        stream: Any = channel.stream_stream(grpc_refusals.STREAM)
        with pytest.raises(grpc.RpcError) as refused:
            next(stream(iter([b""]), timeout=WITHIN_S))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def assert_refused(proxy: Proxy, size_bytes: int) -> None:
    """A message of this size gets our sentence over gRPC, and so does a body over HTTP."""
    with grpc.insecure_channel(proxy.rpc) as channel:
        call: Any = channel.unary_unary(METHOD + "do")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"x" * size_bytes, timeout=WITHIN_S)
    sentence = "no server behind the proxy is ready (try again later)"
    error: Any = refused.value
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, sentence)
    metadata = dict(error.trailing_metadata())
    assert (metadata["crucible-code"], metadata["retry-after"]) == ("service.unavailable", "5")
    for path in ("/compile", "/models/m/infer"):
        answer = httpx.post(proxy.url + path, content=b"x" * size_bytes, timeout=WITHIN_S)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert answer.json()["error"] == "no server behind the proxy is ready"


def test_the_first_call_after_the_last_server_is_killed_is_refused_as_all(
    proxy: Proxy, servers: tuple[Server, Server]
) -> None:
    """No health check has failed yet: the call finds that nobody takes the connection."""
    with method(proxy, "do") as do:
        assert do() in {server.pid for server in servers}
    for server in servers:
        server.kill()
    assert_refused(proxy, 3_000_000)
    assert "refusals" not in proxy.command("list")
    servers[0].start()
    proxy.until(servers[0], ServerState.UP)
    with method(proxy, "do") as do:
        assert do() == servers[0].pid


@pytest.mark.parametrize("path", ["/models", "/v2/models"])
def test_a_server_without_the_model_passes_requests_for_it_to_another_one(
    proxy: Proxy, servers: tuple[Server, Server], path: str
) -> None:
    lacking, other = servers

    def post(what: str, size_bytes: int) -> tuple[int, str]:
        url = f"{proxy.url}{path}/lacking-{lacking.pid}/{what}"
        answer = web.post(url, content=b"x" * size_bytes)
        return answer.status_code, answer.text

    with httpx.Client(timeout=WITHIN_S) as web:
        fits = BUFFER_BYTES - 8 * 1024
        assert {post("infer", size) for size in (0, 10, fits) * 5} == {(200, other.pid)}
        # what may have had an effect, and what the proxy no longer holds, is sent once
        both = {(200, other.pid), (503, lacking.pid)}
        assert {post("promote", 10) for _ in range(10)} == both
        assert {post("infer", 4 * BUFFER_BYTES) for _ in range(10)} == both
        other.kill()
        proxy.until(other, ServerState.DOWN)
        assert post("infer", 10) == (503, lacking.pid), "its own answer"


def test_a_drain_lets_requests_in_flight_end(proxy: Proxy, servers: tuple[Server, Server]) -> None:
    with ThreadPoolExecutor(4) as pool, method(proxy, "hold") as hold:
        held = pool.submit(proxy.get, "/hold")
        until(lambda: sum(map(proxy.runtime.active, addresses(servers))) == 1)
        (busy,) = [each for each in servers if proxy.runtime.active(each.address)]
        (idle,) = [each for each in servers if each is not busy]
        proxy.runtime.drain(busy.address)
        with pytest.raises(HostError, match="still answers 1 requests"):
            wait_until_idle(proxy.runtime, busy.address, 0)
        assert {proxy.get() for _ in range(10)} == {idle.pid}
        call = pool.submit(hold)  # it goes to the other one
        until(lambda: proxy.runtime.active(idle.address) == 1)
        busy.release()
        assert held.result() == busy.pid
        assert "answers no request" in proxy.command("drain", str(busy.address))
        idle.release()
        assert call.result() == idle.pid
    assert proxy.states(busy) == {ServerState.DRAIN}
    assert "DRAIN" in proxy.command("list")
    proxy.command("enable", str(busy.address))
    assert proxy.states(busy) == {ServerState.UP}


def until_more(answers: Counter[str], pid: str) -> None:
    """Wait for 100 more answers of a process."""
    before = answers[pid]
    until(lambda: answers[pid] > before + 100)


def test_no_request_is_lost_while_servers_are_replaced(
    proxy: Proxy, servers: tuple[Server, Server]
) -> None:
    answers: Counter[str] = Counter()
    ended = threading.Event()
    first = [server.pid for server in servers]

    def ask_http() -> None:
        with httpx.Client(timeout=WITHIN_S) as web:
            while not ended.is_set():
                answer = web.get(proxy.url)
                answers[answer.text if answer.status_code == 200 else f"HTTP {answer}"] += 1

    def ask_grpc() -> None:
        with method(proxy, "do") as do:
            while not ended.is_set():
                try:
                    answers[do()] += 1
                except grpc.RpcError as error:
                    answers[str(error)] += 1

    threads = [threading.Thread(target=target) for target in (*[ask_http] * 2, *[ask_grpc] * 2)]
    for thread in threads:
        thread.start()
    try:
        for server in servers:
            until_more(answers, server.pid)
            proxy.command("drain", str(server.address))
            server.kill()
            server.start()
            proxy.command("enable", str(server.address))
            until_more(answers, server.pid)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert set(answers) == {*first, *(server.pid for server in servers)}


def test_servers_of_a_list_are_added_and_removed(servers: tuple[Server, Server]) -> None:
    first, second = servers
    with TemporaryDirectory(dir="/tmp") as folder, started(Path(folder), first) as proxy:
        pid = proxy.get()
        second.kill()
        proxy.pool.update([first.address, second.address])
        assert proxy.states(second) == {ServerState.DOWN}  # it has to answer a check first
        assert {proxy.get() for _ in range(10)} == {pid}
        second.start()
        proxy.until(second, ServerState.UP)
        assert {proxy.get() for _ in range(10)} == {first.pid, second.pid}

        def removed() -> bool:
            proxy.pool.update([second.address])
            return {each.name for each in proxy.runtime.servers()} == {second.address.name}

        until(removed)
        assert {proxy.get() for _ in range(10)} == {second.pid}


def test_servers_of_a_database_are_followed(
    servers: tuple[Server, Server], postgresql: str
) -> None:
    database = Database(postgresql)
    one, two = (Nodes(database, server.pid, "server", str(server.address)) for server in servers)
    one.send_heartbeat({})
    port = free_pair()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "CRUCIBLE_SERVICE_DATABASE_URL": postgresql}
    command = (sys.executable, "-m", "pipeline.cli", "proxy", "start", "--from-database")

    def answers() -> set[str]:
        try:
            return {httpx.get(url).text for _ in range(10)}
        except httpx.TransportError:
            return set()

    with (
        TemporaryDirectory(dir="/tmp") as home,
        subprocess.Popen(
            (*command, "--port", str(port), "--home", home), env=environment
        ) as process,
    ):
        try:
            until(lambda: answers() == {one.id})
            two.send_heartbeat({})
            until(lambda: answers() == {one.id, two.id})
            with refusing_connections(postgresql):
                time.sleep(2)  # it has looked
                assert answers() == {one.id, two.id}
            one.leave()
            until(lambda: answers() == {two.id})
        finally:
            process.terminate()
    database.close()


def test_a_server_that_is_unknown_and_a_second_proxy_are_refused(proxy: Proxy) -> None:
    refused = crucible("proxy", "drain", "127.0.0.1:1", "--home", str(proxy.home))
    assert (refused.code, "the proxy has no server 127.0.0.1:1" in refused.err) == (1, True)
    with (
        pytest.raises(PlanError, match="a proxy runs already"),
        running(ProxyOptions("127.0.0.1", free_pair(), socket_of(proxy.home))),
    ):
        pass


def test_a_port_that_is_in_use_is_named(servers: tuple[Server, Server]) -> None:
    port = servers[0].address.port
    with (
        TemporaryDirectory(dir="/tmp") as folder,
        pytest.raises(HostError, match=f"does not start on 127.0.0.1, ports {port} and"),
        running(ProxyOptions("127.0.0.1", port, socket_of(Path(folder)))),
    ):
        pass
