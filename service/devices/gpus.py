"""This host's NVIDIA GPUs in the service's numbering.

`gpu:1` is the second GPU of CUDA_VISIBLE_DEVICES, in leases and in every child. NVML itself counts
all GPUs of the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from pipeline.host.gpu import UNKNOWN, NvmlDevice, open_nvml


@dataclass(frozen=True, slots=True)
class GpuKind:
    """What GPUs have in common that run one engine equally."""

    name: str
    compute_capability: str | None  # "8.9"; None if NVML does not tell

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.compute_capability or UNKNOWN}"


@contextlib.contextmanager
def visible_gpus(nvml: ModuleType | None = None) -> Iterator[tuple[NvmlDevice, ...]]:
    """Yield the GPUs of this server: the first is gpu:0. Empty without a driver."""
    with open_nvml(nvml) as opened:
        yield opened.visible_devices()


def gpu_kinds(nvml: ModuleType | None = None) -> Mapping[str, GpuKind]:
    """Return the kind of each GPU of this server, by its device's name."""
    with visible_gpus(nvml) as gpus:
        return {
            f"gpu:{number}": GpuKind(gpu.name() or UNKNOWN, gpu.compute_capability())
            for number, gpu in enumerate(gpus)
        }
