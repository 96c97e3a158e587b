"""Map an exception, or the death of a child, to an error: full disk, no memory, path, or our bug.

C++ libraries report such causes only as text, and a killed process reports nothing. `how_it_died`
uses the counters of the kernel, and says "probably" if they are no proof.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pipeline.errors import (
    ChildDied,
    ChildKilled,
    CrucibleError,
    DiskFull,
    HostError,
    InternalError,
)

_PATH_FAULTS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT)
MORE_DISK = "free some space, or set CRUCIBLE_HOME (the store), TMPDIR and --out to a larger disk"
MORE_MEMORY = (
    "free memory, raise the limit of this container, or lower calibration.batch or the largest"
    " sizes of the profiles"
)
_NO_MEMORY = re.compile(
    r"bad_alloc|\bMemoryError\b|can(no|')t allocate memory|Failed to allocate memory for requested"
    r" buffer",
    re.IGNORECASE,
)
"""Texts of C++, Python, the C library (through torch and OpenVINO) and ONNX Runtime. Exhausted GPU
memory has its own errors.
"""
_NO_SPACE = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)


def crucible_error(error: BaseException, child: str = "") -> CrucibleError:
    """Convert any exception of a child, or of this process, to a CrucibleError.

    A fault of the host becomes a HostError. Other exceptions become an InternalError.
    """
    chain = _cause_chain(error)
    if any(_is_out_of_memory(cause) for cause in chain):
        who = f"the child process for '{child}' ran" if child else "this process ran"
        return ChildKilled(f"{who} out of memory: {first_line(error)}", MORE_MEMORY)
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        where = f" while writing '{error.filename}'" if error.filename else ""
        return DiskFull(f"the disk is full{where}", MORE_DISK)
    if any(_NO_SPACE.search(str(cause)) for cause in chain):
        return DiskFull(f"the disk is full: {first_line(error)}", MORE_DISK)
    if isinstance(error, CrucibleError):
        return error
    if isinstance(error, OSError) and error.filename and error.errno in _PATH_FAULTS:
        return HostError(
            f"cannot use '{error.filename}': {error.strerror}", "check the path and its permissions"
        )
    return InternalError(f"{type(error).__name__}: {error}")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return _NO_MEMORY.search(str(error)) is not None


def _cause_chain(error: BaseException | None) -> list[BaseException]:
    """Return the exception and its causes, up to a ChildDied or DiskFull."""
    chain = []
    while error is not None and not isinstance(error, ChildDied | DiskFull):
        chain.append(error)
        error = error.__cause__
    return chain


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, after the class name unless it is our error."""
    text = error.message if isinstance(error, CrucibleError) else f"{type(error).__name__}: {error}"
    return text.strip().partition("\n")[0]


# -- deaths ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """Number of processes that the kernel has killed for memory so far; None if it is unknown."""

    ours: int | None = None  # in the control group of this process and its children
    machine: int | None = None


def memory_kills(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> MemoryKills:
    """Read the kernel's counters.

    Sources: memory.events (cgroup v2) or memory.oom_control (cgroup v1), and /proc/vmstat.
    """
    ours = [count for file in _group_files(proc, groups) if (count := _oom_kill(file)) is not None]
    return MemoryKills(sum(ours) if ours else None, _oom_kill(proc / "vmstat"))


def _group_files(proc: Path, groups: Path) -> Iterator[Path]:
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"


def _oom_kill(file: Path) -> int | None:
    return next(
        (int(line.split()[1]) for line in _lines(file) if line.startswith("oom_kill ")), None
    )


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


class ExitCause(StrEnum):
    """Why a child ended without a result."""

    NO_MEMORY = "no memory"
    KILLED = "killed"  # by SIGKILL, and not for memory
    ENDED = "ended"  # by itself, or by another signal


NEXT_STEPS = {
    ExitCause.NO_MEMORY: MORE_MEMORY,
    ExitCause.KILLED: (
        "run the same command again; if it is killed again, give it more memory, or ask who runs"
        " this machine"
    ),
    ExitCause.ENDED: ("try again with more free memory, or correct your own code if it ran there"),
}


def how_it_died(
    code: int | None, before: MemoryKills, after: MemoryKills, printed: str
) -> tuple[ExitCause, str]:
    """Return why a child ended without a result, and how in words.

    Uses its exit code, the kernel's counters before and after, and its output.
    """
    if code == -signal.SIGKILL:
        return _how_it_was_killed(before, after)
    how = (
        f"by signal {-code} ({signal.Signals(-code).name})"
        if code is not None and code < 0
        else f"with exit code {code}"
    )
    if _NO_MEMORY.search(printed):
        return ExitCause.NO_MEMORY, f"ran out of memory and ended {how}"
    return ExitCause.ENDED, f"ended {how} before it returned a result"


def _how_it_was_killed(before: MemoryKills, after: MemoryKills) -> tuple[ExitCause, str]:
    killed = f"was killed by signal {int(signal.SIGKILL)} (SIGKILL)"
    if _grew(before.ours, after.ours):
        return ExitCause.NO_MEMORY, "was killed by the kernel because memory ran out"
    if _grew(before.machine, after.machine):  # it may have been another process
        text = (
            f"{killed}, probably because memory ran out: the kernel killed a process for that at"
            " this time"
        )
        return ExitCause.NO_MEMORY, text
    if after == MemoryKills():
        return ExitCause.NO_MEMORY, f"{killed}, probably because memory ran out"
    text = (
        f"{killed}, but the kernel reports no lack of memory: a person, a scheduler or a memory"
        " guard has killed it"
    )
    return ExitCause.KILLED, text


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
