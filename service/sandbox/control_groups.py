"""Control groups for the processes of a job: memory and number of processes, of version 2 or 1,
where the server may write them.

In version 2 a group with processes cannot give controllers to groups below it. So the server moves
itself to a group `server` below its own, once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "crucible-"
NEEDED = ("memory", "pids")
REMOVE_S = 2.0  # the kernel frees a group a moment after its last process
ROOT, PROC = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The group of one job; in version 1 a folder for each controller."""

    folders: Mapping[str, Path]

    @property
    def entrances(self) -> tuple[str, ...]:
        """The files to which a process writes `0` to enter."""
        return tuple(dict.fromkeys(str(path / "cgroup.procs") for path in self.folders.values()))

    @property
    def memory_kills(self) -> int:
        """How many of its processes the kernel has killed for memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (self.folders["memory"] / name).read_text("ascii").splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove the group. Its processes must have ended."""
        end = time.monotonic() + REMOVE_S
        for folder in dict.fromkeys(self.folders.values()):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:  # a process is still ending
                    if time.monotonic() > end:
                        return
                    time.sleep(0.02)


class ControlGroups:
    """The groups below which this server makes the groups of its jobs."""

    def __init__(self, parents: Mapping[str, Path], version: int) -> None:
        self._parents, self.version = parents, version

    @classmethod
    def find(cls, root: Path = ROOT, proc: Path = PROC) -> ControlGroups | str:
        """Return where groups can be made, or why they cannot."""
        try:
            lines = proc.read_text("ascii").splitlines()
        except OSError as error:
            return str(error)
        own: dict[str, Path] = {}
        for line in lines:
            number, controllers, path = line.split(":", 2)
            if number == "0":
                own["unified"] = root / path.lstrip("/")
            for name in filter(None, controllers.split(",")):
                own[name] = root / name / path.lstrip("/")
        try:
            if all((own.get(name, root / "-") / "cgroup.procs").exists() for name in NEEDED):
                groups = cls({name: own[name] for name in NEEDED}, 1)
            elif "unified" in own and (own["unified"] / "cgroup.controllers").exists():
                groups = cls(_delegate(own["unified"]), 2)
            else:
                return "no controllers of memory and processes"
            groups.create("test", 2**30, 100).remove()
        except OSError as error:
            return f"cannot write {error.filename or root}: {error.strerror}"
        return groups

    def create(self, name: str, memory_bytes: int | None, processes: int) -> ControlGroup:
        """Make a group. OSError if the kernel refuses."""
        folders = {key: path / f"{PREFIX}{name}" for key, path in self._parents.items()}
        for folder in dict.fromkeys(folders.values()):
            folder.mkdir(exist_ok=True)
        (folders["pids"] / "pids.max").write_text(str(processes), "ascii")
        if memory_bytes is not None:
            file = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (folders["memory"] / file).write_text(str(memory_bytes), "ascii")
        return ControlGroup(folders)


def _delegate(own: Path) -> Mapping[str, Path]:
    """Give this process's group the controllers for groups below it. OSError if it may not."""
    parent = own.parent if own.name == "server" else own  # the server before has moved there
    available = (parent / "cgroup.controllers").read_text("ascii").split()
    if missing := [name for name in NEEDED if name not in available]:
        raise OSError(0, f"no controller {', '.join(missing)}", str(parent))
    if parent is own:
        leaf = own / "server"
        leaf.mkdir(exist_ok=True)
        for pid in (own / "cgroup.procs").read_text("ascii").split():
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid, "ascii")
    control = parent / "cgroup.subtree_control"
    control.write_text(" ".join(f"+{name}" for name in NEEDED), "ascii")
    return dict.fromkeys(NEEDED, parent)


def unique(name: str) -> str:
    """Return a name for a group that no other server of this host uses."""
    return f"{os.getpid()}-{name}"
