"""The data caches of this host's CPU, as the kernel lists them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from pipeline.core.frozen import Frozen

CPUS = Path("/sys/devices/system/cpu")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class Cache(Frozen):
    """All caches of one level together that some threads can use."""

    name: str  # "L2"
    size_bytes: int


def data_caches(
    threads: int, root: Path = CPUS, cpus: Iterable[int] | None = None
) -> tuple[Cache, ...]:
    """Return the caches behind L1, the smallest first; empty if the kernel lists none.

    `threads`: how many run, on cores of their own. `cpus`: those that they may run on; None: those
    of this process.
    """
    instances: dict[int, dict[str, int]] = defaultdict(dict)  # by level: size by sharing CPUs
    for cpu in sorted(os.sched_getaffinity(0) if cpus is None else cpus):
        for index in sorted((root / f"cpu{cpu}" / "cache").glob("index*")):
            try:
                level, kind, size, shared = (
                    (index / name).read_text(encoding="ascii").strip()
                    for name in ("level", "type", "size", "shared_cpu_list")
                )
                count = int(size[:-1]) * UNITS[size[-1]]
            except (OSError, ValueError, KeyError):
                continue  # a hypervisor may leave any of them out
            if kind != "Instruction" and int(level) > 1:
                instances[int(level)][shared] = count
    return tuple(
        Cache(name=f"L{level}", size_bytes=sum(sorted(sizes.values(), reverse=True)[:threads]))
        for level, sizes in sorted(instances.items())
    )
