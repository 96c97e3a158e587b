"""The servers that are attacked: `crucible serve` in processes of their own, with keys.

`Targets.server` compiles with the real worker and serves one model of the tenant `victim`.
`Targets.code_server` also takes code (CRUCIBLE_SERVICE_ALLOW_CODE).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil

from service.storage.database import Database
from service.storage.keys import Keys
from tests.builders.cli import environment
from tests.service.jobs.test_worker import tiny_model

START_S = ANSWER_S = 60.0
JOB_S = 120.0  # for a tiny job, also on a busy host
READ_S = 5.0
GIB = 2**30
ATTACKER = "127.0.0.2"  # the address of requests that fail to authenticate
SECRET = f"secret-{secrets.token_hex(16)}"
"""The value of a variable in the environment of every server."""
KEYS = {  # name of the key: its owner and scopes
    "victim": ("victim", ("compile", "infer")),
    "victims admin": ("victim", ("admin",)),
    "attacker": ("attacker", ("compile", "infer")),
    "admin": ("operator", ("admin",)),
}
MODEL = "treasure"  # the victim's model: 16 numbers `x` in, 4 numbers `y` out
PLAN = """
name: {name}
candidates: [{{backend: onnxruntime, precision: fp32}}]
simplify: {{enabled: false, rewrite_attention: false}}
benchmark: {{duration_s: 0.3, warmup_s: 0.05, budget_s: 0.01, baselines: []}}
"""
SETTINGS = {
    "keys_required": True,
    "job_memory_bytes": 2 * GIB,
    "job_timeout_s": JOB_S,
    "max_unpacked_bytes": 64 * 10**6,
}
Files = dict[str, tuple[str | None, bytes]]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and the keys of its tenants."""

    home: Path
    url: str
    rpc: str  # the address of gRPC
    process: subprocess.Popen[str]
    keys: dict[str, str]  # by the names of KEYS
    read_log: list[int] = field(default_factory=lambda: [0])  # characters that damage() has seen

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 0

    def client(
        self, tenant: str = "attacker", key: str = "", address: str | None = None
    ) -> httpx.Client:
        """Return a client with a tenant's key, or another one, that connects from `address`."""
        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key or self.keys[tenant]}"},
            timeout=ANSWER_S,
            transport=httpx.HTTPTransport(local_address=address, verify=False),
        )

    def connect(self, address: str | None = None) -> socket.socket:
        """Return a new connection for raw bytes."""
        source = (address, 0) if address else None
        return socket.create_connection(self.address, READ_S, source_address=source)

    def head(self, request: str, tenant: str = "attacker", **headers: object) -> bytes:
        """Return the head of a request with a tenant's key."""
        lines = [f"{request} HTTP/1.1", f"Host: {self.address[0]}:{self.address[1]}"]
        lines += [f"Authorization: Bearer {self.keys[tenant]}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    def answer_to(self, data: bytes, address: str | None = None) -> bytes:
        """Send bytes on a new connection. Return what comes back until it closes, or for 5 s."""
        with self.connect(address) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            return received(connection)

    def health_s(self, address: str | None = None) -> float:
        """Return how long one request of /healthz takes on a new connection."""
        transport = httpx.HTTPTransport(local_address=address, verify=False)
        with httpx.Client(transport=transport, timeout=ANSWER_S) as client:
            begin = time.monotonic()
            client.get(f"{self.url}/healthz").raise_for_status()
            return time.monotonic() - begin

    def memory_bytes(self) -> int:
        """Return the resident memory of the server, without its children."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def job(self, files: Files, tenant: str = "attacker") -> dict[str, Any]:
        """Submit a job and return it when it has ended. HTTPStatusError if it is refused."""
        with self.client(tenant) as client:
            answer = client.post("/compile", files=files)
            answer.raise_for_status()
            return self.ended(str(answer.json()["id"]), tenant)

    def ended(self, job_id: str, tenant: str = "attacker") -> dict[str, Any]:
        """Wait until a job has ended."""
        end = time.monotonic() + 2 * JOB_S
        with self.client(tenant) as client:
            while True:
                job: dict[str, Any] = client.get(f"/jobs/{job_id}").json()
                if job["state"] in ("succeeded", "failed", "cancelled"):
                    return job
                if time.monotonic() > end:
                    raise TimeoutError(f"job {job_id} has not ended: {job['state']}")
                time.sleep(0.1)

    def jobs(self) -> set[str]:
        """Return the ids of all jobs."""
        with self.client("admin") as client:
            return {job["id"] for job in client.get("/jobs?limit=200").json()["jobs"]}

    def uploads(self) -> set[Path]:
        """Return all files and folders of uploads."""
        return set((self.home / "uploads").rglob("*"))

    def log(self) -> str:
        return (self.home / "server.log").read_text(errors="replace")

    def damage(self) -> str:
        """Say what is wrong with the server since the last call; empty if nothing is."""
        if self.process.poll() is not None:
            return f"the server ended with {self.process.returncode}"
        try:
            self.health_s()
        except httpx.HTTPError as error:
            return f"/healthz: {type(error).__name__}: {error}"
        text = self.log()
        news, self.read_log[0] = text[self.read_log[0] :], len(text)
        # ExecuteBatchError: gRPC itself ended a call, such as one that is too large
        errors = [
            line
            for line in news.splitlines()
            if re.search('Traceback|"status": 500', line) and "ExecuteBatchError" not in line
        ]
        if errors:
            print(*errors, sep="\n", file=sys.stderr)
        return f"the log has {len(errors)} internal errors" if errors else ""


def received(connection: socket.socket, seconds: float = READ_S) -> bytes:
    """Read until the other side closes or is silent."""
    connection.settimeout(seconds)
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while piece := connection.recv(65536):
            data += piece
    return data


@contextmanager
def started(
    home: Path, module: tuple[str, ...] = ("pipeline.cli", "serve"), **settings: object
) -> Iterator[Server]:
    """Start a server on free ports; it is killed at the end."""
    home.mkdir(exist_ok=True)
    keys = {}
    with closing(Database(home / "crucible.db")) as database:
        for name, (owner, scopes) in KEYS.items():
            keys[name] = Keys(database).create(name, scopes, owner)[1]
    values = {"port": 0, **SETTINGS, **settings}
    variables = {f"CRUCIBLE_SERVICE_{name.upper()}": str(each) for name, each in values.items()}
    more = {**variables, "CRUCIBLE_HOME": str(home), "OPERATORS_SECRET": SECRET}
    with (home / "server.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(more),
        )
    with process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            addresses = [re.search(r"(127\.0\.0\.1:\d+)", line) for line in lines]
            if not all(addresses):
                raise RuntimeError((home / "server.log").read_text()[-500:])
            url, rpc = (address[1] for address in addresses if address)
            server = Server(home, f"http://{url}", rpc, process, keys)
            end = time.monotonic() + START_S
            while httpx.get(f"{server.url}/readyz").status_code != 200:
                if time.monotonic() > end:
                    raise TimeoutError("the server is not ready")
                time.sleep(0.05)
            yield server
        finally:
            process.kill()


class Targets:
    """The servers that are attacked. The second one starts when an attack first needs it."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.folder, self._resources = folder, resources
        self._servers: list[Server] = []
        self.server = self._start("home")  # without code from uploads
        job = self.server.job(self.files(MODEL), "victim")
        if job["state"] != "succeeded":
            raise RuntimeError(f"the victim's model does not compile: {job}")
        self.victims_job = str(job["id"])
        with self.server.client("victims admin") as client:
            for method, path, body in (
                (
                    "POST",
                    f"/models/{MODEL}/promote",
                    {"report": self.victims_job, "override": True},
                ),
                ("PUT", f"/models/{MODEL}/deployment", {}),
            ):
                client.request(method, path, json=body).raise_for_status()

    @cached_property
    def code_server(self) -> Server:
        """A server that takes code from uploads."""
        return self._start("code", allow_code=True)

    @cached_property
    def job_of_code_server(self) -> str:
        """The id of a job of the victim on the server that takes code."""
        return str(self.code_server.job(self.files("other"), "victim")["id"])

    @cached_property
    def tiny(self) -> bytes:
        """An ONNX model that compiles in seconds."""
        path = self.folder / "tiny.onnx"
        tiny_model(path)
        return path.read_bytes()

    def files(self, name: str, model: bytes = b"", filename: str = "model.onnx") -> Files:
        """Return an upload with a plan; without a model, the tiny one."""
        plan = PLAN.format(name=name).encode()
        return {"model": (filename, model or self.tiny), "plan": ("plan.yaml", plan)}

    def damage(self) -> str:
        """Say what is wrong with a running server; empty if nothing is."""
        return "; ".join(filter(None, (server.damage() for server in self._servers)))

    def _start(self, name: str, allow_code: bool = False) -> Server:
        server = self._resources.enter_context(started(self.folder / name, allow_code=allow_code))
        self._servers.append(server)
        return server


def zipped(members: dict[str, bytes]) -> bytes:
    """Return a .zip of these members."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def is_root() -> bool:
    return os.geteuid() == 0
