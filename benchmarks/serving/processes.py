"""Servers as processes: started, asked until they answer, their CPU seconds and memory counted, and
ended with all that they started.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

START_S, STOP_S = 120.0, 15.0
SAID_BYTES = 1500


class NotStarted(Exception):
    """A server that ended, or did not answer in time; with the end of its log."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds: of what holds the listening socket, and of all the rest."""

    api_s: float
    rest_s: float

    def __sub__(self, before: Cpu) -> Cpu:
        return Cpu(self.api_s - before.api_s, self.rest_s - before.rest_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], log: Path, environ: Mapping[str, str], cwd: Path | None = None
) -> Iterator[psutil.Process]:
    """A process and its descendants, all gone afterwards. They are looked for before it is asked to
    end: later they may have another parent.
    """
    words = [str(word) for word in command]
    with log.open("wb") as said:
        started = subprocess.Popen(
            words,
            env=environ,
            cwd=cwd,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process = psutil.Process(started.pid)
    try:
        yield process
    finally:
        family = descendants(process)
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(STOP_S)
        for each in (*family, *descendants(process), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        started.wait()
        psutil.wait_procs(family, timeout=STOP_S)


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def wait_until(
    answers: Callable[[], bool], process: psutil.Process, log: Path, patience_s: float = START_S
) -> None:
    """Call `answers` until it is true. NotStarted if the process ends before, or patience does."""
    until = time.monotonic() + patience_s
    while not answers():
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise NotStarted(f"it ended: {end_of(log)}")
        if time.monotonic() > until:
            raise NotStarted(f"no answer in {patience_s:g} s: {end_of(log)}")
        time.sleep(0.1)


def end_of(log: Path) -> str:
    return log.read_bytes()[-SAID_BYTES:].decode(errors="replace").strip()


def cpu_of(process: psutil.Process, port: int) -> Cpu:
    """CPU seconds so far of a process and its descendants."""
    api_s = rest_s = 0.0
    for each in (process, *descendants(process)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = each.cpu_times()
            listens = any(
                found.status == psutil.CONN_LISTEN and found.laddr.port == port
                for found in each.net_connections("tcp")
            )
            if listens:
                api_s += times.user + times.system
            else:
                rest_s += times.user + times.system
    return Cpu(api_s, rest_s)


def clean_environment(first_on_path: Path | None = None, **more: str) -> dict[str, str]:
    """This process's environment without what would lead to this project's packages."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    if first_on_path is not None:
        kept["PATH"] = f"{first_on_path}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, **more}
