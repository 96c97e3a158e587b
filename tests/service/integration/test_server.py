"""A real server process behind a real socket, with a double for the job worker."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from service.jobs.queue import RESTARTED
from service.jobs.state import FINAL
from service.sandbox.process_tree import of_jobs
from service.storage.database import Database
from service.storage.keys import Keys
from tests.service.builders.app import parts
from tests.service.builders.jobs import WITHIN_S, write_out
from tests.service.http.test_routers_jobs import events_of
from tests.service.jobs.test_worker import tiny_model

MB = 10**6
both_ways = pytest.mark.parametrize("processes", [1, 2])  # of HTTP


@dataclass(frozen=True, slots=True)
class Server:
    process: "subprocess.Popen[str]"
    url: str
    home: Path
    rpc: str = ""  # where gRPC listens

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 0

    def log(self) -> str:
        return (self.home / "server.log").read_text()

    def received(self) -> int:
        """Bytes that it and its HTTP processes have read from anything: sockets and files."""
        pids = [self.process.pid, *self.http_processes()]
        counts = [Path(f"/proc/{pid}/io").read_text(encoding="ascii") for pid in pids]
        return sum(int(count.split("rchar: ")[1].split()[0]) for count in counts)

    def http_processes(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        module = b"service.http.processes.child"
        return [int(child) for child in children if module in command_line(child)]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WITHIN_S)


def command_line(pid: str | int) -> bytes:
    """The command of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def command(home: Path, module: str = "tests.service.serving", **settings: object) -> list[str]:
    return [
        sys.executable,
        "-m",
        module,
        str(home),
        *(f"{name}={value}" for name, value in settings.items()),
    ]


@contextmanager
def serving(
    home: Path, module: str = "tests.service.serving", **settings: object
) -> Iterator[Server]:
    if not (home / "template").exists():
        write_out(home / "template", home / "template-store")
    with (home / "server.log").open("a") as log:
        process = subprocess.Popen(
            command(home, module, **settings), stdout=subprocess.PIPE, stderr=log, text=True
        )
    with process:
        try:
            assert process.stdout is not None
            match = re.fullmatch(
                r"Crucible listens on (http://127\.0\.0\.1:\d+)\n", process.stdout.readline()
            )
            assert match, (home / "server.log").read_text()
            rpc = re.fullmatch(r"gRPC listens on (127\.0\.0\.1:\d+)\n", process.stdout.readline())
            assert rpc, (home / "server.log").read_text()
            server = Server(process, match[1], home, rpc[1])
            until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)
            yield server
        finally:
            process.kill()


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def state_of(server: Server, job_id: str) -> str:
    return str(httpx.get(f"{server.url}/jobs/{job_id}").json()["state"])


def send(server: Server, name: str) -> str:
    answer = httpx.post(f"{server.url}/compile", files=parts(name), timeout=WITHIN_S)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


class Follower(threading.Thread):
    """A client that follows a job's events until the stream ends, or breaks."""

    def __init__(self, server: Server, job_id: str, after: int | None = None) -> None:
        super().__init__(daemon=True)
        self.text, self.broken = "", False
        self._url, self._headers = (
            f"{server.url}/jobs/{job_id}/events",
            {} if after is None else {"Last-Event-ID": str(after)},
        )
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("GET", self._url, headers=self._headers, timeout=WITHIN_S) as answer:
                assert answer.status_code == 200
                for text in answer.iter_text():
                    self.text += text
        except httpx.HTTPError:
            self.broken = True

    def ended(self) -> "Follower":
        self.join(WITHIN_S)
        assert not self.is_alive()
        return self


