"""HAProxy between the hosts and what they share: each host has ports of its own for PostgreSQL and
S3, so that it can be cut off alone.
"""

from __future__ import annotations

import random
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from benchmarks.faults.cluster.program import Program
from benchmarks.serving.crucible import own_environment
from pipeline.errors import HostError
from service.routing.haproxy import program
from service.routing.runtime import Runtime

Shared = Literal["postgresql", "s3"]
SHARED: tuple[Shared, ...] = ("postgresql", "s3")
START_S = 60.0
PORTS = (20_000, 32_000)  # below those that Linux gives to outgoing connections
HEAD = """\
global
    stats socket "{socket}" mode 600 level admin
    maxconn 4000

defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
"""


def kept_port() -> int:
    """A free port whose next one is free, too. The system gives neither to outgoing connections,
    so both are free when a program that listened there is started again.
    """
    while True:
        port = random.randrange(*PORTS)
        try:
            with (
                socket.create_server(("127.0.0.1", port)),
                socket.create_server(("127.0.0.1", port + 1)),
            ):
                return port
        except OSError:
            continue


class Gateway:
    """The HAProxy of all hosts. `postgresql` and `s3`: addresses, as HAProxy writes them."""

    def __init__(self, folder: Path, hosts: Sequence[str], postgresql: str, s3: str) -> None:
        addresses = {"postgresql": postgresql, "s3": s3}
        self.hosts = tuple(hosts)
        self._ports = {each: kept_port() for each in product(SHARED, hosts)}
        self.sockets = Path(mkdtemp(prefix="crucible-gateway-"))  # `folder` may be too long a path
        self._runtime = Runtime(self.sockets / "haproxy.sock")
        text = HEAD.format(socket=self.sockets / "haproxy.sock")
        for (shared, host), port in self._ports.items():
            text += f"\nlisten {shared}-{host}\n    bind 127.0.0.1:{port}\n"
            text += f"    server {shared} {addresses[shared]}\n"
        configuration = folder / "gateway.cfg"
        configuration.write_text(text, encoding="utf-8")
        self._program = Program(
            [program(), "-db", "-f", configuration], folder / "gateway.log", own_environment()
        )

    def start(self) -> None:
        """Start, and return when it answers."""
        self._program.start()
        end = time.monotonic() + START_S
        while True:
            try:
                self._runtime.ask("show info")
                return
            except HostError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def port(self, shared: Shared, host: str) -> int:
        """The port at which a host finds what is shared."""
        return self._ports[shared, host]

    def cut(self, hosts: Iterable[str], shared: Iterable[Shared] = SHARED) -> None:
        """End the connections of these hosts, and refuse new ones."""
        for each, host in product(shared, hosts):
            self._runtime.ask(f"disable server {each}-{host}/{each}")
            self._runtime.ask(f"shutdown sessions server {each}-{host}/{each}")

    def join(self, hosts: Iterable[str], shared: Iterable[Shared] = SHARED) -> None:
        """Let these hosts connect again."""
        for each, host in product(shared, hosts):
            self._runtime.ask(f"enable server {each}-{host}/{each}")

    def close(self) -> None:
        """End it."""
        self._program.close()
        shutil.rmtree(self.sockets, ignore_errors=True)
