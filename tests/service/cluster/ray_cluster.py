"""A Ray cluster of processes of this host: a head, and hosts that join it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil

START_S = 240.0  # beside busy processes
TRIES = 6  # Ray gives up a start after 30 s, which is short beside busy processes
ADDRESS = "127.0.0.1"
# Others than those that Ray's own commands would find, and none that another test may want.
HEAD = ("--head", "--include-dashboard=false", "--num-cpus=1", "--resources={}")


def missing() -> str:
    """Why this host has no Ray for tests; empty if it has."""
    return "" if find_spec("ray") else "no Ray: install the extra `ray`"


class RayHost:
    """A head or a host of a cluster: `ray start --block`, and the processes that it starts."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def processes(self, name: str) -> list[psutil.Process]:
        """Return its living processes with this name, such as `raylet`."""
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if _has_name(child, name)]

    def kill(self, name: str) -> None:
        """Kill its processes with this name at once, as a crash does."""
        for process in self.processes(name):
            process.kill()

    def has_started(self) -> bool:
        """Wait for its start; False if Ray has given it up."""
        end = time.monotonic() + START_S
        while b"Ray runtime started" not in self._log.read_bytes():
            if self._process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        """Kill all that Ray runs here. Nodes of ours are no children of it."""
        if self._process.poll() is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for child in children:
                if child.is_running():
                    child.kill()
        self._process.wait()


class RayCluster:
    """A head that runs no jobs, and the hosts that joined it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, _free_port()
        self.head = self._start_head()
        self.hosts: dict[str, RayHost] = {}

    @property
    def address(self) -> str:
        return f"{ADDRESS}:{self._port}"

    def restart_head(self) -> None:
        """Start a new head at the same address. It knows no host."""
        self.head.close()
        self.head = self._start_head()

    def _start_head(self) -> RayHost:
        options = (*HEAD, f"--port={self._port}", f"--temp-dir={self._folder}/r")
        return self._start("head", options, {})

    def join(self, name: str, labels: str, environment: Mapping[str, str]) -> RayHost:
        """Start a host with one device and these labels of Ray."""
        options = ["--num-cpus=1", '--resources={"measure": 1}', f"--labels={labels}"]
        options.append(f"--address={self.address}")
        self.hosts[name] = self._start(name, options, environment)
        return self.hosts[name]

    def _start(self, name: str, options: Sequence[str], environment: Mapping[str, str]) -> RayHost:
        for _ in range(TRIES):
            host = self._begin(name, options, environment)
            if host.has_started():
                return host
            host.close()
        raise RuntimeError(f"Ray does not start:\n{host.log()}")

    def _begin(self, name: str, options: Sequence[str], environment: Mapping[str, str]) -> RayHost:
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        command += [f"--node-ip-address={ADDRESS}", "--disable-usage-stats"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return RayHost(process, log)

    def close(self) -> None:
        for host in (*self.hosts.values(), self.head):
            host.close()


@contextmanager
def running_ray(folder: Path) -> Iterator[RayCluster]:
    """Start a cluster, and kill it at the end."""
    cluster = RayCluster(folder)
    try:
        yield cluster
    finally:
        cluster.close()


def end_node(pid: int) -> None:
    """Kill a node of ours, and what it has started."""
    try:
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    except ProcessLookupError:
        return


def _has_name(process: psutil.Process, name: str) -> bool:
    try:
        return process.name().startswith(name) or any(name in part for part in process.cmdline())
    except psutil.Error:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])
