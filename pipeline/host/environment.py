"""The fingerprint of the host, the cores this process may use, and its peak memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.core.frozen import Frozen
from pipeline.host.gpu import find_gpus

SPEED_FLAGS = frozenset(
    """avx avx2 fma f16c avx_vnni avx_vnni_int8 avx_ne_convert avx512f avx512bw avx512vl avx512_vnni
    avx512_bf16 avx512_fp16 avx10 amx_tile amx_int8 amx_bf16 amx_fp16 asimd asimddp asimdhp bf16
    i8mm sve sve2 sme""".split()  # noqa: SIM905
)
"""CPU flags, as Linux spells them, for which the libraries have special kernels: x86, then Arm."""

PACKAGES = (
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "onnxsim",
    "onnxscript",
    "onnx-graphsurgeon",
    "polygraphy",
    "openvino",
    "nncf",
    "torch",
    "torchvision",
    "tensorrt-rtx",
    "nvidia-modelopt",
    "cuda-bindings",
    # TensorRT's name depends on how it was installed.
    "tensorrt",
    "tensorrt-cu12",
    "tensorrt-cu12-bindings",
    "tensorrt-cu13",
    "tensorrt-cu13-bindings",
)
"""Packages whose versions the environment records, if they are installed."""


class Environment(Frozen):
    """The host of a measurement. Two reports are comparable only if their hosts agree."""

    cpu: str
    # Flags that change the speed of inference: avx2, avx512_vnni, amx_int8, ...
    cpu_flags: tuple[str, ...]
    cores: int  # usable by this process
    memory_bytes: int
    os: str
    python: str
    packages: dict[str, str]
    gpus: tuple[str, ...] = ()  # names of the usable GPUs
    gpu_driver: str | None = None
    # Governor of the CPU's clock; None where the host does not report it (virtual machines).
    governor: str | None = None
    load_1min: float = 0.0  # of all processes, just before the measurement


def environment() -> Environment:
    """Describe this host as it is now. Imports no heavy library and starts no process."""
    import psutil

    gpus = find_gpus().devices
    return Environment(
        cpu=cpu_name(),
        cpu_flags=cpu_flags(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        os=platform.platform(),
        python=platform.python_version(),
        packages=_installed_packages(),
        gpus=tuple(gpu.name for gpu in gpus),
        gpu_driver=gpus[0].driver if gpus else None,
        governor=_first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or None,
        load_1min=round(os.getloadavg()[0], 2),
    )


def cpu_name() -> str:
    """Return the CPU's model name, or its architecture where Linux gives no name (Arm)."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> tuple[str, ...]:
    """Return this CPU's instruction sets that change the speed of inference, sorted.

    The result is empty where /proc/cpuinfo is missing.
    """
    info = _cpuinfo()
    flags = info.get("flags") or info.get("Features") or ""
    return tuple(sorted(SPEED_FLAGS & set(flags.split())))


def usable_cores() -> int:
    """Return the number of cores this process may use: its affinity and its container's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    cpu_max = _first_line(Path("/sys/fs/cgroup/cpu.max"))  # "150000 100000", or "max 100000"
    quota, _, period = cpu_max.partition(" ")
    if not (quota.isdigit() and period.isdigit()):
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process alone.

    On Linux this is VmHWM. ru_maxrss would include the parent's memory there, because a child
    shares it until it starts its own program.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _cpuinfo() -> dict[str, str]:
    """Return the first CPU's entries of /proc/cpuinfo; empty where the file is missing."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return {}
    first_cpu = file.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    entries = {}
    for line in first_cpu.splitlines():
        key, _, value = line.partition(":")
        entries[key.strip()] = value.strip()
    return entries


def _installed_packages() -> dict[str, str]:
    """Return the versions of those PACKAGES that are installed, by name."""
    versions = {name: _installed_version(name) for name in PACKAGES}
    return {name: version for name, version in versions.items() if version}


def _installed_version(package: str) -> str:
    """Return the version of an installed package, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(file: Path) -> str:
    if not file.is_file():
        return ""
    return file.read_text(encoding="ascii", errors="replace").partition("\n")[0].strip()


@contextlib.contextmanager
def torch_hidden() -> Iterator[None]:
    """Make the import of torch fail within this context, unless it is imported already.

    NNCF and Polygraphy import torch only to check whether an array is a tensor, which takes
    seconds.
    """
    if "torch" in sys.modules:
        yield
        return
    # None marks a module that must not be imported.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
