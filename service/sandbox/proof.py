"""Prove what the sandbox holds: run the acts of `acts.py` in it, below a guardian, as a job runs.

A version number of the kernel is no proof: a container, a security module or a bug may decide
otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pipeline.core.frozen import Frozen
from pipeline.execution.child_process import IMPORT_PATH
from service.sandbox.acts import ACTS, Targets, name_of, outlive_job
from service.sandbox.layers import Box, Layer, Sandbox
from service.sandbox.process_tree import MARK, kill_all, of_jobs
from service.storage.layout import Folders

ATTEMPT_S = 30.0
OUTLIVES_S = 3.0  # a process that still runs so long after its guardian has outlived its job
FILE_BYTES = str(2**20)  # that a file may have
SECRET = "secret"


class Act(Frozen):
    """One act, and what stopped it."""

    name: str
    error: str  # "" if it succeeded


class Proof(Frozen):
    """What the sandbox holds on this host."""

    layers: tuple[Layer, ...]
    acts: tuple[Act, ...]
    fault: str = ""  # why the acts could not be tried

    @property
    def succeeded(self) -> tuple[str, ...]:
        """The names of the acts that the sandbox did not stop; all, if they were not tried."""
        if self.fault:
            return tuple(map(name_of, ACTS))
        return tuple(act.name for act in self.acts if not act.error)

    @property
    def lines(self) -> tuple[str, ...]:
        """Describe the layers and the acts, for people."""
        rows = [
            f"{layer.name}: {'' if layer.held else 'not used: '}{layer.detail}"
            for layer in self.layers
        ]
        if self.fault:
            rows.append(f"the acts could not be tried: {self.fault}")
        elif self.succeeded:
            rows.append(f"code of a job could: {', '.join(self.succeeded)}")
        else:
            rows.append(f"all {len(self.acts)} forbidden acts of a job's code failed")
        return tuple(rows)


def prove(sandbox: Sandbox, database: Path) -> Proof:
    """Try every act in the sandbox. Runs processes for about a second, and leaves nothing."""
    if sandbox.gpu_fault:
        return Proof(layers=sandbox.table, acts=(), fault=f"the GPU: {sandbox.gpu_fault}")
    folders = Folders(sandbox.home)
    mark = f"proof-{secrets.token_hex(4)}"
    work, other = folders.work(mark), folders.work(f"{mark}-other")
    folders.models.mkdir(parents=True, exist_ok=True)
    try:
        work.prepare()
        other.prepare()
        (other.root / SECRET).write_text(SECRET)
        sandbox.enter(other.root.name, other, "cpu").close()  # as a job that has ended
        with _targets(folders, database, other.root / SECRET) as targets:
            acts = list[Act]()
            for device in sandbox.devices:
                box = sandbox.enter(mark, work, device)
                try:
                    acts += _attempt(box, targets, mark, work.root, device)
                finally:
                    kill_all(lambda: of_jobs([mark]))
                    box.close()
        return Proof(layers=sandbox.table, acts=tuple(acts))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Proof(layers=sandbox.table, acts=(), fault=f"{type(error).__name__}: {error}")
    finally:
        for folder in (work, other):
            shutil.rmtree(folder.root, ignore_errors=True)
        (folders.models / "written-by-a-job").unlink(missing_ok=True)


@contextlib.contextmanager
def _targets(folders: Folders, database: Path, secret: Path) -> Iterator[Targets]:
    """Make what the acts are aimed at."""
    name = f"crucible-{secrets.token_hex(4)}"
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_path,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_name,
        subprocess.Popen(["sleep", str(2 * ATTEMPT_S)]) as victim,
    ):
        Path(folder).chmod(0o711)
        path = Path(folder) / "socket"
        by_path.bind(str(path))
        path.chmod(0o777)
        by_name.bind("\0" + name)
        try:
            yield Targets(
                os.getpid(),
                listener.getsockname()[1],
                str(path),
                name,
                str(database),
                str(secret),
                str(folders.models),
                victim.pid,
            )
        finally:
            victim.kill()


def _attempt(box: Box, targets: Targets, mark: str, cwd: Path, device: str) -> tuple[Act, ...]:
    """Run the acts below a guardian, and look for what outlives it."""
    guardian = (sys.executable, "-m", "service.sandbox.guardian", str(os.getpid()), FILE_BYTES)
    acts = (sys.executable, "-m", "service.sandbox.acts", json.dumps(asdict(targets)))
    process = subprocess.Popen(
        (*guardian, *box.command(acts)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.defpath, "PYTHONPATH": IMPORT_PATH, "PYTHONSAFEPATH": "1", MARK: mark},
        cwd=cwd,
        start_new_session=True,
    )
    process.wait(ATTEMPT_S)
    try:
        output, errors = process.communicate(timeout=OUTLIVES_S)
        outlived = False
    except subprocess.TimeoutExpired:
        kill_all(lambda: of_jobs([mark]))
        output, errors = process.communicate()
        outlived = True
    if not output:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError("".join(last) or f"exit status {process.returncode}")
    results: dict[str, str] = json.loads(output.splitlines()[-1])
    ended = results[name_of(outlive_job)] or "its processes ended with it"
    results[name_of(outlive_job)] = "" if outlived else ended
    where = "" if device == "cpu" else f" on {device}"
    return tuple(Act(name=name + where, error=error) for name, error in results.items())
