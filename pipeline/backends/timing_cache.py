"""TensorRT's timing cache on disk, and the lock that gives a build the GPU to itself.

    home()/timing/<key>/cache.bin     TensorRT's serialized cache (trtexec --timingCacheFile reads
                                      it too)
                        target.json   the target, the runs per kernel, and the SHA-256 of cache.bin
    home()/locks/gpu-<uuid>.lock      held while an engine is built: two of our builds on one GPU
                                      take turns

A build looks its kernels up and times only those that are missing (ResNet-18 in fp16 on an H200:
24 s cold, 0.6 s with the cache). A time is wrong for ever if another process uses the GPU
meanwhile, or if others take the CPUs that launch the kernel. Such a build adds nothing to the
cache. Nor does a build for which NVML cannot list the other processes. A container hides the
processes outside of it: there, keep other work off the GPU while building.
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

from pipeline.core.artifacts import Note, NoteCode, Target
from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress
from pipeline.host.gpu import open_nvml
from pipeline.plan.files import home

FILE, ABOUT = "cache.bin", "target.json"
# 1: Python was called while kernels were timed, which made some look slower than others
FORMAT = 2
UNREADABLE = (
    "the timing cache at '{}' was damaged and was created again: this build took as long as the"
    " first one"
)
SHARED = "timing cache not filled: another process used the GPU (process {})"
HIDDEN = (
    "; a process that does not exist here may be this build itself, in a container where NVML gives"
    " the host's process ids (docker: --pid=host)"
)
UNKNOWN = "timing cache not filled: it is not known whether another process used the GPU: {}"
BUSY = (
    "timing cache not filled: other work took {:.0%} of the CPUs and left {:.0%} idle, so kernels"
    " may be timed and chosen badly"
)
# Shares of the CPU time. The idle share alone proves nothing: a build's own threads may take every
# CPU.
MAX_OTHERS = 0.25
MIN_IDLE = 0.1


@dataclass(frozen=True, slots=True)
class CacheScope:
    """What a cache is valid for: one target and one number of timing runs per kernel.

    Times of 1 run must not be looked up by a build that asks for 8.
    """

    target: Target
    iterations: int


class CacheDescription(Frozen):
    """The content of target.json: the scope of a cache, and its checksum."""

    backend: str
    version: str
    device: str
    compute_capability: str | None
    timing_iterations: int
    format: int = FORMAT
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class OtherProcesses:
    """The other processes that compute on a GPU."""

    pids: tuple[int, ...] = ()
    unknown: str = ""  # why NVML cannot list them


class CpuTime(NamedTuple):
    """Seconds of the CPUs that this process may use, since the host started.

    In total, idle, and spent by this process and its ended children.
    """

    total: float = 0.0
    idle: float = 0.0
    own: float = 0.0

    def shares_since(self, before: CpuTime) -> tuple[float, float]:
        """Return the shares of the CPU time since `before`: of other processes, and idle."""
        total = self.total - before.total
        idle = self.idle - before.idle
        own = self.own - before.own
        if total <= 0:
            return 0.0, 1.0
        return max(0.0, total - idle - own) / total, idle / total


@dataclass(slots=True)
class Attached:
    """A timing cache that a builder's config uses. The config must not outlive it."""

    cache: Any
    others: OtherProcesses = OtherProcesses()  # before the build
    cpu: CpuTime = field(default_factory=CpuTime)  # before the build
    notes: tuple[Note, ...] = ()


# -- files -------------------------------------------------------------------


def folder(scope: CacheScope) -> Path:
    """Return the folder of a cache, by library version, GPU model and generation, and timing runs.

    TensorRT itself checks more when it reads the cache.
    """
    key = hashlib.sha256(_description(scope).model_dump_json().encode()).hexdigest()
    return home() / "timing" / key


def _description(scope: CacheScope, sha256: str = "") -> CacheDescription:
    target = scope.target
    return CacheDescription(
        backend=target.backend,
        version=target.version,
        device=target.device,
        compute_capability=target.compute_capability,
        timing_iterations=scope.iterations,
        sha256=sha256,
    )


