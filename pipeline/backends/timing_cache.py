"""TensorRT's timing cache as an artifact of its own, and the GPU to itself while it is filled.

    home()/timing/<key>/cache.bin     what TensorRT serialized (trtexec --timingCacheFile reads it
                                      too)
                        target.json   for which target, how often a kernel was timed, and the sha256
                                      of cache.bin
    home()/locks/gpu-<uuid>.lock      held while an engine is built: two of our builds on one GPU
                                      take turns

A build looks its kernels up and times only those that are not there (ResNet-18 in fp16 on an H200:
24 s cold, 0.6 s with it). A time taken while another process computes, or while others take the
CPUs that launch it, is wrong for ever, so such a build adds nothing; nor does one where NVML does
not tell who else computes. A container hides the processes outside of it: there, keep other work
off the GPU while building.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from filelock import FileLock, Timeout

from pipeline.core import Frozen, Progress, Target
from pipeline.host.gpu import open_nvml
from pipeline.plan.schema import home

FILE, ABOUT = "cache.bin", "target.json"
FORMAT = 2  # 1: Python was called while kernels were timed, which made some look slower than others
UNREADABLE = (
    "the timing cache at '{}' was damaged and is made anew: this build took as long as the first"
)
SHARED = "timing cache not filled: another process used the GPU (process {})"
HIDDEN = (
    "; one that is not seen from here may be this build itself, in a container that gets the host's"
    " numbers (docker: --pid=host)"
)
UNKNOWN = "timing cache not filled: it is not known whether another process used the GPU: {}"
BUSY = (
    "timing cache not filled: other work took {:.0%} of the CPUs and left {:.0%} idle, so kernels"
    " may be timed and chosen badly"
)
MAX_OTHERS, MIN_IDLE = (
    0.25,
    0.1,
)  # a build's own threads may take every CPU: that alone is no reason


@dataclass(frozen=True, slots=True)
class Timed:
    """What a cache is of: one target, each kernel timed so often. Times of 1 run are not to be
    looked up where 8 are asked for.
    """

    target: Target
    iterations: int


class About(Frozen):
    """What lies beside a cache: what it is of, and how it reads when whole."""

    backend: str
    version: str
    device: str
    compute_capability: str | None
    timing_iterations: int
    format: int = FORMAT
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Others:
    """Who else computes on a GPU."""

    pids: tuple[int, ...] = ()
    unknown: str = ""  # why that cannot be said


class CpuTime(NamedTuple):
    """Seconds of the CPUs that this process may use, since the host started: in all, idle, and
    spent by it and its ended children.
    """

    total: float = 0.0
    idle: float = 0.0
    own: float = 0.0

    def shares_since(self, before: CpuTime) -> tuple[float, float]:
        """Of the CPUs' time since then: what others took, and what was idle."""
        total, idle, own = (now - then for now, then in zip(self, before, strict=True))
        return (max(0.0, total - idle - own) / total, idle / total) if total > 0 else (0.0, 1.0)


@dataclass(slots=True)
class Attached:
    """A timing cache in use by a builder's config, which must not outlive it."""

    cache: Any
    others: Others = Others()  # before the build
    cpu: CpuTime = field(default_factory=CpuTime)  # before the build
    notes: list[str] = field(default_factory=list)


# -- files -------------------------------------------------------------------


def folder(timed: Timed) -> Path:
    """Where this cache lies: by library version, GPU model and generation, and iterations. TensorRT
    itself checks more when it reads it.
    """
    key = hashlib.sha256(_about(timed).model_dump_json().encode()).hexdigest()
    return home() / "timing" / key


def _about(timed: Timed, sha256: str = "") -> About:
    target = timed.target
    return About(
        backend=target.backend,
        version=target.version,
        device=target.device,
        compute_capability=target.compute_capability,
        timing_iterations=timed.iterations,
        sha256=sha256,
    )


def read(timed: Timed) -> bytes:
    """This cache; empty where there is none, or none that is whole."""
    place = folder(timed)
    try:
        data, about = (
            (place / FILE).read_bytes(),
            json.loads((place / ABOUT).read_text(encoding="utf-8")),
        )
    except (FileNotFoundError, ValueError):
        return b""
    whole = isinstance(about, dict) and about.get("sha256") == hashlib.sha256(data).hexdigest()
    return data if whole else b""


