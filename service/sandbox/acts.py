"""What a stranger's code must not be able to do, tried by a child in the layers of a job:

    python -m service.sandbox.acts TARGETS

It writes a JSON object: the error of each act, or "" where it succeeded. It does no harm: what it
reads, signals and overwrites is there for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_NEW_USER_NAMESPACE, _PTRACE_SEIZE, _PTRACE_DETACH = 0x10000000, 0x4206, 17
LINGERS_S = 60.0  # of the process that tries to outlive its job


@dataclass(frozen=True, slots=True)
class Targets:
    """What the acts are aimed at."""

    server: int  # process id
    port: int  # of a listener on loopback
    socket_path: str
    socket_name: str  # abstract
    database: str
    other_job: str  # a file in the folder of another job
    repository: str  # the folder of the models
    victim: int  # process id of a process of the server's user, which may be killed


def connect_tcp(targets: Targets) -> None:
    """connect to the server"""
    with socket.create_connection(("127.0.0.1", targets.port), timeout=2):
        pass


def open_internet(targets: Targets) -> None:
    """open an Internet socket"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        pass


def open_netlink(targets: Targets) -> None:
    """open a netlink socket"""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW):
        pass


def open_vsock(targets: Targets) -> None:
    """open a vsock socket"""
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM):
        pass


def open_packet(targets: Targets) -> None:
    """open a packet socket"""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW):
        pass


def connect_path(targets: Targets) -> None:
    """connect to a UNIX socket by path"""
    _send(targets.socket_path)


def connect_name(targets: Targets) -> None:
    """connect to a UNIX socket by its abstract name"""
    _send("\0" + targets.socket_name)


def read_database(targets: Targets) -> None:
    """read the key database"""
    Path(targets.database).read_bytes()


def read_job(targets: Targets) -> None:
    """read another job"""
    Path(targets.other_job).read_bytes()


def write_repository(targets: Targets) -> None:
    """write the repository"""
    Path(targets.repository, "written-by-a-job").write_bytes(b"")


def truncate_database(targets: Targets) -> None:
    """change another job's file"""
    with Path(targets.other_job).open("ab"):
        pass
    os.truncate(targets.other_job, 1)


def read_environment(targets: Targets) -> None:
    """read the server's environment"""
    Path(f"/proc/{targets.server}/environ").read_bytes()


def change_server(targets: Targets) -> None:
    """change how the kernel treats the server"""
    with Path(f"/proc/{targets.server}/oom_score_adj").open("r+b"):
        pass


def trace_server(targets: Targets) -> None:
    """trace a process of the server"""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_SEIZE, targets.victim, None, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    libc.ptrace(_PTRACE_DETACH, targets.victim, None, None)


def make_namespace(targets: Targets) -> None:
    """make a namespace"""
    child = os.fork()
    if child == 0:
        os._exit(0 if ctypes.CDLL(None).unshare(_NEW_USER_NAMESPACE) == 0 else 1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise PermissionError(1, "Operation not permitted")


def signal_server(targets: Targets) -> None:
    """signal the server"""
    os.kill(targets.server, 0)
    os.kill(targets.victim, signal.SIGKILL)


def outlive_job(targets: Targets) -> None:
    """outlive the job"""
    guardian = os.getppid()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:  # it keeps standard output open, by which the server finds it
            for number in signal.valid_signals():
                with contextlib.suppress(OSError):
                    signal.signal(number, signal.SIG_IGN)
            time.sleep(LINGERS_S)
        os._exit(0)
    os.waitpid(child, 0)
    os.kill(guardian, signal.SIGKILL)
    time.sleep(LINGERS_S)


ACTS: Sequence[Callable[[Targets], None]] = (
    connect_tcp,
    open_internet,
    open_netlink,
    open_vsock,
    open_packet,
    connect_path,
    connect_name,
    read_database,
    read_job,
    truncate_database,
    write_repository,
    read_environment,
    change_server,
    trace_server,
    make_namespace,
    signal_server,
    outlive_job,  # the last, because it may end this process
)


def name_of(act: Callable[[Targets], None]) -> str:
    """Return an act's name for messages: `read the key database`."""
    return str(act.__doc__)


def attempt(targets: Targets) -> Mapping[str, str]:
    """Try each act. Return the error of each; "" if it succeeded."""
    results = {}
    for act in ACTS:
        # An act that ends this process leaves what was written before it.
        results[name_of(act)] = ""
        if act is outlive_job:
            print(json.dumps(results), flush=True)
        try:
            act(targets)
        except OSError as error:
            results[name_of(act)] = error.strerror or type(error).__name__
    return results


def _send(address: str) -> None:
    """Connect a new socket, or send by one of a pair, which may need no right."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.connect(address)
    except OSError:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with ours, theirs:
            ours.sendto(b"x", address)


if __name__ == "__main__":
    print(json.dumps(attempt(Targets(**json.loads(sys.argv[1])))), flush=True)
