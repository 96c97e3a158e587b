"""The processes of jobs: each carries the job's id in its environment, whoever its parent is by
now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

import psutil

MARK = "CRUCIBLE_JOB"
KILL_S = 5.0  # after SIGKILL a process is gone at once, unless the kernel holds it
SAME_START_S = 2.0  # the clock by which psutil tells when a process started may be set


def started_at(pid: int) -> float:
    """When a process started, in seconds since 1970: together with the pid it names one process for
    ever. 0 if it is gone already.
    """
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def alive(pid: int, started: float) -> list[psutil.Process]:
    """The process of this pid if it is the one that started then; else nothing."""
    try:
        process = psutil.Process(pid)
        same = (
            abs(process.create_time() - started) < SAME_START_S
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return []
    return [process] if same else []


def of_jobs(job_ids: Collection[str]) -> list[psutil.Process]:
    """All running processes that carry the mark of one of these jobs."""
    found = []
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            if process.environ().get(MARK) in job_ids:
                found.append(process)
        except (psutil.Error, OSError):  # gone, a zombie, or another user's
            continue
    return found


def kill_all(find: Callable[[], Iterable[psutil.Process]], within_s: float = KILL_S) -> bool:
    """SIGKILL what `find` finds until it finds nothing; False if something is left after
    `within_s`.
    """
    end = time.monotonic() + within_s
    while left := list(find()):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
