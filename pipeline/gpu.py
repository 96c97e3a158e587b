"""Which NVIDIA GPUs this host has, asked of nvidia-smi: nothing is loaded into this process, and no CUDA context is made."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

from pipeline.core import Frozen

QUERY = "name,compute_cap,driver_version,memory.total"
TIMEOUT_S = 20.0  # a cold driver without its persistence daemon takes seconds to answer


class Gpu(Frozen):
    """One GPU."""

    name: str
    compute_capability: str  # "8.9"
    driver: str
    memory_bytes: int


class Gpus(Frozen):
    """All GPUs of this host."""

    devices: tuple[Gpu, ...] = ()
    reason: str = ""  # why there are none


def find_gpus(command: str = "nvidia-smi") -> Gpus:
    """The GPUs that `command` (nvidia-smi, or another program that answers like it) lists."""
    program = shutil.which(command)
    if program is None:
        return Gpus(reason=_reason_without_tool())
    try:
        done = subprocess.run(
            [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(reason=f"nvidia-smi gave no answer: {error}")
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())
        return Gpus(reason=f"nvidia-smi failed with exit code {done.returncode}: {said}")
    devices = tuple(_gpu_from_line(line) for line in done.stdout.splitlines() if line.count(",") == QUERY.count(","))
    return Gpus(devices=devices, reason="" if devices else "nvidia-smi lists no GPU")


def _gpu_from_line(line: str) -> Gpu:
    name, capability, driver, mebibytes = (part.strip() for part in line.split(","))
    memory_bytes = int(mebibytes) * 2**20 if mebibytes.isdigit() else 0  # "[N/A]" where it shares the host's memory
    return Gpu(name=name, compute_capability=capability, driver=driver, memory_bytes=memory_bytes)


def _reason_without_tool() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (neither nvidia-smi nor libcuda.so.1 is here)"
    return "libcuda.so.1 is here but nvidia-smi is not (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
