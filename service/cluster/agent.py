"""The actor that keeps one node of ours on a Ray node.

The actor only starts the node, or adopts the one that an actor before it has started there. The
node is no child of Ray: it has a session of its own, and goes on when its actor, the raylet or
the head of Ray ends. It needs nothing but the database and the files.

    HOME/ray/HOST/node.json   the record of the node
    HOME/ray/HOST/node.log    its output
    HOME/ray/HOST/lock        held by the actor
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from pipeline.errors import CrucibleError, HostError
from service.cluster.record import NodeRecord, read_record
from service.sandbox.process_tree import alive, kill_all, started_at
from service.settings import settings_from

NODE = ("-m", "pipeline.cli", "node", "start")
START_S = 300.0  # to import every backend from a slow disk
POLL_S = 0.5
RECORD = "node.json"
LOG_LINES = 20
VISIBLE = "CUDA_VISIBLE_DEVICES"
# $1: the log. The shell ends at once, so the node is nobody's child: Ray kills the children of a
# worker that ends (RAY_kill_child_processes_on_worker_exit).
DETACH = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What an actor starts."""

    devices: tuple[str, ...]
    labels: str = ""  # as `--labels` of `crucible node start`
    command: tuple[str, ...] = NODE  # arguments of the Python interpreter


@dataclass(frozen=True, slots=True)
class AgentState:
    """The node that an actor keeps."""

    node: str  # its id in the database
    host: str
    pid: int
    adopted: bool  # an earlier actor has started it
    log: str


def environment_of_raylet() -> dict[str, str]:
    """Return the environment of `ray start`, with the GPUs that Ray has given to this actor.

    Not that of this process: Ray sets OMP_NUM_THREADS in it, which would slow engines down.
    """
    environment = psutil.Process(os.getppid()).environ()
    if VISIBLE in os.environ:
        environment[VISIBLE] = os.environ[VISIBLE]
    return environment


class Agent:
    """The actor. Ray runs its methods in one event loop."""

    def __init__(
        self,
        options: AgentOptions,
        environment: Callable[[], dict[str, str]] = environment_of_raylet,
    ) -> None:
        self._options, self._environment = options, environment
        self.folder = folder_of_host()
        self.record, self.log = self.folder / RECORD, self.folder / "node.log"
        self.current: NodeRecord | None = None
        self._lock, self._adopted = FileLock(self.folder / "lock"), False
        self._starting = asyncio.Lock()

    async def start(self) -> AgentState:
        """Adopt the node that runs here, or start one, and return it once it claims jobs.

        HostError if it does not start, or if another actor has this home. Repeated calls return
        the same node.
        """
        async with self._starting:
            record = self.current
            if record is None or record.process() is None:
                record = self.current = await self._adopt_or_start()
        return AgentState(record.node, platform.node(), record.pid, self._adopted, str(self.log))

    async def watch(self) -> str:
        """Return the last lines of the node's log when the node has ended."""
        while self.current is not None and self.current.process() is not None:
            await asyncio.sleep(POLL_S)
        return last_lines(self.log)

    async def stop(self, grace_s: float) -> None:
        """End the node: its jobs are queued again. It is killed after `grace_s`; the guardians of
        its jobs then end with it.
        """
        record = self.current
        if record is None or (process := record.process()) is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        end = time.monotonic() + grace_s
        while record.process() is not None and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        kill_all(lambda: alive(record.pid, record.started_s))

    def release(self) -> None:
        """Let another actor have this home, as the end of this one does."""
        self._lock.release()

    async def _adopt_or_start(self) -> NodeRecord:
        self._take_home()
        found = read_record(self.record)
        self._adopted = found is not None and found.process() is not None
        return found if found is not None and self._adopted else await self._start()

    def _take_home(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise HostError(
                f"another actor runs a node in '{self.folder}' on this host",
                "give each Ray node a CRUCIBLE_HOME of its own",
            ) from None

    async def _start(self) -> NodeRecord:
        command = [sys.executable, *self._options.command, "--record", str(self.record)]
        command += ["--devices", ",".join(self._options.devices)]
        if self._options.labels:
            command += ["--labels", self._options.labels]
        pid = start_detached(command, self.log, self._environment())
        started, end = started_at(pid), time.monotonic() + START_S
        while True:
            record = read_record(self.record)
            if record is not None and record.pid == pid:
                return record
            running = alive(pid, started)
            if not running or time.monotonic() > end:
                kill_all(lambda: alive(pid, started))
                what = (
                    f"has not started within {START_S:.0f} s"
                    if running
                    else "ended before it took jobs"
                )
                raise HostError(
                    f"the node on {platform.node()} {what}; its log ends with:\n"
                    f"{last_lines(self.log)}",
                    f"do what it says, on that host; the log is '{self.log}'",
                )
            await asyncio.sleep(POLL_S)


def start_detached(command: list[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a command in a session of its own, as a child of no process of ours, with its output
    at the end of `log`. Returns its pid.
    """
    shell = subprocess.run(
        ["/bin/sh", "-c", DETACH, "sh", str(log), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
    )
    return int(shell.stdout)


def last_lines(file: Path) -> str:
    """Return the end of a log; empty if there is none."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def folder_of_host() -> Path:
    """Return the folder of this host's node. Hosts may share a home."""
    return settings_from(os.environ).home / "ray" / platform.node()


def living_node() -> str:
    """Return the id of the node that runs on this host; empty if none does."""
    record = read_record(folder_of_host() / RECORD)
    return record.node if record is not None and record.process() is not None else ""


def settings_fault() -> str:
    """Return what the settings in the environment of this Ray node lack; empty if nothing."""
    try:
        settings = settings_from(os.environ)
    except CrucibleError as error:
        return str(error)
    if settings.database_url is None:
        return "CRUCIBLE_SERVICE_DATABASE_URL is not set for `ray start` there"
    return ""