def read(scope: CacheScope) -> bytes:
    """Return the content of a cache; empty if it is missing or damaged."""
    cache_folder = folder(scope)
    try:
        data = (cache_folder / FILE).read_bytes()
        description = json.loads((cache_folder / ABOUT).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return b""
    if not isinstance(description, dict):
        return b""
    return data if description.get("sha256") == hashlib.sha256(data).hexdigest() else b""


def write(scope: CacheScope, data: bytes) -> None:
    """Publish a cache. A crash between the two files leaves a cache that `read` ignores as
    damaged.
    """
    cache_folder = folder(scope)
    description = _description(scope, hashlib.sha256(data).hexdigest())
    _publish(cache_folder / FILE, data)
    _publish(cache_folder / ABOUT, (description.model_dump_json(indent=1) + "\n").encode())


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


# -- use by a build ----------------------------------------------------------


def attach(config: Any, scope: CacheScope, gpu: str = "") -> Attached:
    """Give a builder's config the stored cache, or an empty one.

    The notes report a stored cache that cannot be read.
    """
    data = read(scope)
    unreadable = (_note(UNREADABLE.format(folder(scope) / FILE)),)
    notes: tuple[Note, ...] = ()
    if not data and (folder(scope) / FILE).exists():
        notes = unreadable
    cache = config.create_timing_cache(data)
    # False: TensorRT refuses a cache of another device or version
    if cache is None or not config.set_timing_cache(cache, False):
        notes = unreadable
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return Attached(cache, other_processes(gpu), cpu_time(), notes)


def keep(config: Any, scope: CacheScope, attached: Attached, gpu: str = "") -> tuple[Note, ...]:
    """Add the times of a finished build to the stored cache. Return notes on the cache.

    Nothing is added if another process used the GPU, or if other work took the CPUs.
    """
    others = other_processes(gpu)
    unknown = attached.others.unknown or others.unknown
    if unknown:
        return (*attached.notes, _note(UNKNOWN.format(unknown), NoteCode.GPU_SHARED))
    pids = sorted({*attached.others.pids, *others.pids})
    if pids:
        hint = "" if all(map(psutil.pid_exists, pids)) else HIDDEN
        text = SHARED.format(", ".join(map(str, pids))) + hint
        return (*attached.notes, _note(text, NoteCode.GPU_SHARED))
    others_share, idle = cpu_time().shares_since(attached.cpu)
    if others_share > MAX_OTHERS and idle < MIN_IDLE:
        return (*attached.notes, _note(BUSY.format(others_share, idle)))
    merge(config, scope, attached.cache)
    return attached.notes


def _note(text: str, code: NoteCode | None = None) -> Note:
    return Note(stage="build", text=text, level="info", code=code)


def merge(config: Any, scope: CacheScope, cache_from_build: Any) -> None:
    """Add a build's cache to the stored one, under a lock.

    Entries that another build wrote meanwhile stay.
    """
    cache_folder = folder(scope)
    cache_folder.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_folder / "lock"):
        before = read(scope)
        stored = config.create_timing_cache(before) if before else None
        if stored is not None:
            # False: entries of another device are left out
            cache_from_build.combine(stored, False)
        after = bytes(cache_from_build.serialize())
        if after != before:
            write(scope, after)


# -- exclusive use of the GPU ------------------------------------------------


@contextlib.contextmanager
def gpu_lock(gpu: str, progress: Progress) -> Iterator[None]:
    """Lock the GPU of this UUID against other builds of ours. Reports progress while it waits.

    The lock ends with the process that holds it.
    """
    locks = home() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"gpu-{gpu or '0'}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(None, "another build uses this GPU; waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def other_processes(gpu: str = "", nvml: Any = None) -> OtherProcesses:
    """Return the processes that compute on the GPU of this UUID; "" is any GPU.

    This process, its parents and its children are left out. `nvml` is pynvml, or a double.
    """
    pids: set[int] = set()
    with open_nvml(nvml) as opened:
        devices = opened.devices()
        if not devices:
            return OtherProcesses(unknown=opened.reason or "NVML lists no GPU")
        for device in devices:
            if gpu and device.uuid() != gpu:
                continue
            reported = device.compute_pids()
            if reported is None:
                return OtherProcesses(unknown=f"NVML lists no processes of GPU '{device.uuid()}'")
            known = {pid for pid in reported if pid is not None}
            if len(known) < len(set(reported)):
                return OtherProcesses(unknown="NVML lists a process without its number")
            pids |= known
    return OtherProcesses(tuple(sorted(pids - _family())))


def cpu_time() -> CpuTime:
    """Return the CPU time until now. The kernel's figures ignore a quota (docker --cpus)."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cpus = [
        cpu
        for number, cpu in enumerate(psutil.cpu_times(percpu=True))
        if allowed is None or number in allowed
    ]
    # user and nice contain the time of guests
    guests = sum(getattr(cpu, "guest", 0.0) + getattr(cpu, "guest_nice", 0.0) for cpu in cpus)
    idle = sum(cpu.idle + getattr(cpu, "iowait", 0.0) for cpu in cpus)
    own = psutil.Process().cpu_times()
    return CpuTime(
        sum(map(sum, cpus)) - guests,
        idle,
        own.user + own.system + own.children_user + own.children_system,
    )


def _family() -> set[int]:
    own = psutil.Process()
    return {own.pid, *(process.pid for process in (*own.parents(), *own.children(recursive=True)))}
