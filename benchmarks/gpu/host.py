"""The GPU that is measured, its state meanwhile, and caches that go from one command, or one
machine, to the next.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.errors import BackendUnavailable
from pipeline.host.gpu import TIMEOUT_S, VISIBLE
from service.submission.tar import untar

QUERIES = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    # of the last second: some kernel ran; it says nothing about how much of the GPU it used
    "busy_percent": "utilization.gpu",
}
EVERY = 4  # turns of a race between two looks
KEPT = ("timing", "inductor")
MAX_BYTES = 80 * 2**20  # of one cache, packed
PART_BYTES = 15 * 2**20  # of one file: larger ones do not come back from every host


def tensorrt_device() -> str:
    """The GPU that TensorRT uses here; exits with the reason if it cannot be used."""
    try:
        return tensorrt_.probe().device
    except BackendUnavailable as error:
        sys.exit(str(error))


def gpu_state(command: str = "nvidia-smi") -> dict[str, float]:
    """Clocks, power and temperature now of the first GPU that CUDA may use; without what nvidia-smi
    does not tell.
    """
    first = os.environ.get(VISIBLE, "").partition(",")[0] or "0"
    query = [
        command,
        "-i",
        first,
        f"--query-gpu={','.join(QUERIES.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return state_from_line(done.stdout.partition("\n")[0])


def state_from_line(line: str) -> dict[str, float]:
    """`1980, 3201, 512.33, 54, 97` by name; `[N/A]` is left out."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(QUERIES):
        return {}
    return {
        name: float(cell)
        for name, cell in zip(QUERIES, cells, strict=True)
        if cell.replace(".", "", 1).isdigit()
    }


@dataclass(slots=True)
class Watch:
    """A Progress that looks at the GPU at every few turns of a race, between the blocks, and prints
    where the race is.
    """

    turns: int = 0
    states: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, fraction: float | None, text: str, figures: object = None) -> None:
        if figures is not None:  # no turn
            return
        if self.turns % EVERY == 0:
            self.states.append(gpu_state())
        self.turns += 1
        if self.turns % 20 == 1:
            print(
                f"   {0 if fraction is None else fraction:4.0%} {text}", file=sys.stderr, flush=True
            )

    def summary(self) -> dict[str, dict[str, float]]:
        return summary_of(self.states)


def summary_of(states: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Smallest, median and largest of each figure; the first looks come before the GPU has woken
    up, so the median tells.
    """
    found: dict[str, dict[str, float]] = {}
    for name in QUERIES:
        if values := [state[name] for state in states if name in state]:
            found[name] = {
                "min": min(values),
                "median": float(np.median(values)),
                "max": max(values),
            }
    return found


# -- caches ------------------------------------------------------------------


def restore(home: Path, keep: Path) -> list[str]:
    """Unpack what an earlier command kept, unless it is here already."""
    restored = []
    for name in KEPT:
        parts = sorted(keep.glob(f"{name}.tar.gz.*"))
        if parts and not (home / name).exists():
            packed = gzip.decompress(b"".join(part.read_bytes() for part in parts))
            untar(io.BytesIO(packed), home)
            restored.append(name)
    return restored


def store(home: Path, keep: Path, most_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Pack each cache into `keep`, in parts of PART_BYTES; says how large each is, or that it is
    too large to be kept.
    """
    keep.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name in KEPT:
        if not (home / name).is_dir():
            continue
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
            archive.add(home / name, arcname=name)
        content = packed.getvalue()
        found[name] = (
            len(content)
            if len(content) <= most_bytes
            else f"{len(content) / 2**20:.0f} MiB: too large to be kept"
        )
        if len(content) <= most_bytes:
            for old in keep.glob(f"{name}.tar.gz.*"):
                old.unlink()
            for number, begin in enumerate(range(0, len(content), PART_BYTES)):
                (keep / f"{name}.tar.gz.{number}").write_bytes(content[begin : begin + PART_BYTES])
    return found
