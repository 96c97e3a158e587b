"""A program that is started again whenever it ends, until it is closed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.serving.processes import STOP_S, descendants
from pipeline.execution.child_process import die_with_parent

PAUSE_S = 0.5  # before a program that has ended is started again


class Program:
    """A supervised process with all that it starts. It ends with this process."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._command, self.log, self._environment = list(map(str, command)), log, environment
        self.more_environment: Mapping[str, str] = {}  # from the next start on
        self.starts = 0
        self._closing, self._started = threading.Event(), threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name=log.stem)

    def start(self) -> None:
        """Start it and its supervisor."""
        self._supervisor.start()
        self._started.wait()

    def _supervise(self) -> None:
        parent = os.getpid()
        while not self._closing.is_set():
            with self.log.open("ab") as log:
                running = subprocess.Popen(
                    self._command,
                    env={**self._environment, **self.more_environment},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(parent),
                )
            self._running, self.starts = running, self.starts + 1
            self._started.set()
            running.wait()
            self._closing.wait(PAUSE_S)

    def kill(self) -> None:
        """SIGKILL the process alone, as the kernel does when memory is short."""
        self._running.kill()

    def kill_all(self) -> None:
        """SIGKILL the process and all that it has started, as a power failure does."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._running.pid)
            process.suspend()  # else it might start more meanwhile
            for each in (*descendants(process), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    def restart(self) -> None:
        """End it in order. The supervisor starts it again."""
        self._running.terminate()

    def close(self) -> None:
        """End it in order, with all that it started. Repeated calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if not self._started.is_set():
            return
        family = descendants_of(self._running.pid)
        self._running.terminate()
        self._supervisor.join(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running.pid, signal.SIGKILL)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._supervisor.join()


def descendants_of(process_id: int) -> list[psutil.Process]:
    """Return what a process has started; nothing if it has ended."""
    try:
        return descendants(psutil.Process(process_id))
    except psutil.NoSuchProcess:
        return []
