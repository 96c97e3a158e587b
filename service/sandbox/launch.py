"""Give up rights, then become a command that may run a stranger's code:

    python -m service.sandbox.launch CONFINEMENT COMMAND...

It imports nothing of the pipeline, so that it starts in milliseconds. If a right cannot be given
up, the command does not run.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from service.sandbox import landlock, seccomp

NOT_STARTED = 126  # exit status where a layer or the command failed
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38  # linux/prctl.h
_CAPBSET_DROP, _CAP_AMBIENT, _CLEAR_ALL = 24, 47, 4
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a process may do. The layers that are not used have their empty value."""

    read: Sequence[str] = ()  # Landlock: what it may read and execute
    write: Sequence[str] = ()
    devices: Sequence[str] = ()
    seccomp: bool = False
    gpu: bool = False  # the layers leave what CUDA needs
    uid: int = 0  # of the user that it becomes; 0: it keeps its user
    group: int = 0  # that the users of all such processes share
    control_groups: Sequence[str] = ()  # files `cgroup.procs`
    data_bytes: int = 0  # of private memory, also of memory that is only reserved
    cpu_s: int = 0  # of each process
    environment: Mapping[str, str] | None = None  # in place of the one it has

    def command(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs `command` in this confinement."""
        launch = (sys.executable, "-m", "service.sandbox.launch", json.dumps(asdict(self)))
        return (*launch, *command)


def main(arguments: Sequence[str]) -> NoReturn:
    """Confine this process, and execute the command."""
    text, *command = arguments
    try:
        confinement = Confinement(**json.loads(text))
        confine(confinement)
        environment = os.environ if confinement.environment is None else confinement.environment
        os.execve(command[0], command, environment)
    except OSError as error:
        print(f"cannot confine or run '{command[0]}': {error}", file=sys.stderr, flush=True)
    os._exit(NOT_STARTED)


def confine(confinement: Confinement) -> None:
    """Give up all rights of this process that the confinement does not leave. OSError if that
    fails.
    """
    parent = os.getppid()
    for file in confinement.control_groups:
        Path(file).write_text("0", "ascii")
    if confinement.data_bytes:
        limit(resource.RLIMIT_DATA, confinement.data_bytes)
    if confinement.cpu_s:
        limit(resource.RLIMIT_CPU, confinement.cpu_s)
    _drop_bounding_set()
    if confinement.uid:
        os.setgroups([confinement.group])
        os.setresgid(confinement.uid, confinement.uid, confinement.uid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
    _drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # The change of the user has cleared it.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(NOT_STARTED)
    if confinement.read:
        landlock.restrict(confinement.read, confinement.write, confinement.devices)
    if confinement.seccomp:
        seccomp.restrict(confinement.gpu)


def limit(kind: int, most: int) -> None:
    """Lower a limit of this process, soft and hard, unless it is lower."""
    hard = resource.getrlimit(kind)[1]
    effective = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (effective, effective))


def _drop_bounding_set() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)  # fails for those that it has not


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)  # fails on kernels without ambient capabilities
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    number = _CAPSET.get(platform.machine())
    if number is not None and libc.syscall(ctypes.c_long(number), header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument. OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    main(sys.argv[1:])
