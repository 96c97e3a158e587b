"""The first process of a job's child: it restricts itself, starts the worker, and ensures that no
process outlives it.

    python -m service.sandbox.guardian PARENT FILE_BYTES COMMAND...

The worker's processes may leave their session and lose their parent. As their subreaper the
guardian stays the ancestor of all. It kills them when the worker ends, at SIGTERM, and when the
server dies (PR_SET_PDEATHSIG), and then ends with the worker's status. If the guardian itself is
killed, the worker dies by its own PR_SET_PDEATHSIG, and the server finds the rest by the mark in
their environment.

It imports nothing of the pipeline, so that it starts in milliseconds and stays small.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence

import psutil

from service.sandbox.launch import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, limit, prctl
from service.sandbox.process_tree import kill_all

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
MAX_FILES = 4096
WATCHED = (signal.SIGTERM, signal.SIGCHLD)


def main(arguments: Sequence[str]) -> None:
    """Run a command until it ends or this process is told to end. Never returns."""
    parent, file_bytes, *command = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    restrict(int(file_bytes))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with(int(parent), signal.SIGTERM)
    guardian = os.getpid()
    worker = os.fork()
    if worker == 0:
        _execute(command, guardian)
    os.closerange(
        3, MAX_FILES
    )  # only the worker keeps the socket, so that the server notices its end
    status = _watch(worker)
    kill_all(_descendants)
    _end_as(status)


def restrict(file_bytes: int) -> None:
    """Forbid new privileges, core files, many open files, and files larger than `file_bytes`.
    Address space is not limited, because CUDA reserves terabytes of it.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, MAX_FILES)
    limit(resource.RLIMIT_FSIZE, file_bytes)


def _execute(command: list[str], guardian: int) -> None:
    _die_with(guardian, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run '{command[0]}': {error}", file=sys.stderr, flush=True)
        os._exit(127)


def _watch(worker: int) -> int | None:
    """Return the worker's status when it has ended; None at SIGTERM. Reaps all other processes that
    end meanwhile.
    """
    while signal.sigwait(WATCHED) != signal.SIGTERM:
        while (reaped := _reap()) is not None:
            if reaped[0] == worker:
                return reaped[1]
    return None


def _reap() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _descendants() -> list[psutil.Process]:
    while _reap():
        pass
    return psutil.Process().children(recursive=True)


def _end_as(status: int | None) -> None:
    """End with the worker's signal or exit code."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(128 + signal.SIGTERM if status is None else os.waitstatus_to_exitcode(status))


def _die_with(parent: int, number: signal.Signals) -> None:
    """Request this signal for the death of the parent."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the request
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
