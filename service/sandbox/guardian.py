"""The first process of a job's child: it restricts itself, starts the worker, and sees that nothing
outlives it.

    python -m service.sandbox.guardian PARENT FILE_BYTES COMMAND...

What the worker starts may leave its session and lose its parent; as their subreaper the guardian
stays the ancestor of all. It kills them when the worker ends, at SIGTERM, and when the server dies
(PR_SET_PDEATHSIG), and then ends as the worker did. Should the guardian itself be killed, the
worker dies by its own PR_SET_PDEATHSIG, and the server looks for the rest by the mark in their
environment.

It imports nothing of the pipeline: it is to start in milliseconds and to stay small.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence

import psutil

from service.sandbox.process_tree import kill_all

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38  # linux/prctl.h
MAX_FILES = 4096
WATCHED = (signal.SIGTERM, signal.SIGCHLD)


def main(arguments: Sequence[str]) -> None:
    """Run a command until it ends, or this process is to end; never returns."""
    parent, file_bytes, *command = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    restrict(int(file_bytes))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with(int(parent), signal.SIGTERM)
    guardian = os.getpid()
    worker = os.fork()
    if worker == 0:
        _become(command, guardian)
    os.closerange(3, MAX_FILES)  # the worker's now: its end is to be seen at the other end
    status = _watch(worker)
    kill_all(_descendants)
    _end_as(status)


def restrict(file_bytes: int) -> None:
    """No new privileges, no core files, few open files, no file larger than this. Nothing on
    address space: CUDA reserves it by the terabyte.
    """
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, wanted in ((resource.RLIMIT_NOFILE, MAX_FILES), (resource.RLIMIT_FSIZE, file_bytes)):
        hard = resource.getrlimit(kind)[1]
        least = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (least, least))


def _become(command: list[str], guardian: int) -> None:
    _die_with(guardian, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run '{command[0]}': {error}", file=sys.stderr, flush=True)
        os._exit(127)


def _watch(worker: int) -> int | None:
    """The worker's status when it has ended; None at SIGTERM. Reaps whatever else ends
    meanwhile.
    """
    while signal.sigwait(WATCHED) != signal.SIGTERM:
        while (ended := _reap()) is not None:
            if ended[0] == worker:
                return ended[1]
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
    """End by the same signal or with the same code as the worker."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(128 + signal.SIGTERM if status is None else os.waitstatus_to_exitcode(status))


def _die_with(parent: int, number: signal.Signals) -> None:
    """Be sent this signal when the parent ends."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    main(sys.argv[1:])
