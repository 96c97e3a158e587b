"""Two API servers and two nodes with homes of their own, on one PostgreSQL and one S3, behind one
proxy:

    clients -> HAProxy of `crucible proxy` -> api-1, api-2    node-1, node-2
                                                   \\             /
                              gateway: a port of each host for PostgreSQL, and one for S3
                                                   |      |
                                              PostgreSQL  S3 (moto)

All are processes of this machine with a log file each, started again when they end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import make_url

from benchmarks.common import ROOT
from benchmarks.faults.cluster.gateway import Gateway, kept_port
from benchmarks.faults.cluster.host import REAL_MONOTONIC
from benchmarks.faults.cluster.program import Program
from benchmarks.serving.crucible import is_ready, own_environment
from benchmarks.serving.processes import end_of
from service.jobs.nodes import Kind, Node, Nodes
from service.jobs.store import JobStore
from service.storage.database import Database
from tests.service.builders.jobs import write_out
from tests.service.builders.postgresql import DURABLE, Server, running_server
from tests.service.serving.engines import linear

HOSTS: dict[str, Kind] = {"api-1": "server", "api-2": "server", "node-1": "node", "node-2": "node"}
RACERS = ("racer-1", "racer-2")  # processes that race: see races.py
BUCKET = "bucket"
FILES_URL = f"s3://{BUCKET}/files"
START_S = 120.0
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Host:
    """An API server or a node. `port` of a node: not used."""

    name: str
    kind: Kind
    port: int
    home: Path
    program: Program

    def set_clock(self, ahead_s: int) -> None:
        """End it in order, and start it again with a clock that is wrong by so much."""
        # Not the command `faketime`, whose process would get the signals that end the host.
        # Monotonic clocks count from the start of the machine, and are right everywhere.
        self.program.more_environment = (
            {
                "LD_PRELOAD": str(libfaketime()),
                "FAKETIME": f"{ahead_s:+d}s",
                REAL_MONOTONIC: "1",
            }
            if ahead_s
            else {}
        )
        self.program.restart()


class Cluster:
    """All processes, and the database as it is without the gateway."""

    def __init__(self, folder: Path, postgresql: Server, url: str) -> None:
        self.folder, self.postgresql, self.url = folder, postgresql, url
        self.runs, self.template = folder / "runs", folder / "template"
        self.database = Database(url)
        self.jobs, self._nodes = JobStore(self.database), Nodes(self.database, "", "node")
        self._s3_port, self.proxy_port = kept_port(), kept_port()
        names = (*HOSTS, *RACERS)
        s3 = f"127.0.0.1:{self._s3_port}"
        self.gateway = Gateway(folder, names, f"unix@{postgresql.socket}", s3)
        self.s3 = self._s3_client()  # without the gateway
        moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._s3_port)]
        self._s3_program = Program(moto, folder / "s3.log", own_environment())
        self.hosts = {name: self._host(name, kind) for name, kind in HOSTS.items()}
        proxy = [sys.executable, "-m", "pipeline.cli", "proxy", "start"]
        proxy += ["--port", str(self.proxy_port), "--home", str(self.gateway.sockets)]
        for host in self.servers:
            proxy += ["--server", f"127.0.0.1:{host.port}"]
        self.proxy = Program(proxy, folder / "proxy.log", own_environment())

    @property
    def proxy_url(self) -> str:
        """Where clients find the service."""
        return f"http://127.0.0.1:{self.proxy_port}"

    @property
    def servers(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.kind == "server"]

    def environment_of(self, host: str) -> dict[str, str]:
        """The environment of a process of this host: its own ways to PostgreSQL and S3."""
        database = make_url(self.url).database or ""
        own = {
            name: value for name, value in own_environment().items() if not name.startswith("AWS_")
        }
        return {
            **own,
            **self._aws(self.gateway.port("s3", host)),
            "CRUCIBLE_SERVICE_DATABASE_URL": self.postgresql.url_at(
                self.gateway.port("postgresql", host), database
            ),
            "CRUCIBLE_SERVICE_FILES_URL": FILES_URL,
            "PYTHONPATH": f"{ROOT}:{own['PYTHONPATH']}",
        }

    def _aws(self, port: int) -> dict[str, str]:
        return {
            "AWS_CONFIG_FILE": str(self.folder / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(self.folder / "none"),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def _s3_client(self) -> Any:
        import boto3

        environment = self._aws(self._s3_port)
        return boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            region_name=environment["AWS_DEFAULT_REGION"],
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        )

    def _host(self, name: str, kind: Kind) -> Host:
        home, port = self.folder / name, kept_port()
        home.mkdir()
        words = (kind, name, home, port, self.runs, self.template)
        command = [sys.executable, "-m", "benchmarks.faults.cluster.host", *map(str, words)]
        program = Program(command, self.folder / f"{name}.log", self.environment_of(name))
        return Host(name, kind, port, home, program)

    def start(self) -> None:
        """Start all; they are ready on return."""
        write_out(self.template, self.folder / "template-store", real=linear(self.folder / "made"))
        self._s3_program.start()
        self.until(lambda: answers(f"http://127.0.0.1:{self._s3_port}/"), "S3")
        self.s3.create_bucket(Bucket=BUCKET)
        self.gateway.start()
        for host in self.hosts.values():
            host.program.start()
        self.proxy.start()
        self.until(self.is_whole, "all hosts and the proxy")

    def is_whole(self) -> bool:
        """Whether every server answers, every host sends heartbeats, and so does the proxy."""
        ready = all(is_ready(host.port) for host in self.servers) and is_ready(self.proxy_port)
        return ready and all(self.node(name) is not None for name in self.hosts)

    def node(self, name: str) -> Node | None:
        """A host as the database has it; None if it sends no heartbeats."""
        of_host = [node for node in self._nodes.list() if node.labels["cpu"].get("host") == name]
        return next((node for node in of_host if node.is_live), None)

    def jobs_of(self, name: str) -> list[str]:
        """The jobs that a host runs now."""
        node = self.node(name)
        return [job.id for job in node.jobs] if node else []

    def until(self, reached: Callable[[], bool], subject: str, within_s: float = START_S) -> None:
        """Wait. TimeoutError with the ends of all logs."""
        end = time.monotonic() + within_s
        while not reached():
            if time.monotonic() > end:
                logs = "\n".join(f"-- {log.name}\n{end_of(log)}" for log in self.logs())
                raise TimeoutError(f"waited {within_s:g} s for {subject}\n{logs}")
            time.sleep(LOOK_S)

    def logs(self) -> Sequence[Path]:
        return sorted(self.folder.glob("*.log"))

    def end_hosts(self) -> None:
        """End the hosts and the proxy, so that nobody else takes a job."""
        for program in (*(host.program for host in self.hosts.values()), self.proxy):
            program.close()

    def close(self) -> None:
        """End all."""
        self.end_hosts()
        self._s3_program.close()
        self.gateway.close()
        self.database.close()


def libfaketime() -> Path | None:
    """The library of Debian's package faketime; None if it is not installed."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


def answers(url: str) -> bool:
    """Whether somebody answers HTTP at this address."""
    try:
        httpx.get(url, timeout=5.0)
    except httpx.TransportError:
        return False
    return True


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster whose logs and homes are in this folder, and end it."""
    with running_server(DURABLE) as postgresql, postgresql.database() as url:
        cluster = Cluster(folder, postgresql, url)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
