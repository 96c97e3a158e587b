"""Whether an engine fits into the memory that is free, asked before the device is touched."""

from __future__ import annotations

from pathlib import Path

import psutil

from service.errors import Conflict

CGROUP = Path("/sys/fs/cgroup")


def check_fit(what: str, needed_bytes: int, free_bytes: int, device: str) -> None:
    """Conflict with both numbers."""
    if needed_bytes > free_bytes:
        said = f"{what} needs at least {needed_bytes / 2**20:.1f} MiB, {free_bytes / 2**20:.1f} MiB of {device} are free"
        raise Conflict(said, "unload another model, or take fewer instances")


def free_bytes(device: str, cgroup: Path = CGROUP) -> int:
    """Free memory of a device: of this machine, or of the container if it may use less; of a GPU as NVML tells."""
    return _free_on_gpu(int(device.removeprefix("gpu:"))) if device.startswith("gpu:") else _free_here(cgroup)


def _free_here(cgroup: Path) -> int:
    free: int = psutil.virtual_memory().available
    try:
        most, used = ((cgroup / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no limit that could be read
        return free
    return min(free, max(0, int(most) - int(used))) if most.isdigit() else free


def _free_on_gpu(number: int) -> int:
    import pynvml

    from pipeline.gpu import find_gpus

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(find_gpus().devices[number].uuid)
        free: int = pynvml.nvmlDeviceGetMemoryInfo(handle).free
        return free
    finally:
        pynvml.nvmlShutdown()
