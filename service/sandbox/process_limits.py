"""Limits on a job's memory and disk, and on how full the disk may be. `verdict` is pure; `sample`
measures.

Memory is the sum over all processes of the job. Resident pages (RSS) are cheap to read. Only if
their sum is over the limit are shared pages counted once (PSS): reading PSS stops the process for a
moment, which would disturb a measurement.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.errors import DiskFull
from service.settings import Settings

EVERY_S = 0.5
SHARE = 0.8  # of the machine's memory, where the settings name no limit
FULL_SHARE = 10  # running jobs may use the disk reserve up to a tenth of it
GIB = 2**30
CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory and disk that a job and all its processes may use together."""

    memory_bytes: int
    disk_bytes: int
    min_free_bytes: int  # on the disk of the home


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory and disk that they use now, and what is left on the disk of the home."""

    memory_bytes: int
    disk_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Exceeded:
    """The limit that a job exceeds, for its failure."""

    code: str
    message: str
    next_step: str


def verdict(sample: Sample, limits: Limits) -> Exceeded | None:
    """Return why the job must end; None if it may go on."""
    checks = (
        (
            "memory",
            sample.memory_bytes,
            limits.memory_bytes,
            "send a smaller model, smaller profiles, or a smaller calibration.batch",
        ),
        ("disk", sample.disk_bytes, limits.disk_bytes, "send a smaller model or fewer candidates"),
    )
    for resource, used, allowed, advice in checks:
        if used > allowed:
            message = (
                f"the job used {used / GIB:.2f} GiB of {resource}, more than its limit of"
                f" {allowed / GIB:.2f} GiB, and was stopped"
            )
            return Exceeded(
                code=f"job.{resource}",
                message=message,
                next_step=f"{advice}; or raise the service's setting job_{resource}_bytes",
            )
    if sample.free_bytes <= limits.min_free_bytes:
        message = (
            f"the disk of the service is full: {sample.free_bytes} bytes are free, and a job needs"
            f" more than {limits.min_free_bytes}, a tenth of disk_reserve_bytes; it was stopped"
        )
        return Exceeded(
            code=DiskFull.code,
            message=message,
            next_step="free space on the disk of the service's home, then retry the job",
        )
    return None


def limits_from(settings: Settings, machine_bytes: int) -> Limits:
    """Return the limits of each job."""
    return Limits(
        settings.job_memory_bytes or int(SHARE * machine_bytes),
        settings.job_disk_bytes,
        settings.disk_reserve_bytes // FULL_SHARE,
    )


def machine_memory(cgroup: Path = CGROUP) -> int:
    """Return the memory of this machine in bytes, or of the container if its limit is lower."""
    total = psutil.virtual_memory().total
    try:
        text = cgroup.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def sample(pid: int, work: Path, limits: Limits) -> Sample:
    """Measure the memory of a process and its descendants, the size of its work directory, and the
    free space beside that directory.
    """
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    resident = sum(_resident(process) for process in processes)
    memory = (
        resident
        if resident <= limits.memory_bytes
        else sum(_proportional(process) for process in processes)
    )
    return Sample(memory, disk_use(work), shutil.disk_usage(work.parent).free)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def disk_use(folder: Path) -> int:
    """Return the bytes that the files below a folder take on the disk. Links are not followed;
    files that vanish meanwhile do not count.
    """
    total, folders = 0, [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total