def write(timed: Timed, data: bytes) -> None:
    """Publish this cache. A crash between the two files leaves one that `read` takes for
    damaged.
    """
    place = folder(timed)
    about = _about(timed, hashlib.sha256(data).hexdigest())
    _publish(place / FILE, data)
    _publish(place / ABOUT, (about.model_dump_json(indent=1) + "\n").encode())


def _publish(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# -- a build's use of it -----------------------------------------------------


def attach(config: Any, timed: Timed, gpu: str = "") -> Attached:
    """Give a builder's config this cache, or an empty one; notes tell of one that cannot be
    read.
    """
    data = read(timed)
    notes = (
        [UNREADABLE.format(folder(timed) / FILE)]
        if not data and (folder(timed) / FILE).exists()
        else []
    )
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(
        cache, False
    ):  # False: of another device or version it is refused
        notes = [UNREADABLE.format(folder(timed) / FILE)]
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return Attached(cache, other_processes(gpu), cpu_time(), notes)


def keep(config: Any, timed: Timed, attached: Attached, gpu: str = "") -> tuple[str, ...]:
    """After the build: add what it timed to this cache, if the GPU was ours alone and the CPUs kept
    up. Returns all that should be noted.
    """
    others = other_processes(gpu)
    if unknown := attached.others.unknown or others.unknown:
        return (*attached.notes, UNKNOWN.format(unknown))
    if pids := sorted({*attached.others.pids, *others.pids}):
        hint = "" if all(map(psutil.pid_exists, pids)) else HIDDEN
        return (*attached.notes, SHARED.format(", ".join(map(str, pids))) + hint)
    others_share, idle = cpu_time().shares_since(attached.cpu)
    if others_share > MAX_OTHERS and idle < MIN_IDLE:
        return (*attached.notes, BUSY.format(others_share, idle))
    merge(config, timed, attached.cache)
    return tuple(attached.notes)


def merge(config: Any, timed: Timed, cache_from_build: Any) -> None:
    """Add a build's cache to the stored one under a lock: what another build wrote meanwhile
    stays.
    """
    place = folder(timed)
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / "lock"):
        before = read(timed)
        stored = config.create_timing_cache(before) if before else None
        if stored is not None:
            cache_from_build.combine(stored, False)  # False: entries of another device are left out
        after = bytes(cache_from_build.serialize())
        if after != before:
            write(timed, after)


# -- the GPU to itself -------------------------------------------------------


@contextlib.contextmanager
def gpu_lock(gpu: str, progress: Progress) -> Iterator[None]:
    """Hold the GPU of this UUID against other builds of ours; says so while it waits. The lock ends
    with the process that holds it.
    """
    place = home() / "locks"
    place.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place / f"gpu-{gpu or '0'}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(None, "another build uses this GPU; waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def other_processes(gpu: str = "", nvml: Any = None) -> Others:
    """Processes that have the GPU of this UUID open for computing, but for this one, its parents
    and its children; empty: any GPU (`nvml`: pynvml, or a double).
    """
    pids: set[int] = set()
    with open_nvml(nvml) as opened:
        devices = opened.devices()
        if not devices:
            return Others(unknown=opened.reason or "NVML lists no GPU")
        for device in devices:
            if gpu and device.uuid() != gpu:
                continue
            found = device.compute_pids()
            if found is None:
                return Others(unknown=f"NVML lists no processes of GPU '{device.uuid()}'")
            numbered = {pid for pid in found if pid is not None}
            if len(numbered) < len(set(found)):
                return Others(unknown="NVML lists a process without its number")
            pids |= numbered
    return Others(tuple(sorted(pids - _family())))


def cpu_time() -> CpuTime:
    """Until now. Of a quota (docker --cpus) the kernel's figures know nothing."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cpus = [
        each
        for number, each in enumerate(psutil.cpu_times(percpu=True))
        if allowed is None or number in allowed
    ]
    counted_twice = sum(
        getattr(each, name, 0.0) for each in cpus for name in ("guest", "guest_nice")
    )  # in user and nice too
    idle = sum(each.idle + getattr(each, "iowait", 0.0) for each in cpus)
    own = psutil.Process().cpu_times()
    return CpuTime(
        sum(map(sum, cpus)) - counted_twice,
        idle,
        own.user + own.system + own.children_user + own.children_system,
    )


def _family() -> set[int]:
    own = psutil.Process()
    return {own.pid, *(process.pid for process in (*own.parents(), *own.children(recursive=True)))}
