"""Check that an engine fits into the free memory, before the device is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil

from service.devices.gpus import visible_gpus
from service.errors import Conflict
from service.registry.models import Version

CGROUP = Path("/sys/fs/cgroup")

LANGUAGE_RESERVE_BYTES = 2**30
"""Memory of a GPU that a language model needs beside weights and cache, before its first load has
told: the context of CUDA, the workspaces of its libraries and the work on a part of a prompt.
"""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one instance of a version needs, and the source of the number."""

    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of a language model, in equal parts that an option of the deployment counts."""

    option: str
    parts: int
    part_bytes: float
    least: int = 1  # parts that it must have

    @property
    def bytes(self) -> int:
        return math.ceil(self.parts * self.part_bytes)

    def smaller(self, room_bytes: int) -> str:
        """Say which value of the option fits into this memory; "" if none does."""
        most = int(room_bytes / self.part_bytes)
        return f"set `{self.option}` to {most} at most" if most >= self.least else ""


def need_of(version: Version) -> Need:
    """Estimate the memory of one instance.

    The sources, best first: its last load, its benchmark, the size of its files (too low). For a
    language model on a GPU there is a reserve on top of its files.
    """
    if version.memory_bytes:
        return Need(max(version.memory_bytes, version.size_bytes), "as when it was loaded before")
    if version.peak_bytes:
        return Need(max(version.peak_bytes, version.size_bytes), "as in its benchmark")
    if version.language and version.on_gpu:
        reserve = LANGUAGE_RESERVE_BYTES
        return Need(version.size_bytes + reserve, f"its files, {_mib(reserve)} to compute in")
    return Need(version.size_bytes, "its files alone")


def fitting_instances(version: Version, wanted: int, free_bytes: int | None) -> int:
    """Return how many instances fit into the memory: at least 1, at most `wanted`."""
    if free_bytes is None:
        return wanted
    return max(1, min(wanted, free_bytes // max(1, need_of(version).bytes)))


def fitting_tokens(version: Version, free_bytes: int | None) -> int | None:
    """Return for how many tokens half of the memory beside a language model has room.

    None: unknown. The other half is for the work on prompts, and for other models.
    """
    if free_bytes is None or version.language is None:
        return None
    room = (free_bytes - need_of(version).bytes) / 2
    return max(0, int(room / version.language.cache_bytes_per_token))


def check_fit(
    version: Version,
    instances: int,
    free_bytes: int | None,
    device: str,
    cache: Cache | None = None,
) -> None:
    """Raise Conflict with both numbers if the memory is too small. None: unknown, no check.

    `cache`: of a language model, beside the model.
    """
    if free_bytes is None:
        return
    need = need_of(version)
    needed = need.bytes * instances + (cache.bytes if cache else 0)
    if needed > free_bytes:
        noun = "instances" if instances > 1 else "instance"
        source = f"{need.source}, and {_mib(cache.bytes)} of cache" if cache else need.source
        message = (
            f"'{version.model}' with {instances} {noun} needs at least {_mib(needed)} ({source}),"
            f" {_mib(free_bytes)} of {device} are free"
        )
        smaller = cache.smaller(free_bytes - need.bytes) if cache else ""
        advice = smaller or "use fewer instances or another device"
        raise Conflict(message, f"unload another model, or {advice}")


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def free_bytes(device: str, cgroup: Path = CGROUP, nvml: ModuleType | None = None) -> int | None:
    """Return the free memory of a device; None if the driver of a GPU does not report it.

    For the CPU this is the memory of the machine, or of the container if that has less. For a GPU
    it is the value of NVML.
    """
    if not device.startswith("gpu:"):
        return _free_here(cgroup)
    number = int(device.removeprefix("gpu:"))
    with visible_gpus(nvml) as gpus:
        memory = gpus[number].memory() if number < len(gpus) else None
    return None if memory is None else memory.free


def _free_here(cgroup: Path) -> int:
    free: int = psutil.virtual_memory().available
    try:
        most, used = (
            (cgroup / name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
    except OSError:  # there is no readable limit
        return free
    return min(free, max(0, int(most) - int(used))) if most.isdigit() else free
