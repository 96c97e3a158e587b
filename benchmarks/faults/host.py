"""A server whose host fails: restarted when it ends, on a small disk, with a library that makes its
clock wrong and its writes fail.
"""

from __future__ import annotations

import contextlib
import mmap
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.serving.crucible import is_ready, own_environment
from benchmarks.serving.processes import STOP_S, descendants, free_port, wait_until

SOURCE = Path(__file__).with_name("failing_host.c")
CONTROL = struct.Struct("<3q")  # as in SOURCE
DISK = "256m"
RESERVE_BYTES = 16 << 20  # of it, as `disk_reserve_bytes` is of an ordinary disk
BLOCK_BYTES = 1 << 20


class NotRun(Exception):
    """This host cannot have the fault; the message is the reason."""


class Library:
    """The library of `failing_host.c`, and the numbers that it reads."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.reason = ""  # why there is none
        self.environment: dict[str, str] = {}
        control = folder / "control"
        control.write_bytes(bytes(CONTROL.size))
        with control.open("r+b") as file:
            self._numbers = mmap.mmap(file.fileno(), CONTROL.size)
        compiler = shutil.which("cc")
        if not compiler:
            self.reason = "needs a C compiler"
            return
        library = folder / "failing_host.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self.environment = {
            "LD_PRELOAD": str(library),
            "SOAK_CONTROL": str(control),
            "SOAK_FOLDER": str(home),
        }

    @contextlib.contextmanager
    def fault(self, clock_s: int = 0, no_space: bool = False, write_us: int = 0) -> Iterator[None]:
        """Let this be wrong until the block ends. NotRun without a library."""
        if self.reason:
            raise NotRun(self.reason)
        CONTROL.pack_into(self._numbers, 0, clock_s, no_space, write_us)
        try:
            yield
        finally:
            CONTROL.pack_into(self._numbers, 0, 0, 0, 0)


class Disk:
    """A small file system in memory, or an ordinary folder where none can be mounted."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.place = place
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place],
            capture_output=True,
            text=True,
            check=False,
        )
        self.reason = f"cannot mount a small disk: {mounted.stderr}" if mounted.returncode else ""

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Leave no byte until the block ends. NotRun without a small disk."""
        if self.reason:
            raise NotRun(self.reason)
        ballast = self.place / "ballast"
        try:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(BLOCK_BYTES)):
                    pass
            yield
        finally:
            ballast.unlink()

    def unmount(self) -> None:
        if not self.reason:
            subprocess.run(["umount", "--lazy", self.place], check=True)


class Host:
    """`crucible serve` on one home and one port, started again whenever it ends."""

    def __init__(self, folder: Path) -> None:
        self.disk = Disk(folder / "disk")
        self.home = self.disk.place / "home"
        self.library = Library(folder, self.home)
        self.port, self.log = free_port(), folder / "server.log"
        self.starts = 0
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server; it is ready on return."""
        self._supervisor.start()
        self._started.wait()
        wait_until(lambda: is_ready(self.port), self.process, self.log)

    def _supervise(self) -> None:
        command = [sys.executable, "-m", "pipeline.cli", "serve"]
        command += [f"--home={self.home}", f"--port={self.port}"]
        environment = {
            **own_environment(),
            "CRUCIBLE_SERVICE_GRPC_PORT": "0",
            "CRUCIBLE_SERVICE_DISK_RESERVE_BYTES": str(RESERVE_BYTES),
            **self.library.environment,
        }
        while not self._stopping.is_set():
            with self.log.open("ab") as log:
                started = subprocess.Popen(
                    command,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.process = psutil.Process(started.pid)
            self.starts += 1
            self._started.set()
            started.wait()

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes below the server with this word in their command line."""
        found = []
        for each in descendants(self.process):
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in each.cmdline():
                    found.append(each)
        return found

    def close(self) -> None:
        """End the server and all its processes, and unmount its disk."""
        self._stopping.set()
        family: Sequence[psutil.Process] = descendants(self.process)
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.terminate()
        self._supervisor.join(STOP_S)
        for each in (*family, self.process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._supervisor.join()
        psutil.wait_procs(family, timeout=STOP_S)
        self.disk.unmount()
