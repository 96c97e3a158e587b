"""The processes of jobs. Each carries the job's id in its environment, whatever its current
parent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

import psutil

MARK = "CRUCIBLE_JOB"
KILL_S = 5.0  # after SIGKILL a process ends at once, unless it hangs in the kernel
SAME_START_S = 2.0  # tolerance, because the clock behind psutil's start times may be adjusted


def started_at(pid: int) -> float:
    """Return a process's start time in seconds since 1970; 0 if it is gone. Together with the pid
    it identifies the process.
    """
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def alive(pid: int, started: float) -> list[psutil.Process]:
    """Return the process with this pid and start time, or an empty list."""
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
    """Return all running processes that carry the mark of one of these jobs."""
    marked = []
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            if process.environ().get(MARK) in job_ids:
                marked.append(process)
        except (psutil.Error, OSError):  # gone, a zombie, or another user's
            continue
    return marked


def kill_all(find: Callable[[], Iterable[psutil.Process]], within_s: float = KILL_S) -> bool:
    """Send SIGKILL to the processes of `find` until there are none. Returns False if some remain
    after `within_s`.
    """
    end = time.monotonic() + within_s
    while remaining := list(find()):
        for process in remaining:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