class Balancer(threading.Thread):
    """A load balancer: asks /readyz, each time on a new connection, until nobody listens."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.statuses = [httpx.get(f"{server.url}/readyz").status_code]
        self._url = f"{server.url}/readyz"
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            while True:
                self.statuses.append(httpx.get(self._url).status_code)


@both_ways
def test_a_wrong_key_with_a_large_upload_is_refused_before_the_upload(
    tmp_path: Path, processes: int
) -> None:
    with (
        serving(tmp_path, keys_required=True, http_processes=processes) as server,
        socket.create_connection(server.address) as client,
    ):
        head = (
            "POST /compile HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer"
            f" cru_0000000000_{'A' * 43}\r\n"
        )
        head += (
            f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {1000 * MB}\r\n\r\n"
        )
        client.sendall(head.encode())
        client.settimeout(WITHIN_S)
        answer = client.recv(65536)  # although nothing of the body was sent
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in answer.lower()

        before, sent = server.received(), 0
        with (
            socket.create_connection(server.address) as eager,
            contextlib.suppress(ConnectionError),
        ):  # reset, once it was answered
            eager.settimeout(WITHIN_S)
            eager.sendall(head.encode())
            while sent < 1000 * MB:
                sent += eager.send(b"x" * 65536)
        assert sent < 1000 * MB
        assert server.received() - before < MB
        assert not (tmp_path / "uploads").exists()


def spoken(server: Server, *pieces: bytes) -> tuple[bytes, int]:
    """What comes back, and how many pieces were taken until the server would take no more."""
    with socket.create_connection(server.address, timeout=WITHIN_S) as line:
        sent = 0
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                line.sendall(piece)
                sent += 1
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := line.recv(65536):
                answer += more
        return answer, sent


@both_ways
def test_a_head_without_end_and_what_is_no_request_are_refused(
    tmp_path: Path, processes: int
) -> None:
    begin, mega = b"GET /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"a" * MB
    with serving(tmp_path, http_processes=processes) as server:
        before = server.received()
        for first, piece in [
            (begin, b"X-A: " + mega + b"\r\n"),
            (begin + b"X-A: ", mega),
            (b"GET /", mega),
        ]:
            answer, sent = spoken(server, first, *[piece] * 500)
            assert sent < 100
            assert not answer or (
                answer.startswith(b"HTTP/1.1 431 ") and b"more than 65536 bytes" in answer
            )  # a reset may overtake it
        assert server.received() - before < 20 * MB
        answer, _ = spoken(
            server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 431 ")
        answer, _ = spoken(server, b"rubbish\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"service.no_request"' in answer
        answer, _ = spoken(server, begin, b"host: 127.0.0.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"2 Host headers, expected one" in answer
        answer, _ = spoken(
            server, begin, b"X-A: " + b"a" * 30_000 + b"\r\n", b"Connection: close\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200 ")


def test_events_survive_a_kill_without_gap_or_repeat(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        job_id = send(server, "succeed-3")
        first = Follower(server, job_id)
        until(lambda: "event: stage" in first.text)
        server.process.kill()
        assert first.ended().broken
    first_events = events_of(first.text)
    with serving(tmp_path) as server:
        rest = events_of(Follower(server, job_id, first_events[-1][0]).ended().text)
        all_events = events_of(Follower(server, job_id).ended().text)
    assert first_events + rest == all_events
    assert [kind for _, kind, _ in all_events] == [
        "queued",
        "running",
        "stage",
        "queued",
        "running",
        "stage",
        "stage",
        "succeeded",
    ]


def stop_with_open_streams(server: Server, job_id: str) -> None:
    """SIGTERM while a job runs and five clients follow it."""
    followers = [Follower(server, job_id) for _ in range(5)]
    until(lambda: all("event: stage" in follower.text for follower in followers))
    balancer = Balancer(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WITHIN_S) == 0
    assert all(
        follower.ended().text.endswith("event: server-restarting\ndata: {}\nretry: 2000\n\n")
        for follower in followers
    )
    balancer.join(WITHIN_S)
    assert [status for status, _ in itertools.groupby(balancer.statuses)] == [200, 503]
    assert of_jobs([job_id]) == []


@both_ways
def test_sigterm_with_open_streams_and_a_running_job(tmp_path: Path, processes: int) -> None:
    with serving(tmp_path, http_processes=processes) as server:
        job_id = send(server, "deaf")  # ignores SIGTERM
        children = server.http_processes()
        for child in children:  # a service manager signals all processes
            os.kill(child, signal.SIGTERM)
        stop_with_open_streams(server, job_id)
        assert not any(map(command_line, children))
    with serving(tmp_path) as server:
        until(lambda: httpx.get(f"{server.url}/jobs/{job_id}").json()["attempt"] == 2)


@pytest.mark.slow
def test_sigterm_with_open_streams_and_a_job_that_compiles_which_then_goes_on(
    tmp_path: Path,
) -> None:
    tiny_model(tmp_path / "model.onnx")
    plan = (
        b"{name: tiny, candidates: [{backend: onnxruntime, precision: fp32}], benchmark:"
        b" {duration_s: 0.1}}"
    )
    with serving(tmp_path, compiles="yes") as server:
        files = {
            "model": ("model.onnx", (tmp_path / "model.onnx").read_bytes()),
            "plan": ("plan.yaml", plan),
        }
        job_id = httpx.post(f"{server.url}/compile", files=files, timeout=WITHIN_S).json()["id"]
        until(
            lambda: len(of_jobs([job_id])) >= 3
        )  # the guardian, the worker, and the child of a stage
        stop_with_open_streams(server, job_id)
    with serving(tmp_path, compiles="yes") as server:
        while (
            state_of(server, job_id) not in FINAL
        ):  # without a limit: on a busy machine a compile takes minutes
            time.sleep(0.1)
        events = events_of(Follower(server, job_id).ended().text)
    assert [kind for _, kind, _ in events if kind not in ("stage", "figures")] == [
        "queued",
        "running",
        "queued",
        "running",
        "succeeded",
    ]
    assert [data.get("why") for _, kind, data in events if kind == "queued"] == [
        None,
        RESTARTED.why,
    ]  # by the first server, in good order


def test_http_processes_come_back_and_end_with_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, http_processes=2) as server:
        killed, other = server.http_processes()
        os.kill(killed, signal.SIGKILL)
        job_id = send(server, "succeed-3")
        assert "event: succeeded" in Follower(server, job_id).ended().text
        until(lambda: len(server.http_processes()) == 2)
        assert '"http_process.ended"' in server.log()
        children = server.http_processes()
        assert other in children
        assert killed not in children
        server.process.kill()
        until(lambda: not any(map(command_line, children)))


def test_a_second_server_on_one_home_says_so_and_ends(tmp_path: Path) -> None:
    with serving(tmp_path):
        environment = {**os.environ, "CRUCIBLE_SERVICE_PORT": "0"}
        crucible = [sys.executable, "-m", "pipeline.cli", "serve", "--home", str(tmp_path)]
        second = subprocess.run(
            crucible, capture_output=True, text=True, env=environment, timeout=WITHIN_S, check=False
        )
    assert second.returncode == 1
    assert f"another server uses '{tmp_path}'" in second.stderr
    assert "Traceback" not in second.stderr


@both_ways
def test_an_upload_that_is_cut_leaves_nothing_and_the_server_lives(
    tmp_path: Path, processes: int
) -> None:
    with serving(tmp_path, http_processes=processes) as server:
        with socket.create_connection(server.address) as client:
            head = (
                b"POST /compile HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data;"
                b" boundary=b\r\nContent-Length: 1000000\r\n\r\n"
            )
            client.sendall(
                head
                + b'--b\r\nContent-Disposition: form-data; name="model"; filename="m.onnx"\r\n\r\n'
                + b"x" * 100_000
            )
            until(lambda: any((tmp_path / "uploads").glob("*/model")))
        until(lambda: not any((tmp_path / "uploads").iterdir()))
        until(lambda: "client gone" in server.log())
        assert server.end() == 0
        assert "Traceback" not in server.log()


def test_no_key_is_in_any_line_of_the_log(tmp_path: Path) -> None:
    database = Database(tmp_path / "crucible.db")
    _, key = Keys(database).create("k", ["admin"])
    database.close()
    with serving(tmp_path, keys_required=True, log_level="debug") as server:
        for headers in (
            {"Authorization": f"Bearer {key}"},
            {"Authorization": f"bearer {key}x"},
            {"X-Request-Id": key},
            {"Cookie": key},
        ):
            httpx.get(f"{server.url}/jobs", headers=headers)
            httpx.get(
                f"{server.url}/jobs/{key}?after={key}",
                headers={"Authorization": f"Bearer {key}", **headers},
            )
            httpx.post(
                f"{server.url}/compile",
                headers={"Authorization": f"Bearer {key}"},
                files=parts(key),
            )
        with socket.create_connection(server.address) as client:
            client.sendall(f"GET /{key} HTTP/9.9\r\n{key}\r\n\r\n".encode())
            client.recv(1000)
        assert server.end() == 0
    log = server.log()
    assert '"request"' in log
    assert key not in log
    assert key.removeprefix("cru_") not in log  # all of it: a part can be two characters


def test_a_host_that_cannot_be_asked_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    program = f"""
    from pathlib import Path
    from pipeline.errors import ChildDied
    from service.server import serve
    from service.settings import Settings

    async def probe():
        raise ChildDied("the probe died")

    serve(Settings(home=Path({str(tmp_path)!r}), port=0), probe=probe)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert (result.returncode, result.stderr.splitlines()[-1]) == (
        1,
        "pipeline.errors.ChildDied: the probe died",
    )


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        crucible = [
            sys.executable,
            "-m",
            "pipeline.cli",
            "serve",
            "--home",
            str(tmp_path),
            "--port",
            str(port),
        ]
        result = subprocess.run(
            crucible, capture_output=True, text=True, timeout=WITHIN_S, check=False
        )
    assert (result.returncode, f"cannot listen on 127.0.0.1, port {port}" in result.stderr) == (
        1,
        True,
    )


def test_what_large_bodies_leave_free_is_kept() -> None:
    program = """
    import resource
    from service.http.protocol import keep_memory
    assert keep_memory()
    def cycle():
        del [bytes(602_112) for _ in range(16)][:]
    for _ in range(3):
        cycle()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        cycle()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 160  # one a body; where all is given back it is 147 a body
