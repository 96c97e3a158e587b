"""Whether an engine fits into the memory that is free, asked before the device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil

from service.devices.gpus import visible_gpus
from service.errors import Conflict
from service.registry.models import Version

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """What one instance of a version will take, and how that is known."""

    bytes: int
    known: str


def need_of(version: Version) -> Need:
    """As when it was loaded before; before that as in its benchmark; else its files, which is too
    little.
    """
    if version.memory_bytes:
        return Need(max(version.memory_bytes, version.size_bytes), "as when it was loaded before")
    if version.peak_bytes:
        return Need(max(version.peak_bytes, version.size_bytes), "as in its benchmark")
    return Need(version.size_bytes, "its files alone")


def check_fit(version: Version, instances: int, free_bytes: int | None, device: str) -> None:
    """Conflict with both numbers; nothing is refused where nobody tells what is free (None)."""
    if free_bytes is None:
        return
    need = need_of(version)
    if need.bytes * instances > free_bytes:
        what = f"'{version.model}' with {instances} instance{'s' if instances > 1 else ''}"
        message = (
            f"{what} needs at least {_mib(need.bytes * instances)} ({need.known}),"
            f" {_mib(free_bytes)} of {device} are free"
        )
        raise Conflict(message, "unload another model, or take fewer instances")


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def free_bytes(device: str, cgroup: Path = CGROUP, nvml: ModuleType | None = None) -> int | None:
    """Return the free memory of a device; None where the driver of a GPU does not tell.

    Of this machine, or of the container if it may use less; of a GPU as NVML tells.
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
    except OSError:  # no limit that could be read
        return free
    return min(free, max(0, int(most) - int(used))) if most.isdigit() else free
